"""The reference backend against sums written out by hand, one query and one key at a time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.inputs import AttentionInput, PackedStates, Visibility
from windlass.core.positions import RotaryBranch, RotaryIndex, rotate, unrotate
from windlass.kernels import reference
from windlass.kernels.reference import attend

BATCH, KV_HEADS, GROUP, TOKENS, SLOTS, HEAD_DIM, VALUE_DIM, PAIRS = 2, 3, 5, 4, 11, 8, 6, 3


def make(seed: int, tokens: int = TOKENS) -> dict[str, Tensor]:
    """A step with free slots in the middle, padding in row 1, and heads that hold different tokens."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.stack([torch.randperm(30, generator=g)[:SLOTS] for _ in range(BATCH * KV_HEADS)])
    slots = slots.reshape(BATCH, KV_HEADS, SLOTS).to(torch.int32)
    slots[:, :, 4] = -1
    slots[1, :, 7] = -2
    queries = torch.arange(20, 20 + tokens).repeat(BATCH, 1)
    queries[1, tokens - 1] = -1
    return {
        "queries": torch.randn(BATCH, KV_HEADS * GROUP, tokens, HEAD_DIM, generator=g, dtype=torch.float64),
        "keys": torch.randn(BATCH, KV_HEADS, SLOTS, HEAD_DIM, generator=g, dtype=torch.float64),
        "values": torch.randn(BATCH, KV_HEADS, SLOTS, VALUE_DIM, generator=g, dtype=torch.float64),
        "slot_positions": slots,
        "query_positions": queries,
    }


def held(step: dict[str, Tensor]) -> dict[str, Any]:
    """The step as a kernel takes it."""
    return {name: PackedStates(t) if name in ("keys", "values") else t for name, t in step.items()}


def tables(length: int = 40) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length, dtype=torch.float64)[:, None] / torch.tensor([1.0, 3.0, 10.0], dtype=torch.float64)
    return angles.cos() * 1.1, angles.sin() * 1.1


def rotated(vector: Tensor, angle_row: int, table: tuple[Tensor, Tensor]) -> list[float]:
    out = vector.tolist()
    for i in range(PAIRS):
        a, b = out[i], out[i + PAIRS]
        cos, sin = float(table[0][angle_row, i]), float(table[1][angle_row, i])
        out[i], out[i + PAIRS] = a * cos - b * sin, b * cos + a * sin
    return out


