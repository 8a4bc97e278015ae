"""A linear scorer: its formula number by number, streaming against a choice from a whole text, and its file."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.caches import assert_same, held
from tests.helpers.models import Models, Text, read
from tests.helpers.scorers import GROUP, KV_HEADS, by_hand, drawn, projected, scorer_of
from tests.helpers.shares import APART
from windlass import CacheOptions, KVCache, PolicyError, Shares, kernels, prefill
from windlass.cache.options import policy_of
from windlass.policies import Composite, LinearScorer, Smoothed
from windlass.policies.linear_scorer import PREDICTED
from windlass.policies.registry import spelled
from windlass.testing import SLIDING_WINDOW, check_policy

if TYPE_CHECKING:
    pass

SINKS, WINDOW, TOKENS = 2, 3, 61
LIMITS: dict[str, Any] = {"sinks": SINKS, "window": WINDOW, "chunk": 64}


NEEDS_KERNELS = pytest.mark.skipif(not kernels.has_linear("cpu"), reason="no kernel for linear layers on this CPU")


@pytest.fixture
def file(attached_model: Models, tmp_path: Path) -> str:
    return scorer_of(tmp_path / "scorer.safetensors", attached_model("llama"))


def scores(model: PreTrainedModel, ids: Tensor, cache: KVCache, chunk: int) -> list[Tensor]:
    """Scores of the formula for each layer, kv head and token of a text that `cache` reads: (kv_heads, tokens)."""
    weights = drawn().layers
    with projected(model) as layers:
        read(model, cache, ids, chunk)
    found = []
    for number, (queries, keys) in enumerate(layers):
        q, k = torch.cat(queries, 1)[0], torch.cat(keys, 1)[0]
        found.append(
            torch.tensor(
                [
                    [
                        by_hand(weights[number], head, q[at, head * GROUP : (head + 1) * GROUP], k[at, head])
                        for at in range(ids.shape[1])
                    ]
                    for head in range(KV_HEADS)
                ]
            )
        )
    return found


def by_token(cache: KVCache, layer: int, row: int = 0) -> list[dict[int, float]]:
    """Scores of the tokens that each kv head of a layer holds."""
    groups, heads = cache.by_layer[layer], dict[int, dict[int, float]]()
    for number, own in enumerate(groups.layers):
        for at, head in enumerate(groups.heads[number] if groups.heads else range(KV_HEADS)):
            pairs = zip(own.positions[row, at].tolist(), own.table.state[PREDICTED][row, at].tolist(), strict=True)
            heads[head] = {place: value for place, value in pairs if place >= 0}
    return [heads[head] for head in range(KV_HEADS)]


@pytest.mark.parametrize("shares", [None, Shares(APART)], ids=["whole", "groups"])
@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
def test_a_token_has_the_score_of_the_formula_and_the_best_stay(
    attached_model: Models, text: Text, file: str, chunk: int, budget: int | None, shares: Shares | None
) -> None:
    """The best of all tokens outside of the window, for any chunk: a token once evicted would not be among them."""
    model, ids = attached_model("llama"), text(TOKENS)
    cache = KVCache(model, budget, LinearScorer(file), shares=shares, **LIMITS)
    expected = scores(model, ids, cache, chunk)
    for layer, wanted in enumerate(expected):
        assert wanted.unique().numel() > TOKENS
        budgets = dict[int, int]()
        for number, own in enumerate(cache.by_layer[layer].layers):
            for head in cache.by_layer[layer].heads[number] if shares is not None else range(KV_HEADS):
                budgets[head] = own.budget if own.budget is not None else TOKENS
        assert len(set(budgets.values())) == (1 if shares is None or budget is None else 2)
        for head, found in enumerate(by_token(cache, layer)):
            for place, value in found.items():
                assert value == pytest.approx(wanted[head, place].item(), abs=1)
            free = sorted(range(SINKS, TOKENS - WINDOW), key=lambda at: (-wanted[head, at].item(), -at))
            kept = sorted(free[: max(budgets[head] - SINKS - WINDOW, 0)])
            assert sorted(found) == [*range(SINKS), *kept, *range(TOKENS - WINDOW, TOKENS)]


@NEEDS_KERNELS
@pytest.mark.parametrize("budget", [14, None])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shares", [None, Shares(APART)], ids=["whole", "groups"])
def test_one_call_of_a_kernel_leaves_what_the_steps_leave(
    attached_model: Models,
    text: Text,
    file: str,
    budget: int | None,
    rows: int,
    shares: Shares | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids, caches = attached_model("llama"), text(60, rows=rows), list[KVCache]()
    for is_on in (True, False):
        if not is_on:
            monkeypatch.setattr(kernels, "has_decode", lambda _: False)
        limits = {**LIMITS, "batch": rows, "rollback": 9}
        cache = KVCache(model, budget, LinearScorer(file), shares=shares, **limits)
        read(model, cache, ids[:, :40], 40)
        read(model, cache, ids[:, 40:], 1)
        assert (cache.layers[0].decode_kernel._prepared is not None) == is_on
        caches.append(cache)
    assert_same(*caches)
    for cache in caches:
        cache.rollback([5, 2][:rows])
    assert_same(*caches)


@NEEDS_KERNELS
@pytest.mark.parametrize("rows", [1, 2])
def test_decode_asks_the_policy_for_nothing_but_new_scores(
    attached_model: Models, text: Text, file: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, layers = attached_model("llama"), text(60, rows=rows), list[int]()
    from windlass.kernels.cpu.decode import DecoderSteps

    step = DecoderSteps.step

    def counted(self: DecoderSteps, *given: Any) -> Tensor:
        layers.append(len(self._layers))
        return step(self, *given)

    cache = KVCache(model, 14, LinearScorer(file), batch=rows, **LIMITS)
    read(model, cache, ids[:, :40], 40)
    monkeypatch.setattr(LinearScorer, "score", None)
    monkeypatch.setattr(DecoderSteps, "step", counted)
    read(model, cache, ids[:, 40:], 1)
    assert layers == [2] * 19  # all in one call, but for the first token, which packs the slots


@pytest.mark.parametrize("lengths", [(3, 2), (8, 0), (0, 5)])
def test_what_is_rolled_back_was_never_there(
    attached_model: Models, text: Text, file: str, lengths: tuple[int, int]
) -> None:
    """Two rows, after a step of several tokens and steps of one."""
    model, ids = attached_model("llama"), text(60, rows=2)
    for steps in (8, 1):
        cache = KVCache(model, 16, LinearScorer(file), batch=2, **LIMITS)
        read(model, cache, ids[:, :40], 40)
        read(model, cache, ids[:, 40:48], steps)
        cache.rollback(list(lengths))
        for row, count in enumerate(lengths):
            alone = KVCache(model, 16, LinearScorer(file), **LIMITS)
            read(model, alone, ids[row : row + 1, :40], 40)
            left = ids[row : row + 1, 40 : 48 - count]
            if left.shape[1]:
                read(model, alone, left, 8)
            for layer in range(2):
                assert held(cache, layer, row) == held(alone, layer)
                for ours, theirs in zip(by_token(cache, layer, row), by_token(alone, layer), strict=True):
                    assert ours == pytest.approx(theirs, abs=1)


@pytest.mark.parametrize("shares", [None, Shares(APART)], ids=["whole", "groups"])
def test_a_row_of_a_ragged_batch_is_the_row_alone(
    attached_model: Models, text: Text, file: str, shares: Shares | None
) -> None:
    model, policy = attached_model("llama"), LinearScorer(file)
    texts = [text(TOKENS)[0].tolist(), text(37, seed=2)[0].tolist(), text(9, seed=3)[0].tolist()]
    together = KVCache(model, 16, policy, shares=shares, batch=3, **{**LIMITS, "chunk": 13})
    logits = prefill(model, together, texts)
    for row, ids in enumerate(texts):
        alone = KVCache(model, 16, policy, shares=shares, **{**LIMITS, "chunk": 13})
        torch.testing.assert_close(logits[row], prefill(model, alone, [ids])[0], atol=1e-4, rtol=0)
        for layer in range(2):
            for ours, theirs in zip(by_token(together, layer, row), by_token(alone, layer), strict=True):
                assert ours == pytest.approx(theirs, abs=1)


@pytest.mark.parametrize("store", ["int8", "int4", "int4(sinks=2, newest=5)"])
def test_stores_do_not_change_scores(attached_model: Models, text: Text, file: str, store: str) -> None:
    """Scores are of the token as it came. The first layer's tokens come alike."""
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, 16, LinearScorer(file), store=name, **LIMITS) for name in ("plain", store)]
    for cache in caches:
        read(model, cache, ids, 11)
    for plain, packed in zip(*(by_token(cache, 0) for cache in caches), strict=True):
        assert packed == pytest.approx(plain)


