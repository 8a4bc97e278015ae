"""Rows of one cache that write side by side: all of the same options."""

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.engine.feed import feed_tokens
from windlass.engine.reader import forget
from windlass.hf.kv_cache import KVCache


class Lane:
    """`options.batch` rows, each free or of one request.

    `is_alone`: the only row is of one request, whose options no other lane has, and takes over the cache it was read
    into.
    """

    def __init__(self, model: PreTrainedModel, options: CacheOptions, is_alone: bool = False) -> None:
        self._model, self.options, self.is_alone = model, options, is_alone
        self.cache = KVCache.from_options(model, options)
        self.free = list(range(options.batch))

    def serves(self, options: CacheOptions) -> bool:
        """Whether a request with these options may take a row."""
        return is_alike(options, self.options)

    def take(self) -> int | None:
        """A free row, from now on taken; None: there is none."""
        return self.free.pop(0) if self.free else None

    def put(self, row: int, cache: KVCache) -> None:
        """Let the row go on with what a cache of one row has read."""
        if self.is_alone:
            self.cache = cache
        else:
            self.cache.put_row(row, cache)

    def release(self, row: int) -> None:
        """Clear a row that was taken; it is free again."""
        self.cache.clear_row(row)
        self.give_back(row)

    def give_back(self, row: int) -> None:
        """Let a row that was taken, and not written to, be free again."""
        self.free.append(row)
        self.free.sort()

    def step(self, tokens: Mapping[int, int]) -> Tensor:
        """Feed one token to each of some rows; returns (batch, vocabulary) logits."""
        logits = feed_tokens(self._model, self.cache, tokens)
        forget(self.cache)
        return logits

    def reset(self) -> None:
        """After an error: let all rows be empty, those that are taken, too."""
        self.cache.reset()


def is_alike(one: CacheOptions, other: CacheOptions) -> bool:
    """Whether two requests with these options may share a cache."""
    return one.labels() == other.labels()
