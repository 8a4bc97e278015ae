"""Rows of a batch that differ in length: each is read as it would be alone."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import Models, Text, read
from tests.helpers.policies import ALL_POLICIES
from windlass import KVCache
from windlass.policies import H2O, Composite, InChunks, KeyDiff, LagKV, Policy, Pyramid, Smoothed, SnapKV

BUDGET, SHORT, LONG, STEPS = 12, 10, 30, 24
IDLE = {5, 6, 11}  # steps in which the short row gets no token
NESTED = [Smoothed(KeyDiff()), Smoothed(LagKV(lag=3)), InChunks(Smoothed(SnapKV()), 3), Pyramid(Smoothed(H2O()))]
CASES = [*((policy, None) for policy in [*ALL_POLICIES, *NESTED]), (Smoothed(H2O()), "mean_count"), (H2O(), "pick")]


def cache_of(model: PreTrainedModel, policy: Policy, merge: str | None, rows: int) -> KVCache:
    return KVCache(model, BUDGET, policy, sinks=2, window=3, positions="compact", batch=rows, merge=merge)


@torch.no_grad()
def alone(model: PreTrainedModel, cache: KVCache, prompt: Tensor, ids: Tensor, idle: set[int]) -> list[Tensor]:
    """Logits of a row after its prompt, and after each of its tokens."""
    seen = [model(prompt[None], past_key_values=cache).logits[0, -1]]
    return seen + [
        model(ids[None, at : at + 1], past_key_values=cache).logits[0, -1] for at in range(STEPS) if at not in idle
    ]


@pytest.mark.parametrize(("policy", "merge"), CASES, ids=str)
def test_a_row_is_read_as_it_would_be_alone(
    attached_model: Models, text: Text, policy: Policy, merge: str | None
) -> None:
    model, ids = attached_model("llama"), text(LONG + STEPS, rows=2)
    prompts, after = (ids[0, :SHORT], ids[1, :LONG]), ids[:, LONG:]
    cache = cache_of(model, policy, merge, 2)
    mask = torch.tensor([[1] * SHORT + [0] * (LONG - SHORT), [1] * LONG])
    with torch.no_grad():
        logits = model(torch.where(mask > 0, ids[:, :LONG], 0), attention_mask=mask, past_key_values=cache).logits
        together = [[logits[0, SHORT - 1]], [logits[1, LONG - 1]]]
        for at in range(STEPS):
            mask = torch.tensor([[int(at not in IDLE)], [1]])
            logits = model(after[:, at : at + 1], attention_mask=mask, past_key_values=cache).logits[:, -1]
            for row, seen in enumerate(together):
                if mask[row]:
                    seen.append(logits[row])
    for row, (seen, idle) in enumerate(zip(together, (IDLE, set[int]()), strict=True)):
        truth = alone(model, cache_of(model, policy, merge, 1), prompts[row], after[row], idle)
        torch.testing.assert_close(torch.stack(seen), torch.stack(truth), atol=2e-5, rtol=0)


@pytest.mark.parametrize("policy", [KeyDiff(), Smoothed(H2O()), SnapKV()], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_row_recalls_as_it_would_alone(attached_model: Models, text: Text, policy: Policy, seed: int) -> None:
    """Ragged passes at random, of none, one or many tokens a row, beside rows that have evicted or have not yet."""
    model, draw = attached_model("llama"), torch.Generator().manual_seed(seed)
    ids, mode = text(200, rows=3), ("original", "compact", "auto")[seed]

    def cache_of_rows(rows: int) -> KVCache:
        return KVCache(
            model, BUDGET, policy, sinks=2, window=3, positions=mode, batch=rows, recall=16, recall_store="plain"
        )

    together, alone = cache_of_rows(3), [cache_of_rows(1) for _ in range(3)]
    for columns in (20, 1, 18, 1, 1, 25, 1, 5, 1, 1, 30, 1):
        counts = [int(torch.randint(0, columns + 1, (1,), generator=draw)) for _ in range(3)]
        mask = torch.arange(columns) < torch.tensor(counts)[:, None]
        starts = together.next_positions
        new = torch.stack([ids[row, start : start + columns] for row, start in enumerate(starts)])
        with torch.no_grad():
            logits = model(new, attention_mask=mask, past_key_values=together).logits
            for row, cache in enumerate(alone):
                own = model(new[[row]], attention_mask=mask[[row]], past_key_values=cache).logits
                torch.testing.assert_close(logits[row][mask[row]], own[0][mask[row]], atol=2e-5, rtol=0)


def test_a_row_goes_on_as_alone_once_the_longer_one_is_gone(attached_model: Models, text: Text) -> None:
    model, ids, policy = attached_model("llama"), text(LONG + STEPS, rows=2), Smoothed(H2O())
    cache, truth = cache_of(model, policy, None, 2), cache_of(model, policy, None, 1)
    with torch.no_grad():
        mask = torch.tensor([[1] * SHORT + [0] * (LONG - SHORT), [1] * LONG])
        model(ids[:, :LONG], attention_mask=mask, past_key_values=cache)
        model(ids[:1, :SHORT], past_key_values=truth)
    cache.select_rows(torch.tensor([0]))
    ours, alone = (read(model, each, ids[:1, LONG:], 1) for each in (cache, truth))
    torch.testing.assert_close(ours, alone, atol=1e-5, rtol=0)


def test_a_cut_by_shared_scores_moves_their_mean_once(attached_model: Models, text: Text) -> None:
    """The scores that share the budget among layers are not those of the cut: only these count in a running mean."""
    model, cache = attached_model("llama"), KVCache(attached_model("llama"), policy=Composite(Smoothed(H2O(), 0.75)))
    read(model, cache, text(LONG), LONG)
    cache.compress(BUDGET)
    for layer in cache.layers:
        weight = layer.table.state["weight"][layer.positions >= 0]
        torch.testing.assert_close(weight, torch.full_like(weight, 0.25))
