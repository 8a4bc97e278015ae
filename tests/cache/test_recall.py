"""A cache that recalls every evicted token reads the same as a full cache, after any edit of the text."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import bytes_of_slots
from tests.helpers.models import Models, Text, read
from tests.helpers.recalls import TOLERANCE, both, read_both, recalling
from tests.helpers.shares import APART
from windlass import KVCache, Shares, UsageError
from windlass.policies import H2O, NAMES, Policy
from windlass.policies.base import ModelSpecific
from windlass.testing import TRAINED_LENGTH

POLICIES = [policy() for policy in NAMES.values() if not issubclass(policy, ModelSpecific)]


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy_reads_what_it_has_evicted(attached_model: Models, text: Text, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(67)
    caches = both(model, policy=policy, positions="original")
    read_both(model, caches, ids[:, :50], 13)
    read_both(model, caches, ids[:, 50:], 1)
    assert caches[0].layers[0].table.occupancy_bound == 11


@pytest.mark.parametrize(
    "family", ["qwen3", "gemma2", "gemma3", "olmo2", "cohere", "glm4", "phi3", "deepseek_v3", "gemma3n"]
)
@pytest.mark.parametrize("positions", ["original", "compact", "auto", "self_extend(3, 5)", "clamp(9)"])
def test_families_and_positions(attached_model: Models, text: Text, family: str, positions: str) -> None:
    model, ids = attached_model(family), text(61)
    caches = both(model, positions=positions)
    read_both(model, caches, ids[:, :52], 13)
    read_both(model, caches, ids[:, 52:], 1)


@pytest.mark.parametrize("family", ["llama_dynamic", "phi3"])
@pytest.mark.parametrize("positions", ["original", "compact", "auto", "self_extend(3, 5)", "clamp(9)"])
def test_tables_that_depend_on_the_length(attached_model: Models, text: Text, family: str, positions: str) -> None:
    """Up to the trained length and beyond it, by the tokens that are read and not by the slots that there are."""
    model, ids = attached_model(family), text(TRAINED_LENGTH + 26)
    caches = both(model, positions=positions, recall=128)
    read_both(model, caches, ids[:, :40], 20)
    read_both(model, caches, ids[:, 40:], 1)


@pytest.mark.parametrize("positions", ["self_extend(3, 5)", "clamp(9)"])
def test_a_chunk_is_read_by_the_table_of_a_token(attached_model: Models, text: Text, positions: str) -> None:
    """Distances that do not grow with the columns of a pass need no table of a longer text."""
    model, ids = attached_model("llama_dynamic"), text(TRAINED_LENGTH + 26)
    outs = [read(model, KVCache(model, positions=positions), ids, chunk) for chunk in (90, 1)]
    torch.testing.assert_close(*outs, **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "stores"),
    [
        *((family, (each, each)) for family in ("deepseek_v3", "minicpm3") for each in ("plain", "int8", "int4")),
        ("minicpm3", ("plain", "int8")),  # no mixture of experts, which another rounding sends elsewhere
        ("minicpm3", ("plain", "int4")),
    ],
    ids=str,
)
def test_latents_in_codes(attached_model: Models, text: Text, family: str, stores: tuple[str, str]) -> None:
    model, ids = attached_model(family), text(61)
    caches = recalling(model, store=stores[0], recall_store=stores[1]), KVCache(model, store=stores[0])
    for at in (slice(0, 40), slice(40, 57)):
        found, full = (read(model, each, ids[:, at], 20 if at.start == 0 else 1) for each in caches)
        bound = 1e-5 if stores[0] == stores[1] else {"int8": 0.02, "int4": 0.4}[stores[1]]
        assert float((found - full).norm() / full.norm()) < bound
    for cache in caches:
        cache.rollback(3)
    twin = KVCache(model, budget=11, sinks=2, window=3, recall=96, store=stores[0], recall_store=stores[1])
    twin.splice(caches[0])
    outs = [read(model, each, ids[:, 57:], 1) for each in (caches[0], twin)]
    torch.testing.assert_close(*outs, **TOLERANCE)


def test_heads_with_budgets_of_their_own(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(61)
    caches = both(model, shares=Shares(APART), positions="original")
    read_both(model, caches, ids[:, :52], 13)
    read_both(model, caches, ids[:, 52:], 1)
    assert len({layer.table.occupancy_bound for layer in caches[0].layers}) > 2


def test_rows_of_different_lengths(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(58, 3)
    caches = both(model, batch=3)
    mask = torch.ones(3, 58, dtype=torch.bool)
    mask[0, :30] = mask[1, :7] = mask[2, 20:26] = False
    for start in range(0, 58, 9):
        span = slice(start, start + 9)
        with torch.no_grad():
            outs = [
                model(ids[:, span], attention_mask=_until(mask, span), past_key_values=each).logits for each in caches
            ]
        torch.testing.assert_close(*(out[mask[:, span]] for out in outs), **TOLERANCE)


RAGGED = [[0, 20], [17, 1], [1, 1], [0, 1], [23, 0], [0, 30], [1, 0], [1, 1]]


@pytest.mark.parametrize(
    "options", [{}, {"shares": Shares(APART)}, {"policy": H2O()}, {"positions": "compact"}], ids=str
)
def test_a_row_recalls_whatever_the_others_hold(attached_model: Models, text: Text, options: dict[str, Any]) -> None:
    """A row that has evicted beside one with room: the slots of one row do not affect the other."""
    model, ids = attached_model("llama"), text(100, 2)
    caches = both(model, batch=2, **{"positions": "original", **options})
    at = [0, 0]
    for counts in RAGGED:
        mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        new = torch.stack([ids[row, at[row] : at[row] + max(counts)] for row in range(2)])
        with torch.no_grad():
            outs = [model(new, attention_mask=mask, past_key_values=each).logits[mask] for each in caches]
        torch.testing.assert_close(*outs, **TOLERANCE)
        at = [start + count for start, count in zip(at, counts, strict=True)]


def _until(mask: Tensor, span: slice) -> Tensor:
    return mask[:, : span.stop]


EDITS: dict[str, Callable[[KVCache], object]] = {
    "drop": lambda cache: cache.drop(5, 17),
    "keep": lambda cache: cache.keep(9, 40),
    "shift": lambda cache: cache.shift(20, 47, 6),
    "divide": lambda cache: cache.divide(0, 47, 3),
    "rollback": lambda cache: cache.rollback(3),
    "copy": lambda cache: cache.copy(1, 0),
    "select_rows": lambda cache: cache.select_rows(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits(attached_model: Models, text: Text, edit: str) -> None:
    model, ids = attached_model("llama"), text(70, 2)
    caches = both(model, batch=2, positions="original")
    read_both(model, caches, ids[:, :44], 13)
    read_both(model, caches, ids[:, 44:47], 1)
    for cache in caches:
        EDITS[edit](cache)
    read_both(model, caches, ids[:, 47:60], 13)
    read_both(model, caches, ids[:, 60:], 1)
    assert caches[0].next_positions == caches[1].next_positions


def test_a_store_grows_when_the_batch_has_other_rows(attached_model: Models, text: Text) -> None:
    """Past its first segment, with more rows and with fewer than it was made for."""
    model, ids, more = attached_model("llama"), text(40, 2), text(1020, 3, seed=1)
    for rows in ([1, 0, 1], [1]):
        changed = recalling(model, batch=2, chunk=600, recall=16)
        read(model, changed, ids, 13)
        changed.select_rows(torch.tensor(rows))
        fresh = recalling(model, batch=len(rows), chunk=600, recall=16)
        read(model, fresh, ids[rows], 13)
        found, wanted = (read(model, cache, more[: len(rows)], 510) for cache in (changed, fresh))
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_rollback_of_a_prompt_and_of_evictions(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = both(model)
    read_both(model, caches, ids[:, :40], 40)
    for cache in caches:
        cache.rollback(17)
    read_both(model, caches, ids[:, 23:50], 9)
    for cache in caches:
        cache.rollback(9)
    read_both(model, caches, ids[:, 41:], 1)


def test_an_interrupted_pass_leaves_no_trace(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = both(model)
    read_both(model, caches, ids[:, :40], 13)
    hook = model.model.layers[1].mlp.register_forward_pre_hook(_interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(model, caches[0], ids[:, 40:53], 13)
    hook.remove()
    read_both(model, caches, ids[:, 40:], 1)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_nothing_is_recalled_before_anything_is_evicted(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(11)
    outs = [read(model, cache, ids, 1) for cache in (recalling(model), recalling(model, recall=0))]
    assert outs[0].equal(outs[1])


def test_codes_are_close(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    full = read(model, KVCache(model), ids, 13)
    errors = []
    for store in ("plain", "int8", "int4"):
        out = read(model, recalling(model, recall_store=store), ids, 13)
        errors.append(float((out - full).norm() / full.norm()))
    assert errors[0] < 1e-5 < errors[1] < 0.02 < errors[2] < 0.3


@pytest.mark.parametrize("store", ["int8", "int4(sinks=2, newest=5)"])
def test_slots_of_codes_beside_what_is_recalled(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("llama"), text(50)
    outs = [read(model, cache, ids, 7) for cache in both(model, store=store, recall_store=store.split("(")[0])]
    assert float((outs[0] - outs[1]).norm() / outs[1].norm()) < 0.1


@pytest.mark.parametrize("merge", ["mean_count", "sum(next)", "pick"])
def test_merged_tokens_are_recalled_as_they_were(attached_model: Models, text: Text, merge: str) -> None:
    model, ids = attached_model("llama"), text(50)
    cache = recalling(model, merge=merge)
    assert bool(read(model, cache, ids, 7).isfinite().all())
    recall = cache.layers[0].table.recall
    assert recall is not None
    assert recall.positions[0, :50].tolist() == list(range(50))


def test_a_sliding_window_recalls_nothing(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("gemma3"), text(50)
    cache = recalling(model)
    read(model, cache, ids, 13)
    assert [layer.table.recall is None for layer in cache.layers] == [True, False, True, False]


def test_describe_tells_both_sizes(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = recalling(model)
    read(model, cache, text(50), 13)
    recall = [layer.table.recall for layer in cache.layers]
    assert cache.recall_bytes == sum(part.nbytes for each in recall if each is not None for part in each.allocated())
    layers, heads, width = 2, 3, 8
    digests, newest = layers * 2 * 128 * heads * width * 4, layers * heads * 96 * 4
    assert cache.recall_bytes == layers * 1024 * (heads * 2 * width * 4 + 4) + digests + newest
    assert "recall   96 tokens a layer and step, of 50, which take 442.25 KiB in memory (plain)" in cache.describe()
    before = bytes_of_slots(cache)
    read(model, cache, text(1100)[:, 50:], 13)
    assert bytes_of_slots(cache) == before
    assert cache.recall_bytes == layers * 2048 * (heads * 2 * width * 4 + 4) + 2 * digests + newest


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recall": 12}, "recall (12 tokens) must be a multiple of 8, the tokens of a page. Use 8 or 16"),
        ({"recall": 8, "budget": None}, "recall (8 tokens) needs a budget"),
        ({"recall": -8}, "recall"),
        ({"recall_store": "int4(newest=3)"}, "asks for tokens in full precision, which a recall store does not have"),
        ({"recall_store": "int5"}, "is not a store"),
        ({"recall_folder": "/nowhere/at/all"}, "is no folder. Make it first"),
        ({"recall_folder": 3}, "recall_folder"),
    ],
)
def test_what_cannot_be_honoured(attached_model: Models, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        recalling(attached_model("llama"), **options)
    assert said in str(caught.value)


def test_a_splice_that_would_lose_tokens_is_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    caches = recalling(model), recalling(model, recall=0)
    for cache in caches:
        read(model, cache, text(20), 13)
    for mine, other in (caches, caches[::-1]):
        with pytest.raises(UsageError, match="Make both with recall, or both without"):
            mine.splice(other)
