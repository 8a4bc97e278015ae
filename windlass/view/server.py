"""The page and its frames over HTTP: mounted in a server, or alone for a recording."""

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Condition, Lock
from time import monotonic
from typing import Any, Final, NamedTuple, final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from transformers import PreTrainedTokenizerBase

from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.files import read_bytes
from windlass.engine.request import EngineStatus
from windlass.engine.scheduler import Watcher
from windlass.view.recording import (
    HEADER,
    MAGIC,
    STATUS,
    VERSION,
    Camera,
    Encoder,
    Snapshot,
    about,
    json_record,
    read_recording,
)

INDEX: Final = "index.html"
PREFIX: Final = "/view/"
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FRAMES_TYPE: Final = "application/octet-stream"
HEADERS: Final[Mapping[str, str]] = {
    # The page shows texts of a model and of other clients, which must neither run as code nor leave the page.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageFile(NamedTuple):
    """The response to a browser for a path."""

    kind: str
    content: bytes


@cache
def page_files() -> Mapping[str, PageFile]:
    """All files of the page by the path that they are asked for: `/`, and `/view/NAME`."""
    folder = files("windlass.view") / "page"
    found = {}
    for each in folder.iterdir():
        kind = KINDS.get(f".{each.name.rpartition('.')[2]}")
        if kind is not None:
            found["/" if each.name == INDEX else PREFIX + each.name] = PageFile(kind, each.read_bytes())
    return found


HOST: Final = "127.0.0.1"
OWN_NAMES: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
IDLE_S: Final = 30.0  # a connection that says nothing is closed


class RecordingServer(ThreadingHTTPServer):
    """Serves the page and the recording at `path`, and no other file. Port 0 takes any free one.

    Raises: RecordingError for a file that cannot be replayed, and UsageError for a port that is taken.
    """

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        read_recording(path).frames  # noqa: B018  # refused here, in words, and not in the browser
        self.name, self.content = path.name, read_bytes(path, f"recording {path}")
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"port {port} of {HOST} cannot be taken ({error}). Choose another with --port") from None

    def handle_error(self, request: object, client_address: object) -> None:
        """Print the error of a request, but for a browser that closed its connection before the answer's end."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def address(self) -> str:
        """The address for a browser."""
        return f"http://{HOST}:{self.server_address[1]}/?replay={quote(self.name)}"


class _Handler(BaseHTTPRequestHandler):
    server: RecordingServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer with a file of the page, or the recording."""
        # Another page whose name was pointed here must not read it.
        if OWN_NAMES.fullmatch(self.headers.get("Host", "")) is None:
            self.send_error(421)
            return
        try:
            path = urlsplit(self.path).path
        except ValueError:
            self.send_error(400)
            return
        if path == f"{PREFIX}mode":
            self._answer("application/json", json.dumps({"live": False, "replays": [self.server.name]}).encode())
        elif path.startswith(f"{PREFIX}replay/") and unquote(path.removeprefix(f"{PREFIX}replay/")) == self.server.name:
            self._answer(FRAMES_TYPE, self.server.content)
        elif path in page_files():
            self._answer(*page_files()[path])
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


INTERVAL: Final = 0.2  # seconds between two frames of a viewer
COST: Final = 0.01  # share of time that copying may take
GONE: Final = 2.0  # seconds without a step after which a viewer of the newest text looks at another one
TEXTS: Final = 64  # texts that are remembered


class RowSnapshot(NamedTuple):
    """Frames for a viewer: the header of the text, and the tokens of its row."""

    header: dict[str, Any]
    snapshot: Snapshot


