"""An interrupt at any line of a pass leaves the cache as it was, and so does an error while tokens are merged."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.contents import assert_close, assert_nothing_leaks, check_every_line, content, is_same
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import Models, Text
from windlass import KVCache, UsageError
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import MergePlan
from windlass.core.step import Pass
from windlass.engine.decode import Decoder, Sampler
from windlass.engine.generate import prefill
from windlass.engine.sampling import Sampling
from windlass.hf.forward import forward
from windlass.policies import H2O, KeyDiff, Recent, SnapKV

LIMITS: dict[str, Any] = {"budget": 12, "sinks": 2, "window": 3}


def step(model: PreTrainedModel, ids: Tensor) -> Callable[[KVCache], object]:
    def work(cache: KVCache) -> object:
        with torch.no_grad():
            return model(ids, past_key_values=cache)

    return work


@pytest.mark.parametrize("tokens", [1, 4, 20])
@pytest.mark.parametrize(
    ("policy", "merge", "stride"),
    [
        (Recent(), None, 11),
        (KeyDiff(), "mean_count", 5),
        (H2O(), None, 17),
        (SnapKV(observed_queries=2), "mean_count(next)", 17),
    ],
    ids=str,
)
def test_an_interrupt_at_any_line_leaves_the_cache_as_it_was(
    attached_model: Models, text: Text, policy: windlass.policies.Policy, merge: str | None, stride: int, tokens: int
) -> None:
    model, ids = attached_model("llama"), text(60, rows=2)
    cache = KVCache(model, policy=policy, merge=merge, batch=2, **LIMITS)
    step(model, ids[:, :25])(cache)
    for token in ids[:, 25:30].split(1, 1):
        step(model, token)(cache)
    lines = check_every_line(model, cache, step(model, ids[:, 30 : 30 + tokens]), stride * {1: 1, 4: 61, 20: 7}[tokens])
    assert lines > 100


@pytest.mark.parametrize("policy", [H2O(), SnapKV(observed_queries=2)], ids=str)
@pytest.mark.parametrize(("rows", "rollback"), [(1, 0), (2, 3)])
def test_an_interrupt_at_any_line_of_a_step_that_a_kernel_does_all_of(
    attached_model: Models, text: Text, policy: windlass.policies.Policy, rows: int, rollback: int
) -> None:
    model, ids = attached_model("llama"), text(40, rows=rows)
    cache = KVCache(model, policy=policy, batch=rows, rollback=rollback, **LIMITS)
    step(model, ids[:, :25])(cache)
    for token in ids[:, 25:30].split(1, 1):
        step(model, token)(cache)
    check_every_line(model, cache, step(model, ids[:, 30:31]), 3)


@pytest.mark.parametrize("store", ["int8", "int4(sinks=2, newest=5)"])
@pytest.mark.parametrize("budget", [None, 20])
def test_first_passes_growth_and_other_stores(
    attached_model: Models, text: Text, store: str, budget: int | None
) -> None:
    model, ids = attached_model("qwen2"), text(90)
    cache = KVCache(model, budget=budget, store=store, policy=Recent())
    for piece in (ids[:, :60], ids[:, 60:80], ids[:, 80:81], ids[:, 81:]):  # fills, grows, packs
        check_every_line(model, cache, step(model, piece), 397)


@pytest.mark.slow
# An interrupt on a line of `with` comes before it closes its file. The garbage collector does then, and warns.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("is_in_file", [False, True])
@pytest.mark.parametrize("recall_store", ["plain", "int4"])
def test_first_and_later_passes_of_a_cache_with_recall(
    attached_model: Models, text: Text, recall_store: str, is_in_file: bool, tmp_path: Path
) -> None:
    """After an interrupted first pass the cache is as new. Memory that grew in an interrupted pass shrinks back."""
    model, ids = attached_model("llama"), text(1100)
    folder = tmp_path if is_in_file else None
    options = {**LIMITS, "recall": 8, "recall_store": recall_store, "recall_folder": folder}
    cache, twin = KVCache(model, **options), KVCache(model, **options)
    for piece, stride in ((ids[:, :5], 41), (ids[:, 5:25], 211), (ids[:, 25:26], 97)):
        assert check_every_line(model, cache, step(model, piece), stride) > 100
        step(model, piece)(twin)
    for each in (cache, twin):
        step(model, ids[:, 26:1020])(each)
    assert check_every_line(model, cache, step(model, ids[:, 1020:1030]), 301) > 100  # the memory grows
    step(model, ids[:, 1020:1030])(twin)
    with torch.no_grad():
        for token in ids[:, 1030:1040].split(1, 1):
            ours, truth = (model(token, past_key_values=each).logits for each in (cache, twin))
            torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("line", range(1, 400, 57))
def test_an_interrupted_first_pass_allocates_nothing_to_recall(attached_model: Models, text: Text, line: int) -> None:
    model = attached_model("llama")
    cache = KVCache(model, recall=8, **LIMITS)
    assert interrupted_at(line, lambda: step(model, text(20))(cache))
    assert cache.recall_bytes == KVCache(model, recall=8, **LIMITS).recall_bytes


def test_a_second_pass_leaves_the_cache_as_it_was(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, policy=windlass.policies.KVzip(8), **LIMITS)
    with torch.no_grad():
        forward(model, ids, None, cache, [], how=Pass(defer_eviction=True))
        how = Pass(is_second_pass=True, defer_eviction=True)
        check_every_line(
            model, cache, lambda cache: forward(model, ids[:, :8], None, cache, [], how=how), 31, may_be_done=True
        )


@pytest.mark.parametrize("interrupted", [0, 1])
def test_a_second_pass_that_is_interrupted_while_it_is_committed_has_happened(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    """A layer that is committed can't undo it, so the others must not."""
    model, ids = attached_model("llama"), text(21)
    cache, left, commit = KVCache(model, policy=windlass.policies.KVzip(8), **LIMITS), [interrupted], SlotLayer.commit
    with torch.no_grad():
        forward(model, ids[:, :20], None, cache, [], how=Pass(defer_eviction=True))
    twin, how = copy.deepcopy(cache), Pass(is_second_pass=True, defer_eviction=True)

    def stopped(layer: SlotLayer) -> None:
        if layer.index in left:
            left.clear()
            raise KeyboardInterrupt
        commit(layer)

    with torch.no_grad():
        forward(model, ids[:, :8], None, twin, [], how=how)
        monkeypatch.setattr(SlotLayer, "commit", stopped)
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids[:, :8], None, cache, [], how=how)
    assert not left
    assert is_same(content(cache), content(twin))
    assert [layer.checkpoint for layer in cache.layers] == [None, None]
    for each in (cache, twin):
        step(model, ids[:, 20:])(each)
    assert is_same(content(cache), content(twin))


