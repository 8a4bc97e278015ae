"""Decode: one token per row and step. The steps are plain or replays of a CUDA graph, and `Sampler` chooses the tokens.

A step is hundreds of kernels, each of which has to be launched. A cache whose shapes do not change from one token to
the next lets the device be given all of them at once: the step is captured, and replayed for every token.
"""

from __future__ import annotations

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Final, cast, final

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from windlass import kernels
from windlass.cache.history import History
from windlass.cache.layer import SlotLayer
from windlass.core.errors import UsageError, WindlassWarning
from windlass.core.positions import EMPTY, RESERVED
from windlass.core.ranks import Ranks
from windlass.core.step import Pass, Step, StepRecord, no_inference_mode
from windlass.core.types import RotaryTable
from windlass.engine.request import Logprob
from windlass.engine.sampling import Sampling
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache
from windlass.positions.modes import PositionMode

DRAWS: Final = 256  # random numbers made at a time
BITS: Final = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def likeliest(logits: Tensor) -> Tensor:
    """The token of each row's highest logit, (batch, 1), the first of equal ones."""
    if kernels.can_ask(logits) and logits.dtype in BITS:
        # The bits of positive numbers are in the numbers' order. PyTorch's own takes 20 times as long for bfloat16.
        bits = logits.view(BITS[logits.dtype]).numpy()
        if bits.max(-1).min() > 0:
            return torch.from_numpy(bits.argmax(-1, keepdims=True))
    return logits.argmax(-1, keepdim=True)


