"""The kernels in C++, for tensors in a CPU's memory. `kernels.reference` defines each function."""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, reduce
from typing import Final

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.inputs import AttentionInput, GroupCodes, LinearInput, LinearLayer, Mass, Norm, PackedStates
from windlass.core.types import (
    Attended,
    LinearOutputs,
    LinearWeights,
    PerSlot,
    Queries,
    RotaryKeys,
    RotaryTable,
    SlotIndex,
    SlotKeys,
    SlotPositions,
)
from windlass.kernels.cpu.tensors import (
    FLOATS,
    address,
    branch_positions,
    contiguous_means,
    format_of,
    linear_arguments,
    norm_arguments,
    state_arguments,
    steady_arguments,
    table_arguments,
    visibility_arguments,
)

WHY_MISSING = ""
try:
    import windlass.kernels.cpu._native as _native
except ImportError as error:  # installed without a compiler, or built for another system
    _native = None  # type: ignore[assignment]
    WHY_MISSING = str(error)

native = _native  # None where it is missing
MAX_TOKENS: Final = 64  # queries per row that the compiled module takes at once
FEW_TOKENS: Final = 16  # of these, at least, however many heads share a key
SHARED_QUERIES: Final = 1024  # of a key, at most, in more tokens than these few
MAX_CHANNELS: Final = 1024
GROUPS: Final = (0, 16, 32)  # channels that share a scale and an offset, where new codes are made
MAX_ROWS: Final = 16  # inputs of the compiled `linear` at once
MAX_MANY_ROWS: Final = 256  # the same, where `has_digits` or `has_panels`
MAX_PAIR_ROWS: Final = 512  # the same, in panels of pairs, of which 256 rows give two threads uneven parts
FLOAT_ROWS: Final = 32  # tokens of a decoder layer of bfloat16, beyond which PyTorch's products are faster
# Queries of which any number is attended faster than by PyTorch, by instruction set.
FAST_QUERIES: Final = {"avx512_bf16": (torch.bfloat16,), "avx2": (torch.float32, torch.bfloat16, torch.float16)}
GRAIN: Final = 2**19  # bytes of weights, times rows, that are worth another thread
MANY_ROWS: Final = 64  # inputs from which on PyTorch's product of decoded or widened weights is as fast
MAX_LANES: Final = 16  # numbers in a vector of any instruction set
MAX_BLOCK: Final = 64
BLOCKS: Final = {4: (32, MAX_BLOCK), 8: (MAX_BLOCK,)}  # outputs that lie side by side, in codes of so many bits


def chosen() -> str | None:
    """The value of WINDLASS_CPU: avx512_bf16, avx512, avx2, plain, or none for plain PyTorch."""
    return os.environ.get("WINDLASS_CPU") or None


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that this CPU runs, best first. Empty without the compiled module."""
    return () if _native is None else tuple(_native.instruction_sets().split())


def end_pool() -> None:
    """End the calling thread's OpenMP threads, before another thread computes. While they wait, those of the other
    thread sleep at each barrier. The next parallel loop starts new ones."""
    if _native is not None:
        _native.end_pool()


@cache
def instruction_set() -> str:
    """The instruction set in use. "none" where plain PyTorch does the work.

    Raises: UsageError when WINDLASS_CPU asks for one that this CPU does not run.
    """
    wanted, known = chosen(), (*instruction_sets(), "none")
    if known[0] == "none":
        return known[0]
    if wanted is not None and wanted not in known:
        raise UsageError(
            f"WINDLASS_CPU={wanted!r} is not an instruction set of this CPU. Use one of: {', '.join(known)}"
        )
    return wanted or known[0]


def product_dtype(inputs: Tensor) -> torch.dtype:
    """The dtype in which PyTorch multiplies many rows fastest.

    float32 for 16-bit inputs on a CPU with AVX2 or AVX-512 that has no products of bfloat16, where PyTorch's product of
    16 bits is several times slower (docs/log.md).
    """
    is_slow = inputs.device.type == "cpu" and inputs.itemsize == 2 and instruction_set() in ("avx2", "avx512")
    return torch.float32 if is_slow else inputs.dtype


def can_read(queries: Queries, keys: PackedStates, values: PackedStates) -> bool:
    """Return True if `attend` knows the types of these tensors, which are in a CPU's memory."""
    is_known = queries.dtype in FLOATS and format_of(keys) == format_of(values)
    return is_known and knows(keys) and values.channels <= MAX_CHANNELS