class Viewer:
    """One who looks at a text of this `number`, or, with None, at the newest one. `known`: tokens that were told.

    `notify` is called by the engine's thread when there is something to `take`.
    """

    def __init__(self, number: int | None, notify: Callable[[], None] | None) -> None:
        self.number, self.known = number, 0
        self._notify, self._changed = notify, Condition()
        self._latest: RowSnapshot | None = None
        self._current, self._given, self._due = -1, 0.0, 0.0

    def wants(self, number: int, now: float, is_last: bool) -> bool:
        """Return True if a step of this text is to be shown."""
        if self.number is not None:
            is_asked = number == self.number
        else:
            is_asked = number >= self._current or now - self._given > GONE
        return is_asked and (is_last or now >= self._due)

    def put(self, seen: RowSnapshot, now: float, due: float) -> None:
        """Offer a new frame, which replaces one that was not taken. No more are taken before `due`."""
        with self._changed:
            if seen.snapshot.number != self._current:
                self.known = 0
            self._latest, self._current = seen, seen.snapshot.number
            self._given, self._due = now, due
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def take(self, timeout: float = 0.0) -> RowSnapshot | None:
        """The newest frame that was not taken, or None where none comes within `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._latest is not None, timeout)
            taken, self._latest = self._latest, None
            return taken

    @property
    def current(self) -> int:
        """The number of the text that is shown, -1 before the first."""
        return self._current


@final
class SchedulerWatcher(Watcher):
    """Rows that a scheduler shows. `if watch.is_watched: watch.step(...)` is all that it calls, after a step.

    A viewer gets at most five frames a second, fewer where copying one takes more than a hundredth of the time.
    """

    def __init__(self) -> None:
        self.is_watched = False
        self._viewers: list[Viewer] = []
        self._lock = Lock()
        self._texts: dict[int, _ViewedText] = {}

    def attach(self, number: int | None = None, notify: Callable[[], None] | None = None) -> Viewer:
        """Begin to watch, from any thread. `detach` ends it."""
        viewer = Viewer(number, notify)
        with self._lock:
            self._viewers = [*self._viewers, viewer]
            self.is_watched = True
        return viewer

    def detach(self, viewer: Viewer) -> None:
        """Stop watching. It may be called again."""
        with self._lock:
            self._viewers = [each for each in self._viewers if each is not viewer]
            self.is_watched = bool(self._viewers)
            if not self._viewers:
                self._texts = {}  # a cache that only we know would stay alive

    def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
        """Show the contents of a row to the viewers of the text of this number, where one of them is due.

        Called by the thread of the engine, between two passes. The state after the last step is always shown.
        """
        now = monotonic()
        wanting = [viewer for viewer in self._viewers if viewer.wants(number, now, is_last)]
        if wanting:
            self._show(cache, row, number, wanting, now)
        if is_last:
            self._texts.pop(number, None)
        if not self.is_watched:  # the last viewer may have left meanwhile
            self._texts = {}

    def _show(self, cache: CacheState, row: int, number: int, wanting: list[Viewer], now: float) -> None:
        known = min(viewer.known if viewer.current == number else 0 for viewer in wanting)
        text = self._text(cache, row, number)
        seen = RowSnapshot(text.header, text.camera.snapshot(known))
        took = monotonic() - now
        for viewer in wanting:
            viewer.put(seen, now, now + max(INTERVAL, took / COST))

    def _text(self, cache: CacheState, row: int, number: int) -> "_ViewedText":
        text = self._texts.get(number)
        if text is None or text.cache is not cache or text.row != row:
            if len(self._texts) >= TEXTS:
                del self._texts[next(iter(self._texts))]
            text = self._texts[number] = _ViewedText(cache, row, about(cache, number), Camera(cache, row, number))
        return text


class _ViewedText(NamedTuple):
    """A text with viewers: its place, and the frames that all viewers share."""

    cache: CacheState
    row: int
    header: dict[str, Any]
    camera: Camera


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
STATUS_S: Final = 0.5  # between two records of the server's state
MOST_VIEWERS: Final = 8
NUMBER_DIGITS: Final = 12


class ViewApp:
    """Answers GET for the page's files, `/view/mode` and `/view/frames`, and 404 for any other path.

    `/view/frames` is a stream of records for as long as the client reads it, `?text=NUMBER` of one text, by default of
    the newest one. It shows other users' prompts, so protect it with the API key, where there is one.
    `tells_prompts`: False serves only the page, and 403 for frames.
    """

    def __init__(
        self,
        watch: SchedulerWatcher,
        tokenizer: PreTrainedTokenizerBase | None,
        status: Callable[[], EngineStatus] | None = None,
        tells_prompts: bool = True,
    ) -> None:
        self._watch, self._tokenizer, self._status, self._tells_prompts = watch, tokenizer, status, tells_prompts
        self._viewers = 0

    @staticmethod
    def has(path: str) -> bool:
        """Return True if a path belongs to the view."""
        return path in page_files() or path in (f"{PREFIX}mode", f"{PREFIX}frames")

    @staticmethod
    def is_public(path: str) -> bool:
        """Return True if a path has nothing but the page itself, which needs no key."""
        return path in page_files() or path == f"{PREFIX}mode"

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request. Other scopes than HTTP are none of ours."""
        if scope["type"] != "http":
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "text/plain", b"only GET\n")
        elif path == f"{PREFIX}frames":
            await self._frames(scope, receive, send)
        elif path == f"{PREFIX}mode":
            mode = {"live": self._tells_prompts, "replays": []}
            await _answer(send, 200, "application/json", json.dumps(mode).encode())
        elif path in page_files():
            await _answer(send, 200, *page_files()[path])
        else:
            await _answer(send, 404, "text/plain", b"not found\n")

    async def _frames(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("text", [""])[0]
        if not self._tells_prompts:
            await _answer(send, 403, "text/plain", b"this server shows no prompts\n")
            return
        if asked and not (asked.isascii() and asked.isdigit() and len(asked) <= NUMBER_DIGITS):
            await _answer(send, 400, "text/plain", b"text is the number of a request\n")
            return
        if self._viewers >= MOST_VIEWERS:
            await _answer(send, 503, "text/plain", b"too many look already\n")
            return
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        viewer = self._watch.attach(int(asked) if asked else None, notify)
        self._viewers += 1
        gone = asyncio.create_task(disconnected(receive))
        try:
            await _start(send, 200, FRAMES_TYPE)
            await self._sent(viewer, changed, gone, send)
            with suppress(OSError):
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._viewers -= 1
            self._watch.detach(viewer)
            gone.cancel()

    async def _sent(self, viewer: Viewer, changed: asyncio.Event, gone: "asyncio.Task[None]", send: Send) -> None:
        """Send records as they come until the client is gone."""
        texts = _Texts(viewer, self._tokenizer)
        data = MAGIC
        while not gone.done():
            if self._status is not None:
                data += json_record(STATUS, asdict(self._status()))
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            waiting = asyncio.create_task(changed.wait())
            await asyncio.wait({waiting, gone}, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            changed.clear()
            seen = viewer.take()
            data = b"" if seen is None else await asyncio.to_thread(texts.records, seen)


class _Texts:
    """The records of the texts that a viewer sees, one after another."""

    def __init__(self, viewer: Viewer, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._viewer, self._tokenizer = viewer, tokenizer
        self._encoder, self._number = Encoder(tokenizer), -1

    def records(self, seen: RowSnapshot) -> bytes:
        """The next records, with a header first where the text is another one."""
        start = b""
        if seen.snapshot.number != self._number:
            self._encoder, self._number = Encoder(self._tokenizer), seen.snapshot.number
            start = json_record(HEADER, {"version": VERSION, **seen.header})
        frame = self._encoder.frame(seen.snapshot)
        if seen.snapshot.number == self._viewer.current:
            self._viewer.known = self._encoder.known
        return start + frame


async def disconnected(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, code: int, kind: str, length: int | None = None) -> None:
    told = {**HEADERS, "Content-Type": kind} | ({} if length is None else {"Content-Length": str(length)})
    headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": code, "headers": headers})


async def _answer(send: Send, code: int, kind: str, content: bytes) -> None:
    await _start(send, code, kind, len(content))
    await send({"type": "http.response.body", "body": content})
