"""Layers and kv heads with budgets of their own: by hand, under explicit masks, and as twins of caches without."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import windlass
from tests.helpers.caches import bytes_of_slots
from tests.helpers.models import Models, Text, read
from tests.helpers.shares import ALIKE, APART
from windlass import KVCache, Shares, UsageError
from windlass.core.step import Limits
from windlass.policies import NAMES

SINKS, WINDOW = 2, 3


def limits(budget: int) -> Limits:
    return Limits(budget, SINKS, WINDOW, 64, 0)


@pytest.mark.parametrize(
    ("layers", "budget", "expected"),
    [
        # 14 a head beside 6: 42 for each layer. 21 for heads 0 and 2, 7 for head 1. Then 3.5 and 28. Head 1 gets
        # the one that is left, for it takes two to raise the pair that lacks half a token.
        (APART, 20, [[27, 14], [9, 34]]),
        ([[1.0, 3.0], None, [2.0, 2.0]], 16, [[11, 21], [], [16]]),
        ([[0.0, 5.0]], 10, [[6, 14]]),
        (APART, 6, [[6, 6], [6, 6]]),
    ],
)
def test_budgets_by_hand(layers: list[list[float] | None], budget: int, expected: list[list[int]]) -> None:
    shares = Shares(layers)
    assert shares.budgets(limits(budget)) == expected


def test_all_heads_together_keep_as_many_as_without() -> None:
    draw = torch.Generator().manual_seed(1)
    for budget in range(6, 300, 7):
        layers = [torch.rand(heads, generator=draw).mul(3).round(decimals=1).tolist() for heads in (1, 4, 3, 7)]
        shares = Shares([*layers, [1.0]])  # of one head, so that every sum can be had
        sizes = [[len(heads) for heads in shares.groups(layer)] for layer in range(5)]
        found = shares.budgets(limits(budget))
        total = sum(n * size for own, ns in zip(found, sizes, strict=True) for n, size in zip(own, ns, strict=True))
        assert total == budget * 16
        assert min(number for own in found for number in own) >= 6


class Masked:
    """Gives each layer of a plain model a mask of its own, for each of its heads."""

    def __init__(self, model: PreTrainedModel, masks: list[Tensor]) -> None:
        self._hooks = [
            layer.self_attn.register_forward_pre_hook(self._with(mask), with_kwargs=True)
            for layer, mask in zip(model.model.layers, masks, strict=True)
        ]

    def _with(self, mask: Tensor) -> Callable[..., object]:
        def hook(_: nn.Module, given: tuple[object, ...], named: dict[str, object]) -> object:
            return given, {**named, "attention_mask": mask}

        return hook

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("chunk", [1, 7, 61])
def test_each_head_sees_what_its_own_budget_holds(
    plain_model: Models, attached_model: Models, text: Text, chunk: int
) -> None:
    """`Recent` under explicit masks, one for each layer and head: sinks and the newest tokens."""
    plain, model, ids = plain_model("llama"), attached_model("llama"), text(61)
    cache = KVCache(model, 20, "recent", SINKS, WINDOW, positions="original", shares=Shares(APART))
    ours = read(model, cache, ids, chunk)
    place = torch.arange(61)
    age = place[:, None] - place
    masks = []
    for budgets in ([27, 14, 27], [9, 9, 34]):
        seen = torch.stack([(age >= 0) & ((age <= budget - SINKS) | (place < SINKS)) for budget in budgets])
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        masks.append(bias.repeat_interleave(5, 0)[None])
    hooks = Masked(plain, masks)
    try:
        with torch.no_grad():
            expected = plain(ids, use_cache=False).logits
    finally:
        hooks.remove()
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)
    assert [int((layer.positions[0] >= 0).sum(-1).max()) for layer in cache.layers] == [27, 14, 9, 34]


def by_head(cache: KVCache) -> list[list[list[Tensor]]]:
    """Held tokens per layer of the model, head and row, in the order of the text: positions, keys, values, state."""
    found: list[list[list[Tensor]]] = []
    for its in cache.by_layer:
        heads: dict[int, list[list[Tensor]]] = {}
        for layer, own in zip(its.layers, its.heads or [tuple(range(its.layers[0].store.layout[0]))], strict=True):
            positions = layer.positions.expand(-1, len(own), -1)
            state = [each.expand_as(positions) for each in layer.table.state.values()]
            for place, head in enumerate(own):
                heads[head] = []
                for row, at in enumerate(positions[:, place]):
                    order = at.where(at >= 0, 2**30).argsort(stable=True)[: int((at >= 0).sum())]
                    every = at, layer.store.keys()[row, place], layer.store.values()[row, place]
                    heads[head].append([each[order] for each in (*every, *(own[row, place] for own in state))])
        found.append([tensors for head in sorted(heads) for tensors in heads[head]])
    return found


def assert_twins(grouped: KVCache, plain: KVCache) -> None:
    assert grouped.next_positions == plain.next_positions
    assert all(its.whole is None for its in grouped.by_layer)
    for ours, theirs in zip(by_head(grouped), by_head(plain), strict=True):
        for head, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert mine[0].equal(other[0]), head
            for a, b in zip(mine[1:], other[1:], strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# Random draws by the number of a head in its group. A ranking for all heads is one for all heads of a group.
RANKED_APART = [name for name, kind in NAMES.items() if kind is not windlass.policies.Random and kind().needs.per_head]


@pytest.mark.parametrize("name", [*RANKED_APART, "recent", "smoothed(key_diff)"])
def test_groups_of_one_size_are_as_all_heads_together(attached_model: Models, text: Text, name: str) -> None:
    model, ids = attached_model("llama"), text(60, rows=2)
    merge = "weighted" if name == "dmc" else None
    logits, caches = [], []
    for shares in (Shares(ALIKE), None):
        cache = KVCache(model, 17, name, 2, 4, 16, batch=2, merge=merge, shares=shares)
        windlass.prefill(model, cache, ids[:, :40].tolist())
        logits.append(read(model, cache, ids[:, 40:], 1))
        caches.append(cache)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)
    assert_twins(*caches)


@pytest.mark.parametrize("positions", ["original", "compact", "self_extend(3, 5)", "clamp(9)"])
@pytest.mark.parametrize(
    ("store", "merge"), [("plain", "mean_count"), ("int8", None), ("int4(sinks=2, newest=5)", None), ("int4", "mean")]
)
def test_stores_merging_and_positions_go_through(
    attached_model: Models, text: Text, positions: str, store: str, merge: str | None
) -> None:
    model, ids = attached_model("llama"), text(50)
    caches = [
        KVCache(model, 17, "key_diff", 2, 4, 16, positions, store=store, merge=merge, shares=shares)
        for shares in (Shares(ALIKE), None)
    ]
    ours, theirs = (read(model, cache, ids, 7) for cache in caches)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert_twins(*caches)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "gemma3n", "qwen2", "smollm3", "llama_dynamic"])
def test_windows_sinks_and_shared_keys_go_through(attached_model: Models, text: Text, family: str) -> None:
    model, ids = attached_model(family), text(60)
    plain = KVCache(model, 17, "key_diff", 2, 4, 16)
    theirs = read(model, plain, ids, 5)
    heads = [layer.store.layout[0] for layer in plain.layers]
    assert max(heads) > 1
    shares = Shares([[1.0, *[1.0 + 1e-6] * (count - 1)] for count in heads])
    grouped = KVCache(model, 17, "key_diff", 2, 4, 16, shares=shares)
    torch.testing.assert_close(read(model, grouped, ids, 5), theirs, atol=1e-4, rtol=1e-4)


def test_all_that_is_done_to_a_cache_is_done_to_its_groups(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(90, rows=2)

    def caches() -> list[KVCache]:
        return [
            KVCache(model, 21, "snapkv(pool=3)", 2, 4, 16, batch=2, shares=shares) for shares in (Shares(ALIKE), None)
        ]

    pair, others = caches(), caches()
    for own, more in ((pair, ids), (others, text(24, rows=2, seed=3))):
        for cache in own:
            read(model, cache, more[:, :24], 9)
    assert_twins(*pair)
    steps: list[Callable[[KVCache], object]] = [
        lambda cache: read(model, cache, ids[:, 24:30], 1),
        lambda cache: cache.rollback([2, 4]),
        lambda cache: cache.drop(18, 22),
        lambda cache: read(model, cache, ids[:, 30:34], 4),
        lambda cache: cache.shift(22, 40, -3, 1),
        lambda cache: cache.divide(4, 12, 2),
        lambda cache: cache.copy(0, 1),
        lambda cache: read(model, cache, ids[:, 34:44], 3),
        lambda cache: cache.splice(others[pair.index(cache)], 1, 0),
        lambda cache: read(model, cache, ids[:, 44:47], 1),
        lambda cache: cache.select_rows(torch.tensor([1, 0, 1])),
        lambda cache: cache.compress(15),
        lambda cache: read(model, cache, ids[:1, 47:60].expand(3, -1), 2),
    ]
    for step in steps:
        results = [step(cache) for cache in pair]
        if isinstance(results[0], Tensor):
            torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
        assert_twins(*pair)
    loaded = []
    for number, cache in enumerate(pair):
        cache.save(tmp_path / str(number))
        loaded.append(KVCache.load(tmp_path / str(number), model))
    assert_twins(*loaded)
    assert loaded[0].options.document() == pair[0].options.document()
    twin = copy.deepcopy(pair[0])
    results = [read(model, cache, ids[:1, 60:70].expand(3, -1), 1) for cache in (*pair, *loaded, twin)]
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-4, rtol=1e-4)
    pair[0].reset()
    assert pair[0].tokens_seen == [0, 0, 0]
    assert all(layer.is_empty for layer in pair[0].layers)


def test_a_batch_of_different_texts_is_as_each_alone(attached_model: Models, text: Text) -> None:
    model, ids, lengths = attached_model("llama"), text(44, rows=3), (44, 21, 33)
    prompts = [ids[row, :length].tolist() for row, length in enumerate(lengths)]
    options = {"budget": 18, "policy": "h2o", "sinks": 2, "window": 3, "chunk": 10, "shares": Shares(APART)}
    together = KVCache(model, batch=3, **options)  # type: ignore[arg-type]
    logits = windlass.prefill(model, together, prompts)
    for row, prompt in enumerate(prompts):
        alone = KVCache(model, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(windlass.prefill(model, alone, [prompt])[0], logits[row], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("store", ["plain", "int8"])
def test_the_bytes_are_those_of_equal_budgets(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("llama"), text(90)
    sizes, kept = [], []
    for shares in (Shares(APART), None):
        cache = KVCache(model, 26, "key_diff", 2, 4, 16, rollback=0, store=store, shares=shares)
        read(model, cache, ids[:, :80], 16)
        read(model, cache, ids[:, 80:], 1)
        sizes.append(bytes_of_slots(cache) // 100)  # but for scales of channels, of which each tensor has its own
        kept.append(sum(int((layer.positions >= 0).sum()) for layer in cache.layers))
    assert kept == [26 * 6, 26 * 6]
    assert sizes[0] == sizes[1]


def test_one_share_a_layer_puts_no_heads_apart(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 26, "key_diff", 2, 4, shares=Shares([[1.5] * 3, [0.5] * 3]))
    read(model, cache, text(70), 9)
    assert [its.whole is None for its in cache.by_layer] == [False, False]
    assert [layer.table.occupancy_bound for layer in cache.layers] == [36, 16]
    assert "from 16 to 36" in cache.describe()


def test_a_cache_of_transformers_comes_and_goes(attached_model: Models, plain_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    with torch.no_grad():
        theirs = plain_model("llama")(ids).past_key_values
    cache = KVCache.from_rotated(model, theirs, windlass.CacheOptions(shares=Shares(APART)))
    for ours, layer in zip(cache.to_rotated().layers, theirs.layers, strict=True):
        torch.testing.assert_close(ours.keys, layer.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.values, layer.values)
    cut = KVCache(model, 18, "recent", 2, 3, positions="compact", shares=Shares(APART))
    read(model, cut, text(60), 9)
    with pytest.raises(UsageError, match="to_rotated"):
        cut.to_rotated()


def test_policies_are_told_their_layer(attached_model: Models, text: Text) -> None:
    model, seen = attached_model("llama"), list[tuple[int, int]]()

    class Noting(windlass.policies.KeyDiff):
        """Source: none. Differs: none."""

        def score(self, slots: windlass.policies.Slots) -> Tensor:
            seen.append((slots.layer, slots.layers))
            return super().score(slots)

    read(model, KVCache(model, 12, Noting(), 2, 4, shares=Shares(APART)), text(20), 20)
    assert seen == [(0, 2), (1, 2), (1, 2)] or set(seen) == {(0, 2), (1, 2)}