def knows(states: PackedStates) -> bool:
    """Return True if these kernels can read these states."""
    return format_of(states) >= 0 and states.channels <= MAX_CHANNELS


def is_fastest(call: AttentionInput) -> bool:
    """Return True if `attend` is faster than PyTorch's attention for so many queries.

    In products of bfloat16 and with AVX2 it is at any number, otherwise with vectors of AVX-512 at MAX_TOKENS
    (docs/log.md). Other sets were measured for few tokens alone. Where many queries are observed, PyTorch's attention
    is taken.
    """
    tokens, found = call.queries.shape[2], instruction_set()
    if call.observed is None and call.queries.dtype in FAST_QUERIES.get(found, ()):
        return True
    return tokens <= (FEW_TOKENS if found == "plain" else MAX_TOKENS)


def attend(call: AttentionInput) -> tuple[Attended, Mass | None]:
    """See `reference.attend`. Takes any number of queries, some at a time."""
    (_, heads, tokens, _), kv_heads = call.queries.shape, call.keys.data.shape[1]
    size = min(MAX_TOKENS, max(FEW_TOKENS, SHARED_QUERIES * kv_heads // heads))
    if tokens <= size or call.observed is None:
        return _attend(call, size)
    parts = [_attend(_part(call, first, min(first + size, tokens)), size) for first in range(0, tokens, size)]
    masses = [mass for _, mass in parts if mass is not None]
    return torch.cat([out for out, _ in parts], 2), reduce(Mass.plus, masses)


def _part(call: AttentionInput, first: int, end: int) -> AttentionInput:
    """The call of the queries of some columns, each of which is observed in the part that has it."""
    index, observed = call.rotary_index, call.observed
    assert observed is not None
    if index is not None:
        far = None if index.far is None else replace(index.far, queries=index.far.queries[..., first:end])
        index = replace(index, near=replace(index.near, queries=index.near.queries[..., first:end]), far=far)
    observed = (observed - first).where((observed >= first) & (observed < end), -1)
    return replace(
        call,
        queries=call.queries[:, :, first:end],
        query_positions=call.query_positions[:, first:end],
        rotary_index=index,
        observed=observed,
    )


def _attend(call: AttentionInput, some: int) -> tuple[Attended, Mass | None]:
    """The result of all queries, `some` at a time, or of so many at once where any is observed."""
    queries, keys, values, index = call.queries, call.keys, call.values, call.rotary_index
    batch, heads, tokens, _ = queries.shape
    kv_heads, slots = keys.data.shape[1:3]
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
    out = queries.new_empty(batch, tokens, heads, values.channels)
    is_rotated = index is not None and call.tables is not None
    near_queries, near_keys = branch_positions(index.near if is_rotated and index else None)
    far_queries, far_keys = branch_positions(index.far if is_rotated and index else None)
    near, far = (address(near_queries), address(near_keys)), (address(far_queries), address(far_keys))
    observed, rows, rest = call.observed, None, None
    if observed is not None:
        observed = observed.contiguous()
        rows = torch.empty(batch, kv_heads, observed.shape[1], slots)
        rest = torch.empty(batch, kv_heads, slots) if call.is_rest_wanted else None
    query_positions = call.query_positions.to(torch.int64).contiguous()
    sink_logits = None if call.sink_logits is None else call.sink_logits.float().contiguous()
    log_counts = None if call.log_counts is None else call.log_counts.float().contiguous()
    query_gain = None if call.query_gain is None else call.query_gain.float().contiguous()
    key_means, value_means = contiguous_means(keys), contiguous_means(values)
    _native.attend(
        (batch, heads, kv_heads, call.slot_positions.shape[1], tokens, slots),
        format_of(keys),
        FLOATS[queries.dtype],
        queries.data_ptr(),
        queries.stride()[:3],
        state_arguments(keys, key_means),
        state_arguments(values, value_means),
        call.slot_positions.data_ptr(),
        query_positions.data_ptr(),
        (*near, *far, 0 if index is None else index.near_window),
        steady_arguments(call.tables, _native.is_steady),
        address(query_gain),
        call.scale,
        call.softcap or 0.0,
        visibility_arguments(call.visibility),
        address(sink_logits),
        address(log_counts),
        (address(observed), 0 if observed is None else observed.shape[1], address(rows), address(rest)),
        out.data_ptr(),
        some,
        instruction_set(),
        torch.get_num_threads(),
    )
    return out.transpose(1, 2), None if rows is None else Mass(rows, rest)


def can_multiply(call: LinearInput) -> bool:
    """Return True if `linear` knows these tensors, which are in a CPU's memory, and is fastest for so few rows.

    Up to `most_rows` rows go through it where it has panels, or where inputs have 16 bits and weights are codes or
    PyTorch is slow.
    """
    layer, dtype, rows = call.layer, call.inputs.dtype, call.rows
    if not rows or not knows_linear(layer, dtype):
        return False
    if rows <= MAX_ROWS:
        return True
    is_slow = dtype.itemsize == 2 and (layer.is_coded or product_dtype(call.inputs) is not dtype)
    most = most_rows(layer, dtype) if is_slow or has_panels(layer, dtype) else MAX_ROWS
    return most is None or rows <= most


def most_rows(layer: LinearLayer, dtype: torch.dtype) -> int | None:
    """The most rows that `linear` multiplies faster than PyTorch (None: any number)."""
    is_fast = has_panels(layer, dtype) or (has_digits(layer, dtype) and not _has_amx())
    return None if is_fast else MANY_ROWS


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def has_panels(layer: LinearLayer, dtype: torch.dtype) -> bool:
    """Return True if `linear` lays out panels of the weights for many rows.

    With AVX2 alone it widens or decodes them. With products of bfloat16 and no AMX they are pairs of bfloat16.
    """
    weights, found = layer.weights, instruction_set()
    is_float = isinstance(weights, Tensor) and weights.dtype is dtype and dtype.itemsize == 2
    if found == "avx512_bf16":
        return is_float and dtype is torch.bfloat16 and layer.in_features % 2 == 0 and not _has_amx()
    return (layer.is_coded or is_float) and found == "avx2" and not has_digits(layer, dtype)


def has_digits(layer: LinearLayer, dtype: torch.dtype) -> bool:
    """Return True if inputs, rounded to 8 bits, and codes are multiplied as whole numbers."""
    weights, found = layer.weights, instruction_set()
    if dtype is not torch.bfloat16 or not isinstance(weights, GroupCodes):
        return False
    return found in ("avx2", "avx512", "avx512_bf16") if weights.bits == 4 else found == "avx512_bf16"


def rows_at_once(layer: LinearLayer, dtype: torch.dtype) -> int:
    """The most inputs that the compiled module takes at once, which bounds its scratch memory."""
    if has_panels(layer, dtype):
        return MAX_PAIR_ROWS if instruction_set() == "avx512_bf16" else MAX_MANY_ROWS
    return MAX_MANY_ROWS if has_digits(layer, dtype) else MAX_ROWS


def even_parts(rows: int, most: int) -> Iterator[tuple[int, int]]:
    """The first row of each part, and its number of rows, `most` at most.

    The numbers differ by one at most: a few rows, which are multiplied otherwise, are never left over from many.
    """
    parts = -(-rows // most)
    for part in range(parts):
        first = rows * part // parts
        yield first, rows * (part + 1) // parts - first


def knows_linear(layer: LinearLayer, dtype: torch.dtype) -> bool:
    """Return True if `linear` knows this layer, for inputs of this dtype."""
    weights = layer.weights
    if dtype not in FLOATS or not (layer.bias is None or (layer.bias.dtype == dtype and layer.bias.is_contiguous())):
        return False
    if isinstance(weights, GroupCodes):
        return can_read_codes(weights)
    if layer.scales is not None and layer.scales.dtype not in FLOATS:
        return False
    is_known = weights.dtype == (dtype if layer.scales is None else torch.int8)
    return is_known and weights.is_contiguous() and weights.numel() > 0


def can_read_codes(weights: GroupCodes) -> bool:
    """Return True if `linear` knows these weights, whatever the inputs."""
    has_sizes = weights.block in BLOCKS.get(weights.bits, ()) and weights.group % MAX_LANES == 0
    return has_sizes and (weights.supers is not None or weights.pairs.dtype in FLOATS) and weights.is_whole


def can_decode_weights(weights: GroupCodes, dtype: torch.dtype) -> bool:
    """Return True if `decoded` knows these weights, and the dtype that is asked for."""
    return dtype in FLOATS and can_read_codes(weights)


def decode_into(panel: LinearWeights, weights: GroupCodes, first: int) -> None:
    """Write the weights of the outputs from block `first` on, see `GroupCodes.floats`. `panel` is contiguous."""
    arguments, threads = linear_arguments(LinearLayer(weights), panel.dtype, None), torch.get_num_threads()
    own, count = FLOATS[panel.dtype], len(panel)
    _native.decode_weights(arguments, first, count, own, panel.data_ptr(), instruction_set(), threads)


def decoded_outputs(weights: GroupCodes, outputs: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weights of some outputs, whose numbers these are. None: one of them is not there."""
    arguments, outputs = linear_arguments(LinearLayer(weights), dtype, None), outputs.long().contiguous()
    found = torch.empty(*outputs.shape, weights.in_features, dtype=dtype)
    is_found = _native.decode_outputs(
        arguments, outputs.data_ptr(), outputs.numel(), FLOATS[dtype], found.data_ptr(), instruction_set()
    )
    return found if is_found else None


def linear(call: LinearInput) -> LinearOutputs:
    """See `reference.linear`. Takes any number of rows.

    No row depends on the others, but where `has_panels` sums of more than MAX_ROWS have another order.
    """
    inputs, layer, rows = call.inputs.contiguous(), call.layer, call.rows
    threads = max(1, min(torch.get_num_threads(), layer.nbytes * rows // GRAIN))
    dtype, scales = inputs.dtype, None if layer.scales is None else layer.scales.contiguous()
    result = inputs.new_empty(*inputs.shape[:-1], layer.out_features)
    arguments, own = linear_arguments(layer, dtype, scales), FLOATS[dtype]
    most = rows if rows <= MAX_ROWS else rows_at_once(layer, dtype)
    for first, count in even_parts(rows, most):
        read = inputs.data_ptr() + first * inputs.shape[-1] * inputs.itemsize
        written = result.data_ptr() + first * result.shape[-1] * inputs.itemsize
        _native.linear(arguments, count, own, read, written, instruction_set(), threads)
    return result


def norm(states: Tensor, norm: Norm) -> Tensor:
    """See `reference.norm`. Numbers, which lie contiguously, and weights have the same dtype."""
    found = torch.empty_like(states)
    tokens, own = states.numel() // states.shape[-1], FLOATS[states.dtype]
    _native.norm_tokens(norm_arguments(norm), tokens, own, states.data_ptr(), found.data_ptr(), instruction_set())
    return found


def can_decode(states: PackedStates, dtype: torch.dtype) -> bool:
    """Return True if `rotated` knows these numbers, as they are, and the dtype that is asked for."""
    is_whole = states.data.is_contiguous() and states.data.numel() > 0 and states.last is None
    has_scales = states.scales is None or states.scales.is_contiguous()
    return dtype in FLOATS and is_whole and has_scales and knows(states)


def rotated(
    states: PackedStates,
    positions: RotaryKeys | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    used: int,
    dtype: torch.dtype,
) -> Tensor:
    """The first `used` slots as floats, rotated to `positions` (None: not rotated).

    Returns all channels that are held, whatever `states.last` says.
    """
    states = replace(states, last=None)
    batch, kv_heads, slots = states.data.shape[:3]
    out = torch.empty(batch, kv_heads, used, states.channels, dtype=dtype)
    positions = None if positions is None else positions.to(torch.int32).contiguous()
    means = contiguous_means(states)
    _native.rotate(
        (batch, kv_heads, 1 if positions is None else positions.shape[1], slots, used),
        format_of(states),
        FLOATS[dtype],
        state_arguments(states, means),
        address(positions),
        table_arguments(tables),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def mean_key_cosine(keys: PackedStates, positions: SlotPositions) -> PerSlot:
    """See `reference.mean_key_cosine`."""
    batch, kv_heads, slots = keys.data.shape[:3]
    out = torch.empty(batch, kv_heads, slots)
    positions, means = positions.to(torch.int32).contiguous(), contiguous_means(keys)
    _native.mean_key_cosine(
        (batch, kv_heads, positions.shape[1], slots),
        format_of(keys),
        state_arguments(keys, means),
        positions.data_ptr(),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def expected_logits(keys: SlotKeys, means: Tensor, covariances: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.expected_logits`."""
    (batch, kv_heads, slots, channels), group = keys.shape, means.shape[1] // keys.shape[1]
    out = torch.empty(batch, kv_heads, group, slots)
    keys, means, covariances, cos, sin = (each.contiguous() for each in (keys, means, covariances, cos, sin))
    _native.expected(
        (batch, kv_heads, group, slots, channels, cos.shape[1]),
        keys.data_ptr(),
        means.data_ptr(),
        covariances.data_ptr(),
        (cos.data_ptr(), sin.data_ptr()),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def has_floats(tensor: Tensor) -> bool:
    """Return True if kernels know the dtype of these floats."""
    return tensor.dtype in FLOATS


def leverage(keys: SlotKeys, is_counted: Tensor, projection: Tensor | None, ridge: float) -> Tensor:
    """See `kernels.leverage`."""
    batch, kv_heads, slots, channels = keys.shape
    out = torch.empty(batch, kv_heads, slots, dtype=torch.float64)
    keys, is_counted = keys.contiguous(), is_counted.expand(keys.shape[:3]).contiguous()
    _native.leverage(
        (batch * kv_heads, slots, channels, channels if projection is None else projection.shape[1]),
        FLOATS[keys.dtype],
        keys.data_ptr(),
        is_counted.data_ptr(),
        address(projection),
        ridge,
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def redundancy(keys: PackedStates, positions: SlotPositions, order: SlotIndex, threshold: float) -> PerSlot:
    """See `kernels.redundancy`."""
    batch, kv_heads, slots = keys.data.shape[:3]
    out = torch.empty(batch, kv_heads, slots)
    positions, order, means = positions.to(torch.int32).contiguous(), order.contiguous(), contiguous_means(keys)
    _native.redundancy(
        (batch, kv_heads, slots),
        format_of(keys),
        state_arguments(keys, means),
        positions.data_ptr(),
        order.data_ptr(),
        threshold,
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def add_query_mass(
    mass: Tensor,
    queries: Tensor,
    keys: Tensor,
    mask: Tensor,
    log_counts: Tensor | None,
    lse: Tensor,
    targets: Tensor,
    scale: float,
) -> None:
    """Add to `mass` (batch, kv_heads, outputs, slots) the attention that rotated `queries` pay to each slot.

    `mask` (batch, score_heads, tokens, used) tells which of the first slots they see, `lse` (batch, heads, tokens) the
    log-sum-exp of their logits, and `targets` (batch, tokens) the output that each adds to, negative for none.
    """
    (batch, heads, tokens, channels), (_, mask_heads, _, used) = queries.shape, mask.shape
    if (
        keys.stride()[2:] != (channels, 1)
        or keys.stride(1) % channels
        or keys.stride(0) != keys.stride(1) * keys.shape[1]
    ):
        keys = keys.contiguous()
    queries, mask, lse, targets = (each.contiguous() for each in (queries, mask, lse.float(), targets))
    log_counts = None if log_counts is None else log_counts[..., :used].float().contiguous()
    _native.query_mass(
        (batch, heads, keys.shape[1], mask_heads, tokens, used, channels),
        (keys.stride(1) // channels, mass.shape[3], mass.shape[2]),
        FLOATS[queries.dtype],
        queries.data_ptr(),
        keys.data_ptr(),
        mask.data_ptr(),
        address(log_counts),
        lse.data_ptr(),
        targets.data_ptr(),
        scale,
        mass.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
