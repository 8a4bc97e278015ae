"""Attention mass of a chunk's queries against float64, with every instruction set."""

import pytest
import torch

from windlass.kernels import cpu

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

BATCH, KV_HEADS, GROUP, KEY_SLOTS, SLOTS, OUTPUTS, SCALE = 2, 3, 5, 90, 101, 4, 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6}  # inputs are the same in float64


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("tokens", "used", "channels", "mask_heads", "is_counted"),
    [(7, 77, 40, 1, False), (19, 64, 33, KV_HEADS, True), (1, 3, 6, 1, True), (12, 89, 64, KV_HEADS, False)],
)
def test_mass_equals_that_in_float64(
    instruction_set: str,
    dtype: torch.dtype,
    tokens: int,
    used: int,
    channels: int,
    mask_heads: int,
    is_counted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    draw = torch.Generator().manual_seed(used)
    queries = torch.randn(BATCH, tokens, KV_HEADS * GROUP, channels, generator=draw).to(dtype).transpose(1, 2)
    keys = torch.randn(BATCH, KV_HEADS, KEY_SLOTS, channels, generator=draw).to(dtype)[:, :, :used]
    mask = torch.rand(BATCH, mask_heads, tokens, used, generator=draw) < 0.6
    mask[:, :, :, 0] = True
    mask[0, :, tokens // 2] = False  # a query that sees nothing
    counts = torch.rand(BATCH, mask_heads, SLOTS, generator=draw) * 3 if is_counted else None
    targets = torch.randint(-1, OUTPUTS, (BATCH, tokens), generator=draw, dtype=torch.int32)

    logits = (queries.double().unflatten(1, (KV_HEADS, GROUP)) @ keys.double().transpose(-1, -2)[:, :, None]) * SCALE
    if counts is not None:
        logits = logits + counts[:, :, None, None, :used].double()
    logits = logits.masked_fill(~mask[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    probabilities = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp().sum(2)
    before = torch.rand(BATCH, KV_HEADS, OUTPUTS, SLOTS, generator=draw)
    truth = before.double()
    for row in range(BATCH):
        for token in range(tokens):
            if targets[row, token] >= 0:
                truth[row, :, targets[row, token], :used] += probabilities[row, :, token]

    mass = before.clone()
    shaped = lse.flatten(1, 2).float()
    cpu.add_query_mass(mass, queries, keys, mask, counts, shaped, targets, SCALE)
    assert (mass.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()
    assert mass[..., used:].equal(before[..., used:])


def test_threads_change_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 12, 21, 48, generator=draw), torch.randn(1, 4, 300, 48, generator=draw)
    mask, lse = torch.ones(1, 1, 21, 300, dtype=torch.bool), torch.full((1, 12, 21), 9.0)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(torch.zeros(1, 4, 1, 300))
            cpu.add_query_mass(found[-1], queries, keys, mask, None, lse, torch.zeros(1, 21, dtype=torch.int32), 0.1)
    finally:
        torch.set_num_threads(threads)
    assert found[0].equal(found[1])
