"""The four steps against explicit masks, a row against itself alone, and invariants."""

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.caches import MODES, POLICIES, bytes_of_slots
from tests.helpers.models import Models, Text, masked, read
from windlass import KVCache, UsageError
from windlass.cache.layer import SlotLayer
from windlass.core.positions import EMPTY
from windlass.policies import Policy, Recent


def distances(tokens: int) -> tuple[Tensor, Tensor]:
    """(query - key, key) for every pair of a text."""
    key = torch.arange(tokens)[None]
    return torch.arange(tokens)[:, None] - key, key


@pytest.mark.parametrize("chunk", [1, 3, 7, 17, 61])
@pytest.mark.parametrize(("budget", "sinks"), [(6, 4), (13, 4), (13, 0), (40, 1)])
def test_recent_equals_an_explicit_mask_of_sinks_and_window(
    plain_model: Models, attached_model: Models, text: Text, chunk: int, budget: int, sinks: int
) -> None:
    ids = text(61, rows=2)
    distance, key = distances(61)
    seen = (distance >= 0) & ((key < sinks) | (distance < budget - sinks + 1))
    cache = KVCache(attached_model("llama"), budget=budget, sinks=sinks, window=1, batch=2, policy=Recent())
    ours = read(attached_model("llama"), cache, ids, chunk)
    torch.testing.assert_close(ours, masked(plain_model("llama"), ids, seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [1, 5, 53])
def test_recent_on_a_sliding_model_keeps_to_both_windows(
    plain_model: Models, attached_model: Models, text: Text, chunk: int
) -> None:
    """Budget 8 is below the model's window of 11, so sinks count only while inside that window."""
    ids = text(53)
    distance, key = distances(53)
    seen = (distance >= 0) & (distance < 11) & ((key < 3) | (distance < 8 - 3 + 1))
    cache = KVCache(attached_model("mistral"), budget=8, sinks=3, window=2, policy=Recent())
    ours = read(attached_model("mistral"), cache, ids, chunk)
    torch.testing.assert_close(ours, masked(plain_model("mistral"), ids, seen), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_budget_sinks_and_window_hold(attached_model: Models, text: Text, policy: Policy) -> None:
    ids = text(90, rows=2)
    cache = KVCache(attached_model("llama"), budget=16, policy=policy, sinks=3, window=5, batch=2)
    at = 0
    for tokens in (40, 1, 1, 7, 20, 1, 17, 3):
        with torch.no_grad():
            attached_model("llama")(ids[:, at : at + tokens], past_key_values=cache)
        at += tokens
        for layer in cache.layers:
            held = layer.positions.clamp(min=EMPTY).sort(-1).values
            held = held[..., -16:]
            assert (layer.positions >= 0).sum(-1).unique().tolist() == [min(at, 16)]
            assert (held.diff(dim=-1) > 0).all(), "positions of a head must be distinct"
            assert (held[..., :3] == torch.arange(3)).all()
            assert (held[..., -5:] == torch.arange(at - 5, at)).all()
    assert at == 90


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_slot_holds_the_token_its_position_says(attached_model: Models, text: Text, policy: Policy) -> None:
    """Keys and values of the first layer depend on the token alone, so each slot can be checked."""
    model, ids = attached_model("llama"), text(70, rows=2)
    whole = KVCache(model, policy=policy, batch=2)  # which may take a channel of the keys
    read(model, whole, ids, 70)
    cache = KVCache(model, budget=20, policy=policy, window=4, batch=2)
    for tokens in ids.split([33, 1, 1, 1, 20, 1, 13], 1):
        read(model, cache, tokens, tokens.shape[1])
        for ours, truth in (
            (cache.layers[0].store.keys(), whole.layers[0].store.keys()),
            (cache.layers[0].store.values(), whole.layers[0].store.values()),
        ):
            positions = cache.layers[0].positions.expand(-1, 3, -1)
            expected = truth.gather(2, positions.clamp(min=0).long()[..., None].expand(-1, -1, -1, 8))
            is_held = positions >= 0
            torch.testing.assert_close(ours[is_held], expected[is_held], atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_ragged_row_equals_the_row_alone(attached_model: Models, text: Text, policy: Policy, mode: str) -> None:
    """Rows of 50, 23 and 31 tokens in one batch, over budget, then decoding together."""
    model, lengths = attached_model("llama"), (50, 23, 31)
    prompts = [text(n, seed=n)[0].tolist() for n in lengths]
    more = text(6, rows=3, seed=9)
    batch = KVCache(model, budget=12, policy=policy, window=3, chunk=20, positions=mode, batch=3)
    together = [windlass.prefill(model, batch, prompts)]
    together += [read(model, batch, column, 1)[:, 0] for column in more.split(1, 1)]
    for row, prompt in enumerate(prompts):
        alone = KVCache(model, budget=12, policy=policy, window=3, chunk=20, positions=mode)
        logits = [windlass.prefill(model, alone, [prompt])]
        logits += [read(model, alone, column, 1)[:, 0] for column in more[row : row + 1].split(1, 1)]
        # Random ranks by the row's own text, so it is no exception.
        for ours, theirs in zip(logits, together, strict=True):
            torch.testing.assert_close(theirs[row], ours[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES[1:])
def test_position_modes_equal_attention_with_these_distances(attached_model: Models, text: Text, mode: str) -> None:
    """One token at a time and all at once read at the same distances, by different branches."""
    model, ids = attached_model("llama"), text(47)
    at_once = read(model, KVCache(model, positions=mode), ids, 47)
    one_by_one = read(model, KVCache(model, positions=mode), ids, 1)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-5, rtol=0)


def test_a_mode_may_change_between_steps(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    changed, plain = KVCache(model, positions="original"), KVCache(model, positions="original")
    read(model, changed, ids[:, :30], 30)
    read(model, plain, ids[:, :30], 30)
    changed.positions = "compact"
    away = read(model, changed, ids[:, 30:35], 5)
    torch.testing.assert_close(away, read(model, plain, ids[:, 30:35], 5), atol=1e-5, rtol=0)
    changed.positions = "clamp(4)"
    assert (read(model, changed, ids[:, 35:36], 1) - read(model, plain, ids[:, 35:36], 1)).abs().max() > 1e-3


def test_positions_that_do_not_follow_are_refused_and_nothing_is_changed(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(12, rows=2)
    cache = KVCache(model, batch=2)
    read(model, cache, ids, 12)
    before = cache.describe()
    with pytest.raises(UsageError, match=r"position_ids\[1, 1\] is 99, but the cache continues row 1 at position 13"):
        model(ids[:, :2], past_key_values=cache, position_ids=torch.tensor([[12, 13], [12, 99]]))
    assert cache.describe() == before
    assert cache.next_positions == [12, 12]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"budget": 8, "sinks": 4, "window": 4}, r"budget \(8 tokens\) must be at least sinks \(4\) \+ window \(4\)"),
        ({"budget": -1}, "budget must be from 1 to"),
        ({"budget": 2**40}, "budget must be from 1 to"),
        ({"sinks": -1}, "sinks must be from 0"),
        ({"window": 0}, "window must be from 1"),
        ({"chunk": 0}, "chunk must be from 1"),
        ({"batch": 0}, "batch must be from 1"),
        ({"rollback": -2}, "rollback must be from 0"),
        ({"positions": "compacted"}, "is not a position mode. Use one of: auto, original, compact"),
        ({"positions": "clamp(0)"}, "limit must be from 1"),
        ({"positions": "self_extend(8, 64, 2)"}, "self_extend takes group and window, each once"),
        ({"positions": "clamp(far)"}, "limit must be a whole number, got 'far'"),
    ],
)
def test_limits_that_cannot_be_honoured_name_the_way_out(
    attached_model: Models, limits: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        KVCache(attached_model("llama"), **limits)  # type: ignore[arg-type]


def test_another_batch_size_is_refused(attached_model: Models, text: Text) -> None:
    with pytest.raises(UsageError, match="made for batch=2, the model was called with 3 rows"):
        read(attached_model("llama"), KVCache(attached_model("llama"), batch=2), text(4, rows=3), 4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_bytes_are_the_formula_and_what_is_allocated(attached_model: Models, text: Text, family: str) -> None:
    """At rest: budget + 32 slots a layer (16 to write to, 16 for rollback). A window layer has its window."""
    model = attached_model(family)
    cache = KVCache(model, budget=40, batch=2, policy=Recent())
    read(model, cache, text(100, rows=2), 50)
    read(model, cache, text(3, rows=2), 1)
    expected = 0
    for layer in cache.layers:
        slots = (11 if layer.sliding_window else 40) + 32
        kv_heads = layer.store.keys().shape[1]
        expected += 2 * kv_heads * slots * 2 * layer.store.keys().shape[3] * 4 + 2 * slots * 4
    assert bytes_of_slots(cache) == expected
    cache.drop(102, 103)  # after an edit no step can be taken back
    assert cache.bytes_held == expected


def test_an_unbounded_cache_grows_geometrically(attached_model: Models, text: Text) -> None:
    model, cache = attached_model("llama"), KVCache(attached_model("llama"))
    sizes = []
    for token in text(300).split(1, 1):
        read(model, cache, token, 1)
        sizes.append(cache.layers[0].store.slots)
    assert sorted(set(sizes)) == [64, 128, 192, 320]
    assert all(size > at for at, size in enumerate(sizes))


def test_an_interrupted_step_leaves_the_cache_as_it_was(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = attached_model("llama"), text(30)
    cache = KVCache(model, budget=16, policy=windlass.policies.H2O(), window=3)
    twin = KVCache(model, budget=16, policy=windlass.policies.H2O(), window=3)
    for one in (cache, twin):
        read(model, one, ids[:, :20], 20)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 20:25], past_key_values=cache)
    assert cache.next_positions == [20]
    torch.testing.assert_close(read(model, cache, ids[:, 20:], 1), read(model, twin, ids[:, 20:], 1), atol=0, rtol=0)


def test_finished_rows_cost_the_others_nothing(attached_model: Models, text: Text) -> None:
    """A row that gets padding only is neither written nor evicted from, and observes nothing."""
    model = attached_model("llama")
    cache = KVCache(model, budget=10, policy=windlass.policies.SnapKV(observed_queries=4), window=3, batch=2)
    read(model, cache, text(25, rows=2), 25)
    before = [_votes(layer, 1) for layer in cache.layers]
    mask = torch.tensor([[1], [0]])
    with torch.no_grad():
        for token in text(5, rows=2).split(1, 1):
            model(token, attention_mask=mask, past_key_values=cache)
    assert cache.next_positions == [30, 25]
    assert [_votes(layer, 1) for layer in cache.layers] == before


def _votes(layer: SlotLayer, row: int) -> dict[tuple[int, int], float]:
    """SnapKV's votes of a row's tokens, by (head, position)."""
    return {
        (head, int(position)): float(vote)
        for head, (positions, votes) in enumerate(
            zip(layer.positions[row], layer.table.state["votes"][row], strict=True)
        )
        for position, vote in zip(positions, votes, strict=True)
        if position >= 0
    }
