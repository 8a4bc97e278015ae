"""Prompts of policies that see a text whole before they cut it: read in pieces, between which others go on."""

from collections.abc import Iterator

import pytest
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.gates import Gate
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import (
    alone,
    bytes_told,
    events_of,
    options_of,
    request_of,
    rows_of,
    running,
    tokens_of,
    wait_for,
)
from windlass import UsageError
from windlass.cache.options import CacheOptions
from windlass.engine import row_bytes
from windlass.engine.request import EngineLimits, Progress
from windlass.engine.scheduler import Scheduler
from windlass.hf.attach import attached

TWICE = "KVzip(scoring_chunk=20)"  # reads a text a second time, so many tokens at once
SHARED = "composite(key_diff)"  # its layers keep different numbers of tokens, text by text


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def gate(attached_model: Models) -> Iterator[Gate]:
    made = Gate(attached_model("llama"))
    yield made
    made.remove()


def test_others_wait_for_one_piece(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    """Between any two pieces of the prompt stands a step of the text that is written beside it."""
    model, options = attached_model("llama"), options_of(policy=TWICE)
    ids, other = rows_of(text, 3 * 13 + 8, 5)
    widths = list[int]()

    def count(_: object, __: tuple[object, ...], kwargs: dict[str, Tensor]) -> None:
        widths.append(kwargs["input_ids"].shape[1])

    with running(model, tokenizer, kinds=[(1, options_of()), (1, options)]) as engine:
        beside = engine.submit(request_of(other, 4000))
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"])
        hook = attached(model).decoder.outer.register_forward_pre_hook(count, with_kwargs=True)
        events = events_of(engine.submit(request_of(ids, 3, options=options)))
        hook.remove()
        engine.cancel(beside)
    pieces = [(at, width) for at, width in enumerate(widths) if width > 1]
    assert [width for _, width in pieces] == [13, 13, 13, 8, 20, 20, 7]
    first, last = pieces[0][0], pieces[-1][0]
    assert [at for at, _ in pieces] == list(range(first, last + 1, 2))
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == len(ids)


@pytest.mark.parametrize("policy", [TWICE, SHARED])
def test_texts_are_those_of_each_alone(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, policy: str
) -> None:
    model, options = attached_model("llama"), options_of(policy=policy)
    prompts = rows_of(text, 40, 44, 9, 55)
    with running(model, tokenizer, kinds=[(1 if policy == SHARED else 3, options)]) as engine:
        tickets = [engine.submit(request_of(ids, 9 + n, options=options)) for n, ids in enumerate(prompts)]
        found = [tokens_of(ticket) for ticket in tickets]
        wait_for(lambda: engine.status().free_rows == engine.status().total_rows)
        assert not any(engine._lanes[0].cache.tokens_seen)
    assert found == [alone(model, ids, options, 9 + n) for n, ids in enumerate(prompts)]


def test_rows_of_one_cache_cannot_share_a_budget_each_for_itself(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(UsageError, match=r"2 rows of one cache cannot do separately\. Give it one row"):
        Scheduler(attached_model("llama"), tokenizer, [(2, options_of(policy=SHARED))])


@pytest.mark.parametrize("passes", [2, 4, 6], ids=["first", "last of the first", "second"])
def test_a_cancel_waits_for_one_piece(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, gate: Gate, passes: int
) -> None:
    model, options = attached_model("llama"), options_of(policy=TWICE)
    ids, again = rows_of(text, 3 * 13 + 8, 23)
    with running(model, tokenizer, kinds=[(1, options)]) as engine:
        gate.arm("inside", passes)
        ticket = engine.submit(request_of(ids, 3, options=options))
        gate.wait()
        engine.cancel(ticket)
        gate.open()
        wait_for(lambda: engine.status().cancelled_total == 1)
        assert engine.status().free_rows == 1
        assert gate.passes == passes
        assert engine.status().bytes_held == 0  # nothing came to the row
        found = tokens_of(engine.submit(request_of(again, 7, options=options)))
    assert found == alone(model, again, options, 7)


@pytest.mark.parametrize(
    ("rows", "options"), [(2, options_of(policy=TWICE, store="int8")), (1, options_of(policy=SHARED))]
)
def test_bytes_never_exceed_the_formula(
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    rows: int,
    options: CacheOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_bytes, "SECONDS", 0.0)  # so that no turn goes uncounted
    model, limits = attached_model("llama"), EngineLimits(prompt_tokens=150, max_tokens=40, alone=0)
    prompts = rows_of(text, 150, 41, 149, 13)
    with running(model, tokenizer, kinds=[(rows, options)], limits=limits) as engine:
        held = bytes_told(engine)
        for ticket in [engine.submit(request_of(ids, 5 + n, options=options)) for n, ids in enumerate(prompts)]:
            tokens_of(ticket)
        wait_for(lambda: engine.status().free_rows == rows)
        assert max(held) <= engine.bytes_limit < 2 * max(held)
        assert held[-1] <= rows * engine.row_bytes[0].writing(190) < 0.5 * max(held)
