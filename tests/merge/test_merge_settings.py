"""What a cache does with cells, and the settings of rules: thresholds, rare tokens, equal keys."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.merge.test_merge import (
    ENDS,
    GROUP,
    HEADS,
    SCALE,
    SINKS,
    WINDOW,
    Models,
    random_step,
    record_of,
    room_of,
    rotary_of,
)
from windlass.cache.layer import LayerCache
from windlass.core.shapes import Scores
from windlass.core.step import AttentionCall, Limits, Step
from windlass.kernels import reference
from windlass.kernels.reference import Visibility
from windlass.merge import FRAMES, MERGES, TARGETS, MeanCount, absorb, merge_of
from windlass.policies import Policy, Slots
from windlass.positions.modes import Original
from windlass.stores.base import Plain


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps what came first: here one token at least of every kind."""

    def score(self, slots: Slots) -> Scores:
        return -slots.positions.float()


def attended(merge: str | None, budget: int, kinds: int) -> Tensor:
    """What the last query reads from a layer without rotation, of 60 tokens that are `kinds` different ones."""
    g = torch.Generator().manual_seed(1)
    limits = Limits(budget=budget, sinks=0, window=4, chunk=60, rollback=0)
    layer = LayerCache(0, limits, Oldest(), None, Plain(), merge_of(merge))
    keys, values = torch.randn(1, 2, kinds, 8, generator=g), torch.randn(1, 2, kinds, 5, generator=g)
    which = torch.cat((torch.arange(kinds), torch.randint(kinds, (60 - kinds,), generator=g)))
    call = AttentionCall(0.4)
    for at in range(60):
        step = Step(torch.tensor([[at]]), (1,), torch.tensor([at + 1]), torch.tensor([0]), at + 1)
        query = torch.randn(1, 4, 1, 8, generator=g)
        own = which[at : at + 1]
        out = layer.step(query, keys[:, :, own], values[:, :, own], step, Original(), call)
    return out


def test_cells_of_equal_tokens_lose_nothing() -> None:
    """n equal tokens in one cell weigh what they weighed apart; without the count they do not."""
    whole = attended(None, budget=64, kinds=9)
    torch.testing.assert_close(attended("mean_count", budget=30, kinds=9), whole, atol=1e-5, rtol=0)
    for worse in ("mean", "sum", "values", None):
        assert (attended(worse, budget=30, kinds=9) - whole).abs().max() > 1e-2, worse


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("count", [1, 6])
def test_keepkv_changes_nothing_for_the_newest_query(attached_model: Models, frame: str, count: int) -> None:
    """One query head for each kv head: it reads the cells as it read their tokens, exactly."""
    rotary, step = rotary_of(attached_model("llama_yarn")), random_step(HEADS, 5)
    step["queries"] = step["queries"][:, ::GROUP]
    for name, far in (("queries", 2.0), ("keys", 3.0)):  # logits far from 0, wherever a key stands
        step[name][..., 8:] = far + 0.2 * step[name][..., 8:]
    step["evicted"], step["before"] = step["evicted"][..., :count], step["before"][..., :count]
    room = room_of(step, rotary)
    was = room.positions.scatter(-1, step["evicted"], step["before"])
    record = record_of(step)

    def read(positions: Tensor) -> Tensor:
        tables = rotary.tables(max(ENDS), torch.device("cpu"))
        own = torch.tensor([[ENDS[0] - 1], [ENDS[1] - 1]])
        query = torch.stack([step["queries"][row, :, 2 - row] for row in range(2)])[:, :, None]
        reading = Original().read(positions, own)
        store, counts = room.store, room.state["merged"].log1p()
        more = {"reading": reading, "tables": tables, "scale": SCALE, "visibility": Visibility(), "log_counts": counts}
        return reference.attend(query, store.held_keys(), store.held_values(), positions, own, **more)[0]

    before = read(was)
    absorb(MERGES["keepkv"]("next", frame, threshold=-1.0), room, record)
    torch.testing.assert_close(read(room.positions), before, atol=2e-6, rtol=0)
    room = room_of(step, rotary)
    absorb(MeanCount("next", frame), room, record)
    assert (read(room.positions) - before).abs().max() > 1e-3


