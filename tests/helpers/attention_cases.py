"""Steps for `kernels.attend`, and the reference's results for them in float64, shared by all backends' tests."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from windlass.core.inputs import AttentionInput, Format, Mass, PackedStates, Visibility
from windlass.kernels import reference
from windlass.positions.modes import position_mode

BATCH, OBSERVED = 4, 3
ALL = Visibility()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # of norms, per row and head


@dataclass(frozen=True)
class Case:
    """A step, and how it is read. `bits` is None where keys and values are held as floats."""

    shape: tuple[int, int, int, int, int] = (3, 5, 8, 6, 3)  # kv_heads, group, head_dim, value_dim, pairs
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    mode: str | None = "original"  # None: no rotation
    visibility: Visibility = ALL
    extras: tuple[str, ...] = ()
    mass: str | None = "rest"
    slots: int = 63
    tokens: int = 4
    is_per_head: bool = True
    is_evicted: bool = True
    is_latent: bool = False  # values are channels of the keys


AXES: dict[str, list[Any]] = {
    "shape": [
        (2, 3, 64, 64, 32),
        (3, 1, 128, 128, 64),
        (3, 5, 8, 6, 3),
        (1, 6, 40, 48, 10),
        (2, 7, 96, 32, 16),
        (1, 22, 50, 38, 5),
    ],
    "dtype": list(TOLERANCE),
    "bits": [None, 8, 4],
    "mode": [None, "original", "compact", "self_extend(4, 22)", "clamp(30)"],
    "visibility": [
        ALL,
        Visibility(700),
        Visibility(None, 40, 9),
        Visibility(70, 50, 13),
        Visibility(attention_chunk=37),
    ],
    "extras": [(), ("softcap",), ("sinks", "counts"), ("counts", "gain"), ("gain",)],
    "mass": [None, "rows", "rest"],
    "slots": [1, 63, 1000],
    "tokens": [1, 5, 16, 17, 33, 64, 65],
    "is_per_head": [True, False],
    "is_evicted": [True, False],
    "is_latent": [False, True],
}


def table() -> Iterator[Case]:
    """Cases in which every value of an axis meets every value of every other axis."""
    pairs = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    draw = random.Random(0)

    def met(row: dict[str, object]) -> set[tuple[str, object, str, object]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(AXES, 2)} & pairs

    while pairs:
        rows = [{axis: draw.choice(values) for axis, values in AXES.items()} for _ in range(30)]
        a, x, b, y = min(pairs, key=str)
        best = max(({**row, a: x, b: y} for row in rows), key=lambda row: len(met(row)))
        pairs -= met(best)
        yield Case(**best)


def noise(case: Case, seed: int = 0) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed + case.slots + case.tokens)
    return lambda *shape: torch.randn(*shape, generator=g)


def held(case: Case, randn: Callable[..., Tensor], width: int, has_means: bool) -> PackedStates:
    """Random keys or values about as large as 1: int8 with scales of either sign, int4 in groups with offsets."""
    kv_heads = case.shape[0]
    if case.bits is None:
        return PackedStates(randn(BATCH, kv_heads, case.slots, width).to(case.dtype))
    most = 2 ** (case.bits - 1)
    codes = (randn(BATCH, kv_heads, case.slots, width * case.bits // 8) * most).to(torch.int64)
    group = (16 if has_means else 32) if case.bits == 4 else 0
    numbers = 2 * -(-width // group) if group else 1
    scales = (randn(BATCH, kv_heads, case.slots, numbers) / most).half()
    means = randn(kv_heads, width) if has_means else None
    if case.bits == 4:
        return PackedStates((codes * 37 % 256).to(torch.uint8), Format.INT4, scales, means, group=group)
    return PackedStates(codes.clamp(-128, 127).to(torch.int8), Format.INT8, scales, means)


def positions(case: Case, seed: int = 0) -> Tensor:
    """Rows with free and reserved slots in the middle or none yet evicted. Row 2 is empty."""
    g = torch.Generator().manual_seed(seed + case.slots)
    score_heads = case.shape[0] if case.is_per_head else 1
    if case.is_evicted:
        drawn = [torch.randperm(2 * case.slots, generator=g)[: case.slots] for _ in range(BATCH * score_heads)]
        where = torch.stack(drawn).reshape(BATCH, score_heads, case.slots)
        where[torch.rand(where.shape, generator=g) < 0.2] = -1
        where[0, :, case.slots // 3 : case.slots // 2] = -2
        where[1, :, case.slots // 4 : case.slots // 4 * 3] = -1  # more than one block of slots
    else:
        where = torch.arange(case.slots) + case.slots // 3
        where = (where + case.slots + 1).where(where < case.slots, -1).repeat(BATCH, score_heads, 1)
    where[2] = -1
    return where.to(torch.int32)


def step(case: Case, seed: int = 0) -> AttentionInput:
    """A call of `attend`, whose queries are a transposed view, as transformers gives them."""
    kv_heads, group, head_dim, value_dim, pairs = case.shape
    randn, where = noise(case, seed), positions(case, seed)
    end = 2 * case.slots + 1
    at = torch.arange(end - case.tokens, end).clamp(min=-1).repeat(BATCH, 1)
    at[3, : (case.tokens + 1) // 2] = -1  # padding
    rotary_index = tables = None
    if case.mode is not None:
        mode = position_mode(case.mode)
        rotary_index = mode.rotary_index(where, at)
        most_held = int((where >= 0).sum(-1).max()) + 1  # the queries' own tokens count, too
        length = mode.bound(end, most_held, case.tokens)  # no more: reading past it shows under a sanitizer
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(pairs) / pairs)
        tables = angles.cos() * 1.1, angles.sin() * 1.1
    columns = torch.stack([torch.randperm(case.tokens + 2)[:OBSERVED] for _ in range(BATCH)])
    columns = columns.where(columns < case.tokens, -1)
    queries = randn(BATCH, case.tokens, kv_heads * group, head_dim).to(case.dtype).transpose(1, 2)
    keys, values = held(case, randn, head_dim, has_means=True), held(case, randn, value_dim, has_means=False)
    return AttentionInput(
        queries=queries,
        keys=keys,
        values=replace(keys, last=min(value_dim, head_dim)) if case.is_latent else values,
        slot_positions=where,
        query_positions=at,
        rotary_index=rotary_index,
        tables=tables,
        scale=head_dim**-0.5,
        visibility=case.visibility,
        softcap=5.0 if "softcap" in case.extras else None,
        sink_logits=randn(kv_heads * group) if "sinks" in case.extras else None,
        log_counts=randn(*where.shape).abs() if "counts" in case.extras else None,
        observed=None if case.mass is None else columns,
        is_rest_wanted=case.mass == "rest",
        query_gain=randn(head_dim) if "gain" in case.extras else None,
    )


def cast(tables: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = tables
    return cos.to(dtype), sin.to(dtype)


def exactly(call: AttentionInput) -> tuple[Tensor, Mass | None]:
    """The reference's output in float64."""
    keys, values = (PackedStates(states.floats().double()) for states in (call.keys, call.values))
    tables = call.tables and cast(call.tables, torch.float64)
    return reference.attend(replace(call, queries=call.queries.double(), keys=keys, values=values, tables=tables))


def compare(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Equal within `tolerance` of the norm for each row and head, and zero where the truth is."""
    error, size = (ours.double() - truth).flatten(2).norm(dim=-1), truth.double().flatten(2).norm(dim=-1)
    assert ours.shape == truth.shape
    assert ours.isfinite().all()
    assert (ours[truth == 0] == 0).all()
    assert (error <= tolerance * size).all(), float((error / size).nan_to_num().max())
