"""One row of a benchmark at work: a cache of its own behind a text of some length, and what a run takes."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

from windlass.core.errors import UsageError
from windlass.engine.decode import Decoder
from windlass.engine.generate import prefill
from windlass.engine.graph import graph_for, wait_for
from windlass.engine.sampler import Sampler
from windlass.engine.sampling import Sampling
from windlass.evals.speed.depth import fill
from windlass.evals.speed.rotated import RotatedStorage
from windlass.evals.speed.rows import BenchRow
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import LayerShape
from windlass.hf.weights import stored_bytes

Clock = Callable[[], float]

RECORDED: Final = 3  # steps before those that are timed: one as it comes, one recorded, one more


class Timer:
    """Runs one row, on a cache of its own that goes back to the row's depth after each run."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape], row: BenchRow) -> None:
        self.row = row
        self._model, self._shapes = model, shapes
        kind = RotatedStorage if row.setup.storage == "rotated" else KVCache
        self.cache = kind.from_options(model, replace(row.setup.options, batch=row.workload.batch))
        draw = torch.Generator().manual_seed(0)
        size = row.workload.batch, row.workload.tokens
        self._ids: list[list[int]] = torch.randint(vocabulary_of(model), size, generator=draw).tolist()
        self._graph = None
        if row.setup.graph == "on" and not row.workload.is_prompt:
            self._graph = graph_for(self.cache.device)
            self._logits = torch.randn(row.workload.batch, vocabulary_of(model), generator=draw).to(self.cache.device)

    def warm_up(self, clock: Clock) -> None:
        """Fill the cache, then one run that does not count."""
        self._refill()
        self.run(clock)
        self.take_back()
        if not self.row.workload.is_prompt:
            self.row.bytes_per_token = (weight_bytes(self._model) + self._bytes_read()) / self.row.workload.batch

    def run(self, clock: Clock) -> float:
        """Seconds that the row's workload takes, until the device has done all of it."""
        torch.set_num_threads(self.row.setup.threads)
        work = self._begun()
        wait_for(self.cache.device)
        started = clock()
        work()
        wait_for(self.cache.device)
        return clock() - started

    def _begun(self) -> Callable[[], None]:
        """What is timed. Raises: UsageError for a step that cannot be recorded, though a graph is asked for."""
        if self.row.workload.is_prompt:
            return self._read
        if self._graph is None:
            return self._decode
        sampler = Sampler(Sampling(), self._ids, self.cache.device)
        decoding = Decoder(self._model, self.cache, sampler, self._logits, self._graph)

        def write(tokens: int) -> None:
            for _ in range(tokens):
                decoding.next_tokens()
                decoding.advance([True] * self.row.workload.batch, is_last=False)

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                write(RECORDED)
            except UserWarning as error:
                raise UsageError(f"--graph on: {error}; leave it out, or use off") from error
        return partial(write, self.row.workload.tokens)

    def _read(self) -> None:
        prefill(self._model, self.cache, self._ids)

    def _decode(self) -> None:
        for column in range(self.row.workload.tokens):
            prefill(self._model, self.cache, [ids[column : column + 1] for ids in self._ids])

    def take_back(self) -> None:
        """Let the cache be as before the run, or fill it anew where that cannot be taken back."""
        try:
            self.cache.rollback(self.row.workload.tokens + (0 if self._graph is None else RECORDED))
        except UsageError:
            self._refill()

    def _refill(self) -> None:
        torch.set_num_threads(self.row.setup.threads)
        fill(self.cache, self._shapes, self.row.workload.depth)
        if not self.row.workload.is_prompt:
            # The first token after a prompt packs the slots; it belongs to none of the runs.
            prefill(self._model, self.cache, [ids[:1] for ids in self._ids])
            self.cache.rollback(1)

    def _bytes_read(self) -> float:
        """Keys, values and scales of all texts that a step of decode reads, as the mean over a run.

        Of a token that is held in full precision, too, that copy is read, and its codes are not.
        """
        total = 0.0
        for layer in self.cache.layers:
            most = layer.table.occupancy_bound + self.row.workload.tokens if layer.budget is None else layer.budget
            held = [min(layer.table.occupancy_bound + done, most) + 1 for done in range(self.row.workload.tokens)]
            tokens = sum(held) / len(held)
            ring = layer.store.full_precision
            full_precision = min(tokens, ring.sinks + ring.newest)
            keys, values = layer.store.packed()
            for part in (keys, values) if values.last is None else (keys,):
                coded = part.data.nbytes + (0 if part.scales is None else part.scales.nbytes)
                copied = part.full_precision
                copies = 0.0 if copied is None else full_precision * copied.nbytes / copied.shape[2]
                total += copies + (tokens - (full_precision if copies else 0)) * coded / layer.store.slots
        return total


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a token of decode reads: all but the input embedding, of which it reads one row.

    An embedding that is also the head counts, and so does every expert of a mixture.
    """
    total = sum(map(stored_bytes, model.parameters()))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        return total
    assert isinstance(embedding, torch.Tensor)
    return total - stored_bytes(embedding)
