"""A decode step as a CUDA graph: captured once, replayed for every token.

A step is hundreds of kernels, each of which has to be launched. A cache whose shapes do not change from one token to
the next lets the device be given all of them at once.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor

from windlass.cache.history import History
from windlass.cache.layer import SlotLayer
from windlass.core.positions import EMPTY, RESERVED


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
