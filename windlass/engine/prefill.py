"""Prefill: the passes that read a prompt, whole or chunk by chunk."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.compress import cut_to_budget
from windlass.cache.edits import holds_all, remap, takes_edits
from windlass.core.errors import UsageError
from windlass.core.parse import SYSTEM
from windlass.core.positions import EMPTY
from windlass.core.step import PROMPT, Pass, Step
from windlass.engine import recompute
from windlass.engine.decode import logprobs_of
from windlass.engine.prefix_cache import Snapshots, key_of, pack
from windlass.engine.prefix_entry import CacheEntry, EditedRow
from windlass.engine.recompute import Alignment, EditPlan, Sinks
from windlass.engine.request import Logprob, Request
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find, scoring_chunk


@torch.no_grad()
def feed(model: PreTrainedModel, cache: KVCache, pieces: list[list[int]], columns: list[int], how: Pass) -> Tensor:
    """Run one step of the model over rows of different lengths, and return the logits of `columns` only."""
    width = max(map(len, pieces))
    ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    mask = None
    if any(len(piece) < width for piece in pieces):
        mask = torch.tensor([[1] * len(piece) + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    return forward(model, ids, mask, cache, columns, how=how)


@torch.no_grad()
def feed_tokens(model: PreTrainedModel, cache: KVCache, tokens: Mapping[int, int]) -> Tensor:
    """Feed one token to each row in `tokens` while other rows idle, and return (batch, vocabulary) logits."""
    rows, device = cache.rows, cache.device
    each = [[tokens[row]] if row in tokens else [] for row in range(cache.batch_size)]
    ids = torch.tensor([own or [0] for own in each], device=device)
    starts, lengths = rows.next_positions, tuple(map(len, each))
    pairs = list(zip(starts, lengths, strict=True))
    step = Step(
        positions=torch.tensor([[start if length else EMPTY] for start, length in pairs], device=device),
        lengths=lengths,
        next_positions=torch.tensor([start + length for start, length in pairs], device=device),
        prompt_ends=torch.tensor(rows.prompt_ends, device=device),
        end=max(starts) + 1,
        ids=ids,
        sinks=rows.sinks(device),
    )
    return forward(model, ids, None, cache, [0], Pass(step, each))[:, 0]


def end_of_text(model: PreTrainedModel) -> list[int]:
    """The tokens that end a text, as the model's generation config names them."""
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


Progress = Callable[[int, int], None]
Look = Callable[[int, Tensor], None]
"""Called with the first token's number of a pass, and its (batch, tokens, vocabulary) logits."""
Passes = Generator[tuple[int, int], None, Tensor]
"""Yields the number of tokens done and their total after each pass. Returns the (batch, vocabulary) logits of each
row's last token. No work is left once all tokens are done."""


def passes(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    how: Pass = PROMPT,
    look: Look | None = None,
) -> Passes:
    """Feed the prompts in chunks. With a `look`, the logits of all tokens are computed."""
    longest = max(map(len, prompts))
    cache.reserve(longest + scoring_chunk(cache.policy))
    last: dict[int, Tensor] = {}
    for start, stop in _spans(cache, [*map(len, prompts)]):
        pieces = [list(prompt[start:stop]) for prompt in prompts]
        ends = {row: len(piece) - 1 for row, piece in enumerate(pieces) if 0 < len(prompts[row]) - start <= len(piece)}
        columns = sorted(set(ends.values())) if look is None else [*range(stop - start)]
        is_chunk = stop == longest or not stop % cache.chunk  # no row evicts because another one ends
        logits = feed(model, cache, pieces, columns, how if is_chunk else replace(how, defer_eviction=True))
        if look is not None:
            look(start, logits)
        for row, column in ends.items():
            last[row] = logits[row, columns.index(column)]
        yield stop, longest
    return torch.stack([last[row] for row in range(len(prompts))])


def whole_passes(
    model: PreTrainedModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    how: Pass,
    look: Look | None = None,
) -> Passes:
    """Feed the prompts in chunks to an empty cache, and a second time if the policy has a `scoring_chunk`.

    Each reading is then half of the progress. A `look` gets the logits of the first reading.
    """
    tokens = scoring_chunk(cache.policy)
    if not tokens:
        return (yield from passes(model, cache, prompts, how, look))
    first, longest, done = passes(model, cache, prompts, how, look), max(map(len, prompts)), 0
    while done < longest:
        done, _ = next(first)
        yield done // 2, longest
    logits = rest_of(first)
    for start in range(0, longest, tokens):
        pieces = [list(prompt[start : start + tokens]) for prompt in prompts]
        feed(model, cache, pieces, [], replace(how, is_second_pass=True))
        yield (longest + min(start + tokens, longest)) // 2, longest
    return logits


def rest_of(left: Passes, progress: Progress | None = None) -> Tensor:
    """Run the remaining passes, report each to `progress`, and return the logits."""
    while True:
        try:
            told = next(left)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits
        if progress is not None:
            progress(*told)


