"""Steps that cannot be recorded run as they come, and one warning says why."""

from dataclasses import dataclass

import pytest

from tests.helpers.models import Models, Text
from tests.helpers.recorded import BUDGET, begun, same, write
from tests.helpers.tape import Tape
from windlass import KVCache, kernels
from windlass.core.types import Scores
from windlass.engine.generate import prefill
from windlass.hf.cpu_decoder import FewTokensLayer, WholeDecoder
from windlass.policies import H2O, Policy, Recent
from windlass.policies.base import Slots
from windlass.testing import TRAINED_LENGTH


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference kernels, as compiled ones would hide their work from the tape."""
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    monkeypatch.setattr(FewTokensLayer, "_kernel", lambda *_: None)  # which a shared model may have prepared before
    monkeypatch.setattr(WholeDecoder, "output", lambda *_: None)  # as above


@dataclass(frozen=True)
class Waiting(Policy):
    """Looks at a number on the host, which a policy must not. Source: none. Differs: all."""

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() * (1.0 if int(slots.positions.max()) >= 0 else 2.0)


def test_what_cannot_be_recorded_runs_as_it_comes_and_says_so(attached_model: Models, text: Text) -> None:
    for model, policy in ((attached_model("llama"), Waiting()), (attached_model("gpt_oss"), H2O())):
        tape, (ours, logits), (theirs, others) = Tape(), *(begun(model, text, {"policy": policy}) for _ in range(2))
        with pytest.warns(UserWarning, match=r"can't be recorded as one graph.*_local_scalar_dense") as said:
            written = write(model, ours, logits, tape)
        assert len(said) == 1
        assert written == write(model, theirs, others, None)
        same(ours, theirs)


def test_tables_that_follow_the_length_of_the_text_are_not_recorded(attached_model: Models, text: Text) -> None:
    model = attached_model("llama_dynamic")
    ids = text(TRAINED_LENGTH + 2)[0].tolist()
    ours, theirs = (KVCache(model, budget=BUDGET, rollback=0, policy=Recent()) for _ in range(2))
    logits, others = (prefill(model, cache, [ids]) for cache in (ours, theirs))
    with pytest.warns(UserWarning, match="rotary tables change with the length"):
        written = write(model, ours, logits, Tape())
    assert written == write(model, theirs, others, None)
    same(ours, theirs)
