"""A server of a model that several processes hold together: rank 0 takes requests, the others follow it."""

import logging
import os
import signal
from collections.abc import Callable
from threading import Event, Thread
from typing import Final

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.scheduler import Scheduler
from windlass.engine.service import Service, Watcher
from windlass.hf.attach import attached
from windlass.serve.run import ServeOptions, scheduler_of, serve

LOG: Final = logging.getLogger("windlass.serve")
GRACE: Final = 5.0  # seconds for which a server whose engine has failed still says so
FAILED: Final = 1  # the exit code


def serve_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: ServeOptions,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until a signal ends rank 0; all processes call this. Returns the exit code: 1 where a rank was lost.

    Then requests under way are told of it, `/health` answers 503 for five seconds, and the server ends. Other ranks
    leave signals to rank 0.

    Raises: UsageError where the address cannot be had; for a view, which would show the heads of one rank; for memory
    for reuse, because what a client deletes there would be deleted on rank 0 alone.
    """
    if asked.is_shown:
        raise UsageError("--view would show the heads of rank 0 alone; leave it out with --tensor-parallel")
    if asked.reuse_bytes:
        raise UsageError("--reuse keeps prefixes of rank 0 alone; leave it out with --tensor-parallel")
    heads = attached(model).heads
    if heads is None or heads.ranks.is_first:
        return _led(model, tokenizer, asked, say)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    scheduler = scheduler_of(model, tokenizer, asked, None)
    scheduler.run()
    return FAILED if scheduler.has_failed else 0


def _led(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: ServeOptions, say: Callable[[str], None]
) -> int:
    engines: list[Scheduler] = []
    has_ended = Event()

    def started(
        model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: ServeOptions, watcher: Watcher
    ) -> Service:
        engines.append(scheduler_of(model, tokenizer, asked, watcher))
        engines[0].start()
        Thread(target=_end_with, args=(engines[0], has_ended), name="windlass-ranks", daemon=True).start()
        return engines[0]

    try:
        code = serve(model, tokenizer, asked, started, say)
    finally:
        has_ended.set()
    return FAILED if engines[0].has_failed else code


def _end_with(engine: Scheduler, has_ended: Event) -> None:
    """End the server, as a signal does, once its engine has failed and some time was left to tell so."""
    engine.wait()
    if engine.has_failed and not has_ended.wait(GRACE):
        LOG.error("the server ends, for another rank was lost")
        os.kill(os.getpid(), signal.SIGTERM)
