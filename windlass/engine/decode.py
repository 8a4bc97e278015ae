"""Token after token: what the model chooses is fed, and handed out."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import RotaryTable
from windlass.core.step import Record, Step, outlasting
from windlass.engine.graph import Graph, free_reserved, in_place, undone
from windlass.engine.sampling import Sampler
from windlass.hf.attach import forward
from windlass.hf.kv_cache import KVCache
from windlass.positions.modes import PositionMode

LEAST: Final = 1024  # positions for which a step is recorded, and then twice as many each time they are used up


@dataclass(frozen=True, eq=False)
class Phase:
    """What holds for all steps that one graph serves: the cache's memory, which layers evict, where slots are read."""

    tensors: list[Tensor]
    is_evicting: list[bool]
    mode: PositionMode

    @classmethod
    def of(cls, cache: KVCache) -> "Phase":
        """That of the next step."""
        layers = cache.layers
        is_evicting = [
            layer.budget is not None and not layer.is_whole and layer.most_held >= layer.budget for layer in layers
        ]
        return cls([tensor for layer in layers for tensor in layer.tensors().values()], is_evicting, cache.positions)

    def is_like(self, other: "Phase | None") -> bool:
        """Whether the same graph serves both."""
        return (
            other is not None
            and self.is_evicting == other.is_evicting
            and self.mode is other.mode
            and len(self.tensors) == len(other.tensors)
            and all(ours is theirs for ours, theirs in zip(self.tensors, other.tensors, strict=True))
        )