class Sampler:
    """Chooses tokens by a `Sampling`, with transformers' own logits processors.

    `texts` are the rows' tokens so far, which a repetition penalty counts. Row r of a batch draws from a
    generator of its own on the CPU, so that its draws are the same in any batch and on every device. All that
    `choose` reads lies in the same memory at every step and nothing waits for the device, so it may be captured
    in a graph. Call `prepare` before each step, captured or not.

    With several `ranks` each of them chooses, and all take the tokens of rank 0.
    """

    @no_inference_mode
    def __init__(
        self,
        sampling: Sampling,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._is_greedy = sampling.temperature == 0.0
        self._penalty, self._texts = sampling.repetition_penalty, texts
        self._generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(texts))]
        # A GPU of Apple's has no float64: of two tokens on the edge of a draw, it may take the other one.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._draws = torch.zeros(len(texts), DRAWS, dtype=self._wide, device=device)
        self._column = torch.full((1,), -1, device=device)  # column of the latest draws
        self._drawn = DRAWS  # the same number on the host
        self._seen: Tensor | None = None  # (batch, vocabulary): whether a row has the token
        self._warpers = LogitsProcessorList()
        if self._is_greedy:
            return
        if sampling.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))

    @no_inference_mode
    def prepare(self) -> None:
        """Make draws for the next step, where there are none left."""
        self._drawn += 1
        if not self._is_greedy and self._drawn >= DRAWS:
            rows = [torch.rand(DRAWS, generator=generator, dtype=self._wide) for generator in self._generators]
            self._draws.copy_(torch.stack(rows))
            self._column.fill_(-1)
            self._drawn = 0

    @no_inference_mode
    def choose(self, logits: Tensor) -> Tensor:
        """One token a row, (batch, 1), from `logits` (batch, vocabulary). The first call must not be captured."""
        if self._penalty != 1.0:
            logits = self._penalised(logits.float())
        if self._is_greedy:
            chosen = likeliest(logits)
        else:
            # No processor here looks at the text.
            scores = self._warpers(cast(torch.LongTensor, None), cast(torch.FloatTensor, logits.float()))
            upto = scores.softmax(-1).to(self._wide).cumsum(-1)
            self._column += 1
            # The first token whose share reaches beyond the draw: never one without a share.
            drawn = self._draws.index_select(1, self._column) * upto[:, -1:]
            chosen = torch.searchsorted(upto, drawn, right=True).clamp(max=upto.shape[-1] - 1)
        if self._ranks is not None:
            chosen = self._ranks.broadcast(chosen)
        if self._seen is not None:
            self._seen.scatter_(1, chosen, True)
        return chosen

    def next_token(self, logits: Tensor) -> int:
        """The next token of the only row, from its (vocabulary,) `logits`."""
        self.prepare()
        return int(self.choose(logits[None]))

    def _penalised(self, scores: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            for row, text in enumerate(self._texts):
                self._seen[row, torch.tensor(list(text), device=scores.device, dtype=torch.long)] = True
        return weakened(scores, self._seen, self._penalty)


def weakened(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits with a repetition penalty for the tokens that were `seen`.

    Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1. Differs: negative scores are multiplied.
    """
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


# Sent instead of a token: rank 0 has none, by an error of the request or of its own.
REFUSED: Final = -1
BROKEN: Final = -2


def agreed_token(ranks: Ranks | None, choose: Callable[[], int]) -> int:
    """The token that `choose` gives on rank 0. Only rank 0 calls it. All ranks raise where it does."""
    if ranks is None:
        return choose()
    if not ranks.is_first:
        token = ranks.broadcast_object(0)
        if token == REFUSED:
            raise UsageError("rank 0 found no token that the request allows")
        if token == BROKEN:
            raise RuntimeError("rank 0 failed to choose a token")
        return token
    token = BROKEN
    try:
        token = choose()
    except UsageError:
        token = REFUSED
        raise
    finally:
        ranks.broadcast_object(token)
    return token


ROWS: Final = 64  # turned to float32 at once: a prompt's logits are large


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[tuple[Logprob, ...]]:
    """The log probability of each of `tokens` by a row of `logits` (rows, vocabulary), then of the `top` likeliest."""
    found = []
    for start in range(0, len(tokens), ROWS):
        chosen = list(tokens[start : start + ROWS])
        values = logits[start : start + len(chosen)].float().log_softmax(-1)
        own = values.gather(1, torch.tensor(chosen, device=values.device)[:, None])[:, 0].tolist()
        best = values.topk(top)
        for token, value, *others in zip(chosen, own, best.indices.tolist(), best.values.tolist(), strict=True):
            found.append((Logprob(token, value), *map(Logprob, *others)))
    return found


class Graph(ABC):
    """Work of a device that can be run again, on the memory that it was recorded with."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> None:
        """Record `work` without doing it. Replaces the previous recording.

        Raises: RuntimeError, or the error of `work`, if it cannot be recorded. Nothing was done then.
        """

    @abstractmethod
    def replay(self) -> None:
        """Launch the recorded work and return at once."""

    @abstractmethod
    def copied(self, ids: Tensor) -> Callable[[], list[int]]:
        """Start to copy (batch, 1) `ids` to the host. Calling the result waits for the copy and returns it."""


@final
class CudaGraph(Graph):
    """Work of the current CUDA device."""

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, work: Callable[[], None]) -> None:
        self._graph = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        self._graph = graph

    def replay(self) -> None:
        assert self._graph is not None, "replay before capture"
        self._graph.replay()

    def copied(self, ids: Tensor) -> Callable[[], list[int]]:
        host, event = torch.empty_like(ids, device="cpu", pin_memory=True), torch.cuda.Event()
        host.copy_(ids, non_blocking=True)
        event.record()

        def wait() -> list[int]:
            event.synchronize()
            tokens: list[int] = host[:, 0].tolist()
            return tokens

        return wait


def graph_for(device: torch.device) -> Graph | None:
    """Return a graph for this kind of device, or None if steps run without one."""
    return CudaGraph() if device.type == "cuda" else None


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work. Returns at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tensors_of(layer: SlotLayer) -> list[Tensor]:
    """The tensors that a recorded step reads in a layer. If they change, it must be recorded again."""
    recall = layer.table.recall
    return [*layer.tensors().values(), *([] if recall is None else recall.step_tensors)]


def grows_next(layer: SlotLayer, counts: Sequence[int]) -> bool:
    """Return True if a step of so many tokens of each row, one at most, needs more memory than the layer has."""
    table = layer.table
    is_full = layer.budget is None and table.occupancy_bound >= table.slots
    return is_full or (table.recall is not None and not table.recall.has_room(counts))


def is_ranked_by_host(layer: SlotLayer) -> bool:
    """Return True if the host ranks the layer's recalled pages, for slots in a device's memory."""
    recall = layer.table.recall
    return recall is not None and recall.device != layer.positions.device


def count_recorded(layer: SlotLayer, counts: Sequence[int]) -> None:
    """Let the layer's recall store know that a recorded step has written `counts` tokens of each row."""
    recall = layer.table.recall
    if recall is not None:
        recall.count_recorded(list(map(operator.add, recall.lengths, counts)))


@contextmanager
def freeing_reserved(layers: list[SlotLayer]) -> Iterator[None]:
    """Free the slots that earlier steps reserved, but not those that the step inside reserves. Can be captured.

    Records of earlier steps list slots of one moment, but a graph must find the slots anew at each replay.
    """
    reserving = [layer for layer in layers if layer.budget is not None or layer.rules.joins]
    reserved = [layer.positions == RESERVED for layer in reserving]
    for layer in layers:
        layer.history = History(has_evicted=layer.history.has_evicted)
    yield
    for layer, mask in zip(reserving, reserved, strict=True):
        layer.positions.masked_fill_(mask, EMPTY)


@contextmanager
def in_place(layers: list[SlotLayer]) -> Iterator[None]:
    """During capture, copy every replaced tensor back into its original storage: a replay reads fixed addresses.

    The step's records hold copies of the original contents.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_in_place(layer))
        yield


@contextmanager
def _in_place(layer: SlotLayer) -> Iterator[None]:
    table, ring = layer.table, layer.store.full_precision
    statistics, tensors = table.statistics, ring.tensors
    table.statistics = {name: tensor.clone() for name, tensor in statistics.items()}
    ring.tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    yield
    for original, replaced in ((statistics, table.statistics), (tensors, ring.tensors)):
        for name, tensor in original.items():
            tensor.copy_(replaced[name])
    # New dictionaries, because a ring caches its index by the identity of the old one.
    table.statistics, ring.tensors = dict(statistics), dict(tensors)


@contextmanager
def restoring(layers: list[SlotLayer]) -> Iterator[None]:
    """Restore the host's state of the layers on exit: a capture records work without doing it."""
    before = [
        (each, each.table.statistics, each.store.full_precision.tensors, each.table.occupancy_bound, each.history)
        for each in layers
    ]
    recalls = [(each.table.recall, each.table.recall.lengths) for each in layers if each.table.recall is not None]
    try:
        yield
    finally:
        for layer, statistics, ring, held, history in before:
            layer.table.statistics, layer.store.full_precision.tensors = statistics, dict(ring)
            layer.table.occupancy_bound, layer.history = held, history
        for recall, lengths in recalls:
            recall.count_recorded(lengths)


FIRST_CAPTURE: Final = 1024  # positions that the first captured step serves, doubled each time they are used up


@dataclass(frozen=True, eq=False)
class GraphKey:
    """Facts common to all steps that one graph serves: the cache's memory, which layers evict, where slots are read."""

    tensors: list[Tensor]
    is_evicting: list[bool]
    mode: PositionMode

    @classmethod
    def of(cls, cache: KVCache) -> GraphKey:
        """The key of the next step."""
        layers = cache.layers
        is_evicting = [layer.budget is not None and layer.table.occupancy_bound >= layer.budget for layer in layers]
        tensors = [tensor for layer in layers for tensor in tensors_of(layer)]
        return cls(tensors, is_evicting, cache.positions)

    def is_like(self, other: GraphKey | None) -> bool:
        """Return True if the same graph serves both."""
        return (
            other is not None
            and self.is_evicting == other.is_evicting
            and self.mode is other.mode
            and len(self.tensors) == len(other.tensors)
            and all(own is wanted for own, wanted in zip(self.tensors, other.tensors, strict=True))
        )


class Decoder:
    """Greedy or sampled decode from a prompt's `logits` (batch, vocabulary), one token per row and step.

    Call `next_tokens()`, then `advance(rows)` with the rows that continue. After that the tokens are in the cache.
    With a `graph`, step n + 1 is launched before the host reads token n, so the cache is one step ahead until
    `advance`. The first step runs eagerly and the second is captured. A step that can't be captured runs eagerly,
    after one warning. A replayed step can be rolled back while it is the last. The cache may be edited between two
    tokens.
    """

    def __init__(
        self, model: PreTrainedModel, cache: KVCache, sampler: Sampler, logits: Tensor, graph: Graph | None
    ) -> None:
        # A replayed step would change the state of a recurrent layer without a copy of the old state. In a text with
        # pictures the host computes the places of each step. It also ranks tokens that a file stores.
        is_served = graph is not None and not cache.recurrent and not cache.rows.has_pictures
        self._graph = graph if is_served and not any(map(is_ranked_by_host, cache.layers)) else None
        self._model, self._cache, self._sampler = model, cache, sampler
        self._is_recordable = self._graph is not None
        self._active = self._fed = [True] * cache.batch_size
        self._waiting: Callable[[], list[int]] | None = None
        sampler.prepare()
        self._ids = sampler.choose(logits)
        self._sync_rows()

    def next_tokens(self) -> list[int]:
        """Return the next token of each row. Tokens of rows that have ended are meaningless."""
        if self._graph is None:
            return self._read()
        waiting = self._waiting or self._graph.copied(self._ids)
        self._feed(None, is_last=False)
        self._waiting = self._graph.copied(self._ids)
        try:
            return waiting()
        finally:  # also where an interrupt ends the wait
            self._cache.rows = self._cache.rows.told(self._of_active(waiting(), self._fed))

    @no_inference_mode
    def advance(self, rows: Sequence[bool], is_last: bool) -> None:
        """Feed the tokens chosen last, where that is not done, and choose others unless it `is_last`."""
        if self._graph is None:
            self._feed(self._of_active(self._read(), self._active), is_last)
        if list(rows) != self._active:
            self._active = list(rows)
            self._is_active.copy_(torch.tensor(self._active))

    def _read(self) -> list[int]:
        tokens: list[int] = self._ids[:, 0].tolist()
        return tokens

    def _of_active(self, tokens: list[int], active: list[bool]) -> list[list[int]]:
        return [[token] * is_active for token, is_active in zip(tokens, active, strict=True)]

    @no_inference_mode
    def _sync_rows(self) -> None:
        """Copy the rows' positions to the device, and drop graphs captured at other positions."""
        rows, device = self._cache.rows, self._cache.device
        self._ends = rows.next_positions
        self._next = torch.tensor(self._ends, device=device)
        self._prompt_ends = torch.tensor(rows.prompt_ends, device=device)
        self._sinks = rows.sinks(device)
        self._is_active = torch.tensor(self._active, device=device)
        self._captured_end = 0  # the captured step is valid for positions below this
        self._warm_key: GraphKey | None = None
        self._captured_key: GraphKey | None = None
        self._records: list[StepRecord] = []
        self._tables: list[dict[torch.dtype, tuple[RotaryTable, RotaryTable]]] = []  # read by the graph

    @no_inference_mode
    def _feed(self, tokens: list[list[int]] | None, is_last: bool) -> None:
        """One step of the model, of `tokens` where the host knows them already."""
        if self._cache.next_positions != self._ends:
            self._sync_rows()
        if not is_last:
            self._sampler.prepare()
        lengths = tuple(map(int, self._active))
        if not self._is_recordable or not self._is_replayed(lengths):
            self._step(lengths, tokens, is_last)
        self._fed = self._active
        self._ends = self._cache.next_positions

    def _step(
        self, lengths: tuple[int, ...], tokens: list[list[int]] | None, is_last: bool, is_captured: bool = False
    ) -> None:
        """Run one step, eagerly or under capture. State passed from step to step stays at the same addresses."""
        positions = self._next.where(self._is_active, EMPTY)[:, None]
        after, ids = self._next + self._is_active, self._ids.clone()
        end = max(self._ends) + 1
        headroom = max(self._captured_end - end, 0)
        step = Step(
            positions=positions,
            lengths=lengths,
            next_positions=after,
            prompt_ends=self._prompt_ends,
            end=end + headroom,
            ids=ids,
            graph_headroom=headroom,
            is_captured=is_captured,
            places=self._cache.rows.places(positions),
            sinks=self._sinks,
        )
        columns = [] if is_last else [0]
        logits = forward(self._model, ids, None, self._cache, columns, Pass(step, tokens))
        self._next.copy_(after)
        if not is_last:
            self._ids.copy_(self._sampler.choose(logits[:, 0]))

    def _is_replayed(self, lengths: tuple[int, ...]) -> bool:
        """Run the step from a graph, captured first if need be. Returns False if nothing was done."""
        cache, end = self._cache, max(self._ends) + 1
        rotaries = [layer.rotary for layer in cache.layers if layer.rotary is not None]
        if end > self._captured_end:
            # A graph reads tables of one length: it serves positions up to a round number, within the limit of a
            # scheme that changes with the length.
            self._captured_end, self._warm_key, self._captured_key = FIRST_CAPTURE, None, None
            while self._captured_end < end:
                self._captured_end *= 2
            changes = [each.constant_length for each in rotaries if each.table_changes_at(self._captured_end)]
            self._captured_end = min([self._captured_end, *(length for length in changes if length >= end)])
        if not all(each.same_table(end, self._captured_end) for each in rotaries):
            self._fall_back("its rotary tables change with the length of the text")
            return False
        key = GraphKey.of(cache)
        grows = any(grows_next(layer, lengths) for layer in cache.layers)
        if grows or not key.is_like(self._captured_key):
            if grows or not key.is_like(self._warm_key):
                self._step(lengths, None, is_last=False)
                # The step may have moved the slots, as the first after a prompt does.
                self._warm_key = replace(key, tensors=GraphKey.of(cache).tensors)
                return True
            if not self._is_captured(lengths):
                return False
            self._captured_key = key
        assert self._graph is not None, "a captured step without a graph"
        self._graph.replay()
        self._note_replay(key, lengths)
        return True

    def _is_captured(self, lengths: tuple[int, ...]) -> bool:
        """Capture a step. Returns False, after a warning, if it can't be captured."""
        layers, text = self._cache.layers, self._cache.text

        def work() -> None:
            with freeing_reserved(layers), in_place(layers):
                self._step(lengths, None, is_last=False, is_captured=True)
            self._records = [layer.history.records[-1] for layer in layers]
            self._tables = [layer.rotary.built for layer in layers if layer.rotary is not None]

        assert self._graph is not None, "nothing to capture with"
        try:
            with restoring(layers):
                self._graph.capture(work)
        except Exception as error:
            self._fall_back(f"{type(error).__name__}: {error}")
            return False
        finally:
            self._cache.text = text
        return True

    def _note_replay(self, key: GraphKey, lengths: tuple[int, ...]) -> None:
        """Update the cache's records after a step that the device took without it."""
        step = replace(self._records[0].step, lengths=lengths, is_captured=False)
        for layer, record, is_evicting in zip(self._cache.layers, self._records, key.is_evicting, strict=True):
            held = layer.table.occupancy_bound
            latest = History(has_evicted=layer.history.has_evicted)
            layer.history = latest.with_record(replace(record, step=step, occupancy_bound=held))
            layer.table.occupancy_bound = held if is_evicting else held + 1
            count_recorded(layer, lengths)
        self._cache.rows = self._cache.rows.fed(lengths, 1, (0,) * len(lengths))

    def _fall_back(self, reason: str) -> None:
        self._is_recordable, self._captured_end = False, 0
        warnings.warn(
            f"a step of {type(self._model).__name__} can't be recorded as one graph, so each step runs eagerly, which "
            f"is slower: {reason}",
            WindlassWarning,
            stacklevel=2,
        )
