"""Attention of a chunk of a prompt over slots: keys are turned once, then PyTorch's own kernel works.

Measured against a matrix of probabilities per head, which takes ten times as long. Queries come in
blocks, so that no mask of slots x slots is ever made, and slots that no query sees are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.packed import Held
from windlass.core.rotary_index import Branch, Reading
from windlass.core.shapes import Attended, ObservedColumns, Queries, QueryPositions, RotaryTable, Scores, SlotPositions
from windlass.kernels import cpu
from windlass.kernels.reference import SCORE_BYTES, Mass, Visibility, visible
from windlass.positions.rotary import rotate

MASK_BYTES = SCORE_BYTES // 4  # of one block of queries


def attend(
    queries: Queries,
    keys: Held,
    values: Held,
    slot_positions: SlotPositions,
    query_positions: QueryPositions,
    *,
    reading: Reading | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    log_counts: Scores | None = None,
    observed: ObservedColumns | None = None,
    is_rest_wanted: bool = False,
) -> tuple[Attended, Mass | None]:
    """See `reference.attend`; any number of queries, no softcap."""
    assert softcap is None, "a softcap, which PyTorch's kernel does not know"
    slots, used = slot_positions.shape[2], _used(slot_positions >= 0)
    where = slot_positions[..., :used]
    if log_counts is None and where.shape[1] > 1 and bool((where == where[:, :1]).all()):
        where = where[:, :1]  # nothing was evicted yet: one mask serves all heads
    near_branch = None if reading is None or tables is None else reading.near
    far_branch = None if reading is None or tables is None else reading.far
    near_window = reading.near_window if reading is not None and far_branch is not None else None
    counts = None if log_counts is None else log_counts[..., :used]
    sight = _Sight(where, query_positions.to(torch.int32), visibility, near_window, counts)
    branches = [_turned(queries, keys, near_branch, tables, used)]
    if far_branch is not None:
        branches.append(_turned(queries, keys, far_branch, tables, used))
    is_plain = values.scales is None and values.codes.dtype == queries.dtype
    read = values.codes[:, :, :used] if is_plain else cpu.turned(values, None, None, used, queries.dtype)
    out, divisor = _attended(branches, read, sight, scale, sink_logits)
    if observed is None:
        return out, None
    mass = _mass(branches, sight, divisor, scale, observed, is_rest_wanted)
    beyond = (0, slots - used)
    return out, Mass(pad(mass.rows, beyond), None if mass.rest is None else pad(mass.rest, beyond))


@dataclass(frozen=True)
class _Turned:
    """Queries and keys of one branch, at their rotary positions."""

    queries: Tensor  # (batch, heads, tokens, head_dim)
    keys: Tensor  # (batch, kv_heads, used, head_dim)


@dataclass(frozen=True)
class _Sight:
    """Which query sees which slot, and in which branch; asked for some queries at a time."""

    slots: SlotPositions
    queries: QueryPositions
    visibility: Visibility
    near_window: int | None  # None: one branch
    log_counts: Tensor | None

    def masks(self, queries: QueryPositions, used: int) -> list[Tensor]:
        """Per branch, whether (batch, ranked, queries, used) is seen through it."""
        slots = self.slots[..., :used]
        distance = queries[:, None, :, None] - slots[:, :, None, :]
        seen = visible(distance, slots, self.visibility)
        if self.near_window is None:
            return [seen]
        is_near = distance < self.near_window
        return [seen & is_near, seen & ~is_near]

    def bias(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to logits: the log counts, and -inf where `mask` hides a slot."""
        counts = torch.zeros((), dtype=dtype, device=mask.device)
        if self.log_counts is not None:
            counts = self.log_counts[:, :, None, : mask.shape[-1]].to(dtype)
        return torch.where(mask, counts, -torch.inf)

    def blocks(self, itemsize: int) -> Iterator[tuple[slice, int]]:
        """Queries whose masks take MASK_BYTES at most, and how many of the first slots they see."""
        batch, ranked, used = self.slots.shape
        tokens = self.queries.shape[1]
        size = max(1, MASK_BYTES // (batch * ranked * used * itemsize))
        for start in range(0, tokens, size):
            newest = self.queries[:, start : start + size].amax(1)
            yield (
                slice(start, start + size),
                _used((self.slots >= 0) & (self.slots <= newest[:, None, None])),
            )


def _turned(
    queries: Queries,
    keys: Held,
    branch: Branch | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    used: int,
) -> _Turned:
    if branch is None or tables is None:
        is_plain = keys.scales is None and keys.codes.dtype == queries.dtype
        plain = keys.codes[:, :, :used] if is_plain else cpu.turned(keys, None, None, used, queries.dtype)
        return _Turned(queries, plain)
    cos, sin = tables
    at = branch.queries
    if at.shape[1] > 1:
        at = at.repeat_interleave(queries.shape[1] // at.shape[1], 1)
    turned = rotate(queries.float(), cos[at], sin[at]).to(queries.dtype)
    return _Turned(turned, cpu.turned(keys, branch.keys, tables, used, queries.dtype))


def _attended(
    branches: Sequence[_Turned], values: Tensor, sight: _Sight, scale: float, sink_logits: Tensor | None
) -> tuple[Attended, Tensor]:
    """The result, and the logarithm of each query's divisor, (batch, heads, tokens)."""
    outs, divisors = [], []
    queries = branches[0].queries
    for span, used in sight.blocks(queries.itemsize):
        parts = []
        for branch, mask in zip(branches, sight.masks(sight.queries[:, span], used), strict=True):
            bias = sight.bias(mask, queries.dtype)
            out, divisor = _flash(
                branch.queries[:, :, span], branch.keys[:, :, :used], values[:, :, :used], bias, scale
            )
            seen = mask.any(-1)
            if seen.shape[1] > 1:
                seen = seen.repeat_interleave(queries.shape[1] // seen.shape[1], 1)
            parts.append((out, divisor.masked_fill(~seen, -torch.inf)))
        out, divisor = _joined(parts, sink_logits)
        outs.append(out)
        divisors.append(divisor)
    return torch.cat(outs, 2), torch.cat(divisors, 2)


def _flash(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's blocked attention; returns also the logarithms of the divisors."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kv_heads, width = keys.shape[1], values.shape[-1]
    widest = max(keys.shape[-1], width)  # the kernel wants one width
    queries, keys, values = (pad(x, (0, widest - x.shape[-1])) for x in (queries, keys, values))
    group = queries.shape[1] // kv_heads
    outs, divisors = [], []
    step = kv_heads if bias.shape[1] == 1 else 1
    for head in range(0, kv_heads, step):
        own = slice(head, head + step)
        shared = slice(head * group, (head + step) * group)
        mask = bias if bias.shape[1] == 1 else bias[:, own]
        out, divisor = kernel(queries[:, shared], keys[:, own], values[:, own], 0.0, False, attn_mask=mask, scale=scale)
        outs.append(out[..., :width])
        divisors.append(divisor)
    return (outs[0], divisors[0]) if len(outs) == 1 else (torch.cat(outs, 1), torch.cat(divisors, 1))


def _joined(parts: Sequence[tuple[Tensor, Tensor]], sink_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """One softmax over the slots of all parts, and over the learned sinks; zeros where all is hidden."""
    divisors = torch.stack([divisor for _, divisor in parts])
    if sink_logits is not None:
        sinks = sink_logits.to(divisors.dtype)[None, None, :, None]
        divisors = torch.cat((divisors, sinks.expand(1, *divisors.shape[1:])))
    total = divisors.logsumexp(0)
    total = total.masked_fill(total == -torch.inf, 0.0)
    out, divisor = parts[0]
    if len(parts) == 1 and sink_logits is None:
        return out.masked_fill((divisor == -torch.inf)[..., None], 0.0), total
    joined = sum(
        (part * (own - total).exp()[..., None] for part, own in parts), start=torch.zeros((), device=out.device)
    )
    return joined.to(out.dtype), total


def _mass(
    branches: Sequence[_Turned],
    sight: _Sight,
    divisor: Tensor,
    scale: float,
    observed: ObservedColumns,
    is_rest_wanted: bool,
) -> Mass:
    keys = [branch.keys.float().transpose(-1, -2)[:, :, None] for branch in branches]

    def mass_of(columns: ObservedColumns) -> Tensor:
        """Attention of these queries, summed over heads that share keys: (batch, kv_heads, n, used)."""
        masks = sight.masks(sight.queries.gather(1, columns), sight.slots.shape[2])
        kv_heads = branches[0].keys.shape[1]
        at = columns[:, None, :].expand(-1, divisor.shape[1], -1)
        tops = divisor.gather(2, at).unflatten(1, (kv_heads, -1))[..., None]
        mass = torch.zeros((), device=divisor.device)
        for branch, turned, mask in zip(branches, keys, masks, strict=True):
            queries = branch.queries.gather(2, at[..., None].expand(-1, -1, -1, branch.queries.shape[-1])).float()
            logits = queries.unflatten(1, (kv_heads, -1)) @ turned * scale
            mass = mass + (logits + sight.bias(mask, torch.float32)[:, :, None] - tops).exp().sum(2)
        return mass

    size = max(1, SCORE_BYTES // (divisor.shape[0] * divisor.shape[1] * sight.slots.shape[2] * 4))
    rows = [mass_of(columns.clamp(min=0)) * (columns >= 0)[:, None, :, None] for columns in observed.split(size, dim=1)]
    if not is_rest_wanted:
        return Mass(torch.cat(rows, 2), None)
    batch, tokens = sight.queries.shape
    others = torch.ones(batch, tokens + 1, device=observed.device)
    others = others.scatter(1, observed.where(observed >= 0, tokens), 0.0)[:, :-1]
    columns = torch.arange(tokens, device=observed.device).expand(batch, -1)
    rest = [
        torch.einsum("bhts,bt->bhs", mass_of(some), weight)
        for some, weight in zip(columns.split(size, dim=1), others.split(size, dim=1), strict=True)
    ]
    return Mass(torch.cat(rows, 2), torch.stack(rest).sum(0))


def _used(is_held: Tensor) -> int:
    """One past the last slot that any row and head holds, and at least 1."""
    held = is_held.flatten(0, 1).any(0).nonzero()
    return int(held[-1]) + 1 if len(held) else 1
