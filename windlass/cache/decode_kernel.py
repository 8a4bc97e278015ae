"""A decode step of a layer by one call of a kernel, where nothing beyond writing and attending is asked of it."""

import copy
from collections.abc import Callable
from typing import NamedTuple, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable
from windlass.core.attention import Mass
from windlass.core.decode import DecodeInput, DecodeSlots
from windlass.core.limits import MAX_NUMBER
from windlass.core.shapes import Attended, Queries, SlotIndex
from windlass.core.step import AttentionCall, Step
from windlass.policies.base import TOKEN, Policy
from windlass.policies.interfaces import Trained
from windlass.policies.wrapper import find
from windlass.positions.base import PositionMode
from windlass.positions.rotary import Rotary


class Decoded(NamedTuple):
    """The slots that got the new tokens, what their queries read, and their attention mass if they are observed."""

    written: SlotIndex
    out: Attended
    mass: Mass | None
    queries: Queries
    initial_state: dict[str, Tensor]


class LayerStep(NamedTuple):
    """A step of a layer: its slots and rules, new queries, keys and values, and how they are read."""

    table: SlotTable
    rules: LayerRules
    rotary: Rotary | None
    states: tuple[Tensor, ...]
    step: Step
    mode: PositionMode
    call: AttentionCall


class _Prepared(NamedTuple):
    """A kernel, and what it was prepared for: it serves as long as all of it is the same."""

    kernel: Callable[[DecodeInput], tuple[SlotIndex, Attended, Mass | None]]
    end: int  # of the longest text
    tensors: tuple[ReferenceType[Tensor], ...]  # weak: what a layer, or the rotary, gives up must not be kept alive
    rules: LayerRules
    rotary: Rotary | None
    mode: PositionMode
    numbers: tuple[object, ...]


@final
class DecodeKernel:
    """The kernel for steps of one token per row of one layer, prepared when such a step comes.

    It serves keys and values that are stored as they are, in texts whose tokens are read at their own positions: not
    merged or counted tokens, pictures, an indexer, policies that change keys or ask for token ids, or norms after RoPE.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._prepared: _Prepared | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "DecodeKernel":
        """That of a copied layer, whose slots are elsewhere."""
        return DecodeKernel(copy.deepcopy(self._policy, memo))

    def step(self, asked: LayerStep, is_observed: bool) -> Decoded | None:
        """Write and attend; None, and nothing has happened, where the step is none that it serves."""
        table, rules, rotary, states, step, mode, call = asked
        if not kernels.has_decode(step.positions.device.type) or step.positions.shape[1] != 1:
            return None
        if step.is_captured or step.places is not None:
            return None
        if call.sees_to is not None or call.picker is not None or call.sink_logits is not None:
            return None
        tensors, numbers = _tensors(table, rotary), _numbers(states, call)
        if tensors is None or any(each.stride(-1) != 1 for each in states):
            return None
        (queries, keys, values), prepared = states, self._prepared
        if prepared is None or not (
            prepared.end >= step.end
            and prepared.rules is rules
            and prepared.rotary is rotary
            and prepared.mode is mode
            and prepared.numbers == numbers
            and len(prepared.tensors) == len(tensors)
            and all(weak() is tensor for weak, tensor in zip(prepared.tensors, tensors, strict=True))
        ):
            prepared = self._prepared = self._prepare(asked)
            if prepared is None:
                return None
        return Decoded(*prepared.kernel(DecodeInput(queries, keys, values, step.positions, is_observed)), queries, {})

    def _prepare(self, asked: LayerStep) -> _Prepared | None:
        """A kernel for steps like this one; None where it can't be served."""
        table, rules, rotary, states, step, mode, call = asked
        held, end, tables = table.store.in_place(), MAX_NUMBER, None
        if held is None or rules.merge is not None or TOKEN in table.state or find(self._policy, Trained) is not None:
            return None
        queries, keys, values = states
        if (keys.dtype, values.dtype) != (held[0].dtype, held[1].dtype):
            return None
        if rotary is not None:
            if rotary.norm_weights is not None:
                return None
            trained_length = rotary.trained_length if rules.sliding_window is None else None
            end = mode.within(trained_length, rules.budget is not None).stands_until()
            if step.end > end or rotary.table_changes_at(step.end):
                return None
            tables = rotary.tables(step.end, queries.device, kernels.table_dtype(queries))
            end = min(end, tables[0].shape[0])
        state = tuple((tensor, 0.0) for tensor in table.state.values())
        slots = DecodeSlots(*held, table.positions, state, tables, call.scale, rules.visibility, call.softcap)
        kernel = kernels.decode_of(slots, queries)
        tensors = _tensors(table, rotary)
        if kernel is None or tensors is None:
            return None
        return _Prepared(kernel, end, tuple(map(ref, tensors)), rules, rotary, mode, _numbers(states, call))


def _tensors(table: SlotTable, rotary: Rotary | None) -> tuple[Tensor, ...] | None:
    """What a step writes to, and the tables that it reads. None where keys and values are not all that is held."""
    held = table.store.in_place()
    if held is None:
        return None
    tables = () if rotary is None else rotary.built.get(torch.float32, ())
    return *held, table.positions, *table.state.values(), *tables


def _numbers(states: tuple[Tensor, ...], call: AttentionCall) -> tuple[object, ...]:
    """What else is the same in all steps that one kernel serves."""
    queries, keys, values = states
    sizes = queries.shape, keys.shape, values.shape, queries.dtype, keys.dtype, values.dtype
    return *sizes, call.scale, call.softcap
