"""Attention that reads only the slots that the model's indexer picks for each query.

Source: DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Differs: it picks among the tokens
that the layer holds; an index key is held un-rotated beside its token's key and is rotated as that one is when it is
read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.cache.table_view import TableView
from windlass.core.attention import AttentionInput
from windlass.core.errors import UsageError
from windlass.core.picks import Picker, Turn
from windlass.core.shapes import IndexKeys
from windlass.core.step import AttentionCall
from windlass.kernels.reference import visible

DISTANCE_BYTES = 64 * 2**20  # most bytes of distances alive at once


@dataclass(frozen=True)
class Picks:
    """A layer's indexer, and its keys of all slots."""

    picker: Picker
    keys: IndexKeys

    @classmethod
    def of(cls, view: TableView, call: AttentionCall) -> Picks | None:
        """None where the indexer would pick all that any query sees.

        Raises: UsageError in a text with pictures.
        """
        picker = call.picker
        if picker is None or view.occupancy <= picker.limit:
            return None
        assert view.index_keys is not None, "an indexer in a layer that holds no keys of it"
        if view.places is not None:
            raise UsageError(
                f"in a text with pictures the model's indexer would pick {picker.limit} of {view.occupancy} tokens, "
                f"which a KVCache does not do; give it a budget, so that it holds {picker.limit} at most in a pass"
            )
        return cls(picker, view.index_keys)

    def columns(self, start: int, stop: int) -> Picks:
        """The same for some of the step's columns."""
        return replace(self, picker=self.picker.columns(start, stop))


def picked(call: AttentionInput, picks: Picks) -> AttentionInput:
    """`call`, whose queries read no other slots than those picked for them.

    Raises: UsageError where far keys have another rotary position than near ones.
    """
    index, tables = call.rotary_index, call.tables
    keys_turn = queries_turn = None
    if index is not None and tables is not None:
        if index.far is not None:
            raise UsageError(
                "these positions read far tokens in groups, and the model's indexer scores each token once in a pass; "
                'feed single tokens, or set cache.positions to "original" or "compact"'
            )
        queries_turn, keys_turn = (_turn(tables, at[:, 0]) for at in (index.near.queries, index.near.keys))
    seen = _seen(call)
    return replace(call, picked=picks.picker.picked(picks.keys, seen, keys_turn, queries_turn))


def _turn(tables: Turn, at: Tensor) -> Turn:
    return tables[0][at], tables[1][at]


def _seen(call: AttentionInput) -> Tensor:
    """(batch, tokens, slots): what each query would read without an indexer."""
    slots, queries = call.slot_positions[:, :1], call.query_positions
    size = max(1, DISTANCE_BYTES // (slots.numel() * slots.itemsize))
    blocks = []
    for start in range(0, queries.shape[1], size):
        span = slice(start, start + size)
        sees_to = None if call.sees_to is None else call.sees_to[:, span]
        distance = queries[:, None, span, None] - slots[:, :, None, :]
        blocks.append(visible(distance, slots, call.visibility, sees_to)[:, 0])
    return torch.cat(blocks, 1)
