"""Rows of a batch that differ in length: each is read as it would be alone."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import Models, Text, read
from tests.helpers.policies import ALL_POLICIES
from windlass import H2O, Composite, InChunks, KeyDiff, KVCache, LagKV, Pyramid, Smoothed, SnapKV
from windlass.policies import Policy

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
