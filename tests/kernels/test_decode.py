"""One call that writes a token, attends, observes and evicts, against plain PyTorch, with every instruction set."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.stores import packed_as
from windlass.core.inputs import DecodeInput, DecodeOutput, DecodeSlots, Ranking, Retention, Visibility
from windlass.core.positions import EMPTY, RESERVED, ReadRule
from windlass.kernels import cpu, reference

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

from windlass.kernels.cpu.decode import Decode

BATCH, KV_HEADS, GROUP, SLOTS, HEAD_DIM, VALUE_DIM, ROTATED, LENGTH = 2, 3, 5, 77, 48, 24, 20, 90
NEXT = (61, 70)  # positions of the rows' next tokens
BUDGET = 62  # of the tokens that they hold, the second row has more
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
STORES = ["plain", "int8", "int4"]
RANKINGS = {
    "Recent": (1, Ranking("nothing", "position")),
    "H2O": (KV_HEADS, Ranking("sum", "state")),
    "TOVA": (1, Ranking("last", "state")),
    "SnapKV": (KV_HEADS, Ranking("fade", "pooled", 1 / 7, 5)),
    "SnapKV by the mean": (KV_HEADS, Ranking("fade", "pooled", 1 / 3, 3, is_mean=True)),
    "KeyDiff": (KV_HEADS, Ranking("nothing", "novelty")),
}


class Slots:
    """Slots of random keys and values, some free and some reserved, different for each row and head."""

    def __init__(
        self, score_heads: int, dtype: torch.dtype, states: int = 2, seed: int = 0, store: str = "plain", **options: Any
    ) -> None:
        draw = torch.Generator().manual_seed(seed + score_heads)
        self.positions = torch.full((BATCH, score_heads, SLOTS), EMPTY, dtype=torch.int32)
        for row, head in product(range(BATCH), range(score_heads)):
            held = NEXT[row] - 2 * head
            at = torch.randperm(SLOTS, generator=draw)[: held + 1]
            self.positions[row, head, at[:held]] = torch.randperm(NEXT[row], generator=draw)[:held].int()
            self.positions[row, head, at[held]] = RESERVED
        self.state = tuple(torch.rand(self.positions.shape, generator=draw) for _ in range(states))
        angles = torch.rand(LENGTH, ROTATED // 2, generator=draw) * 6
        means = torch.randn(KV_HEADS, HEAD_DIM, generator=draw)
        keys = torch.randn(BATCH, KV_HEADS, SLOTS, HEAD_DIM, generator=draw).to(dtype)
        values = torch.randn(BATCH, KV_HEADS, SLOTS, VALUE_DIM, generator=draw).to(dtype)
        self.fixed = DecodeSlots(
            packed_as(store, keys, means),
            packed_as(store, values, group=8),
            score_heads,
            **{"tables": (angles.cos(), angles.sin()), "scale": 0.2, "visibility": Visibility(), **options},
        )

    def tensors(self) -> list[Tensor]:
        return [*self.contents(), self.positions, *self.state]

    def contents(self) -> list[Tensor]:
        """Keys and values as they are held."""
        held = self.fixed.keys, self.fixed.values
        return [tensor for each in held for tensor in (each.data, each.scales) if tensor is not None]

    def new_token(self, step: int, dtype: torch.dtype, is_observed: bool, is_evicting: bool = False) -> DecodeInput:
        """States as a model hands them in, which are views. In the second step the first row is padding."""
        draw = torch.Generator().manual_seed(100 + step)
        widths = (KV_HEADS * GROUP, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)
        queries, keys, values = (
            torch.randn(BATCH, 1, *width, generator=draw).to(dtype).transpose(1, 2) for width in widths
        )
        positions = torch.tensor([[EMPTY if step == 1 else NEXT[0] + step], [NEXT[1] + step]])
        ends = torch.tensor([NEXT[0] + step + (step != 1), NEXT[1] + step + 1])
        return DecodeInput(
            queries, keys, values, positions, self.positions, self.state, ends, is_observed, is_evicting
        )  # fmt: skip

    def take(self, done: DecodeOutput) -> None:
        self.positions, self.state = done.slot_positions, done.state


def assert_attended(ours: DecodeOutput, truth: DecodeOutput, new: DecodeInput, dtype: torch.dtype) -> None:
    assert ours.written.equal(truth.written)
    assert ours.out.shape == truth.out.shape
    is_real = new.positions >= 0
    difference = (ours.out.double() - truth.out.double()) * is_real[:, None, :, None]
    assert difference.norm() <= TOLERANCE[dtype] * truth.out.double().norm()
    assert (ours.mass is None) == (truth.mass is None)
    if ours.mass is not None and truth.mass is not None:
        assert ours.mass.rest is None
        torch.testing.assert_close(ours.mass.rows, truth.mass.rows, atol=1e-2 * TOLERANCE[dtype] ** 0.5, rtol=1e-2)


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("score_heads", "options"),
    [
        (1, {}),
        (KV_HEADS, {}),
        (1, {"tables": None}),
        (KV_HEADS, {"visibility": Visibility(sliding_window=13), "softcap": 1.5}),
        (1, {"visibility": Visibility(reach=17, sinks=4)}),
        (1, {"visibility": Visibility(attention_chunk=29)}),
        (KV_HEADS, {"rule": ReadRule(ranked_from=0)}),
        (1, {"rule": ReadRule(ranked_from=63, near=3, trained=18)}),
        (KV_HEADS, {"rule": ReadRule(near=5, trained=40), "visibility": Visibility(reach=17, sinks=4)}),
        (1, {"rule": ReadRule(group=3, near=8)}),
        (KV_HEADS, {"rule": ReadRule(limit=12)}),
    ],
)
def test_steps_equal_the_reference(
    instruction_set: str,
    dtype: torch.dtype,
    store: str,
    score_heads: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    ours, truth = (Slots(score_heads, dtype, store=store, **options) for _ in range(2))
    kernel = Decode(ours.fixed, ours.new_token(0, dtype, False).queries)
    for step in range(3):
        done, wanted = kernel(ours.new_token(step, dtype, step != 2)), None
        wanted = reference.decode(truth.fixed, truth.new_token(step, dtype, step != 2))
        assert_attended(done, wanted, ours.new_token(step, dtype, False), dtype)
        ours.take(done)
        truth.take(wanted)
        assert all(its.equal(one) for its, one in zip(ours.tensors(), truth.tensors(), strict=True))


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("name", RANKINGS)
@pytest.mark.parametrize("limits", [(0, 0), (3, 4), (2, 80)], ids=str)
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(sliding_window=66), Visibility(attention_chunk=30)])
@pytest.mark.parametrize(
    ("dtype", "store"), [*product(TOLERANCE, STORES[:1]), (torch.float32, "int4"), (torch.bfloat16, "int8")]
)
def test_rows_over_budget_evict_what_the_reference_evicts(
    instruction_set: str,
    name: str,
    limits: tuple[int, int],
    visibility: Visibility,
    dtype: torch.dtype,
    store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel starts from the reference's state after the step before."""
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    score_heads, ranking = RANKINGS[name]
    states = int(ranking.score in ("state", "pooled"))
    options: dict[str, Any] = {"visibility": visibility, "retention": Retention(ranking, BUDGET, *limits)}
    ours, truth = (Slots(score_heads, dtype, states, store=store, **options) for _ in range(2))
    kernel = Decode(ours.fixed, ours.new_token(0, dtype, False).queries)
    released: list[tuple[Tensor, Tensor]] = []
    evicted = 0
    for step in range(5):
        new = replace(truth.new_token(step, dtype, step % 2 == 0, is_evicting=step != 2), released=released)
        done = kernel(new)
        wanted = reference.decode(truth.fixed, new)
        assert_attended(done, wanted, new, dtype)
        close = {"atol": 1e-2 * TOLERANCE[dtype] ** 0.5, "rtol": 1e-2}
        for its, one in zip(done.state, wanted.state, strict=True):
            torch.testing.assert_close(its, one, **close)
        assert (done.evicted is None) == (wanted.evicted is None) == (step == 2)
        released = []
        if done.evicted is not None and wanted.evicted is not None:
            assert done.evicted_positions is not None
            assert wanted.evicted_positions is not None
            assert done.evicted_positions.equal(wanted.evicted_positions)
            is_gone = wanted.evicted_positions >= 0
            assert done.evicted[is_gone].equal(wanted.evicted[is_gone])
            released, evicted = [(wanted.evicted, wanted.evicted_positions)], evicted + int(is_gone.sum())
        assert done.slot_positions.equal(wanted.slot_positions)
        for its, one in zip(ours.contents(), truth.contents(), strict=True):
            its.copy_(one)
        truth.take(wanted)
    assert evicted >= 4