@pytest.mark.parametrize("ranked", [1, HEADS])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_the_rarest_take_nothing_in(attached_model: Models, share: float, ranked: int) -> None:
    rotary, differs = rotary_of(attached_model("llama")), False
    for seed in range(2):
        step = random_step(ranked, seed)
        rooms = [room_of(step, rotary) for _ in range(2)]
        absorb(MeanCount(rare=share), rooms[0], record_of(step))
        # The same, told by hand which are not there to be joined: they stand where no cell may.
        positions = step["positions"].clone()
        for row, rank in product(range(2), range(ranked)):
            heads = range(HEADS) if ranked == 1 else [rank]
            held = [slot for slot, at in enumerate(step["positions"][row, rank]) if at >= 0]
            cells = [s for s in held if SINKS <= positions[row, rank, s] < ENDS[row] - WINDOW]
            cosines = dict.fromkeys(held, 0.0)
            for head in heads:
                units = {s: torch.nn.functional.normalize(step["keys"][row, head, s].double(), dim=0) for s in held}
                mean = torch.nn.functional.normalize(sum(units.values()), dim=0)  # type: ignore[arg-type]
                cosines = {s: cosines[s] + float(units[s] @ mean) for s in held}
            for slot in sorted(cells, key=lambda s: cosines[s])[: int(share * len(cells))]:
                positions[row, rank, slot] = SINKS - 1
        absorb(MeanCount(), replace(rooms[1], positions=positions), record_of(step))
        for name in ("keys", "values"):
            ours, theirs = (room.store.tensors()[name] for room in rooms)
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
        assert rooms[0].state["merged"].equal(rooms[1].state["merged"])
        plain = room_of(step, rotary)
        absorb(MeanCount(), plain, record_of(step))
        differs |= not plain.store.keys().equal(rooms[0].store.keys())
    assert differs or share < 0.5


@pytest.mark.parametrize("target", TARGETS)
def test_a_token_too_unlike_its_cell_is_let_go(attached_model: Models, target: str) -> None:
    rotary, step, kept = rotary_of(attached_model("llama")), random_step(HEADS, 2), []
    for threshold in (-1.0, 0.2, 1.0):
        room = room_of(step, rotary)
        absorb(MeanCount(target, threshold=threshold), room, record_of(step))
        kept.append(float((room.state["merged"] - step["merged"]).sum()))
    assert kept[0] > kept[1] > kept[2] == 0
    keys = step["keys"].clone()
    step["keys"] = keys[:, :, :1].expand_as(keys).clone()  # all alike
    room = room_of(step, rotary)
    absorb(MeanCount(target, threshold=1.0), room, record_of(step))
    assert float((room.state["merged"] - step["merged"]).sum()) == kept[0]


def test_of_equal_keys_the_newer_cell_takes_a_token(attached_model: Models) -> None:
    rotary, step, chosen = rotary_of(attached_model("llama")), random_step(1, 2), []
    step["keys"] = step["keys"][:, :, :1].expand_as(step["keys"]).clone()
    for row in range(2):
        places = step["positions"][row, 0].tolist()
        cells = sorted((at, slot) for slot, at in enumerate(places) if SINKS <= at < ENDS[row] - WINDOW)
        step["keys"][row, :, cells[-1][1]] *= -1  # the newest of all is unlike them
        chosen.append(cells[-2][1])
    room = room_of(step, rotary)
    absorb(MeanCount(), room, record_of(step))
    changed = room.state["merged"] != step["merged"]
    assert changed.nonzero().tolist() == [[row, 0, slot] for row, slot in enumerate(chosen)]
