"""Schedulers over tiny models, and the results of requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import Text
from windlass.cache.options import CacheOptions
from windlass.engine.disk import DiskTier
from windlass.engine.request import EngineLimits, EngineStatus, Event, Failure, Finish, Piece, Request, Ticket
from windlass.engine.scheduler import Scheduler
from windlass.engine.text import Stops
from windlass.hf.kv_cache import KVCache

PATIENCE = 60.0  # seconds: nothing here takes as long
OPTIONS: dict[str, Any] = {"budget": 17, "sinks": 2, "window": 3, "chunk": 13, "rollback": 0}


def options_of(**options: Any) -> CacheOptions:
    return CacheOptions(**OPTIONS | options)


def request_of(ids: list[int], max_tokens: int = 6, **given: Any) -> Request:
    """A request without a stop. `options` of the cache may be given, as a `CacheOptions`."""
    options = given.pop("options", options_of())
    return Request(tuple(ids), options, max_tokens, given.pop("stops", Stops(frozenset())), **given)


@contextmanager
def running(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: int = 3,
    limits: EngineLimits | None = None,
    reuse_bytes: int = 0,
    kinds: list[tuple[int, CacheOptions]] | None = None,
    disk: DiskTier | None = None,
) -> Iterator[Scheduler]:
    """A scheduler whose thread runs until the end of the block."""
    scheduler = Scheduler(model, tokenizer, kinds or [(rows, options_of())], limits, reuse_bytes, disk=disk)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()


def events_of(ticket: Ticket) -> list[Event]:
    """All of them, once the last one is there."""
    events: list[Event] = []
    while not events or not isinstance(events[-1], Finish | Failure):
        more = ticket.take(PATIENCE)
        assert more, "the engine gives no events"
        events += more
    return events


def tokens_of(ticket: Ticket) -> list[int]:
    """The tokens of a request that must not fail."""
    events = events_of(ticket)
    assert isinstance(events[-1], Finish), events[-1]
    return [event.token for event in events if isinstance(event, Piece)]


def alone(model: PreTrainedModel, ids: list[int], options: CacheOptions, count: int) -> list[int]:
    """Greedy text of one request, by the library's own prefill and passes of the model."""
    cache = KVCache.from_options(model, options)
    logits, found = windlass.prefill(model, cache, [ids]), list[int]()
    while True:
        found.append(int(logits.argmax()))
        if len(found) == count:
            return found
        with torch.no_grad():
            logits = model(torch.tensor([[found[-1]]]), past_key_values=cache).logits[:, -1]


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.002)


def rows_of(text: Text, *lengths: int) -> list[list[int]]:
    ids = text(max(lengths), len(lengths))
    return [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]


def bytes_told(engine: Scheduler) -> list[int]:
    """A list to which the engine adds the bytes that it holds, after every turn from now on."""
    held: list[int] = []
    told = engine._told

    def noted() -> EngineStatus:
        status = told()
        held.append(status.bytes_held)
        return status

    engine._told = noted  # type: ignore[method-assign]
    return held