@torch.no_grad()
def revise(model: PreTrainedModel, cache: KVCache, ids: Sequence[int], progress: Progress | None = None) -> int | None:
    """Change the text of a cache of one row into `ids`, as an edited request does, and return the tokens read.

    Tokens of both texts move to their new positions, evicted ones stay evicted, and other tokens are read. After an
    error or an interrupt the cache is empty.

    None, and nothing is changed: the texts have no tokens in common, or the cache takes no such edit.
    """
    row, old = cache.rows.rows[0], (cache.tokens or [[]])[0]
    if not old or row.pins or row.next_position != len(old) or find(cache.policy, OneShot) is not None:
        return None
    sinks = int(cache.options.sinks) if row.sinks is None else row.sinks
    plan = EditPlan.of(Alignment(tuple(ids)).to(tuple(old)), len(ids) + 1, Sinks(sinks, sinks), window=0)
    gaps, rest = plan.gaps, list(ids[plan.end :])
    if not plan.cached or not takes_edits(cache, plan.end, bool(gaps)):
        return None
    total, done = len(gaps) + len(rest), 0
    try:
        remap(cache, plan.moves(len(old)), plan.end)
        if cache.budget is None:
            pack(cache)
        for step in recompute.rewrite_steps(cache, gaps, dict(enumerate(ids)), 0, is_insert=True):
            recompute.read_step(model, cache, step)
            cache.forget_steps()
            done += step.lengths[0]
            if progress is not None:
                progress(done, total)
        cache.rows = cache.rows.changed(lambda _, one: one.filled(ids[: plan.end], not cache.options.recall), 0)
        if rest:
            rest_of(passes(model, cache, [rest]), None if progress is None else lambda n, _: progress(done + n, total))
    except BaseException:
        cache.reset()
        raise
    return total


