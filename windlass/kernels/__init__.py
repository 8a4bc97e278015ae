"""Arithmetic over slots: attention, eviction, and reading and writing slots.

`reference` defines the meaning of each function. Here each call goes to the fastest backend that can serve it: on a CPU
the compiled module (`cpu`) or PyTorch's own attention (`sdpa`), on a GPU `triton`, elsewhere and for types that these
do not know `reference`. The arguments alone decide.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from windlass.core.errors import WindlassWarning
from windlass.core.inputs import (
    AttentionInput,
    BestPages,
    DecoderLayer,
    DecodeSlots,
    EvictionInput,
    GroupCodes,
    LinearInput,
    Mass,
    Norm,
    PackedStates,
    PageInput,
    ReadInput,
    WriteInput,
    Writes,
)
from windlass.core.types import (
    Attended,
    Hidden,
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
from windlass.kernels import cpu, reference, sdpa
from windlass.kernels import reference as reference_recall
from windlass.kernels.cpu import slots as cpu_codes
from windlass.kernels.cpu import slots as cpu_slots

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import Decode, DecoderSteps, FewTokens, LayerSlots, Watch

PANEL: Final = 2**18  # weights that are decoded or widened at once, for a product with many rows


def attend(call: AttentionInput) -> tuple[Attended, Mass | None]:
    """See `reference.attend`."""
    device = call.queries.device.type
    # Runs once per picture, or chunk of joined tokens. No compiled kernel supports picks.
    if call.sees_to is not None or call.picked is not None or call.seen_until is not None:
        return reference.attend(call)
    if _is_compiled(device) and cpu.can_read(call.queries, call.keys, call.values):
        return cpu.attend(call) if call.softcap is not None or cpu.is_fastest(call) else sdpa.attend(call)
    if _has_triton(device):
        from windlass.kernels import triton  # late: where there is no GPU, Triton itself is not imported

        if triton.can_read(call.queries, call.keys, call.values):
            return triton.attend(call)
    return reference.attend(call)


def best_pages(call: PageInput) -> BestPages:
    """See `reference_recall.best_pages`."""
    if _is_compiled(call.queries.device.type):
        from windlass.kernels.cpu import slots as recall  # late: it needs the compiled module

        if recall.can_scan((*call.pieces, *recall.keys_of(call.digests))):
            return recall.best_pages(call)
    found: BestPages = _recall_of(call.queries).best_pages(call)
    return found


def read_tokens(call: ReadInput) -> Tensor:
    """See `reference_recall.read_tokens`."""
    if _is_compiled(call.index.device.type):
        from windlass.kernels.cpu import slots as recall  # late, as above

        return recall.read_tokens(call)
    rows: Tensor = _recall_of(call.index).read_tokens(call)
    return rows


def write_tokens(call: WriteInput) -> None:
    """See `reference_recall.write_tokens`."""
    if _is_compiled(call.index.device.type):
        from windlass.kernels.cpu import slots as recall  # late, as above

        recall.write_tokens(call)
    else:
        _recall_of(call.index).write_tokens(call)


def can_ask(tensor: Tensor) -> bool:
    """Return True if the host can read a value of `tensor` at once. Where it has to wait for a device, no step that
    does so can be captured in a graph. Plain PyTorch counts as a device."""
    return _is_compiled(tensor.device.type)


def recall_device(device: torch.device, dtype: torch.dtype) -> torch.device:
    """The device that ranks keys a model on `device` evicts: itself, if its kernels can read them in host memory."""
    is_known = _has_triton(device.type) and dtype in (torch.float32, torch.bfloat16, torch.float16)
    return device if is_known else torch.device("cpu")


def decode_of(slots: DecodeSlots, queries: Queries) -> "Decode | None":
    """`reference_decode.decode` for these slots and queries like these, or None where no backend has it in one call.

    Call it only while keys, values and tables have the memory that they had.
    """
    if not _is_compiled(queries.device.type) or not cpu.can_read(queries, slots.keys, slots.values):
        return None
    from windlass.kernels.cpu.decode import Decode  # late: they need the compiled module
    from windlass.kernels.cpu.slots import can_recall

    if slots.recall is not None and not can_recall(slots.recall):
        return None
    return Decode(slots, queries)


def has_decode(device: str) -> bool:
    """Return True if `decode_of` may find a kernel on this kind of device."""
    return _is_compiled(device)


def linear(call: LinearInput) -> LinearOutputs:
    """See `reference.linear`. Many rows are multiplied by panels of the weights where `needs_panels` says so."""
    if has_linear(call.inputs.device.type) and cpu.can_multiply(call):
        return cpu.linear(call)
    return _multiply_panels(call) if needs_panels(call) else reference.linear(call)


def norm(states: Tensor, norm: Norm) -> Tensor:
    """See `reference.norm`."""
    is_known = has_linear(states.device.type) and cpu.has_floats(states) and states.numel() > 0
    is_like = (
        is_known and states.dtype is norm.weights.dtype and states.is_contiguous() and norm.weights.is_contiguous()
    )
    return cpu.norm(states, norm) if is_like else reference.norm(states, norm)


def needs_panels(call: LinearInput) -> bool:
    """Return True if many rows are multiplied by panels of decoded or widened weights, which PyTorch reads."""
    weights, dtype = call.layer.weights, call.inputs.dtype
    if call.layer.is_coded or isinstance(weights, GroupCodes):
        return True
    return cpu.product_dtype(call.inputs) is not dtype and weights.dtype is dtype


def _multiply_panels(call: LinearInput) -> LinearOutputs:
    """Decode or widen PANEL weights at a time, always into the same memory, and let PyTorch multiply. No gradients."""
    layer, weights, dtype = call.layer, call.layer.weights, cpu.product_dtype(call.inputs)
    width, block = layer.in_features, weights.block if isinstance(weights, GroupCodes) else 1
    inputs = call.inputs.reshape(-1, width).to(dtype)
    outputs = inputs.new_empty(len(inputs), layer.out_features)
    step = min(layer.out_features, max(1, PANEL // width // block) * block)
    scratch = inputs.new_empty(step, width)
    for first in range(0, layer.out_features, step):
        last = min(layer.out_features, first + step)
        panel = scratch[: last - first]
        if isinstance(weights, GroupCodes):
            decode_into(panel, weights, first)
        else:
            panel.copy_(weights[first:last])
        torch.mm(inputs, panel.T, out=outputs[:, first:last])
    if layer.scales is not None:
        outputs *= layer.scales.to(dtype)
    if layer.bias is not None:
        outputs += layer.bias.to(dtype)
    return outputs.to(call.inputs.dtype).view(*call.inputs.shape[:-1], layer.out_features)


def decode_into(panel: LinearWeights, weights: GroupCodes, first: int) -> None:
    """Write the weights of the outputs from `first`, which begins a block, on, rounded to the panel's dtype."""
    if _is_compiled(weights.codes.device.type) and cpu.can_decode_weights(weights, panel.dtype):
        cpu.decode_into(panel, weights, first // weights.block)
        return
    outputs = torch.arange(first, first + len(panel), device=weights.codes.device)
    panel.copy_(weights.floats(torch.promote_types(panel.dtype, torch.float32), outputs))


def decoded_outputs(weights: GroupCodes, outputs: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The weights of these outputs, as `decode_into` gives them. None: no backend, or an output that is not there."""
    is_known = _is_compiled(weights.codes.device.type) and outputs.device.type == "cpu"
    is_known = is_known and outputs.numel() > 0 and cpu.can_decode_weights(weights, dtype)
    return cpu.decoded_outputs(weights, outputs, dtype) if is_known else None


def decoder_layer_of(layer: DecoderLayer, dtype: torch.dtype, device: torch.device) -> "FewTokens | None":
    """`reference_layer` for this layer, and few tokens of this dtype, or None where no backend has it.

    Call it only while the layer's weights have the memory that they had.
    """
    if not has_linear(device.type):
        return None
    from windlass.kernels.cpu.decode import FewTokens, can_serve  # late: it needs the compiled module

    return FewTokens(layer, dtype) if can_serve(layer, dtype) else None


def decoder_steps(
    layers: "Sequence[LayerSlots]", hidden: Hidden, is_kept: bool = False, keeps_keys: bool = False
) -> "DecoderSteps":
    """Decode steps of decoder layers of `decoder_layer_of`, for hidden states like these. See `DecoderSteps`."""
    from windlass.kernels.cpu.decode import DecoderSteps  # late: it needs the compiled module

    return DecoderSteps(layers, hidden, is_kept, keeps_keys)


def can_watch() -> bool:
    """Return True if the compiled module, and with it `watch`, is there."""
    return cpu.native is not None


def watch() -> "Watch":
    """A compiled look at objects of Python that are to stay as they are. See `can_watch`."""
    from windlass.kernels.cpu.decode import Watch  # late, as above

    return Watch()


def has_linear(device: str) -> bool:
    """Return True if a linear layer of few rows has a kernel of its own on this kind of device, faster than PyTorch's.

    A CPU without AVX2 was not measured, and is left to PyTorch.
    """
    return _is_compiled(device) and cpu.instruction_set() != "plain"


def table_dtype(queries: Queries) -> torch.dtype:
    """The dtype that the rotary tables of a call of `attend` should have.

    On a GPU one row of cos and sin is read per key. In float32 that would be as many bytes as a key and a value of 16
    bits.
    """
    return torch.float16 if queries.device.type == "cuda" and queries.itemsize == 2 else torch.float32


def mean_key_cosine(keys: PackedStates, positions: SlotPositions) -> PerSlot:
    """See `reference.mean_key_cosine`."""
    kernel = reference.mean_key_cosine
    if _is_compiled(positions.device.type) and cpu.knows(keys):
        kernel = cpu.mean_key_cosine
    elif _has_triton(positions.device.type):
        from windlass.kernels import triton  # late, as above

        if triton.knows(keys):
            kernel = triton.mean_key_cosine
    return kernel(keys, positions)


def rotated(states: Tensor, positions: RotaryKeys, tables: tuple[RotaryTable, RotaryTable]) -> Tensor | None:
    """States (batch, heads, slots, channels), each rotated to its position, in float32. None: no backend has it."""
    packed, batch, heads, slots = PackedStates(states), *states.shape[:3]
    has_shape = positions.shape[0] == batch and positions.shape[1] in (1, heads) and positions.shape[2] == slots
    has_tables = all(each.dtype is torch.float32 and each.is_contiguous() for each in tables)
    if not (has_shape and has_tables and _is_compiled(states.device.type) and cpu.can_decode(packed, torch.float32)):
        return None
    return cpu.rotated(packed, positions, tables, slots, torch.float32)


def expected_logits(keys: SlotKeys, means: Tensor, covariances: Tensor, cos: Tensor, sin: Tensor) -> Tensor | None:
    """Logits of rotated keys for queries of a normal distribution, as `ExpectedAttention` has them. None: no backend.

    `means` (batch, heads, channels) and symmetric `covariances` (batch, heads, channels, channels) are rotated by `cos`
    and `sin` (batch, pairs) first. Returns (batch, kv_heads, group, slots).
    """
    is_known = _is_compiled(keys.device.type) and keys.numel() > 0
    return cpu.expected_logits(keys, means, covariances, cos, sin) if is_known else None


def leverage(keys: SlotKeys, is_counted: Tensor, projection: Tensor | None, ridge: float) -> Tensor | None:
    """`policies.leverage.leverage` of float keys, or None where no backend has it."""
    is_known = _is_compiled(keys.device.type) and cpu.has_floats(keys) and keys.numel() > 0
    return cpu.leverage(keys, is_counted, projection, ridge) if is_known else None


def redundancy(keys: PackedStates, positions: SlotPositions, order: SlotIndex, threshold: float) -> PerSlot | None:
    """`policies.r_kv.redundancy`, or None where no backend has it. `order` is that of `argsort_positions`."""
    is_known = _is_compiled(positions.device.type) and cpu.knows(keys) and positions.shape[1] == keys.data.shape[1]
    return cpu.redundancy(keys, positions, order, threshold) if is_known else None


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    free: SlotIndex = _slots_of(positions).first_free(positions, count)
    return free


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """See `reference.argsort_positions`."""
    order: SlotIndex = _slots_of(positions).argsort_positions(positions)
    return order


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """See `reference.evict`."""
    index, before = _slots_of(call.positions).evict(call)
    return index, before


def write_all(index: SlotIndex, writes: Writes) -> None:
    """See `reference.write_all`."""
    _slots_of(index).write_all(index, writes)


def encode(states: Tensor, means: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    if _is_compiled(states.device.type) and cpu_codes.can_encode(states, group):
        return cpu_codes.encode(states, means, group)
    has_triton = _has_triton(states.device.type)
    backend = import_module("windlass.kernels.triton.slots") if has_triton else reference
    codes, scales = backend.encode(states, means, group)
    return codes, scales


def decode(states: PackedStates, dtype: torch.dtype) -> Tensor:
    """The numbers that these states stand for, rounded from float32 to `dtype`."""
    if _is_compiled(states.data.device.type) and cpu.can_decode(states, dtype):
        return cpu.rotated(states, None, None, states.data.shape[2], dtype)
    return states.floats().to(dtype)


def read(states: Tensor, index: SlotIndex) -> Tensor:
    """See `reference.read`."""
    return reference.read(states, index)


@cache
def _is_compiled(device: str) -> bool:
    """Return True if the compiled kernels serve this kind of device. Warns once of a missing build."""
    if device != "cpu" or cpu.chosen() == "none":
        return False
    if cpu.instruction_set() == "none":
        warnings.warn(
            "windlass was installed without its compiled kernels (no C++ compiler was found), so attention runs in "
            f"plain PyTorch, which is slower. Install a compiler, then windlass again ({cpu.WHY_MISSING})",
            WindlassWarning,
            stacklevel=3,
        )
        return False
    if cpu.instruction_set() == "plain" and cpu.chosen() is None:
        warnings.warn(
            "this CPU has neither AVX2 nor AVX-512: attention runs in plain C++, which is slower",
            WindlassWarning,
            stacklevel=3,
        )
    return True


def _slots_of(tensor: Tensor) -> ModuleType:
    """The backend whose slot functions (first_free, evict, write_all and so on) serve this tensor's device."""
    device = tensor.device.type
    if _has_triton(device):
        return import_module("windlass.kernels.triton.slots")
    return cpu_slots if _is_compiled(device) else reference


def _recall_of(tensor: Tensor) -> ModuleType:
    """The backend of recall for this tensor's device, where the compiled kernels do not serve it."""
    return import_module("windlass.kernels.triton.recall") if _has_triton(tensor.device.type) else reference_recall


@cache
def _has_triton(device: str) -> bool:
    """Return True if Triton's kernels serve this kind of device. Warns once where they are missing."""
    if device != "cuda":
        return False
    if find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed, so on this GPU attention runs in plain PyTorch, which is slower. "
            "Install it: pip install triton",
            WindlassWarning,
            stacklevel=3,
        )
        return False
    return True
