"""A cache with merged tokens rolls steps back, saves, splices, and refuses."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.caches import assert_same
from tests.helpers.models import Models, Text
from windlass import KVCache, PromptCacheError, UsageError
from windlass.cache.merging import MeanCount, Merge, MergeBatch
from windlass.policies import H2O, TOVA, KeyDiff, Policy, Recent
from windlass.stores.formats import store_of

RULES = ["sum(next)", "pick", "mean", "mean_count(next)", "mean_count(threshold=0.1)"]


POLICIES = [Recent(), KeyDiff(), H2O(), TOVA()]


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor, size: int) -> Tensor:
    return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(size, 1)], 1)


@pytest.mark.parametrize("store", ["plain", "int8"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_step_that_merged_can_be_taken_back(attached_model: Models, text: Text, policy: Policy, store: str) -> None:
    model, ids = attached_model("llama"), text(60, rows=2)
    caches = [
        KVCache(model, budget=18, policy=policy, window=3, batch=2, merge="mean_count", store=store) for _ in range(2)
    ]
    for cache in caches:
        read(model, cache, ids[:, :40], 15)
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(7)
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        held = mine.positions >= 0
        assert held.equal(theirs.positions >= 0)
        for name, tensor in mine.table.state.items():
            assert tensor[held.expand_as(tensor)].equal(theirs.table.state[name][held.expand_as(tensor)])
        for a, b in ((mine.store.keys(), theirs.store.keys()), (mine.store.values(), theirs.store.values())):
            mask = held.expand(-1, a.shape[1], -1)
            assert a[mask].equal(b[mask])
    # Part of a step, too: as if only its first tokens had come.
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(4)
    read(model, caches[1], ids[:, 40:43], 3)
    ours, truth = (read(model, cache, ids[:, 43:], 1) for cache in caches)
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", [KeyDiff(), H2O()], ids=repr)
@pytest.mark.parametrize("merge", RULES)
def test_every_rule_can_be_taken_back(attached_model: Models, text: Text, merge: str, policy: Policy) -> None:
    """Rows of different lengths, whole steps and parts of them, with all that the rule remembers."""
    model, ids = attached_model("gemma2"), text(60, rows=2)  # sliding layers, too
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    options = {"budget": 18, "policy": policy, "window": 3, "batch": 2, "merge": merge}
    caches = [KVCache(model, **options) for _ in range(2)]  # type: ignore[arg-type]
    for cache in caches:
        for start in (0, 14, 28):
            model(ids[:, start : start + 14], attention_mask=mask[:, : start + 14], past_key_values=cache)
    read(model, caches[0], ids[:, 42:49], 7)
    caches[0].rollback(4)
    read(model, caches[1], ids[:, 42:45], 3)
    assert any("merged" in layer.table.state for layer in caches[0].layers)
    assert_same(*caches)
    read(model, caches[0], ids[:, 45:46], 1)
    caches[0].rollback(1)
    assert_same(*caches)
    ours, theirs = (read(model, cache, ids[:, 45:], 5) for cache in caches)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("merge", ["mean_count", "mean(next)", *RULES])
def test_a_saved_cache_merges_on(attached_model: Models, text: Text, tmp_path: Path, merge: str) -> None:
    model, ids = attached_model("llama"), text(74)
    cache = KVCache(model, budget=20, policy=KeyDiff(), merge=merge)
    read(model, cache, ids[:, :50], 25)
    cache.save(tmp_path / "merged.safetensors")
    again = KVCache.load(tmp_path / "merged.safetensors", model)
    assert str(again.merge) == merge
    assert float(again.layers[0].table.state["merged"].max()) > 0
    torch.testing.assert_close(
        read(model, again, ids[:, 50:], 8), read(model, cache, ids[:, 50:], 8), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("merge", RULES)
def test_spliced_merged_tokens_are_read_as_before(attached_model: Models, text: Text, merge: str) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, budget=20, policy=KeyDiff(), merge=merge) for _ in range(2)]
    read(model, caches[0], ids[:, :50], 25)
    caches[1].splice(caches[0])
    ours, theirs = (read(model, cache, ids[:, 50:], 5) for cache in caches)
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    caches[1].positions = "original"
    with pytest.raises(UsageError, match="to_rotated: tokens of this cache were merged"):
        caches[1].to_rotated()


@pytest.mark.parametrize("store", ["int8", "int4"])
@pytest.mark.parametrize("merge", RULES)
def test_every_rule_works_on_codes(attached_model: Models, text: Text, merge: str, store: str) -> None:
    """Not exact, but near: codes are made anew each time that a token is merged."""
    model, ids = attached_model("llama"), text(50)
    logits = [
        read(model, KVCache(model, budget=24, policy=Recent(), merge=merge, store=each), ids, 10)
        for each in ("plain", store)
    ]
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert error < (0.05 if store == "int8" else 0.6), float(error)


def test_spliced_merged_tokens_keep_their_counts(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(50)
    caches = [KVCache(model, budget=20, policy=KeyDiff(), merge="mean_count") for _ in range(2)]
    read(model, caches[0], ids, 25)
    caches[1].splice(caches[0])
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        ours, truth = ((layer.table.state["merged"] * (layer.positions >= 0)).sum(-1) for layer in (mine, theirs))
        assert ours.equal(truth)
        assert float(ours.sum()) == 30 * ours.numel()
    with pytest.raises(UsageError, match="splice: the other cache merges tokens by mean_count, this one does not"):
        KVCache(model, budget=20, policy=Recent()).splice(caches[0])
    with pytest.raises(UsageError, match="to_rotated: tokens of this cache were merged"):
        caches[0].to_rotated()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None, "merge": "mean"}, "merge=mean needs a budget"),
        ({"merge": "average"}, "merge='average' is not a rule. Use one of: mean_count, mean, sum, pick, weighted, or"),
        ({"merge": "keepkv"}, "merge='keepkv' is not a rule. Use one of: mean_count, mean, sum, pick, weighted, or"),
        ({"merge": "mean(rotated)"}, r"merge='mean\(rotated\)': 'rotated' is not a setting"),
        ({"merge": "mean(far)"}, r"merge='mean\(far\)': 'far' is not a setting. Use one of: nearest, next, as in"),
        ({"merge": "pick(next)", "store": "int4(newest=4)"}, r"merge=pick\(next\) does not go with store int4"),
    ],
)
def test_what_cannot_merge_is_refused(attached_model: Models, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KVCache(attached_model("llama"), **{"budget": 20, **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="target of a merge must be one of: nearest, next"):
        MeanCount("far")


@dataclass(frozen=True)
class Unknown(Merge):
    """A rule that has no name here any more, or not yet."""

    name = "keepkv"

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.mean()


def test_a_file_of_an_unknown_rule_is_refused(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=20, merge=Unknown(), policy=Recent())
    read(model, cache, text(30), 30)
    cache.save(tmp_path / "unknown")
    with pytest.raises(
        PromptCacheError, match=r"merge='keepkv' is not a rule\. Use one of: mean_count, mean, sum, pick"
    ):
        KVCache.load(tmp_path / "unknown", model)


def test_low_bit_targets_are_coded_anew_and_nothing_else(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    cache = KVCache(model, budget=20, policy=KeyDiff(), merge="mean_count", store=store_of("int8"), window=5)
    read(model, cache, ids[:, :30], 30)
    read(model, cache, ids[:, 30:31], 1)  # packs the slots
    layer = cache.layers[0]
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    read(model, cache, ids[:, 31:32], 1)
    targets = layer.history.records[-1].merged_into
    assert targets is not None
    changed = (layer.tensors()["key_codes"] != before["key_codes"]).any(-1)
    written = torch.zeros_like(changed).scatter(2, targets, True)
    written.scatter_(2, layer.history.records[-1].written.expand(-1, changed.shape[1], -1), True)
    assert changed.any()
    assert not (changed & ~written).any()
