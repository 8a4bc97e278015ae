"""The sums of cosines by which `RKV` ranks: loops over tokens in float64, plain PyTorch, and every instruction set."""

import pytest
import torch
from torch import Tensor

from tests.helpers.stores import packed_as
from windlass.core.inputs import PackedStates
from windlass.core.positions import EMPTY
from windlass.kernels import cpu, reference
from windlass.policies.r_kv import redundancy

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

BATCH, KV_HEADS, SLOTS, WIDTH = 2, 3, 37, 22


def case(dtype: torch.dtype, store: str, held: int, seed: int = 0) -> tuple[PackedStates, Tensor]:
    """Keys of a few words, so that many are near another one, in any order. The last row has fewer."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randn(6, WIDTH, generator=draw)
    keys = words[torch.randint(6, (BATCH, KV_HEADS, SLOTS), generator=draw)]
    keys = keys + 0.7 * torch.randn(keys.shape, generator=draw)
    keys[0, 0, 5] = 0
    positions = torch.full((BATCH, KV_HEADS, SLOTS), EMPTY, dtype=torch.int32)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            count = max(held - 9 * row - head, 0)
            at = torch.randperm(SLOTS, generator=draw)[:count]
            positions[row, head, at] = torch.randperm(90, generator=draw)[:count].int()
    is_free = (positions < 0)[..., None]
    keys = keys.masked_fill(is_free, 40.0 if store == "plain" else 0.3).to(dtype)
    return packed_as(store, keys, torch.randn(KV_HEADS, WIDTH, generator=draw)), positions


def by_loops(keys: Tensor, positions: Tensor, threshold: float) -> Tensor:
    total = torch.zeros(positions.shape, dtype=torch.float64)
    for row in range(BATCH):
        for head in range(KV_HEADS):
            text = [at for _, at in sorted((p, at) for at, p in enumerate(positions[row, head].tolist()) if p >= 0)]
            states = keys[row, head].double()
            lengths = {at: float(states[at].norm()) or 1.0 for at in text}
            for one in text:
                cosines = {other: float(states[one] @ states[other]) / lengths[one] / lengths[other] for other in text}
                total[row, head, one] += sum(cosine for other, cosine in cosines.items() if other != one)
                near = [other for other in text if other != one and cosines[other] > threshold]
                if near:
                    total[row, head, near[-1]] -= cosines[near[-1]]
    return total


@pytest.mark.parametrize("way", ["plain", *(f"cpu {each}" for each in cpu.instruction_sets())])
@pytest.mark.parametrize(
    ("dtype", "store"), [(torch.float32, "plain"), (torch.bfloat16, "plain"), (torch.float16, "int4")]
)
@pytest.mark.parametrize(("held", "threshold"), [(37, 0.5), (33, 0.0), (16, 0.9), (8, 0.5), (1, 0.2), (0, 0.5)])
def test_it_equals_loops(
    way: str, dtype: torch.dtype, store: str, held: int, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, positions = case(dtype, store, held)
    order = reference.argsort_positions(positions)
    ours = redundancy(keys, positions, order, threshold)
    if way != "plain":
        monkeypatch.setattr(cpu, "instruction_set", lambda: way.removeprefix("cpu "))
        ours = cpu.redundancy(keys, positions, order, threshold)
    wanted = by_loops(keys.floats(), positions, threshold)
    assert held < 30 or (wanted != 0).sum() > 3 * held
    torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=0)


def test_threads_change_no_bit() -> None:
    keys, positions = case(torch.float32, "plain", 37)
    order, threads = reference.argsort_positions(positions), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(cpu.redundancy(keys, positions, order, 0.5))
    finally:
        torch.set_num_threads(threads)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])
