"""Exact tokens through rollbacks, failed steps, splices and files."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.caches import POLICIES
from tests.helpers.models import Models, Text, read
from tests.helpers.stores import SPECS, assert_alike, exact_positions, in_text_order, pair
from tests.helpers.stores import one_arithmetic as one_arithmetic
from windlass import KVCache, PolicyError, UsageError
from windlass.cli.options import LoadOptions
from windlass.cli.session import open_session
from windlass.policies import KeyDiff, Policy, Recent, Slots

# Without a budget no policy ranks tokens, but it still decides whether heads share positions.
STATELESS = [(policy, 14) for policy in POLICIES if not (policy.needs.state or policy.needs.statistics)]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("policy", "budget"), [(Recent(), None), (KeyDiff(), None), *STATELESS], ids=repr)
def test_steps_of_decode_are_taken_back_as_if_never_written(
    attached_model: Models, text: Text, spec: str, policy: Policy, budget: int | None
) -> None:
    model, ids = attached_model("llama"), text(90, rows=2)
    caches = [KVCache(model, budget=budget, policy=policy, window=2, store=spec, batch=2) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :40], 20)
        read(model, cache, ids[:, 40:43], 1)
    for _ in range(2):
        read(model, caches[0], ids[:, 60:76], 1)
        caches[0].rollback(16)
    assert_alike(in_text_order(caches[0]), in_text_order(caches[1]))
    for end in (44, 50):
        for cache in caches:
            read(model, cache, ids[:, 43:end], 1)
        # Slots lie in another order, so sums over them differ in their last bits: only the first layer has none.
        assert_alike(*(in_text_order(cache)[:6] for cache in caches))


@pytest.mark.parametrize("spec", SPECS)
def test_a_last_step_of_any_length_is_taken_back(attached_model: Models, text: Text, spec: str) -> None:
    model, ids = attached_model("llama"), text(300)
    for options in ({}, {"budget": 60}):
        caches = [KVCache(model, store=spec, **options) for _ in range(2)]  # type: ignore[arg-type]
        for cache in caches:
            read(model, cache, ids[:, :50], 50)
        read(model, caches[0], ids[:, 50:250], 200)
        caches[0].rollback(200)
        assert_alike(in_text_order(caches[0]), in_text_order(caches[1]))
        for cache in caches:
            read(model, cache, ids[:, 250:], 1)
        assert_alike(*(in_text_order(cache)[:3] for cache in caches))


def test_what_cannot_be_taken_back_exactly_is_refused(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(200)
    for rollback, allowed in ((16, 32), (100, 116)):
        cache = KVCache(model, store="int4(newest=5)", rollback=rollback)
        read(model, cache, ids, 50)
        before = in_text_order(cache)
        way_out = r"store int4\(newest=5\) still holds exactly in layer 0.*Use drop, .* a larger rollback"
        with pytest.raises(UsageError, match=f"rollback of {allowed + 1} tokens is more than {way_out}"):
            cache.rollback(allowed + 1)
        assert_alike(in_text_order(cache), before)
        cache.rollback(allowed)
        assert exact_positions(cache) == [*range(195 - allowed, 200 - allowed)]
        cache.drop(50, 200)
        assert cache.next_positions == [50]
        assert exact_positions(cache) == []
        read(model, cache, ids[:, :3], 1)
        assert exact_positions(cache) == [50, 51, 52]


@dataclass(frozen=True)
class Failing(Recent):
    """Fails where the text is longer than 60 tokens, after some layers have passed."""

    passes: list[int] = field(default_factory=list)

    def score(self, slots: Slots) -> Tensor:
        if int(slots.next_positions.max()) > 60 and not self.passes.pop():
            raise ValueError
        return super().score(slots)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layers", [0, 1])
def test_a_failed_step_leaves_every_exact_token(attached_model: Models, text: Text, spec: str, layers: int) -> None:
    """Longer than the ring: all of its places were written to."""
    model, ids = attached_model("llama"), text(160)
    cache = KVCache(model, budget=30, policy=Failing([0] + [1] * layers), store=spec)
    read(model, cache, ids[:, :50], 50)
    before = in_text_order(cache)
    with pytest.raises(PolicyError):
        read(model, cache, ids[:, 50:], 110)
    assert_alike(in_text_order(cache), before)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("policy", [Recent(), KeyDiff()], ids=repr)
def test_splice(attached_model: Models, text: Text, spec: str, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(120, rows=2)
    lives = []
    for first, second in zip(
        pair(model, spec, budget=24, policy=policy, batch=2), pair(model, spec, budget=30, policy=policy), strict=True
    ):
        read(model, second, ids[:1, :50], 25)  # of passes that are taken whole
        second.drop(10, 20)
        first.splice(second, row=1)  # into an empty row, then into one that holds text
        read(model, first, ids[:, 50:60], 1)
        first.splice(second, row=0)
        life = [*in_text_order(first), *in_text_order(second)]
        lives.append([*life, read(model, first, ids[:, 60:70], 1), *in_text_order(first)])
    assert_alike(*lives)


def test_a_splice_brings_exact_tokens_and_codes(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    source = KVCache(model, store="int4(sinks=2, newest=3)")
    read(model, source, ids[:, :30], 30)
    for store, is_exact in (("int4(sinks=2, newest=3)", [0, 1, 27, 28, 29]), ("int4", [])):
        cache = KVCache(model, store=store)
        cache.splice(source)
        for mine, theirs in zip(cache.layers, source.layers, strict=True):
            for name in mine.store.part_names:
                assert mine.tensors()[name][:, :, :30].equal(theirs.tensors()[name][:, :, :30])
            same = (mine.store.keys()[0, 0, :30] == theirs.store.keys()[0, 0, :30]).all(-1)
            assert same.all() == bool(is_exact)
        assert not is_exact or exact_positions(cache) == is_exact


def test_a_splice_counts_tokens_in_the_order_of_their_text(attached_model: Models, text: Text) -> None:
    """Slots that were freed and taken again are in another order."""
    model, store = attached_model("llama"), "int4(sinks=2, newest=3)"
    source, cache = KVCache(model, budget=12, window=2, store=store, policy=Recent()), KVCache(model, store=store)
    read(model, source, text(60), 1)
    slots = source.layers[0].positions[0, 0]
    assert slots[slots >= 0].diff().min() < 0
    cache.splice(source)
    assert exact_positions(cache) == [0, 1, 57, 58, 59]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("policy", [Recent(), KeyDiff()], ids=repr)
def test_a_saved_cache_goes_on_as_if_never_interrupted(
    attached_model: Models, text: Text, tmp_path: Path, spec: str, policy: Policy
) -> None:
    model, ids = attached_model("llama"), text(70, rows=2)
    cache = KVCache(model, budget=20, policy=policy, window=6, chunk=7, batch=2, store=spec)
    windlass.prefill(model, cache, [ids[0, :40].tolist(), ids[1, :31].tolist()])
    read(model, cache, ids[:, 40:45], 1)
    cache.rollback([2, 1])
    cache.save(tmp_path / "file")
    again = KVCache.load(tmp_path / "file", model)
    assert again.store.name == spec
    assert_alike(in_text_order(again), in_text_order(cache))
    assert exact_positions(again) == exact_positions(cache)
    for one in (again, cache):
        read(model, one, ids[:, 45:48], 1)
    assert exact_positions(again, 1) == exact_positions(cache, 1)


@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_may_cross_the_border_of_inference_mode(attached_model: Models, text: Text, spec: str) -> None:
    model, ids = attached_model("llama"), text(90, rows=2)
    cache, truth = (KVCache(model, store=spec, batch=2) for _ in range(2))
    with torch.inference_mode():
        read(model, cache, ids[:, :70], 70)
    read(model, truth, ids[:, :70], 70)
    for one in (cache, truth):
        one.copy(0, 1)
        read(model, one, ids[:, 70:], 1)
        one.rollback(3)
    assert_alike(in_text_order(cache), in_text_order(truth))


def test_the_command_line_takes_numbers() -> None:
    folder = Path(__file__).parents[1] / "models" / "stories260K"
    session = open_session(str(folder), {"store": "int4(newest=8)"}, LoadOptions("float32"))
    assert session.cache.store.name == "int4(newest=8)"
    windlass.prefill(session.model, session.cache, [[1, 2, 3]])
    assert exact_positions(session.cache) == [0, 1, 2]