@pytest.mark.parametrize("rule", ["mean_count", "mean_count(next)", "sum", "mean", "pick"])
def test_merging_leaves_the_scores_of_the_tokens_that_stay(
    attached_model: Models, text: Text, file: str, rule: str
) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, 16, LinearScorer(file), merge=merge, **LIMITS) for merge in (None, rule)]
    for cache in caches:
        read(model, cache, ids, 11)
    for dropped, merged in zip(*(by_token(cache, 0) for cache in caches), strict=True):
        assert sorted(merged.values()) == pytest.approx(sorted(dropped.values()))  # merged tokens may stand elsewhere


def test_compress_keeps_the_best_of_a_text_held_whole(attached_model: Models, text: Text, file: str) -> None:
    model, ids = attached_model("llama"), text(60)
    whole, streamed = (KVCache(model, budget, LinearScorer(file), **LIMITS) for budget in (None, 16))
    for cache in (whole, streamed):
        read(model, cache, ids, 60)
    whole.compress(16)
    assert [held(whole, layer) for layer in range(2)] == [held(streamed, layer) for layer in range(2)]


def test_a_text_is_saved_loaded_and_copied_with_its_scores(
    attached_model: Models, text: Text, file: str, tmp_path: Path
) -> None:
    model, ids = attached_model("llama"), text(60)
    cache = KVCache(model, 16, LinearScorer(file), **LIMITS)
    read(model, cache, ids[:, :40], 11)
    cache.save(tmp_path / "text")
    others = [copy.deepcopy(cache), KVCache.load(tmp_path / "text", model, policy=LinearScorer(file))]
    for each in (cache, *others):
        read(model, each, ids[:, 40:], 5)
    for other in others:
        assert_same(cache, other)


