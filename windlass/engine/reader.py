"""Reads the prompt of one request, a chunk at a time, into a cache of one row."""

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.errors import UsageError
from windlass.core.step import PROMPT
from windlass.engine.feed import feed
from windlass.engine.generate import prefill
from windlass.engine.request import Request
from windlass.engine.snapshots import Snapshots
from windlass.hf.kv_cache import KVCache
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find


class PromptReader(ABC):
    """One prompt that is read into `cache`; `read` reads one more chunk of it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.cached = self.done = cache.tokens_seen[0]
        """Tokens that were not read for this request; those that the cache has by now."""
        self.recomputed = 0
        """Tokens of parts that were read again in their place."""
        self.logits: Tensor | None = None
        """(vocabulary,) of the last token, once all is read."""

    @property
    def is_done(self) -> bool:
        """Whether the whole prompt is read."""
        return self.logits is not None

    @abstractmethod
    def read(self) -> None:
        """Read one more chunk: as many tokens as the cache's options say, or less.

        Raises: UsageError for what cannot be read so.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what is held for the rest of the prompt, which nobody reads any more. May be repeated."""


@final
class Reader(PromptReader):
    """A prompt that is read from its beginning on. What `snapshots` have of it is not read again."""

    def __init__(self, model: PreTrainedModel, request: Request, snapshots: Snapshots) -> None:
        self._model, self.request, self._snapshots = model, request, snapshots
        self._is_whole = find(request.options.policy, OneShot) is not None  # must see the text before it is cut
        kept = None if self._is_whole else snapshots.longest(request)
        super().__init__(KVCache.from_options(model, request.options) if kept is None else kept)
        if request.options.budget is None:  # grows once, as its bytes were counted
            self.cache.reserve(len(request.prompt) + request.max_tokens)
        self._stops = frozenset[int]() if self._is_whole else snapshots.wanted(request)

    def read(self) -> None:
        prompt, chunk = self.request.prompt, self.request.options.chunk
        if self.is_done:
            raise UsageError("the prompt is read; nothing is left")
        if self._is_whole:
            self.logits, self.done = prefill(self._model, self.cache, [prompt])[0], len(prompt)
            return
        piece = list(prompt[self.done : self.done + chunk])
        is_last = self.done + len(piece) == len(prompt)
        logits = feed(self._model, self.cache, [piece], [len(piece) - 1] if is_last else [], PROMPT)
        self.done += len(piece)
        forget(self.cache)
        if self._snapshots.packs:
            pack(self.cache)
        if is_last:
            self.logits = logits[0, 0]
        elif self.done in self._stops:
            self._snapshots.put(self.request, self.done, self.cache)

    def close(self) -> None:
        pass  # nothing is held


def forget(cache: KVCache) -> None:
    """Let nothing of the latest step be rolled back: a server never does, and it would take memory."""
    for layer in cache.layers:
        layer.forget_steps(0)


def pack(cache: KVCache) -> None:
    """Let tokens lie in the first slots, with none free behind them, as a file has them. Asks the device."""
    for layer in cache.layers:
        if not layer.is_empty:
            layer.table.count()
            layer.resize(max(layer.table.occupancy_bound, 1))
