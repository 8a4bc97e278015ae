"""Layers of a model that attend to the keys and values of another layer: they read its slots, and hold nothing.

By the time they attend, the layer that wrote has evicted for this pass. So it keeps a view of its slots for each part
of the step, and they find in each column what its own queries found there. Its policy is shown its own queries alone:
those of the others come too late where a step is taken column by column, and a text must not depend on its steps.
"""

import torch
from torch import Tensor

from windlass.cache.attend import attend
from windlass.cache.slot_layer import SlotLayer
from windlass.core.errors import UsageError
from windlass.core.record import StepRecord
from windlass.core.shapes import Attended, Queries
from windlass.core.step import AttentionCall
from windlass.positions.modes import PositionMode


def attend_shared(layer: SlotLayer, queries: Queries, mode: PositionMode, call: AttentionCall) -> Attended:
    """What queries of the pass's last columns read of a layer that has taken its step; afterwards it is as before.

    `call.sees_to` is for all columns of the step.

    Raises: UsageError for another sliding window than the layer's own, beyond which its tokens are gone.
    """
    assert layer.views, "a layer whose slots are shared comes before those that share them"
    if call.sliding_window != layer.sliding_window:
        raise UsageError(
            f"keys and values of slots {layer.index} are shared through a sliding window of {call.sliding_window}, and "
            f"their own layer has {layer.sliding_window}; a KVCache needs the same in both"
        )
    views, outs, left, merges = list(layer.views), list[Tensor](), queries.shape[2], list[_Unmerged]()
    widths = [view.step.positions.shape[1] for view in views]
    calls = call.split(widths)
    while left:  # from the newest part back, so that each merge is undone on the way
        view, its, width = views.pop(), calls.pop(), widths.pop()
        merges.extend(_Unmerged(layer, record) for record in layer.history.records if record.step is view.step)
        columns = min(left, width)
        piece = queries[:, :, left - columns : left]
        if its.sees_to is not None:
            its = its.split([width - columns, columns])[1]
        outs.append(attend(view.tail(columns), layer.rules, layer.rotary, piece, mode, its, None)[0])
        left -= columns
    for merge in reversed(merges):
        merge.redo()
    return outs[0] if len(outs) == 1 else torch.cat(outs[::-1], 2)


class _Unmerged:
    """A layer without what a step merged, until `redo`. An interrupt in between leaves it to the checkpoint."""

    def __init__(self, layer: SlotLayer, record: StepRecord) -> None:
        self._store, self._targets = layer.store, record.merged_into
        if self._targets is not None and record.merged_before is not None:
            self._merged = self._store.take_all(self._targets)
            self._store.put(self._targets, record.merged_before)

    def redo(self) -> None:
        if self._targets is not None:
            self._store.put(self._targets, self._merged)
