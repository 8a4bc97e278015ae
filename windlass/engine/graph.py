"""A step of the model as a graph of the device's work, which is recorded once and run again for every token.

A step is hundreds of kernels, each of which has to be launched. A cache whose shapes do not change from one token to
the next lets the device be given all of them at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import final

import torch
from torch import Tensor

from windlass.cache.layer import LayerCache
from windlass.core.rotary_index import EMPTY


class Graph(ABC):
    """Work of a device that can be run again, on the memory that it was recorded with."""

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> None:
        """Record what `work` would do, without doing it; what was recorded before is forgotten.

        Raises: RuntimeError, or what `work` raises, for work that cannot be recorded; nothing was done then.
        """

    @abstractmethod
    def replay(self) -> None:
        """Do the work once more; returns at once."""

    @abstractmethod
    def copied(self, ids: Tensor) -> Callable[[], list[int]]:
        """Begin to copy (batch, 1) `ids` to the host; the copy is what the call of the result waits for."""


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
        assert self._graph is not None, "replay of what was never captured"
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
    """A graph for this kind of device; None where steps are run as they come."""
    return CudaGraph() if device.type == "cuda" else None


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done all that it was given; at once on a CPU, which does things as they come."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_reserved(layer: LayerCache) -> None:
    """Forget the layer's records as `forget_records` would, in a way that may be recorded."""
    layer.positions.clamp_(min=EMPTY)  # RESERVED is below it
    layer.records.clear()


@contextmanager
def in_place(layers: list[LayerCache]) -> Iterator[None]:
    """Let a step that puts new tensors in the place of old ones leave their content in the old ones' memory.

    Its records keep what was there before.
    """
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_in_place(layer))
        yield


@contextmanager
def _in_place(layer: LayerCache) -> Iterator[None]:
    exact = layer.store.exact
    statistics, copies = layer.statistics, exact.copies
    layer.statistics = {name: tensor.clone() for name, tensor in statistics.items()}
    exact.copies = {name: tensor.clone() for name, tensor in copies.items()}
    yield
    for own, new in ((statistics, layer.statistics), (copies, exact.copies)):
        for name, tensor in own.items():
            tensor.copy_(new[name])
    # Other dictionaries: what was found out for the old ones no longer holds.
    layer.statistics, exact.copies = dict(statistics), dict(copies)


@contextmanager
def undone(layers: list[LayerCache]) -> Iterator[None]:
    """What the host knows of the layers is afterwards as it was, whatever was recorded meanwhile."""
    before = [(each, each.statistics, each.store.exact.copies, each.most_held, each.has_evicted) for each in layers]
    records = [list(layer.records) for layer in layers]
    try:
        yield
    finally:
        for (layer, statistics, copies, held, has_evicted), kept in zip(before, records, strict=True):
            layer.statistics, layer.store.exact.copies = statistics, dict(copies)
            layer.most_held, layer.has_evicted = held, has_evicted
            layer.records.clear()
            layer.records.extend(kept)
