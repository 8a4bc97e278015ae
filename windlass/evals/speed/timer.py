"""One row of a benchmark at work: a cache of its own behind a text of some length, and what a run takes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from transformers import PreTrainedModel

from windlass.core.errors import UsageError
from windlass.engine.decode import Decoding
from windlass.engine.generate import prefill
from windlass.engine.graph import graph_for, wait_for
from windlass.engine.sampling import Sampler, Sampling
from windlass.evals.speed.depth import LayerShape, fill
from windlass.evals.speed.grid import Row
from windlass.evals.speed.rotated import RotatedStorage
from windlass.hf.attach import vocabulary_of
from windlass.hf.kv_cache import KVCache

Clock = Callable[[], float]

RECORDED: Final = 3  # steps before those that are timed: one as it comes, one recorded, one more


class Timer:
    """Runs one row, on a cache of its own that goes back to the row's depth after each run."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape], row: Row, chunk: int) -> None:
        self.row = row
        self._model, self._shapes = model, shapes
        settings = row.settings
        kind = RotatedStorage if settings.storage == "rotated" else KVCache
        self.cache = kind(
            model,
            budget=settings.budget,
            policy=settings.policy,
            chunk=chunk,
            positions=settings.positions,
            store=settings.store,
            batch=row.task.batch,
        )
        draw = torch.Generator().manual_seed(0)
        size = row.task.batch, row.task.tokens
        self._ids: list[list[int]] = torch.randint(vocabulary_of(model), size, generator=draw).tolist()
        self._graph = None
        if settings.graph == "on" and not row.task.is_prompt:
            self._graph = graph_for(self.cache.device)
            self._logits = torch.randn(row.task.batch, vocabulary_of(model), generator=draw).to(self.cache.device)

    def warm_up(self, clock: Clock) -> None:
        """Fill the cache, then one run that does not count."""
        self._refill()
        self.run(clock)
        self.take_back()
        if not self.row.task.is_prompt:
            self.row.bytes_per_token = (weight_bytes(self._model) + self._bytes_read()) / self.row.task.batch

    def run(self, clock: Clock) -> float:
        """Seconds that the row's task takes, until the device has done all of it."""
        torch.set_num_threads(self.row.settings.threads)
        work = self._begun()
        wait_for(self.cache.device)
        started = clock()
        work()
        wait_for(self.cache.device)
        return clock() - started

    def _begun(self) -> Callable[[], None]:
        """What is timed. Raises: UsageError for a step that cannot be recorded, though a graph is asked for."""
        if self.row.task.is_prompt:
            return self._read
        if self._graph is None:
            return self._decode
        sampler = Sampler(Sampling(), self._ids, self.cache.device)
        decoding = Decoding(self._model, self.cache, sampler, self._logits, self._graph)

        def write(tokens: int) -> None:
            for _ in range(tokens):
                decoding.chosen()
                decoding.go_on([True] * self.row.task.batch, is_last=False)

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                write(RECORDED)
            except UserWarning as error:
                raise UsageError(f"--graph on: {error}; leave it out, or use off") from error
        return partial(write, self.row.task.tokens)

    def _read(self) -> None:
        prefill(self._model, self.cache, self._ids)

    def _decode(self) -> None:
        for column in range(self.row.task.tokens):
            prefill(self._model, self.cache, [ids[column : column + 1] for ids in self._ids])

    def take_back(self) -> None:
        """Let the cache be as before the run, or fill it anew where that cannot be taken back."""
        try:
            self.cache.rollback(self.row.task.tokens + (0 if self._graph is None else RECORDED))
        except UsageError:
            self._refill()

    def _refill(self) -> None:
        torch.set_num_threads(self.row.settings.threads)
        fill(self.cache, self._shapes, self.row.task.depth)
        if not self.row.task.is_prompt:
            # The first token after a prompt packs the slots; it belongs to none of the runs.
            prefill(self._model, self.cache, [ids[:1] for ids in self._ids])
            self.cache.rollback(1)

    def _bytes_read(self) -> float:
        """Keys, values and scales of all texts that a step of decode reads, as the mean over a run.

        Of a token that is held exactly, too, the exact copy is read, and its codes are not.
        """
        total = 0.0
        for layer in self.cache.layers:
            most = layer.most_held + self.row.task.tokens if layer.budget is None else layer.budget
            held = [min(layer.most_held + done, most) + 1 for done in range(self.row.task.tokens)]
            tokens = sum(held) / len(held)
            exact = min(tokens, layer.store.exact.sinks + layer.store.exact.newest)
            for part in (layer.store.held_keys(), layer.store.held_values()):
                coded = part.codes.nbytes + (0 if part.scales is None else part.scales.nbytes)
                copies = 0.0 if part.exact is None else exact * part.exact.nbytes / part.exact.shape[2]
                total += copies + (tokens - (exact if copies else 0)) * coded / layer.store.slots
        return total


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a token of decode reads: all but the input embedding, of which it reads one row.

    An embedding that is also the head counts, and so does every expert of a mixture.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        return total
    assert isinstance(embedding, torch.Tensor)
    return total - embedding.nbytes