def test_an_interrupted_decode_goes_on_as_if_nothing_had_been(attached_model: Models, text: Text) -> None:
    """Also within the decoder and the engine: every emitted token is in the cache, whole or not at all."""
    model, ids = attached_model("llama"), text(30)
    cache = KVCache(model, policy=KeyDiff(), merge="mean_count", **LIMITS)
    step(model, ids)(cache)
    for line in range(1, 4000, 97):
        own, twin = copy.deepcopy(cache), copy.deepcopy(cache)
        interrupted_at(line, partial(_written, model, own))
        assert_nothing_leaks(own)
        assert own.tokens is not None
        more = own.tokens[0][30:]
        assert len(more) == own.tokens_seen[0] - 30 == own.next_positions[0] - 30
        for token in more:
            step(model, torch.tensor([[token]]))(twin)
        assert_close(content(own), content(twin))


def _written(model: PreTrainedModel, cache: KVCache) -> None:
    """Six tokens, greedy, after a prompt of one."""
    logits = prefill(model, cache, [[7]])
    decoder = Decoder(model, cache, Sampler(Sampling(), [[7]], logits.device), logits, None)
    for at in range(6):
        decoder.next_tokens()
        decoder.advance([True], is_last=at == 5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_while_tokens_are_merged_loses_none(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, merge="mean_count", **LIMITS)
    step(model, ids[:, :12])(cache)
    before = content(cache)
    apply = MergePlan.apply

    def half(plan: MergePlan, *args: Any) -> None:
        apply(plan, *args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(MergePlan, "apply", half)
        with pytest.raises(error):
            step(model, ids[:, 12:16])(cache)
    assert is_same(content(cache), before)
    assert [int((layer.positions >= 0).sum(-1).max()) for layer in cache.layers] == [12, 12]
    assert_nothing_leaks(cache)


@pytest.mark.parametrize("rollback", [0, 16])
def test_no_rollback_after_an_interrupt_brings_other_contents_back(
    attached_model: Models, text: Text, rollback: int
) -> None:
    """The pass that was interrupted may have written to slots that earlier ones had reserved."""
    model, ids = attached_model("llama"), text(60)
    pieces = (ids[:, :12], ids[:, 12:28], ids[:, 28:44])
    cache = KVCache(model, policy=H2O(), rollback=rollback, **LIMITS)
    for piece in pieces:
        step(model, piece)(cache)
    twin = copy.deepcopy(cache)
    assert interrupted_at(1500, lambda: step(model, ids[:, 44:60])(cache))
    assert is_same(content(cache), content(twin))
    for counts in (16, 16):
        twin.rollback(counts)
        try:
            cache.rollback(counts)
        except UsageError:
            return
        assert_close(content(cache), content(twin))


def test_a_cache_that_was_fed_with_gradients_on_can_be_copied(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, policy=H2O(), **LIMITS)
    model(ids, past_key_values=cache)  # parameters ask for gradients here
    twin = copy.deepcopy(cache)
    assert is_same(content(twin), content(cache))
    for record in (record for layer in cache.layers for record in layer.history.records):
        assert record.queries is not None
        assert not record.queries.requires_grad


def test_a_refused_pass_takes_nothing_back(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, **LIMITS)
    step(model, ids[:, :15])(cache)
    before = content(cache)
    for wrong in ({"position_ids": torch.tensor([[3]])}, {"attention_mask": torch.ones(1, 5)}):
        with pytest.raises(UsageError):
            model(ids[:, 15:16], past_key_values=cache, **wrong)
        assert is_same(content(cache), before)
