"""One call that writes a token and attends, against plain PyTorch, with every instruction set."""

from itertools import product

import pytest
import torch
from torch import Tensor

from windlass.core.attention import Visibility
from windlass.core.decode import DecodeInput, DecodeSlots
from windlass.core.rotary_index import EMPTY, RESERVED
from windlass.kernels import cpu, reference

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

from windlass.kernels.cpu.decode import Decode

BATCH, KV_HEADS, GROUP, SLOTS, HEAD_DIM, VALUE_DIM, ROTATED, LENGTH = 2, 3, 5, 77, 48, 24, 20, 90
NEXT = (61, 70)  # positions of the rows' next tokens
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def slots_of(score_heads: int, dtype: torch.dtype, **options: object) -> DecodeSlots:
    """Slots of random keys and values, of which some are free and some reserved; each row and head has its own."""
    draw = torch.Generator().manual_seed(score_heads)
    positions = torch.full((BATCH, score_heads, SLOTS), EMPTY, dtype=torch.int32)
    for row, head in product(range(BATCH), range(score_heads)):
        held = NEXT[row] - 9 * head
        at = torch.randperm(SLOTS, generator=draw)[: held + 1]
        positions[row, head, at[:held]] = torch.randperm(NEXT[row], generator=draw)[:held].int()
        positions[row, head, at[held]] = RESERVED
    angles = torch.rand(LENGTH, ROTATED // 2, generator=draw) * 6
    return DecodeSlots(
        torch.randn(BATCH, KV_HEADS, SLOTS, HEAD_DIM, generator=draw).to(dtype),
        torch.randn(BATCH, KV_HEADS, SLOTS, VALUE_DIM, generator=draw).to(dtype),
        positions,
        ((torch.rand(positions.shape, generator=draw), 0.0), (torch.rand(positions.shape, generator=draw), 3.0)),
        **{"tables": (angles.cos(), angles.sin()), "scale": 0.2, "visibility": Visibility(), **options},  # type: ignore[arg-type]
    )


def copied(slots: DecodeSlots) -> DecodeSlots:
    state = tuple((tensor.clone(), initial) for tensor, initial in slots.state)
    memory = slots.keys.clone(), slots.values.clone(), slots.positions.clone(), state
    return DecodeSlots(*memory, slots.tables, slots.scale, slots.visibility, slots.softcap)


def new_token(step: int, dtype: torch.dtype, is_observed: bool) -> DecodeInput:
    """States as a model hands them in, which are views; in the second step the first row is padding."""
    draw = torch.Generator().manual_seed(100 + step)
    widths = (KV_HEADS * GROUP, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)
    queries, keys, values = (
        torch.randn(BATCH, 1, *width, generator=draw).to(dtype).transpose(1, 2) for width in widths
    )
    positions = torch.tensor([[EMPTY if step == 1 else NEXT[0] + step], [NEXT[1] + step]])
    return DecodeInput(queries, keys, values, positions, is_observed)


def memory_of(slots: DecodeSlots) -> list[Tensor]:
    return [slots.keys, slots.values, slots.positions, *(tensor for tensor, _ in slots.state)]


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("score_heads", "options"),
    [
        (1, {}),
        (KV_HEADS, {}),
        (1, {"tables": None}),
        (KV_HEADS, {"visibility": Visibility(sliding_window=13), "softcap": 1.5}),
        (1, {"visibility": Visibility(reach=17, sinks=4)}),
        (1, {"visibility": Visibility(attention_chunk=29)}),
    ],
)
def test_steps_equal_the_reference(
    instruction_set: str,
    dtype: torch.dtype,
    score_heads: int,
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    ours, truth = (slots_of(score_heads, dtype, **options) for _ in range(2))
    kernel = Decode(ours, new_token(0, dtype, False).queries)
    for step in range(3):
        new = new_token(step, dtype, is_observed=step != 2)
        written, out, mass = kernel(new)
        index, wanted, wanted_mass = reference.decode(truth, new)
        assert written.equal(index)
        assert out.shape == wanted.shape
        is_real = new.positions >= 0
        difference = (out.double() - wanted.double()) * is_real[:, None, :, None]
        assert difference.norm() <= TOLERANCE[dtype] * wanted.double().norm()
        assert (mass is None) == (wanted_mass is None)
        if mass is not None and wanted_mass is not None:
            assert mass.rest is None
            torch.testing.assert_close(mass.rows, wanted_mass.rows, atol=1e-2 * TOLERANCE[dtype] ** 0.5, rtol=1e-2)
        for its, one in zip(memory_of(ours), memory_of(truth), strict=True):
            assert its.equal(one)


def test_a_step_touches_no_other_slot() -> None:
    slots = slots_of(KV_HEADS, torch.float32)
    before, new = copied(slots), new_token(0, torch.float32, False)
    written, _, _ = Decode(slots, new.queries)(new)
    assert (before.positions.gather(-1, written) == EMPTY).all()
    assert (slots.positions.gather(-1, written) == new.positions[:, None]).all()
    for its, was in zip(memory_of(slots), memory_of(before), strict=True):
        is_other = torch.ones(its.shape[:3], dtype=torch.bool).scatter(-1, written, False)
        assert its[is_other].equal(was[is_other])
