"""Queries that stand among the tokens that are held, in no order, as in a pass that reads tokens again."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from tests.helpers.attention_cases import TOLERANCE, Case, cast, compare, exactly, step
from windlass.core.inputs import AttentionInput, Visibility
from windlass.core.positions import RotaryBranch, RotaryIndex
from windlass.kernels import cpu, sdpa

SEEN = (Visibility(), Visibility(70), Visibility(None, 40, 9), Visibility(attention_chunk=37))


def scattered(bits: int | None, visibility: Visibility, tokens: int) -> AttentionInput:
    """Slots read at their positions by queries that stand anywhere, a tenth of them padding."""
    shape = (2, 3, 64, 64, 32)
    call = step(Case(shape, torch.float32, bits, None, visibility, mass=None, slots=130, tokens=tokens))
    batch, heads = call.slot_positions.shape[:2]
    end = int(call.slot_positions.max())
    at = torch.randint(0, end, (batch, tokens)).where(torch.rand(batch, tokens) > 0.1, -1)
    branch = RotaryBranch(at.clamp(min=0)[:, None].expand(-1, heads, -1), call.slot_positions.clamp(min=0))
    angles = torch.arange(end + 1)[:, None] / 10000 ** (torch.arange(32) / 32)
    return replace(call, query_positions=at, rotary_index=RotaryIndex(branch), tables=(angles.cos(), angles.sin()))


@pytest.mark.parametrize("tokens", [1, 5, 16, 40, 65])
@pytest.mark.parametrize("visibility", SEEN, ids=str)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_compiled_attention(
    bits: int | None, visibility: Visibility, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu.instruction_sets():
        pytest.skip("windlass was installed without its compiled kernels")
    monkeypatch.setattr(sdpa, "MASK_BYTES", 2**14)  # so that a chunk takes several blocks
    call = scattered(bits, visibility, tokens)
    for kernel in (cpu.attend, sdpa.attend):
        compare(kernel(call)[0], exactly(call)[0], TOLERANCE[torch.float32])


@pytest.mark.parametrize("tokens", [1, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize("visibility", SEEN[:2], ids=str)
def test_triton(visibility: Visibility, tokens: int) -> None:
    if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
        pytest.skip("Triton runs in its interpreter where there is no GPU")
    from windlass.kernels import triton

    call = scattered(None, visibility, tokens)
    assert call.tables is not None
    call = replace(call, tables=cast(call.tables, torch.float32))
    compare(triton.attend(call)[0], exactly(call)[0], TOLERANCE[torch.float32])
