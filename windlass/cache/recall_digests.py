"""Digests of a recall store's pages: the largest and the least number of each channel among their tokens' keys."""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor

from windlass.cache.recall_memory import RecallMemory, Segment
from windlass.core.limits import PAGE
from windlass.core.recall import Digests, TiledKeys, tokens_of
from windlass.kernels.reference_recall import digest_of
from windlass.stores.base import Parts, Store

NOWHERE: Final = -1  # the index of what is not written


@final
class PageDigests:
    """The digests of all pages of `memory`, held by the same `codec`: near the device that ranks pages by them."""

    def __init__(self, codec: Store, memory: RecallMemory) -> None:
        self.codec, self.memory = codec, memory
        folder, piece = memory.folder, memory.piece // PAGE
        self.largest, self.least = (RecallMemory(folder, piece, is_near=folder is None) for _ in range(2))
        self._tiled: tuple[tuple[Segment, ...], tuple[Digests, ...]] = (), ()

    @property
    def both(self) -> tuple[RecallMemory, RecallMemory]:
        """Where the largest numbers are, and the least."""
        return self.largest, self.least

    def grow(self, sample: Parts) -> None:
        """Make room for the digest of each page, where tokens are like those of `sample`."""
        pages = self.memory.capacity // PAGE
        for each in self.both:
            if pages > each.capacity:
                keys = self.codec.decode_keys(sample)[:, :, :1]
                each.grow(pages, self.codec.parts_of(keys, keys[..., :0]))

    def write(self, before: Tensor, after: Tensor, most: int, kv_heads: int) -> None:
        """Digest the pages of the tokens from `before` to `after` (batch,), of no row more than `most`.

        Rows without any keep their digests; that of a page without tokens is not looked at. Asks nothing of the device.
        """
        pages = before[:, None] // PAGE + torch.arange((most + PAGE - 2) // PAGE + 1, device=before.device)
        known = pages.clamp(max=self.memory.capacity // PAGE - 1)[:, None]
        tokens = tokens_of(known.expand(-1, kv_heads, -1))
        keys = self.codec.decode_keys(self.memory.read(tokens, self.largest.names)).unflatten(2, (-1, PAGE))
        bounds = digest_of(keys, (tokens < after[:, None, None]).unflatten(2, (-1, PAGE)))
        for each, numbers in zip(self.both, bounds, strict=True):
            each.put(pages.where((before < after)[:, None], NOWHERE), self.codec.parts_of(numbers, numbers[..., :0]))

    def tiled(self) -> tuple[Digests, ...]:
        """As kernels read them: the same ones as long as the memory is."""
        if self._tiled[0] is not self.largest.segments:
            self._tiled = self.largest.segments, tuple(map(Digests, *map(self._keys, self.both)))
        return self._tiled[1]

    def _keys(self, memory: RecallMemory) -> list[TiledKeys]:
        (keys,), found = memory.no_keys, []
        for segment in memory.segments:
            held = self.codec.over(segment.parts | memory.no_keys)
            found.append(TiledKeys(segment.parts[keys], held.packed_keys()))
        return found
