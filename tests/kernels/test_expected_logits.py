"""Logits of a normal distribution of queries: plain PyTorch, and every instruction set, against float64 in loops."""

import pytest
import torch

from windlass.kernels import cpu
from windlass.policies.expected_attention import expected_logits

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)


@pytest.mark.parametrize("way", ["plain", *(f"cpu {each}" for each in cpu.instruction_sets())])
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "slots", "channels", "pairs"),
    [(2, 3, 2, 37, 22, 11), (1, 2, 3, 64, 7, 2), (3, 1, 1, 65, 9, 0), (1, 1, 5, 1, 64, 32), (2, 1, 2, 130, 33, 16)],
)
def test_it_equals_loops(
    way: str,
    batch: int,
    kv_heads: int,
    group: int,
    slots: int,
    channels: int,
    pairs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = torch.Generator().manual_seed(slots)
    heads = kv_heads * group
    keys = torch.randn(batch, kv_heads, slots, channels, generator=draw)
    mean = torch.randn(batch, heads, channels, generator=draw)
    covariance = torch.randn(batch, heads, channels, channels, generator=draw)
    covariance = covariance + covariance.mT
    cos, sin = torch.randn(2, batch, pairs, generator=draw)
    ours = expected_logits(keys, mean, covariance, cos, sin)
    if way != "plain":
        monkeypatch.setattr(cpu, "instruction_set", lambda: way.removeprefix("cpu "))
        ours = cpu.expected_logits(keys, mean, covariance, cos, sin)
    assert ours.shape == (batch, kv_heads, group, slots)
    for row in range(batch):
        turn = torch.eye(channels, dtype=torch.float64)
        for i in range(pairs):
            c, s = float(cos[row, i]), float(sin[row, i])
            turn[i, i], turn[i, i + pairs], turn[i + pairs, i], turn[i + pairs, i + pairs] = c, -s, s, c
        for head in range(heads):
            states = keys[row, head // group].double()
            logits = states @ (turn @ mean[row, head].double()) / channels**0.5
            square = turn @ covariance[row, head].double() @ turn.T
            logits = logits + torch.stack([key @ square @ key for key in states]) / (2 * channels)
            found = ours[row, head // group, head % group].double()
            torch.testing.assert_close(found, logits, rtol=0, atol=float(1e-5 * logits.abs().max() + 1e-6))