def test_tokens_without_queries_leave_first(attached_model: Models, plain_model: Models, text: Text, file: str) -> None:
    model, ids = attached_model("llama"), text(30)
    theirs = plain_model("llama")(ids[:, :20], use_cache=True).past_key_values
    policy = LinearScorer(file)
    cache = KVCache.from_rotated(model, theirs, CacheOptions(16, policy, sinks=SINKS, window=WINDOW))
    assert all(value == 0 for head in by_token(cache, 0) for value in head.values())
    read(model, cache, ids[:, 20:], 3)
    assert held(cache, 0) == [[0, 1, *range(16, 30)]] * KV_HEADS


@pytest.mark.parametrize("family", ["gemma3", "qwen2"])
def test_layers_without_weights_keep_their_newest(
    attached_model: Models, text: Text, tmp_path: Path, family: str
) -> None:
    """A sliding window is longer than this budget, so that a policy evicts from it."""
    model, ids, budget = attached_model(family), text(60), SLIDING_WINDOW - 1
    policy = LinearScorer(scorer_of(tmp_path / "scorer", model, layers=(1, 3)))
    cache = KVCache(model, budget, policy, **LIMITS)
    read(model, cache, ids, 9)
    windowed = [layer for layer in range(4) if cache.layers[layer].sliding_window is not None]
    assert windowed == [0, 2]
    assert all(not any(head.values()) for layer in windowed for head in by_token(cache, layer))
    assert all(min(head.values()) > 0 for head in by_token(cache, 1))


def test_it_serves_layers_that_share_keys(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """Where attention reads the model's own keys, nothing stands against it."""
    model = attached_model("gemma3n")
    policy = LinearScorer(scorer_of(tmp_path / "scorer", model, layers=(1,)))
    read(model, KVCache(model, 12, policy, **LIMITS), text(30), 7)


def test_another_model_is_refused(attached_model: Models, file: str, tmp_path: Path) -> None:
    way = r"Fit one to this model with `windlass calibrate --scorer`, in the same dtype \(torch.float32\)"
    with pytest.raises(PolicyError, match=f"was fitted to a LlamaForCausalLM, this is a Qwen3ForCausalLM. {way}"):
        KVCache(attached_model("qwen3"), 20, Smoothed(LinearScorer(file)))
    with pytest.raises(PolicyError, match=f"was fitted to another LlamaForCausalLM. {way}"):
        KVCache(attached_model("llama_linear"), 20, LinearScorer(file))
    wrong = LinearScorer(scorer_of(tmp_path / "wrong", attached_model("llama"), heads=2))
    words = "was fitted to 2 kv heads of 5 query heads and 8 channels in layer 0, and these are 3 of 5 and 8. Fit one"
    with pytest.raises(PolicyError, match=words):
        read(attached_model("llama"), KVCache(attached_model("llama"), 20, wrong), torch.tensor([[1, 2]]), 2)


def test_it_is_made_from_a_file_and_prints_so(file: str) -> None:
    policy = LinearScorer(file)
    assert policy_of(f"linear_scorer({file})") == policy == policy_of(f"LinearScorer( file={file!r} )")
    assert policy_of(f"composite(linear-scorer({file}))") == Composite(policy)
    assert repr(policy) == f"LinearScorer(file={file!r})"
    assert policy_of(repr(policy)) == policy
    assert policy_of(spelled(repr(policy))) == policy
    assert hash(policy) == hash(LinearScorer(file))
    for each in (policy, Smoothed(policy)):
        check_policy(each)
    with pytest.raises(PolicyError, match=r"policy 'linear_scorer' needs a file: LinearScorer\(FILE\), with a file of"):
        policy_of("linear_scorer")
    with pytest.raises(PolicyError, match=r"needs a file: LinearScorer\(FILE\)"):
        policy_of("smoothed(linear_scorer)")
    with pytest.raises(PolicyError, match=r"scorer nowhere cannot be read: No such file .* --scorer -o FILE"):
        policy_of("LinearScorer(nowhere)")