def by_hand(
    step: dict[str, Tensor],
    index: RotaryIndex | None,
    scale: float,
    visibility: Visibility,
    softcap: float | None,
    sinks: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and mass (batch, kv_heads, tokens, slots), by loops."""
    tokens = step["queries"].shape[2]
    out = torch.zeros(BATCH, KV_HEADS * GROUP, tokens, VALUE_DIM, dtype=torch.float64)
    mass = torch.zeros(BATCH, KV_HEADS, tokens, SLOTS, dtype=torch.float64)
    for b in range(BATCH):
        for head in range(KV_HEADS * GROUP):
            kv = head // GROUP
            for t in range(tokens):
                at = int(step["query_positions"][b, t])
                logits = {}
                for s in range(SLOTS):
                    position = int(step["slot_positions"][b, kv, s])
                    if position < 0 or position > at:
                        continue
                    d = at - position
                    if visibility.sliding_window is not None and d >= visibility.sliding_window:
                        continue
                    if visibility.reach is not None and d >= visibility.reach and position >= visibility.sinks:
                        continue
                    chunk = visibility.attention_chunk
                    if chunk is not None and at // chunk != position // chunk:
                        continue
                    q, k = step["queries"][b, head, t].tolist(), step["keys"][b, kv, s].tolist()
                    if index is not None:
                        branch = index.near if index.far is None or d < index.near_window else index.far
                        q = rotated(step["queries"][b, head, t], int(branch.queries[b, kv, t]), tables())
                        k = rotated(step["keys"][b, kv, s], int(branch.keys[b, kv, s]), tables())
                    weights = [1.0] * HEAD_DIM if gain is None else gain.tolist()
                    logit = scale * sum(x * w * y for x, w, y in zip(q, weights, k, strict=True))
                    logits[s] = logit if softcap is None else softcap * math.tanh(logit / softcap)
                divisor = sum(math.exp(x) for x in logits.values())
                divisor += 0 if sinks is None else math.exp(float(sinks[head]))
                for s, logit in logits.items():
                    share = math.exp(logit) / divisor
                    out[b, head, t] += share * step["values"][b, kv, s]
                    mass[b, kv, t, s] += share
    return out, mass


def indexes() -> dict[str, RotaryIndex | None]:
    g = torch.Generator().manual_seed(1)
    q = torch.randint(40, (BATCH, KV_HEADS, TOKENS), generator=g)
    k = torch.randint(40, (BATCH, KV_HEADS, SLOTS), generator=g)
    return {
        "not rotated": None,
        "one branch": RotaryIndex(RotaryBranch(q, k)),
        "near and far": RotaryIndex(RotaryBranch(q, k), RotaryBranch(q.flip(-1), k.flip(-1)), 6),
    }


@pytest.mark.parametrize("index", indexes())
@pytest.mark.parametrize(
    "visibility",
    [
        Visibility(),
        Visibility(sliding_window=7),
        Visibility(reach=4, sinks=9),
        Visibility(9, 5, 13),
        Visibility(attention_chunk=7),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("softcap", "has_sinks", "has_gain"), [(None, False, False), (0.7, False, True), (None, True, False)]
)
def test_attend_equals_loops(
    index: str,
    visibility: Visibility,
    softcap: float | None,
    has_sinks: bool,
    has_gain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, where = make(2), indexes()[index]
    gain = torch.linspace(-2, 3, HEAD_DIM, dtype=torch.float64) if has_gain else None
    sinks = torch.linspace(-1, 2, KV_HEADS * GROUP, dtype=torch.float64) if has_sinks else None
    observed = torch.tensor([[3, 1], [2, -1]])
    options: dict[str, Any] = {"scale": 0.4, "visibility": visibility, "softcap": softcap, "sink_logits": sinks}
    options["query_gain"] = gain
    truth, mass = by_hand(step, where, 0.4, visibility, softcap, sinks, gain)
    for block in (None, 1):  # all queries at once, and one block a query
        if block is not None:
            monkeypatch.setattr(reference, "SCORE_BYTES", block)
        call = AttentionInput(
            **held(step), rotary_index=where, tables=tables(), observed=observed, is_rest_wanted=True, **options
        )
        out, seen = attend(call)
        torch.testing.assert_close(out, truth, atol=1e-12, rtol=0)
        assert seen is not None
        assert seen.rest is not None
        expected = torch.stack((mass[0][:, [3, 1]], mass[1][:, [2, 2]]))
        expected[1, :, 1] = 0
        torch.testing.assert_close(seen.rows, expected.float(), atol=1e-6, rtol=0)
        rest = torch.stack((mass[0][:, [0, 2]].sum(1), mass[1][:, [0, 1, 3]].sum(1)))
        torch.testing.assert_close(seen.rest, rest.float(), atol=1e-6, rtol=0)


def test_a_query_that_sees_nothing_gives_zeros_not_nan() -> None:
    step = make(3)
    step["values"][0, 0, 4] = torch.inf  # a free slot may hold any finite number, and even infinity is not read
    step["values"][0, 0, 4] = 1e30
    out, _ = attend(AttentionInput(**held(step), rotary_index=None, tables=None, scale=1.0, visibility=Visibility()))
    assert out[1, :, -1].eq(0).all()
    assert out.isfinite().all()
    assert out.abs().max() < 10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("slots", [1, 63, 1000])
def test_low_precision_stays_near_float64(dtype: torch.dtype, tolerance: float, slots: int) -> None:
    g = torch.Generator().manual_seed(slots)
    shapes = {"queries": (2, 15, 3, 8), "keys": (2, 3, slots, 8), "values": (2, 3, slots, 6)}
    low = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    positions = {
        "slot_positions": torch.arange(slots, dtype=torch.int32).expand(2, 1, -1),
        "query_positions": torch.arange(slots - 1, slots + 2).expand(2, -1),
    }
    options = {"tables": None, "scale": 0.35, "visibility": Visibility()}
    call: dict[str, Any] = {"rotary_index": None, **options, **positions}
    ours, _ = attend(AttentionInput(**held(low), **call))
    truth, _ = attend(AttentionInput(**held({name: tensor.double() for name, tensor in low.items()}), **call))
    assert ours.dtype == dtype
    assert (ours.double() - truth).norm() / truth.norm() <= tolerance


@given(st.integers(0, 39), st.integers(0, 39))
@settings(max_examples=25, deadline=None)
def test_unrotate_undoes_rotate_and_products_depend_on_the_distance_alone(a: int, b: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(HEAD_DIM, generator=g, dtype=torch.float64) for _ in range(2))
    cos, sin = tables(80)
    torch.testing.assert_close(unrotate(rotate(k, cos[a], sin[a]), cos[a], sin[a]), k)
    near = rotate(q, cos[a], sin[a]) @ rotate(k, cos[b], sin[b])
    far = rotate(q, cos[a + 40], sin[a + 40]) @ rotate(k, cos[b + 40], sin[b + 40])
    torch.testing.assert_close(near, far)


@pytest.mark.usefixtures("many_calls")
def test_the_shapes_of_a_call_are_checked_against_one_another() -> None:
    call = AttentionInput(**held(make(4)), rotary_index=None, tables=None, scale=1.0, visibility=Visibility())
    for name, tensor in (("query_positions", call.query_positions[:1]), ("queries", call.queries[:, :, 1:])):
        changed: dict[str, Any] = {name: tensor}
        with pytest.raises(TypeError):
            replace(call, **changed)
