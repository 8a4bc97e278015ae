"""Reads the prompt of one request, a chunk at a time, into a cache of one row."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import final

from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.compress import cut_to_budget
from windlass.core.errors import UsageError
from windlass.core.limits import SYSTEM
from windlass.core.step import PROMPT
from windlass.engine.feed import feed
from windlass.engine.logprobs import logprobs_of
from windlass.engine.passes import rest_of, whole_passes
from windlass.engine.request import Logprob, Request
from windlass.engine.snapshots import Snapshots
from windlass.hf.kv_cache import KVCache
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find


class PromptReader(ABC):
    """One prompt that is read into `cache`; `read` reads one more chunk of it."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.cached = self.done = cache.tokens_seen[0]
        """Tokens that were not read for this request; those that are done by now."""
        self.recomputed = 0
        """Tokens of parts that were read again in their place."""
        self.is_whole = False
        """Whether the cache holds all that was read until the end, when it is cut."""
        self.logprobs: list[tuple[Logprob, ...]] = []
        """Of each token but the first, as far as the prompt is read; none where they are not asked for."""
        self.logits: Tensor | None = None
        """(vocabulary,) of the last token, once all is read."""

    @property
    def is_done(self) -> bool:
        """Whether the whole prompt is read."""
        return self.logits is not None

    @property
    def seen(self) -> int:
        """Tokens that the cache has read; `done` is less where it reads them twice."""
        return self.cache.tokens_seen[0]

    @abstractmethod
    def read(self) -> None:
        """Read one more chunk: as many tokens as the cache's options say, or less.

        Of a prompt that is read twice, the second time, as many as its policy says.

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
        is_whole = find(request.options.policy, OneShot) is not None
        kept = None if is_whole or request.scores_prompt else snapshots.longest(request)
        super().__init__(empty_cache(model, request) if kept is None else kept.cache)
        self._known_logits = None if kept is None else kept.logits
        self.is_whole = is_whole
        if request.options.budget is None:  # grows once, as its bytes were counted
            self.cache.reserve(len(request.prompt) + request.max_tokens)
        self._pass_ends = request.pass_ends
        self._stops = frozenset[int]() if is_whole else snapshots.wanted(request)
        how = replace(PROMPT, defer_eviction=request.options.budget is not None)
        look = self._score if request.scores_prompt else None
        self._passes = whole_passes(model, self.cache, [request.prompt], how, look)

    def read(self) -> None:
        if self.is_done:
            raise UsageError("the prompt is read; nothing is left")
        if self._known_logits is not None:
            self.logits = self._known_logits.clone()  # a writer may change what it is given
            return
        if self.is_whole:
            self._read_whole()
            return
        stop = next(end for end in self._pass_ends if end > self.done)
        piece = list(self.request.prompt[self.done : stop])
        is_last = stop == len(self.request.prompt)
        columns = [*range(len(piece))] if self.request.scores_prompt else [len(piece) - 1] if is_last else []
        logits = feed(self._model, self.cache, [piece], columns, PROMPT)
        if self.request.scores_prompt:
            self._score(self.done, logits)
        self.done += len(piece)
        forget(self.cache)
        if self._snapshots.packs:
            pack(self.cache)
        if is_last:
            self.logits = logits[0, -1]
        if self.done in self._stops:
            self._snapshots.put(self.request, self.done, self.cache, self.logits)

    def _score(self, start: int, logits: Tensor) -> None:
        """Note what tokens behind `start` are given by (1, tokens, vocabulary) logits of those before them."""
        told = self.request.prompt[start + 1 : start + 1 + logits.shape[1]]
        self.logprobs += logprobs_of(logits[0], told, self.request.top_logprobs or 0)

    def _read_whole(self) -> None:
        self.done, total = next(self._passes)
        forget(self.cache)
        if self.done == total:
            if self.cache.budget is not None:
                cut_to_budget(self.cache)
            self.logits = rest_of(self._passes)[0]

    def close(self) -> None:
        pass  # nothing is held


def empty_cache(model: PreTrainedModel, request: Request) -> KVCache:
    """A cache of one row for a request's prompt, which knows its system text."""
    cache = KVCache.from_options(model, request.options)
    if request.options.sinks == SYSTEM:
        cache.set_sinks(request.head)
    return cache


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
