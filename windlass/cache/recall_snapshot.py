"""What a recall store was before a pass, so that an interrupted pass leaves no trace in it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from windlass.cache.recall import RecallStore
from windlass.cache.recall_memory import Segment


class RecallSnapshot(NamedTuple):
    """The lengths of a store's rows, and its memory: it grows by further tensors, and those of before stay."""

    lengths: tuple[int, ...]
    positions: Tensor
    last_recalled: Tensor
    segments: list[tuple[Segment, ...]]

    @classmethod
    def of(cls, store: RecallStore) -> RecallSnapshot:
        """Of a store as it is now."""
        segments = [each.segments for each in (store.memory, *store.digests.both)]
        return cls(store.lengths, store.positions, store.last_recalled, segments)

    def restore(self, store: RecallStore) -> None:
        """Let the store hold no more than then. One that was never written to has no memory again."""
        for memory, segments in zip((store.memory, *store.digests.both), self.segments, strict=True):
            memory.segments = segments
        store.positions, store.last_recalled = self.positions, self.last_recalled
        store.cut_to(self.lengths)