class Decoding:
    """Writes on from a prompt's `logits` (batch, vocabulary), one token per row and step.

    `chosen` gives the next token of each row, `go_on` says which rows get one more; then the tokens are in the
    cache. With a `graph` they are in it before: the device works on a step while the host looks at the token of
    the one before. A step is then run once as it comes and recorded the second time, and can be taken back while
    it is the last. What cannot be recorded is run as it comes, after a warning. Edits of the cache between
    two tokens are seen.
    """

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, sampler: Sampler, logits: Tensor, graph: Graph | None
    ) -> None:
        self._model, self._cache, self._sampler, self._graph = model, cache, sampler, graph
        self._is_recordable = graph is not None
        self._rows = self._fed = [True] * cache.batch_size
        self._waiting: Callable[[], list[int]] | None = None
        sampler.prepare()
        self._ids = sampler.choose(logits)
        self._stand()

    def chosen(self) -> list[int]:
        """The next token of each row; of a row that has ended, any."""
        if self._graph is None:
            return self._read()
        waiting = self._waiting or self._graph.copied(self._ids)
        self._feed(is_last=False)
        self._waiting = self._graph.copied(self._ids)
        try:
            return waiting()
        finally:  # also where an interrupt ends the wait
            self._count(waiting())

    @outlasting
    def go_on(self, rows: Sequence[bool], is_last: bool) -> None:
        """Feed the tokens chosen last, where that is not done, and choose others unless it `is_last`."""
        if self._graph is None:
            tokens = self._read()
            self._feed(is_last)
            self._count(tokens)
        if list(rows) != self._rows:
            self._rows = list(rows)
            self._is_going.copy_(torch.tensor(self._rows))

    def _read(self) -> list[int]:
        tokens: list[int] = self._ids[:, 0].tolist()
        return tokens

    def _count(self, tokens: list[int]) -> None:
        """Tell the cache which tokens it was fed."""
        self._cache.standing.remember([[token] * is_fed for token, is_fed in zip(tokens, self._fed, strict=True)])

    @outlasting
    def _stand(self) -> None:
        """Put where the rows stand on the device; what was recorded for another place is forgotten."""
        standing, device = self._cache.standing, self._cache.device
        self._ends = list(standing.next_positions)
        self._next = torch.tensor(self._ends, device=device)
        self._prompt_ends = torch.tensor(standing.prompt_ends, device=device)
        self._is_going = torch.tensor(self._rows, device=device)
        self._serves = 0  # positions below this, as recorded
        self._tried: Phase | None = None
        self._recorded: Phase | None = None
        self._records: list[Record] = []
        self._tables: list[dict[torch.dtype, tuple[RotaryTable, RotaryTable]]] = []  # which the graph reads

    @outlasting
    def _feed(self, is_last: bool) -> None:
        """One step of the model. The cache is told what it needs to know, but for the tokens."""
        standing = self._cache.standing
        if standing.next_positions != self._ends:
            self._stand()
        if not is_last:
            self._sampler.prepare()
        lengths = tuple(map(int, self._rows))
        if not self._is_recordable or not self._is_replayed(lengths):
            self._step(lengths, is_last)
        self._fed = self._rows
        standing.count(lengths, 1)
        self._ends = list(standing.next_positions)

    def _step(self, lengths: tuple[int, ...], is_last: bool) -> None:
        """One step as it comes, or as it is recorded: what one leaves to the next stays in the same memory."""
        positions = self._next.where(self._is_going, EMPTY)[:, None]
        after, ids = self._next + self._is_going, self._ids.clone()
        end = max(self._ends) + 1
        ahead = max(self._serves - end, 0)
        step = Step(positions, lengths, after, self._prompt_ends, end + ahead, ids, ahead=ahead)
        self._cache.script = step
        try:
            logits = forward(self._model, ids, None, self._cache, [] if is_last else [0], positions)
        finally:
            self._cache.script = None
        self._next.copy_(after)
        if not is_last:
            self._ids.copy_(self._sampler.choose(logits[:, 0]))

    def _is_replayed(self, lengths: tuple[int, ...]) -> bool:
        """Run the step from its graph, where there is one or can be; False where nothing was done."""
        cache, end = self._cache, max(self._ends) + 1
        rotaries = [layer.rotary for layer in cache.layers if layer.rotary is not None]
        if end > self._serves:
            self._serves, self._tried, self._recorded = LEAST, None, None
            while self._serves < end:
                self._serves *= 2
            changes = [each.trained_length for each in rotaries if each.outgrows(self._serves)]
            self._serves = min([self._serves, *(length for length in changes if length >= end)])
        if not all(each.agrees(end, self._serves) for each in rotaries):
            self._give_up("its rotary tables change with the length of the text")
            return False
        phase = Phase.of(cache)
        grows = any(layer.budget is None and layer.most_held >= layer.store.slots for layer in cache.layers)
        if grows or not phase.is_like(self._recorded):
            if grows or not phase.is_like(self._tried):
                self._step(lengths, is_last=False)
                # The step may have moved the slots, as the first after a prompt does.
                self._tried = replace(phase, tensors=Phase.of(cache).tensors)
                return True
            if not self._is_recorded(lengths):
                return False
            self._recorded = phase
        assert self._graph is not None, "a recorded step without a graph"
        self._graph.replay()
        self._settle(phase, lengths)
        return True

    def _is_recorded(self, lengths: tuple[int, ...]) -> bool:
        """Record a step; False, after a warning, where that cannot be."""
        layers = self._cache.layers

        def work() -> None:
            for layer in layers:
                free_reserved(layer)
            with in_place(layers):
                self._step(lengths, is_last=False)
            self._records = [layer.records[-1] for layer in layers]
            self._tables = [layer.rotary.built for layer in layers if layer.rotary is not None]

        assert self._graph is not None, "nothing to record with"
        try:
            with undone(layers):
                self._graph.capture(work)
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return False
        return True

    def _settle(self, phase: Phase, lengths: tuple[int, ...]) -> None:
        """What the layers know of themselves, after a step that the device was given without them."""
        step = replace(self._records[0].step, lengths=lengths)
        for layer, record, is_evicting in zip(self._cache.layers, self._records, phase.is_evicting, strict=True):
            layer.records.clear()
            layer.records.append(replace(record, step=step, most_held=layer.most_held))
            layer.most_held += 0 if is_evicting else 1

    def _give_up(self, reason: str) -> None:
        self._is_recordable, self._serves = False, 0
        warnings.warn(
            f"a step of {type(self._model).__name__} can't be recorded as one graph, so each runs as it comes, which "
            f"is slower: {reason}",
            stacklevel=2,
        )
