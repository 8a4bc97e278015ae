"""An ASGI application called without a server, and one served on loopback for a browser."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Queue
from typing import Any

from windlass.engine.request import EngineStatus, RowStatus

Message = dict[str, Any]
App = Callable[[Mapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

STATUS_NOW = EngineStatus(
    is_alive=True,
    rows=(RowStatus(3, "writing", "lane", 17, 12, 4096),),
    free_rows=1,
    total_rows=2,
    queued=5,
    queued_tokens=77,
    bytes_held=8192,
    bytes_limit=9000,
    prompt_tokens_total=1,
    written_tokens_total=2,
    cached_tokens_total=3,
    errors_total=0,
    cancelled_total=0,
    steps_total=9,
    evicted_total=8,
)


def scope_of(path: str, query: str = "", method: str = "GET") -> dict[str, Any]:
    return {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}


def called(app: App, path: str, query: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an answer that ends by itself."""
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    asyncio.run(asyncio.wait_for(_of(app(scope_of(path, query, method), receive, send)), 20))
    headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
    return messages[0]["status"], headers, b"".join(each["body"] for each in messages[1:])


async def _of(what: Awaitable[None]) -> None:
    await what


@contextmanager
def served(app: App) -> Iterator[str]:
    """The address of a server of `app`: one request a connection, no more than a test needs."""
    opened: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answered(reader, writer)
        writer.close()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {line.partition(": ")[0].lower(): line.partition(": ")[2] for line in head[1:] if line}
        path, _, query = target.partition("?")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if given:
                return given.pop()
            while await reader.read(1000):
                pass
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                lines = [f"HTTP/1.1 {message['status']} OK", "connection: close"]
                lines += [f"{name.decode()}: {value.decode()}" for name, value in message["headers"]]
                writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            else:
                writer.write(message["body"])
            await writer.drain()

        await app({**scope_of(path, query, method), "headers": list(headers.items())}, receive, send)

    ports: Queue[int] = Queue()
    is_over: Queue[Callable[[], object]] = Queue()

    async def run() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        is_over.put(lambda: loop.call_soon_threadsafe(over.set))
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await over.wait()
        server.close()
        await asyncio.sleep(0.05)  # who came last has begun, too
        for writer in opened:
            writer.transport.abort()
        await asyncio.sleep(0.05)  # and now all see that their client has gone

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=20)}"
    finally:
        is_over.get(timeout=20)()
        thread.join()