HEAD, MIDDLE, ADJACENT, NONE = (0, 4), (20, 31), (31, 33), (0, 0)


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("name", RANKINGS)
@pytest.mark.parametrize(
    ("pins", "visibility"),
    [
        ([[HEAD, NONE], [MIDDLE, ADJACENT]], Visibility()),
        ([[MIDDLE], [NONE]], Visibility(sliding_window=45)),  # the window evicts pinned tokens, too
        ([[(0, 55)], [(11, 65)]], Visibility()),  # all but the window and a few
        ([[(0, 2**31)], [(0, 70)]], Visibility(attention_chunk=30)),  # of pinned tokens the oldest goes
    ],
)
def test_pinned_tokens_are_evicted_last(
    instruction_set: str,
    name: str,
    pins: list[list[tuple[int, int]]],
    visibility: Visibility,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some scores are infinite or no number, and rank below those of pinned tokens, too."""
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    score_heads, ranking = RANKINGS[name]
    options: dict[str, Any] = {"visibility": visibility, "retention": Retention(ranking, 40, 1, 3)}
    states = int(ranking.score in ("state", "pooled"))
    slots = Slots(score_heads, torch.float32, states, **options)
    for state in slots.state:
        state[..., ::7], state[..., 3::11] = torch.inf, torch.nan if ranking.score == "state" else 0.0
    ranges = torch.tensor(pins)
    kernel, released = Decode(slots.fixed, slots.new_token(0, torch.float32, False).queries), list[Any]()
    bounds = [[range(start, stop) for start, stop in row] for row in pins]
    for step in range(8):
        new = slots.new_token(step, torch.float32, False, is_evicting=True)
        new = replace(new, released=released, pins=ranges)
        done, wanted = kernel(new), reference.decode(slots.fixed, new)
        assert done.evicted_positions is not None
        assert wanted.evicted_positions is not None
        assert done.evicted_positions.equal(wanted.evicted_positions)
        assert done.slot_positions.equal(wanted.slot_positions)
        before = wanted.slot_positions.scatter(-1, wanted.evicted, wanted.evicted_positions)  # type: ignore[arg-type]
        for row, head in product(range(BATCH), range(score_heads)):
            held, gone = before[row, head].tolist(), int(wanted.evicted_positions[row, head, 0])
            end = int(new.next_positions[row])
            free = [at for at in held if 1 <= at < end - 3 and not any(at in each for each in bounds[row])]
            if free and visibility == Visibility():
                assert gone in free
            unseen = [at for at in held if 0 <= at <= end - (visibility.sliding_window or end + 1)]
            unseen += [at for at in held if 0 <= at < end - end % (visibility.attention_chunk or end + 1)]
            if unseen:
                assert gone in unseen
        released = [(wanted.evicted, wanted.evicted_positions)]
        slots.take(wanted)


@pytest.mark.parametrize("store", STORES)
def test_a_step_touches_no_other_slot_and_nothing_of_before(store: str) -> None:
    retention = Retention(Ranking("sum", "state"), BUDGET, 1, 1)
    slots, before = (Slots(KV_HEADS, torch.float32, 1, store=store, retention=retention) for _ in range(2))
    new = slots.new_token(0, torch.float32, False, is_evicting=True)
    done = Decode(slots.fixed, new.queries)(new)
    assert (before.positions.gather(-1, done.written) == EMPTY).all()
    is_other = torch.ones(BATCH, KV_HEADS, SLOTS, dtype=torch.bool).scatter(-1, done.written, False)
    for its, was in zip(slots.tensors(), before.tensors(), strict=True):
        assert its[is_other].equal(was[is_other])
    assert slots.positions.equal(before.positions)
    assert slots.state[0].equal(before.state[0])
    assert done.evicted is not None
    is_other.scatter_(-1, done.evicted, False)
    assert done.slot_positions[is_other].equal(before.positions[is_other])


def test_slots_come_in_the_order_of_the_text_whatever_the_last_step_had() -> None:
    """The kernel's memory of the last step is a guess: tokens may have moved since, or share a position."""
    _, ranking = RANKINGS["SnapKV"]
    retention = Retention(ranking, 40, 2, 3)
    held = [Slots(KV_HEADS, torch.float32, 1, seed, retention=retention) for seed in (0, 50, 90)]
    held[2].positions[held[2].positions > 3] //= 3
    kernel = Decode(held[0].fixed, held[0].new_token(0, torch.float32, False).queries)
    for slots in (*held, held[1]):
        new = slots.new_token(0, torch.float32, False, is_evicting=True)
        done, wanted = kernel(new), reference.decode(held[0].fixed, new)
        assert done.slot_positions.equal(wanted.slot_positions)
        assert done.evicted is not None
        assert wanted.evicted is not None
        assert done.evicted.equal(wanted.evicted)
