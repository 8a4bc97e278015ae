"""Memory estimates of a request, for admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final

import torch
from transformers import PreTrainedModel

from windlass.cache.describe import bytes_by_part
from windlass.cache.layer import SlotLayer
from windlass.cache.layer_config import GROWTH, LayerConfig
from windlass.cache.options import CacheOptions
from windlass.cache.recall import PIECE
from windlass.cache.rows import MOST_CHECKPOINTS
from windlass.core.parse import SYSTEM
from windlass.core.step import HEADROOM, PROMPT
from windlass.engine.prefill import feed, feed_tokens
from windlass.engine.request import EngineLimits
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find, scoring_chunk

PROBE: Final = 9  # tokens that are read to measure a layer's bytes per token
STEP_BYTES: Final = 64  # per token of the latest pass, for its position, its id and its flags


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer: of a slot, and of a token that may be recalled."""

    rules: LayerConfig
    of_slot: int
    of_recalled: float


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row of a cache with these options, as upper bounds for a text of a given length."""

    options: CacheOptions
    layers: tuple[LayerBytes, ...]
    fixed: int

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, options: CacheOptions) -> RowBytes:
        """Bytes measured with a few tokens, which are read for it."""
        cache = KVCache.from_options(model, replace_batch(options))
        if options.sinks == SYSTEM:
            cache.set_sinks(0)
        feed(model, cache, [[0] * PROBE], [], PROMPT)
        feed_tokens(model, cache, {0: 0})
        cache.forget_steps()
        cache.checkpoint()
        states = bytes_by_part(cache).get("checkpoints", 0) * (MOST_CHECKPOINTS - 1)
        layers = tuple(map(_measured, cache.layers))
        slots = sum(each.of_slot * layer.table.slots for each, layer in zip(layers, cache.layers, strict=True))
        return cls(cache.options, layers, cache.bytes_held + states - slots + STEP_BYTES * cache.chunk)

    def writing(self, tokens: int) -> int:
        """Bytes while it writes a text that ends after `tokens`."""
        return self._bytes(tokens, HEADROOM + self.options.rollback, is_whole=False)

    def writing_alone(self, tokens: int) -> int:
        """Bytes while it writes such a text with no other row beside it, and keeps the room for a chunk."""
        return self._bytes(tokens, max(self.options.chunk, HEADROOM + self.options.rollback), is_whole=False)

    def reading(self, tokens: int) -> int:
        """Bytes while its prompt of at most `tokens` is read. A `OneShot` policy holds it whole."""
        is_whole = find(self.options.policy, OneShot) is not None
        return self._bytes(tokens, max(self.options.chunk, HEADROOM + self.options.rollback), is_whole)

    def prompt(self, tokens: int, has_parts: bool) -> int:
        """Bytes while a prompt is read, which may have parts if `has_parts`."""
        return max(self.reading(tokens), self.joining(tokens)) if has_parts else self.reading(tokens)

    def joining(self, tokens: int) -> int:
        """Bytes while a prompt with parts is read, the last of which ends within the budget."""
        budget, chunk = self.options.budget, self.options.chunk
        if budget is None:
            return self.reading(tokens + chunk)
        # A splice makes room for its part beside the budget, and lets layers of a sliding window hold all of it.
        slots = 2 * budget + max(chunk, HEADROOM + self.options.rollback) + GROWTH
        return self.fixed + sum(each.of_slot * slots for each in self.layers)

    def recalled(self, tokens: int) -> int:
        """Bytes of the tokens that such a text may recall, in memory or in a file. They come on top of the row's."""
        return int(sum(each.of_recalled for each in self.layers) * (1.5 * tokens + 2 * PIECE))

    def _bytes(self, tokens: int, room: int, is_whole: bool) -> int:
        held = tokens + scoring_chunk(self.options.policy) + HEADROOM
        most = -(-held // GROWTH) * GROWTH
        total = self.fixed
        for each in self.layers:
            budget = each.rules.budget
            slots = most if budget is None else budget + room
            total += each.of_slot * (max(slots, most if is_whole else 0) + each.rules.recall_room)
        return total


def most_held(rows: Sequence[RowBytes], counts: Sequence[int], limits: EngineLimits, kept: int) -> int:
    """The most bytes of an engine with `counts` of these kinds of rows, beside `kept` bytes for reuse."""
    longest = limits.prompt_tokens + limits.max_tokens
    pairs = [*zip(counts, rows, strict=True)]
    writing = sum(max(count * each.writing(longest), each.writing_alone(longest) * (kept > 0)) for count, each in pairs)
    reading = min(limits.reading, sum(counts)) * max(each.prompt(longest, has_parts=kept > 0) for each in rows)
    recalled = limits.recall_bytes * any(each.options.recall for each in rows)
    return writing + reading + limits.alone * limits.alone_bytes + recalled + kept


def replace_batch(options: CacheOptions, batch: int = 1) -> CacheOptions:
    """The same options for another number of rows, without tokens that can be rolled back."""
    return replace(options, batch=batch, rollback=0)


def _measured(layer: SlotLayer) -> LayerBytes:
    table = layer.table
    beside = {*table.store.constant_names, *table.store.full_precision.tensors}
    of_slots = [
        tensor
        for name, tensor in table.tensors().items()
        if name not in beside and tensor.ndim > 2 and tensor.shape[2] == table.slots
    ]
    recall = table.recall
    of_recalled = (
        0.0
        if recall is None or recall.is_empty
        else sum(each.nbytes for each in recall.allocated()) / recall.memory.capacity
    )
    return LayerBytes(layer.rules, sum(tensor.nbytes for tensor in of_slots) // table.slots, of_recalled)


SECONDS: Final = 0.1  # lifetime of a count


class Sizes:
    """The latest count of some caches. It is made anew where there are other caches or rows, or after `SECONDS`."""

    def __init__(self) -> None:
        self._caches: Sequence[tuple[KVCache, int]] = ()
        self._bytes: list[int] = []
        self._at = 0.0

    def of(self, caches: Sequence[KVCache], is_exact: bool) -> list[int]:
        """Bytes of each cache, its recalled tokens included. Counted anew where they are to be exact."""
        is_same = len(caches) == len(self._caches) and all(
            own is other and own.batch_size == rows for own, (other, rows) in zip(caches, self._caches, strict=True)
        )
        if is_exact or not is_same or monotonic() - self._at > SECONDS:
            self._caches, self._at = tuple((cache, cache.batch_size) for cache in caches), monotonic()
            self._bytes = [cache.bytes_held + cache.recall_bytes for cache in caches]
        return self._bytes