def _spans(cache: KVCache, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The columns [start, stop) of each pass over prompts of these lengths.

    With recurrent layers, which read no padding, no row ends in the middle of a pass: it idles in the next one.
    """
    longest = max(lengths)
    stops = {*range(cache.chunk, longest, cache.chunk), longest, *(lengths if cache.recurrent else ())}
    return list(pairwise([0, *sorted(stops)]))


class PromptReader(ABC):
    """One prompt that is read into `cache`, chunk by chunk, with `read`."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.cached = self.done = cache.tokens_seen[0]
        """Number of tokens taken from a cached prefix, and number of tokens done by now."""
        self.recomputed = 0
        """Number of tokens of parts, or behind an edit, that were read again in their place."""
        self.moved = 0
        """Number of cached tokens behind the first edit of their row, as not all were read behind the same text."""
        self.exact_tokens: int | None = None
        """Number of first tokens that were read behind the very tokens before them (None: all)."""
        self.is_whole = False
        """True if the cache holds all tokens until the end of the prompt, when it is cut."""
        self.logprobs: list[tuple[Logprob, ...]] = []
        """Log probabilities of each token read so far, but for the first (empty unless asked for)."""
        self.logits: Tensor | None = None
        """(vocabulary,) logits of the last token, once the prompt is read. Nobody may write into them."""
        self.passes: tuple[int, ...] = ()
        """The ends of the passes that read the first tokens, up to the first that came in another way."""

    @property
    def is_done(self) -> bool:
        """Return True if the whole prompt is read."""
        return self.logits is not None

    @property
    def may_be_kept(self) -> bool:
        """Return True if other requests may go on from the cache's text."""
        return False

    @property
    def seen(self) -> int:
        """Tokens that the cache has read. `done` is less while a prompt is read twice."""
        return self.cache.tokens_seen[0]

    @abstractmethod
    def read(self) -> None:
        """Read one more chunk: at most the cache's `chunk` of tokens.

        The second reading of a prompt takes the policy's `scoring_chunk` instead.

        Raises: UsageError if the prompt cannot be read with these options.
        """

    @abstractmethod
    def keep(self) -> None:
        """Keep a copy of the prompt, once it is read, if other requests need one."""

    @abstractmethod
    def close(self) -> None:
        """Release memory reserved for the rest of the prompt, which will not be read. May be repeated."""


@final
class Reader(PromptReader):
    """Reader of a prompt: from its beginning, from a prefix that `snapshots` hold, or of the gaps of an edited text."""

    def __init__(self, model: PreTrainedModel, request: Request, snapshots: Snapshots) -> None:
        self._model, self.request, self._snapshots = model, request, snapshots
        is_whole = find(request.options.policy, OneShot) is not None
        takes_any = not (is_whole or request.scores_prompt)
        edited = snapshots.edited(request) if takes_any and not request.pins else None
        kept = edited.entry if edited is not None else snapshots.longest(request) if takes_any else None
        super().__init__(empty_cache(model, request) if kept is None else kept.cache)
        if kept is not None:
            self.passes, self.exact_tokens = kept.passes, kept.exact_tokens
        self._gaps: Iterator[Step] = iter(())
        if edited is not None:
            self._begin_edited(edited)
        if self.exact_tokens is not None:
            self.moved = max(self.cached - self.exact_tokens, 0)
        self._known_logits = kept.logits if kept is not None and self.done == len(request.prompt) else None
        self.is_whole = is_whole
        self.cache.keep_room(True)  # a short last chunk moves nothing
        if request.options.budget is None:  # reserved at once, as its bytes were counted
            self.cache.reserve(len(request.prompt) - self.cached + request.max_tokens)
        self._pass_ends = request.pass_ends
        self._stops = frozenset[int]() if is_whole else snapshots.wanted(request)
        is_kept = snapshots.kept.limit > 0 and request.reuse.store
        self._marks = frozenset((*request.ends, *self._pass_ends[-2:]) if is_kept else ())
        how = replace(PROMPT, defer_eviction=request.options.budget is not None)
        look = self._score if request.scores_prompt else None
        self._passes = whole_passes(model, self.cache, [request.prompt], how, look)

    def _begin_edited(self, edited: EditedRow) -> None:
        """Take a row over whose text has gaps."""
        self.recomputed = edited.again
        self.cached = self.done = len(edited.entry.tokens) - len(edited.gaps)
        if self.cache.budget is None:
            pack(self.cache)  # dropped tokens have left slots
        ids = dict(enumerate(self.request.prompt))
        self._gaps = recompute.rewrite_steps(self.cache, edited.gaps, ids, 0, is_insert=True)
        self._fill()

    def _read_gap(self, step: Step) -> None:
        recompute.read_step(self._model, self.cache, step)
        self.cache.forget_steps()
        self.done += step.lengths[0]
        self._fill()

    def _fill(self) -> None:
        """Name the tokens of a row, once its text has no gaps. Until then it has no ids, so that nobody takes it."""
        if self.done == (end := self.cache.tokens_seen[0]):
            ids, is_in_order = self.request.tokens[:end], not self.cache.options.recall
            self.cache.rows = self.cache.rows.changed(lambda _, row: row.filled(ids, is_in_order), 0)

    def read(self) -> None:
        if self.is_done:
            raise UsageError("the prompt is read. Nothing is left")
        if (gap := next(self._gaps, None)) is not None:
            self._read_gap(gap)
            return
        if self._known_logits is not None:
            self.logits = self._known_logits
            return
        if self.is_whole:
            self._read_whole()
            return
        stop = self._next_end()
        piece = list(self.request.prompt[self.done : stop])
        is_last = stop == len(self.request.prompt)
        columns = [*range(len(piece))] if self.request.scores_prompt else [len(piece) - 1] if is_last else []
        logits = feed(self._model, self.cache, [piece], columns, PROMPT)
        if self.request.scores_prompt:
            self._score(self.done, logits)
        if self.done == max(self.passes, default=0):
            self.passes += (stop,)
        self.done += len(piece)
        self.cache.forget_steps()  # a server rolls nothing back
        if self._snapshots.packs and self.done > holds_all(self.cache):  # else tokens lie in their order
            pack(self.cache)
        if self.done in self._marks and self._is_cut_later:
            self.cache.checkpoint()
        if is_last:
            self.logits = logits[0, -1].clone()  # the others' memory is free
        elif self.done in self._stops and not self._is_cut_later:
            self._snapshots.put(self.entry)

    def _next_end(self) -> int:
        """The end of the next pass: of a message or a chunk.

        Ends of messages serve requests that are read in the same passes to the bit, and copies of a text that is about
        to lose tokens. Where nobody needs them, a pass goes on, as each costs as much as several tokens.
        """
        if self.request.reuse.mode.name == "exact" or self.cache.recurrent or not self._is_cut_later:
            return next(end for end in self._pass_ends if end > self.done)
        return min(self.done + self.request.options.chunk, len(self.request.prompt))

    def keep(self) -> None:
        """Keep a copy of the whole prompt, if others need one."""
        is_read = self.logits is not None and self._known_logits is None
        if is_read and self.done in self._stops and not self._is_cut_later:
            self._snapshots.put(replace(self.entry, logits=self.logits, logits_end=self.done))

    @property
    def may_be_kept(self) -> bool:
        return not self.is_whole

    @property
    def entry(self) -> CacheEntry:
        """The row so far."""
        tokens = self.request.tokens[: self.done]
        is_all = self.done <= holds_all(self.cache)
        return CacheEntry(
            tokens=tokens,
            passes=self.passes,
            holds_all=is_all,
            exact_tokens=self.exact_tokens,
            checkpoints=self.cache.checkpoints_of(0),
            key=key_of(self.request),
            cache=self.cache,
            bytes=0,
        )

    @property
    def _is_cut_later(self) -> bool:
        """Return True if the row still serves all beginnings of the prompt once the text has ended."""
        return len(self.request.prompt) <= holds_all(self.cache)

    def _score(self, start: int, logits: Tensor) -> None:
        """Record log probabilities of the tokens after `start`, from the (1, tokens, vocabulary) logits before them."""
        told = self.request.prompt[start + 1 : start + 1 + logits.shape[1]]
        self.logprobs += logprobs_of(logits[0], told, self.request.top_logprobs or 0)

    def _read_whole(self) -> None:
        self.done, total = next(self._passes)
        self.cache.forget_steps()  # a server rolls nothing back
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
        cache.set_sinks(request.head, pins=request.pins)
    return cache
