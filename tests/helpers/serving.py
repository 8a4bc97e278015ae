"""A server on loopback whose engine writes a test's script, and a raw client of it."""

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic, sleep
from typing import Any

import openai

from tests.helpers.chats import TEMPLATE, with_template
from windlass.cache.options import CacheOptions
from windlass.engine.request import (
    EngineDeadError,
    EngineLimits,
    EngineStatus,
    Event,
    Failure,
    Finish,
    Piece,
    Progress,
    QueueFullError,
    Request,
    RowStatus,
    Ticket,
    Usage,
)
from windlass.engine.scheduler import Service
from windlass.serve.app import Server
from windlass.serve.errors import ServerSettings
from windlass.serve.prompts import PromptTokenizer
from windlass.serve.run import HttpServer, bind

TOOLS = "{% if tools %}[tools]{{ tools | tojson }}\n{% endif %}"
NAME, VOCABULARY = "finder-3m", 2048
OPTIONS = CacheOptions(budget=96, policy="recent")
Script = Callable[[Request], Iterator[Event | None]]


@cache
def words() -> PromptTokenizer:
    """The shipped model's, under a template that knows tools."""
    return PromptTokenizer(with_template(TEMPLATE.replace("{% for", TOOLS + "{% for", 1)), [1], VOCABULARY)


def usage(request: Request, written: int) -> Usage:
    """Numbers that are all different, so that one in another's place shows."""
    prompt = len(request.prompt)
    return Usage(prompt, written, 3, prompt + written, 7, prompt + written - 7, 2, 4096)


def says(text: str) -> Script:
    """Writes `text`, sign by sign, after some progress."""

    def script(request: Request) -> Iterator[Event | None]:
        total = len(request.prompt)
        yield Progress(1, total)
        yield Progress(total, total)
        for at, sign in enumerate(text[: request.max_tokens]):
            yield Piece(10 + at, sign)
        yield Finish("stop" if len(text) <= request.max_tokens else "length", usage(request, len(text)))

    return script


def events(*given: Event | None) -> Script:
    """Yield these events. None waits until the request is cancelled or `release` is called."""
    return lambda _: iter(given)


class ScriptedService(Service):
    """Answers each request by a script, in a thread of its own. The received requests are in `requests`."""

    def __init__(self, script: Script, limits: EngineLimits | None = None) -> None:
        self.script, self.limits, self.options = script, limits or EngineLimits(), OPTIONS
        self.requests: list[Request] = []
        self.is_alive, self.is_full, self.stopped = True, False, list[float]()
        self._lock, self._released = threading.Lock(), threading.Event()
        self._under_way: dict[int, Ticket] = {}
        self._cancels: dict[int, threading.Event] = {}
        self.cancelled: dict[int, float] = {}

    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
        return [self._taken(request, notify) for request in requests]

    def _taken(self, request: Request, notify: Callable[[], None] | None) -> Ticket:
        if not self.is_alive:
            raise EngineDeadError("the engine has stopped after 3 errors in a row")
        if self.is_full:
            raise QueueFullError("64 requests wait already", 7.0)
        with self._lock:
            self.requests.append(request)
            ticket = Ticket(len(self.requests), request, notify)
            self._under_way[ticket.number] = ticket
            self._cancels[ticket.number] = threading.Event()
        threading.Thread(target=self._write, args=(ticket,), daemon=True).start()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        with self._lock:
            self.cancelled.setdefault(ticket.number, monotonic())
            self._under_way.pop(ticket.number, None)
        self._cancels[ticket.number].set()

    def status(self) -> EngineStatus:
        with self._lock:
            rows = tuple(RowStatus(each.number, "writing", "a", 5, 4, 4096) for each in self._under_way.values())
        busy = len(rows)
        return EngineStatus(self.is_alive, rows, 4 - busy, 4, 0, 0, 8192, 16384, 11, 12, 13, 0, 14, 15, 16)

    def stop(self, seconds: float = 0.0) -> None:
        self.stopped.append(seconds)
        until = monotonic() + seconds
        while self._under_way and monotonic() < until:
            sleep(0.01)
        for ticket in list(self._under_way.values()):
            ticket.put(Failure("the server ends", is_ours=True))
        self.is_alive = False

    def release(self) -> None:
        """Let all scripts go on."""
        self._released.set()

    def is_idle(self, seconds: float = 10.0) -> bool:
        """Return True if no request is under way, now or soon."""
        return soon(lambda: not self._under_way, seconds)

    def _write(self, ticket: Ticket) -> None:
        cancelled = self._cancels[ticket.number]
        for event in self.script(ticket.request):
            while event is None and not (cancelled.is_set() or self._released.is_set()):
                cancelled.wait(0.01)
            if cancelled.is_set():
                return
            if event is not None:
                ticket.put(event)
        with self._lock:
            self._under_way.pop(ticket.number, None)


