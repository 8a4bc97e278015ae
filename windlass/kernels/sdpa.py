"""Attention of a chunk of a prompt over slots: keys are rotated once, then PyTorch's own kernel works.

Ten times as fast as a matrix of probabilities for each head. Queries come in blocks, so that no mask of
slots x slots is ever made, and slots that no query sees are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.inputs import AttentionInput, Format, Mass, PackedStates, Visibility
from windlass.core.positions import RotaryBranch, rotate
from windlass.core.types import Attended, ObservedColumns, QueryPositions, SlotPositions
from windlass.kernels import cpu
from windlass.kernels.reference import SCORE_BYTES, visible

MASK_BYTES = SCORE_BYTES // 4  # of one block of queries
MOST_QUERIES = 256  # of one block: the first of more queries would meet many slots that only the last ones see


def attend(call: AttentionInput) -> tuple[Attended, Mass | None]:
    """See `reference.attend`. Takes any number of queries, no softcap."""
    assert call.softcap is None, "a softcap, which PyTorch's kernel does not know"
    dtype = call.queries.dtype
    call = replace(call, queries=call.queries.to(cpu.product_dtype(call.queries)))
    queries, index, slots = call.queries, call.rotary_index, call.slot_positions.shape[2]
    used = _used(call.slot_positions >= 0)
    where = call.slot_positions[..., :used]
    if call.log_counts is None and where.shape[1] > 1 and bool((where == where[:, :1]).all()):
        where = where[:, :1]  # nothing was evicted yet: one mask serves all heads
    near = None if index is None or call.tables is None else index.near
    far = None if index is None or call.tables is None else index.far
    near_window = index.near_window if index is not None and far is not None else None
    counts = None if call.log_counts is None else call.log_counts[..., :used]
    masks = _Masks(where, call.query_positions.to(torch.int32), call.visibility, near_window, counts)
    branches = [_rotated(call, near, used)]
    if far is not None:
        branches.append(_rotated(call, far, used))
    values = _floats(call.values, used, queries.dtype)
    out, lse = _attended(branches, values, masks, call.scale, call.sink_logits)
    out = out.to(dtype)
    if call.observed is None:
        return out, None
    return out, _mass(branches, masks, lse, call.scale, call.observed, call.is_rest_wanted, slots)


@dataclass(frozen=True)
class _BranchInput:
    """Queries and keys at the rotary positions of one branch."""

    queries: Tensor  # (batch, heads, tokens, head_dim)
    keys: Tensor  # (batch, kv_heads, used, head_dim)


@dataclass(frozen=True)
class _Masks:
    """Makes the masks of some queries at a time: which query sees which slot, and through which branch."""

    slots: SlotPositions
    queries: QueryPositions
    visibility: Visibility
    near_window: int | None  # None: one branch
    log_counts: Tensor | None

    def masks(self, queries: QueryPositions, used: int) -> list[Tensor]:
        """Per branch, whether (batch, score_heads, queries, used) is seen through it."""
        slots = self.slots[..., :used]
        distance = queries[:, None, :, None] - slots[:, :, None, :]
        seen = visible(distance, slots, self.visibility)
        if self.near_window is None:
            return [seen]
        is_near = distance < self.near_window
        return [seen & is_near, seen & ~is_near]

    def bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Addends of logits: the log counts, and -inf where `mask` hides a slot."""
        counts = torch.zeros((), dtype=dtype, device=mask.device)
        if self.log_counts is not None:
            counts = self.log_counts[:, :, None, : mask.shape[-1]].to(dtype)
        return torch.where(mask, counts, -torch.inf)

    def spans(self, itemsize: int) -> Iterator[tuple[slice, int]]:
        """Blocks of queries whose masks take MASK_BYTES at most, and how many of the first slots each block sees."""
        batch, score_heads, used = self.slots.shape
        tokens = self.queries.shape[1]
        size = min(MOST_QUERIES, max(1, MASK_BYTES // (batch * score_heads * used * itemsize)))
        for start in range(0, tokens, size):
            newest = self.queries[:, start : start + size].amax(1)
            yield (
                slice(start, start + size),
                _used((self.slots >= 0) & (self.slots <= newest[:, None, None])),
            )


def _rotated(call: AttentionInput, branch: RotaryBranch | None, used: int) -> _BranchInput:
    queries, gain = call.queries, call.query_gain
    if branch is None or call.tables is None:
        weighed = queries if gain is None else (queries.float() * gain).to(queries.dtype)
        return _BranchInput(weighed, _floats(call.keys, used, queries.dtype))
    cos, sin = call.tables
    at = branch.queries
    if at.shape[1] > 1:
        at = at.repeat_interleave(queries.shape[1] // at.shape[1], 1)
    rotated = rotate(queries.float(), cos[at], sin[at])
    rotated = (rotated if gain is None else rotated * gain).to(queries.dtype)
    return _BranchInput(rotated, cpu.rotated(call.keys, branch.keys, call.tables, used, queries.dtype))


def _floats(states: PackedStates, used: int, dtype: torch.dtype) -> Tensor:
    """The first `used` slots as `dtype`, or a view where they have it."""
    if states.format is Format.FLOAT and states.data.dtype == dtype:
        return states.data[:, :, :used, states.first :]
    return cpu.rotated(states, None, None, used, dtype)[..., states.first :]


def _attended(
    branches: Sequence[_BranchInput], values: Tensor, masks: _Masks, scale: float, sink_logits: Tensor | None
) -> tuple[Attended, Tensor]:
    """The result, and each query's log-sum-exp of logits, (batch, heads, tokens)."""
    outs, lses = [], []
    queries = branches[0].queries
    for span, used in masks.spans(queries.itemsize):
        partials = []
        for branch, mask in zip(branches, masks.masks(masks.queries[:, span], used), strict=True):
            bias = masks.bias(mask, queries.dtype)
            out, lse = _flash(branch.queries[:, :, span], branch.keys[:, :, :used], values[:, :, :used], bias, scale)
            seen = mask.any(-1)
            if seen.shape[1] > 1:
                seen = seen.repeat_interleave(queries.shape[1] // seen.shape[1], 1)
            partials.append((out, lse.masked_fill(~seen, -torch.inf)))
        out, lse = _joined(partials, sink_logits)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's blocked attention, and the log-sum-exp of its logits."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kv_heads, width = keys.shape[1], values.shape[-1]
    widest = max(keys.shape[-1], width)  # the kernel wants one width
    queries, keys, values = (pad(x, (0, widest - x.shape[-1])) for x in (queries, keys, values))
    group = queries.shape[1] // kv_heads
    outs, lses = [], []
    step = kv_heads if bias.shape[1] == 1 else 1
    for head in range(0, kv_heads, step):
        own = slice(head, head + step)
        shared = slice(head * group, (head + step) * group)
        mask = bias if bias.shape[1] == 1 else bias[:, own]
        out, lse = kernel(queries[:, shared], keys[:, own], values[:, own], 0.0, False, attn_mask=mask, scale=scale)
        outs.append(out[..., :width])
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(lses, 1))


def _joined(partials: Sequence[tuple[Tensor, Tensor]], sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """One softmax over the slots of all partials, and over the learned sinks, with zeros where all is hidden."""
    lses = torch.stack([lse for _, lse in partials])
    if sink_logits is not None:
        sinks = sink_logits.to(lses.dtype)[None, None, :, None]
        lses = torch.cat((lses, sinks.expand(1, *lses.shape[1:])))
    total = lses.logsumexp(0)
    total = total.masked_fill(total == -torch.inf, 0.0)
    out, lse = partials[0]
    if len(partials) == 1 and sink_logits is None:
        return out.masked_fill((lse == -torch.inf)[..., None], 0.0), total
    joined = sum(
        (part * (own - total).exp()[..., None] for part, own in partials), start=torch.zeros((), device=out.device)
    )
    return joined.to(out.dtype), total


def _mass(
    branches: Sequence[_BranchInput],
    masks: _Masks,
    lse: Tensor,
    scale: float,
    observed: ObservedColumns,
    is_rest_wanted: bool,
    slots: int,
) -> Mass:
    """The attention that each of `slots` slots got: of the observed queries one by one, and of all others in sum."""
    (batch, tokens), observations = masks.queries.shape, observed.shape[1]
    numbers = torch.arange(observations, device=observed.device, dtype=torch.int32).expand(batch, -1)
    columns, targets = observed.clamp(min=0), numbers.where(observed >= 0, -1)
    if is_rest_wanted:
        columns = torch.arange(tokens, device=observed.device).expand(batch, -1)
        rest = torch.full((batch, tokens + 1), observations, device=observed.device, dtype=torch.int32)
        targets = rest.scatter(1, observed.where(observed >= 0, tokens), numbers)[:, :-1]
    mass = torch.zeros(batch, branches[0].keys.shape[1], observations + is_rest_wanted, slots)
    score_heads, used = masks.slots.shape[1:]
    size = max(1, MASK_BYTES // (batch * score_heads * used))
    for some, its in zip(columns.split(size, 1), targets.split(size, 1), strict=True):
        at = some[:, None].expand(-1, lse.shape[1], -1)
        seen = masks.masks(masks.queries.gather(1, some), used)
        for branch, mask in zip(branches, seen, strict=True):
            queries = branch.queries.gather(2, at[..., None].expand(-1, -1, -1, branch.queries.shape[-1]))
            cpu.add_query_mass(mass, queries, branch.keys, mask, masks.log_counts, lse.gather(2, at), its, scale)
    return Mass(mass[:, :, :observations], mass[:, :, observations] if is_rest_wanted else None)


def _used(is_held: Tensor) -> int:
    """One past the last slot that any row and head holds, and at least 1."""
    held = is_held.flatten(0, 1).any(0).nonzero()
    return int(held[-1]) + 1 if len(held) else 1
