"""KVzip: a first text is held whole, shown once more, and cut. Scores are attention weights of transformers itself."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.caches import assert_same, bytes_of_slots, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, PolicyError, UsageError
from windlass.core.step import HEADROOM
from windlass.policies import KeyNorm, KVzip
from windlass.testing import SLIDING_WINDOW

KV_HEADS, GROUP = 3, 5


def peaks(plain: PreTrainedModel, ids: list[int], repeat: int) -> list[list[list[float]]]:
    """Per layer, kv head and token of the text, the most that any query of a repeated piece gives it."""
    most = [[[0.0] * len(ids) for _ in range(KV_HEADS)] for _ in range(plain.config.num_hidden_layers)]
    for start in range(0, len(ids), repeat):
        piece = ids[start : start + repeat]
        with torch.no_grad():
            seen = plain(torch.tensor([ids + piece]), output_attentions=True).attentions
        for layer, weights in enumerate(seen):
            for head in range(KV_HEADS * GROUP):
                for query in range(len(ids), len(ids) + len(piece)):
                    for token in range(len(ids)):
                        was = most[layer][head // GROUP][token]
                        most[layer][head // GROUP][token] = max(was, float(weights[0, head, query, token]))
    return most


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "gemma3n", "gemma4_e"])
def test_the_best_by_what_the_repeated_text_looks_at_are_kept(
    plain_model: Models, attached_model: Models, text: Text, family: str
) -> None:
    """Grouped heads, learned sinks, soft-caps. A layer that holds just its sliding window is unaffected."""
    ids = text(29)[0].tolist()
    model, truth = attached_model(family), peaks(plain_model(family), ids, 6)
    budget, sinks, window = 16, 2, 3
    cache = KVCache(model, budget, KVzip(6), sinks, window, chunk=8)
    logits = windlass.prefill(model, cache, [ids])
    with torch.no_grad():
        torch.testing.assert_close(logits, plain_model(family)(torch.tensor([ids])).logits[:, -1], atol=1e-5, rtol=0)
    for layer in cache.layers:
        if layer.sliding_window is not None:
            assert held(cache, layer.index) == [list(range(29 - SLIDING_WINDOW, 29))]
            continue
        for head, positions in enumerate(held(cache, layer.index)):
            score = truth[layer.index][head]
            best = sorted(range(sinks, 29 - window), key=lambda p: -score[p])[: budget - sinks - window]
            assert positions == [0, 1, *sorted(best), 26, 27, 28]
            order = layer.positions[0, head].clamp(min=0)
            is_held = layer.positions[0, head] >= 0
            expected = torch.tensor(score)[order][is_held]
            torch.testing.assert_close(layer.table.state["peak"][0, head][is_held], expected, atol=1e-6, rtol=1e-4)


def test_the_second_reading_leaves_nothing_but_scores(attached_model: Models, text: Text) -> None:
    """Kept tokens and later logits equal those of a cache that read the text once."""
    model, ids = attached_model("llama"), text(40, rows=2)
    prompts = [ids[0].tolist(), ids[1, :23].tolist()]
    zipped = KVCache(model, 60, KVzip(7), chunk=9, batch=2)
    twin = KVCache(model, 60, KeyNorm(), chunk=9, batch=2)
    logits = [windlass.prefill(model, cache, prompts) for cache in (zipped, twin)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    assert zipped.tokens_seen == [40, 23]
    for layer in zipped.layers:
        layer.table.state = {}
    twin.compress(60)
    assert_same(zipped, twin)


@pytest.mark.parametrize("mode", ["original", "compact"])
@pytest.mark.parametrize("store", ["plain", "int8(sinks=2, newest=5)"])
def test_a_ragged_row_equals_the_row_alone(attached_model: Models, text: Text, mode: str, store: str) -> None:
    model, lengths = attached_model("llama"), (50, 23, 31)
    prompts = [text(n, seed=n)[0].tolist() for n in lengths]
    options = {"policy": KVzip(8), "window": 3, "chunk": 20, "positions": mode, "store": store}
    batch = KVCache(model, 12, batch=3, **options)  # type: ignore[arg-type]
    windlass.prefill(model, batch, prompts)
    more = text(20, rows=3, seed=9)
    together = read(model, batch, more, 1)
    for row, prompt in enumerate(prompts):
        alone = KVCache(model, 12, **options)  # type: ignore[arg-type]
        windlass.prefill(model, alone, [prompt])
        torch.testing.assert_close(
            together[row : row + 1], read(model, alone, more[row : row + 1], 1), atol=1e-4, rtol=0
        )
        assert held(batch, 1, row) == held(alone, 1)


def test_memory_falls_to_that_of_the_budget(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, twin = (KVCache(model, 12, KVzip(8), chunk=20) for _ in range(2))
    windlass.prefill(model, cache, [text(50)[0].tolist()])
    read(model, twin, text(1), 1)
    assert bytes_of_slots(cache) == bytes_of_slots(twin) == 2 * 3 * (12 + HEADROOM + 16) * (2 * 8 * 4 + 2 * 4)


def test_later_tokens_push_out_the_text_lowest_first_and_are_never_scored(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 16, KVzip(8), sinks=2, window=3)
    windlass.prefill(model, cache, [text(30)[0].tolist()])
    layer = cache.layers[1]
    peak = layer.table.state["peak"]
    score = {int(p): float(s) for p, s in zip(layer.positions[0, 2], peak[0, 2], strict=True) if p >= 0}
    before = held(cache, 1)[2]
    gone = sorted(before[2:], key=lambda p: score[p])[:4]
    windlass.prefill(model, cache, [text(4, seed=1)[0].tolist()])
    assert held(cache, 1)[2] == sorted({*before} - {*gone} | {30, 31, 32, 33})
    windlass.prefill(model, cache, [text(30, seed=2)[0].tolist()])
    assert held(cache, 1)[2] == [0, 1, *range(50, 64)]


@pytest.mark.parametrize("at", [1, 3, 4, 6])
def test_an_interrupt_leaves_a_cache_within_its_budget(attached_model: Models, text: Text, at: int) -> None:
    model, calls = attached_model("llama"), []
    cache = KVCache(model, 16, KVzip(9), sinks=2, window=3, chunk=10)

    def interrupt(done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        windlass.prefill(model, cache, [text(30)[0].tolist()], interrupt)
    assert calls == [(5, 30), (10, 30), (15, 30), (19, 30), (24, 30), (28, 30), (30, 30)][:at]
    assert cache.tokens_seen == [min(10 * at, 30)]
    assert {layer.table.occupancy_bound for layer in cache.layers} == {min(10 * at, 16)}
    assert read(model, cache, text(30, seed=1), 10).isfinite().all()
    assert {layer.table.occupancy_bound for layer in cache.layers} == {16}


def test_without_a_first_prompt_it_keeps_the_newest(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    cache = KVCache(model, 16, KVzip(), sinks=2, window=3)
    read(model, cache, ids, 8)
    assert held(cache, 1) == [[0, 1, *range(26, 40)]] * KV_HEADS
    with pytest.raises(PolicyError, match="KVzip: scoring_chunk must be at least 1, got 0"):
        KVzip(0)


def test_the_text_cannot_be_taken_back(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 16, KVzip())
    windlass.prefill(model, cache, [text(30)[0].tolist()])
    with pytest.raises(UsageError, match="row 0 was edited 0 tokens ago"):
        cache.rollback(1)


def test_progress_ends_once(attached_model: Models, text: Text) -> None:
    told: list[tuple[int, int]] = []
    show: Callable[[int, int], None] = lambda done, total: told.append((done, total))  # noqa: E731
    model = attached_model("llama")
    windlass.prefill(model, KVCache(model, 16, KVzip(16), chunk=16), [text(30)[0].tolist()], show)
    assert told == [(8, 30), (15, 30), (23, 30), (30, 30)]
