"""The page and its frames as an ASGI application, for a server to mount; nothing but asyncio is needed."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final
from urllib.parse import parse_qs

from transformers import PreTrainedTokenizerBase

from windlass.engine.status import EngineStatus
from windlass.view.frames import Encoder
from windlass.view.page_files import FRAMES_TYPE, HEADERS, PREFIX, page_files
from windlass.view.watch import Seen, Viewer, Watch
from windlass.view.wire import HEADER, MAGIC, STATUS, VERSION, json_record

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
STATUS_S: Final = 0.5  # between two records of the server's state
MOST_VIEWERS: Final = 8
NUMBER_DIGITS: Final = 12


class ViewApp:
    """Answers GET for the page's files, `/view/mode` and `/view/frames`; 404 for any other path.

    `/view/frames` is a stream of records for as long as the client reads it, `?text=NUMBER` of one text, else of the
    newest one. It shows what others asked: whoever mounts this lets nobody there without a key, where there is one.
    `tells_prompts`: false gives out the page alone, and 403 for frames.
    """

    def __init__(
        self,
        watch: Watch,
        tokenizer: PreTrainedTokenizerBase | None,
        status: Callable[[], EngineStatus] | None = None,
        tells_prompts: bool = True,
    ) -> None:
        self._watch, self._tokenizer, self._status, self._tells_prompts = watch, tokenizer, status, tells_prompts
        self._viewers = 0

    @staticmethod
    def has(path: str) -> bool:
        """Whether a path is one of ours."""
        return path in page_files() or path in (f"{PREFIX}mode", f"{PREFIX}frames")

    @staticmethod
    def is_public(path: str) -> bool:
        """Whether a path has nothing but the page itself, which needs no key."""
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
        gone = asyncio.create_task(_gone(receive))
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
        """Send what comes until the client is gone."""
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

    def records(self, seen: Seen) -> bytes:
        """The next records; a header first where the text is another one."""
        start = b""
        if seen.snapshot.number != self._number:
            self._encoder, self._number = Encoder(self._tokenizer), seen.snapshot.number
            start = json_record(HEADER, {"version": VERSION, **seen.header})
        frame = self._encoder.frame(seen.snapshot)
        if seen.snapshot.number == self._viewer.current:
            self._viewer.known = self._encoder.known
        return start + frame


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, code: int, kind: str, length: int | None = None) -> None:
    told = {**HEADERS, "Content-Type": kind} | ({} if length is None else {"Content-Length": str(length)})
    headers = [(name.lower().encode(), value.encode()) for name, value in told.items()]
    await send({"type": "http.response.start", "status": code, "headers": headers})


async def _answer(send: Send, code: int, kind: str, content: bytes) -> None:
    await _start(send, code, kind, len(content))
    await send({"type": "http.response.body", "body": content})
