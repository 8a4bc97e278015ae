"""Rows of one cache that write side by side: all of the same options."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.exchange import arrange_rows
from windlass.cache.options import CacheOptions
from windlass.engine.feed import feed_tokens
from windlass.engine.reader import forget
from windlass.hf.kv_cache import KVCache
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find

PATIENCE: Final = 32  # steps in a row that fewer rows would have served, after which there are fewer


class Lane:
    """`options.batch` rows, each free or of one request.

    A step computes every row that the cache has, so it has as many as write: 1, 2, 4 and so on up to all. They lie in
    its first rows, which is why a row of the lane may stand at different indices of the cache at different times. Rows
    are moved when one more is needed, and when half of them were idle for `PATIENCE` steps.

    `is_alone`: the only row is of one request, whose options no other lane has. It takes over the cache it was read
    into; so does the only row of a policy whose layers keep what each text makes of the budget.
    """

    def __init__(self, model: PreTrainedModel, options: CacheOptions, is_alone: bool = False) -> None:
        self._model, self.options, self.is_alone = model, options, is_alone
        self.cache = KVCache.from_options(model, replace(options, batch=1))
        self.free = list(range(options.batch))
        self._takes_over = is_alone or shares_budget(options)
        self._index: dict[int, int] = {}  # in the cache, of each row that was put there
        self._idle_steps = 0
        self._is_moving = False

    def serves(self, options: CacheOptions) -> bool:
        """Whether a request with these options may take a row."""
        return is_alike(options, self.options)

    def take(self) -> int | None:
        """A free row, from now on taken; None: there is none."""
        return self.free.pop(0) if self.free else None

    def index(self, row: int) -> int:
        """Where in the cache a row stands that was put there."""
        return self._index[row]

    def put(self, row: int, cache: KVCache) -> None:
        """Let the row go on with what a cache of one row has read."""
        if self._takes_over:
            self.cache, self._index = cache, {row: 0}
            return
        if self._is_moving and not self._index:  # nobody is left who could be told
            self.reset()
        rows = self._rows_for(len(self._index) + 1)
        if rows > self.cache.batch_size or (rows < self.cache.batch_size and not self._index):
            self._arrange(rows)
        taken = set(self._index.values())
        index = self._index[row] = next(each for each in range(self.cache.batch_size) if each not in taken)
        self.cache.put_row(index, cache)

    def release(self, row: int) -> None:
        """Clear a row that was taken; it is free again."""
        index = self._index.pop(row, None)
        if index is not None and self._takes_over:
            self.reset()
        elif index is not None and not self._is_moving:  # else `reset` will
            self.cache.clear_row(index)
        self.give_back(row)

    def give_back(self, row: int) -> None:
        """Let a row that was taken, and not written to, be free again."""
        self.free.append(row)
        self.free.sort()

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        """Feed one token to each of some rows; returns the (vocabulary,) logits of each.

        Raises: RuntimeError where rows were lost, because an error ended a move of them.
        """
        if self._is_moving:
            raise RuntimeError("the rows were lost while they were moved")
        rows = self._rows_for(len(self._index))
        self._idle_steps = self._idle_steps + 1 if rows < self.cache.batch_size else 0
        if self._idle_steps > PATIENCE:
            self._arrange(rows)
        logits = feed_tokens(self._model, self.cache, {self._index[row]: token for row, token in tokens.items()})
        forget(self.cache)
        return {row: logits[self._index[row]] for row in tokens}

    def reset(self) -> None:
        """After an error: let all rows be empty, those that are taken, too."""
        self.cache.reset()
        self._index, self._idle_steps, self._is_moving = {}, 0, False

    def _rows_for(self, count: int) -> int:
        """How many rows the cache is to have, for so many that write."""
        return min(1 << max(count - 1, 0).bit_length(), self.options.batch)

    def _arrange(self, rows: int) -> None:
        """Let the cache have so many rows, those that write first."""
        kept = sorted(self._index, key=self._index.__getitem__)
        self._is_moving = True
        arrange_rows(self.cache, [*map(self.index, kept), *[None] * (rows - len(kept))])
        self._is_moving = False
        self._index = {row: index for index, row in enumerate(kept)}
        self._idle_steps = 0


def is_alike(one: CacheOptions, other: CacheOptions) -> bool:
    """Whether two requests with these options may share a cache."""
    return one.labels() == other.labels()


def shares_budget(options: CacheOptions) -> bool:
    """Whether each text decides how much of the budget each layer keeps, which rows of one cache cannot."""
    one_shot = find(options.policy, OneShot)
    return one_shot is not None and one_shot.shares_budget