def soon(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Return True if it holds, now or within so many seconds."""
    until = monotonic() + seconds
    while not holds():
        if monotonic() > until:
            return False
        sleep(0.005)
    return True


@dataclass(frozen=True)
class Served:
    """A running server: its address, and its parts."""

    port: int
    service: ScriptedService
    http: HttpServer
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai_client(self) -> openai.OpenAI:
        """OpenAI's own, which asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


@contextmanager
def serving(service: ScriptedService, known: PromptTokenizer | None = None, **settings: Any) -> Iterator[Served]:
    """A server on a free port of loopback, until the end of the block, with other words if they are given."""
    listener = bind("127.0.0.1", 0)
    server = Server(service, known or words(), ServerSettings(NAME, **settings))
    http = HttpServer(server)
    thread = threading.Thread(target=http.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert soon(lambda: http.started, 10.0)
        yield Served(listener.getsockname()[1], service, http, server)
    finally:
        service.release()
        http.should_exit = http.force_exit = True
        thread.join(10.0)
        assert not thread.is_alive()


@dataclass
class Answer:
    """A raw answer: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes
    events: list[bytes] = field(default_factory=list)

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """A client that shows each byte, and leaves as a test wants it to."""

    def __init__(self, port: int, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(10.0)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self._got = b""

    def send(self, method: str, path: str, body: bytes = b"", /, **headers: str) -> None:
        """A request. Headers are named with _ for -."""
        lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
        lines |= {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)

    def post(self, path: str, document: Any, **headers: str) -> None:
        self.send("POST", path, json.dumps(document).encode(), **headers)

    def until(self, mark: bytes) -> bytes:
        """All bytes up to `mark`, which is among them."""
        while mark not in self._got:
            came = self.socket.recv(65536)
            assert came, f"closed before {mark!r}: {self._got[-300:]!r}"
            self._got += came
        given, _, self._got = self._got.partition(mark)
        return given + mark

    def answer(self) -> Answer:
        """The whole of one answer."""
        first, *lines = self.until(b"\r\n\r\n").decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int(self.until(b"\r\n"), 16):
                body += self._exactly(size + 2)[:-2]
            self.until(b"\r\n")
        else:
            body = self._exactly(int(headers.get("content-length", 0)))
        return Answer(status, headers, body)

    def answer_rest(self) -> bytes:
        """All bytes to the end of a chunked answer."""
        rest = self._got
        while not rest.endswith(b"\r\n0\r\n\r\n"):
            came = self.socket.recv(1 << 20)
            assert came, "closed before the end"
            rest += came
        return rest

    def close(self, is_reset: bool = False) -> None:
        """Leave by FIN, or by RST."""
        if is_reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def is_closed(self) -> bool:
        """Wait for the server to close the connection. Return True if it did."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def _exactly(self, size: int) -> bytes:
        while len(self._got) < size:
            came = self.socket.recv(65536)
            assert came, "closed in the middle of a body"
            self._got += came
        given, self._got = self._got[:size], self._got[size:]
        return given


def ask(port: int, path: str, document: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own: GET without a document."""
    client = RawClient(port)
    try:
        if document is None:
            client.send("GET", path, b"", **headers)
        else:
            client.post(path, document, **headers)
        return client.answer()
    finally:
        client.close()


def chat(**fields: Any) -> dict[str, Any]:
    """A request for a chat."""
    return {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], **fields}


def complete(**fields: Any) -> dict[str, Any]:
    """A request for a completion."""
    return {"model": NAME, "prompt": "Hello there", **fields}
