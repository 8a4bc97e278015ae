"""An engine that stands still where a test says, and a server over it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jaxtyping
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.state import CacheState
from windlass.engine.request import EngineStatus, Request, Ticket
from windlass.engine.scheduler import Scheduler, Service, Watcher
from windlass.hf.attach import attached
from windlass.serve.app import Server
from windlass.serve.errors import ServerSettings
from windlass.serve.prompts import PromptTokenizer
from windlass.serve.run import HttpServer, bind

PATIENCE = 30.0  # seconds: nothing here takes as long


class Gate(Watcher):
    """Counts the model's passes since `arm`, and lets the engine's thread wait inside of one of them, or right after
    it, until `open`."""

    is_watched = True

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes = 0
        self._halt: tuple[str, int] | None = None
        self._reached, self._opened = threading.Event(), threading.Event()
        self._hook = attached(model).decoder.outer.register_forward_pre_hook(self._begins)

    def arm(self, place: str, number: int) -> None:
        """Let the engine wait `inside` of the pass of this number, the next one being 1, or `after` it."""
        self.passes = 0
        self._reached.clear()
        self._opened.clear()
        self._halt = place, number

    def wait(self) -> None:
        """Return when the engine waits."""
        assert self._reached.wait(PATIENCE), f"the engine never came there, {self.passes} passes"

    def open(self) -> None:
        """Let the engine go on."""
        self._halt = None
        self._opened.set()

    def remove(self) -> None:
        """Leave the model as it was."""
        self.open()
        self._hook.remove()

    def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
        self._meet("after")

    def _begins(self, *_: Any) -> None:
        self.passes += 1
        self._meet("inside")

    def _meet(self, place: str) -> None:
        if self._halt == (place, self.passes):
            self._reached.set()
            assert self._opened.wait(PATIENCE), "nobody opened the gate"


class Told(Service):
    """A scheduler that counts requests."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self.limits, self.options = scheduler, scheduler.limits, scheduler.options
        self.submitted, self.cancelled = 0, 0

    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
        tickets = self._scheduler.submit_all(requests, notify)
        self.submitted += len(tickets)
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        self._scheduler.cancel(ticket)
        self.cancelled += 1

    def has_taken(self, requests: int) -> bool:
        """Return True if so many requests have come."""
        return self.submitted >= requests

    def status(self) -> EngineStatus:
        return self._scheduler.status()

    def stop(self, seconds: float = 0.0) -> None:
        self._scheduler.stop(seconds)


@contextmanager
def listening(service: Service, tokenizer: PreTrainedTokenizerBase, vocabulary: int, name: str) -> Iterator[int]:
    """The port of a server over `service`, which ends with the block."""
    jaxtyping.config.update("jaxtyping_disable", True)  # of the engine's thread, which reads one setting for all
    listener = bind("127.0.0.1", 0)
    http = HttpServer(Server(service, PromptTokenizer(tokenizer, [1], vocabulary), ServerSettings(name)))
    listener.listen()  # clients may come before the thread runs
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        http.end()
        thread.join(PATIENCE)
        assert not thread.is_alive()
