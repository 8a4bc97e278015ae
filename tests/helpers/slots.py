"""A policy's view of a layer, with keys turned or not, and a check of its scores against a formula."""

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.core.positions import EMPTY, rotate
from windlass.policies import Observation, Policy, Slots
from windlass.stores.formats import Plain

BATCH, KV_HEADS, GROUP, SLOTS, HEAD_DIM, VALUE_DIM = 3, 2, 4, 29, 6, 5
HELD = (23, 0, 14)  # tokens of each row: one row holds none
HEADS = KV_HEADS * GROUP
SPEEDS, SCALE = (0.9, 0.013), 1.25  # two channel pairs turn, the other two channels do not
# Positions of the queries of three steps: ragged, a row that sees none, more of them than one step has.
STEPS = (
    [[7, 6, 5, 4, 3, 2, 1, 0], [EMPTY] * 8, [2, 1, 0, *[EMPTY] * 5]],
    [[8], [EMPTY], [3]],
    [[12, 11, 10, 9], [EMPTY] * 4, [5, 4, EMPTY, EMPTY]],
)
Texts = list[tuple[int, int, list[int]]]  # row, head, and its slots in the order of the text


def slots_of(
    seed: int = 0,
    names: tuple[str, ...] = (),
    rotate: Callable[[Tensor, Tensor], Tensor] = lambda states, _: states,
    step_angles: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None,
) -> Slots:
    """Rows of different lengths with gaps in their text, in any order of slots.

    Free slots hold numbers that must not count.
    """
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(BATCH, KV_HEADS, SLOTS, HEAD_DIM, generator=draw) + torch.arange(HEAD_DIM)
    values = torch.randn(BATCH, KV_HEADS, SLOTS, VALUE_DIM, generator=draw)
    positions = torch.full((BATCH, KV_HEADS, SLOTS), EMPTY, dtype=torch.int32)
    for row, held in enumerate(HELD):
        for head in range(KV_HEADS):
            places = torch.randperm(SLOTS, generator=draw)[:held]
            positions[row, head, places] = torch.randperm(3 * SLOTS, generator=draw)[:held].int()
    is_free = (positions < 0)[..., None]
    store = Plain()
    store.restore({"keys": keys.where(~is_free, 40.0), "values": values.where(~is_free, -30.0)})
    state = {name: torch.rand(positions.shape, generator=draw) for name in names}
    ends = torch.tensor([3 * SLOTS, 0, 3 * SLOTS + 5])
    return Slots(store, positions, state, ends, ends, rotate, step_angles, statistics={})


def turned_slots() -> Slots:
    speeds = torch.tensor(SPEEDS)

    def rotated(states: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None] * speeds
        return rotate(states, SCALE * angles.cos(), SCALE * angles.sin())

    return slots_of(7, (), rotated, lambda: (SCALE * speeds.cos(), SCALE * speeds.sin()))


def observe(policy: Policy, slots: Slots) -> list[dict[int, Tensor]]:
    """Observe three steps of queries. Returns those of each row by position: (heads, head_dim)."""
    draw = torch.Generator().manual_seed(1)
    rows: list[dict[int, Tensor]] = [{} for _ in range(BATCH)]
    for step in STEPS:
        positions = torch.tensor(step)
        queries = torch.randn(BATCH, HEADS, positions.shape[1], HEAD_DIM, generator=draw) + torch.linspace(
            -1, 2, HEAD_DIM
        )
        policy.observe(slots, Observation(torch.zeros(slots.positions.shape), queries, positions))
        for row, seen in enumerate(step):
            rows[row].update({p: queries[row, :, i].double() for i, p in enumerate(seen) if p >= 0})
    return rows


def texts(slots: Slots) -> Texts:
    return [
        (row, head, sorted((i for i, p in enumerate(held) if p >= 0), key=held.__getitem__))
        for row, heads in enumerate(slots.positions.tolist())
        for head, held in enumerate(heads)
    ]


def assert_scores(
    policy: Policy, slots: Slots, expected: Callable[[int, int, list[int]], list[float]], tolerance: float = 1e-5
) -> None:
    """Check scores of held tokens: `expected` gives a head's scores in the order of the text."""
    score = policy.score(slots)
    assert score.shape == slots.positions.shape
    for row, head, order in texts(slots):
        truth = torch.tensor(expected(row, head, order), dtype=torch.float64)
        torch.testing.assert_close(score[row, head, order].double(), truth, rtol=1e-4, atol=tolerance)
