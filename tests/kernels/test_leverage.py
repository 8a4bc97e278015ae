"""Leverage of keys: plain PyTorch, and every instruction set, against ridge regression by an inverse."""

import pytest
import torch

from windlass.kernels import cpu
from windlass.policies.leverage import leverage

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

RIDGE = 0.03


@pytest.mark.parametrize("way", ["plain", *(f"cpu {each}" for each in cpu.instruction_sets())])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "kv_heads", "slots", "channels", "width"),
    [(2, 3, 137, 22, 13), (1, 2, 64, 9, None), (3, 1, 33, 64, 48), (1, 1, 1, 6, 4), (2, 1, 5, 31, None)],
)
def test_it_equals_an_inverse(
    way: str,
    dtype: torch.dtype,
    batch: int,
    kv_heads: int,
    slots: int,
    channels: int,
    width: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(slots)
    keys = torch.randn(batch, kv_heads, slots, channels, generator=draw).to(dtype) + 1
    is_counted = torch.rand(batch, kv_heads, slots, generator=draw) < 0.7
    is_counted[-1, -1] = False
    projection = None
    if width is not None:
        projection = torch.randn(channels, width, generator=draw, dtype=torch.float64)
    ours = leverage(keys, is_counted, projection, RIDGE)
    if way != "plain":
        monkeypatch.setattr(cpu, "instruction_set", lambda: way.removeprefix("cpu "))
        ours = cpu.leverage(keys, is_counted, projection, RIDGE)
    assert (ours[~is_counted] == 0).all()
    for row in range(batch):
        for head in range(kv_heads):
            counted = is_counted[row, head]
            x = keys[row, head, counted].double()
            x = x - x.mean(0)
            x = x if projection is None else x @ projection
            expected = (x @ torch.linalg.inv(x.T @ x + RIDGE * torch.eye(x.shape[1])) @ x.T).diagonal()
            torch.testing.assert_close(ours[row, head, counted], expected, rtol=0, atol=1e-9)
