"""Attention to merged tokens, and the settings of rules: thresholds, equal keys."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.helpers.merges import ENDS, HEADS, SINKS, WINDOW, merged_by, random_step
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import TARGETS, MeanCount, merge_of
from windlass.core.step import AttentionCall, Limits, Step
from windlass.core.types import Scores
from windlass.policies import Policy, Slots
from windlass.positions.modes import Original
from windlass.stores.formats import Plain


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps the oldest tokens: here one token at least of every kind."""

    def score(self, slots: Slots) -> Scores:
        return -slots.positions.float()


def attended(merge: str | None, budget: int, kinds: int) -> Tensor:
    """Output of the last query in a layer without rotation, of 60 tokens that are `kinds` different ones."""
    g = torch.Generator().manual_seed(1)
    limits = Limits(budget=budget, sinks=0, window=4, chunk=60, rollback=0)
    layer = SlotLayer(0, limits, Oldest(), None, Plain(), merge_of(merge))
    keys, values = torch.randn(1, 2, kinds, 8, generator=g), torch.randn(1, 2, kinds, 5, generator=g)
    which = torch.cat((torch.arange(kinds), torch.randint(kinds, (60 - kinds,), generator=g)))
    call = AttentionCall(0.4)
    for at in range(60):
        step = Step(torch.tensor([[at]]), (1,), torch.tensor([at + 1]), torch.tensor([0]), at + 1)
        query = torch.randn(1, 4, 1, 8, generator=g)
        own = which[at : at + 1]
        out = layer.step(LayerCall(query, keys[:, :, own], values[:, :, own], step, Original(), call))
    return out


def test_merged_equal_tokens_lose_nothing() -> None:
    """n equal tokens merged into one have the same weight as before. Without the count they have less."""
    whole = attended(None, budget=64, kinds=9)
    torch.testing.assert_close(attended("mean_count", budget=30, kinds=9), whole, atol=1e-5, rtol=0)
    for worse in ("mean", "sum", None):
        assert (attended(worse, budget=30, kinds=9) - whole).abs().max() > 1e-2, worse


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_too_unlike_its_target_is_dropped(target: str) -> None:
    step, kept = random_step(HEADS, 2), []
    for threshold in (-1.0, 0.2, 1.0):
        layer, _ = merged_by(MeanCount(target, threshold=threshold), step)
        kept.append(float((layer.state["merged"] - step["merged"]).sum()))
    assert kept[0] > kept[1] > kept[2] == 0
    keys = step["keys"].clone()
    step["keys"] = keys[:, :, :1].expand_as(keys).clone()  # all alike
    layer, _ = merged_by(MeanCount(target, threshold=1.0), step)
    assert float((layer.state["merged"] - step["merged"]).sum()) == kept[0]


def test_of_equal_keys_the_newer_target_takes_a_token() -> None:
    step, chosen = random_step(1, 2), []
    step["keys"] = step["keys"][:, :, :1].expand_as(step["keys"]).clone()
    for row in range(2):
        places = step["positions"][row, 0].tolist()
        cells = sorted((at, slot) for slot, at in enumerate(places) if SINKS <= at < ENDS[row] - WINDOW)
        step["keys"][row, :, cells[-1][1]] *= -1  # the newest of all is unlike them
        chosen.append(cells[-2][1])
    layer, _ = merged_by(MeanCount(), step)
    changed = layer.state["merged"] != step["merged"]
    assert changed.nonzero().tolist() == [[row, 0, slot] for row, slot in enumerate(chosen)]
