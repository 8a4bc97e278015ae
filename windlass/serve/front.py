"""What clients of replicas talk to: it hands each request to a replica, and the answer through, as it comes.

An answer is read from the replica no faster than the client takes it, so the replica still sees a client that takes
nothing; and a client that goes is gone for the replica, too.
"""

import asyncio
import hashlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from multidict import CIMultiDict
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.errors import ApiError, JsonAnswer, RequestLimits, event, stopping
from windlass.serve.middleware import BodyLimit, bare_path
from windlass.serve.stream import ClientGone, unless_gone

CONNECT_S: Final = 5.0


@dataclass(eq=False)
class Place:
    """Where a replica stands. `session` is None while none does; `under_way` are the tasks that wait for it."""

    number: int
    url: str = ""
    session: aiohttp.ClientSession | None = None
    under_way: set["asyncio.Task[None]"] = field(default_factory=set)

    def open(self, url: str) -> None:
        """A replica stands at `url`, from now on."""
        self.url = url
        self.session = aiohttp.ClientSession(
            # A connection that is kept may be the one that a replica has closed as it died.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """It stands there no more: whoever still waits for an answer of it is cancelled, for it may never come."""
        if self.session is not None:
            session, self.session = self.session, None
            for task in self.under_way:
                task.cancel()
            await session.close()


class Places(ABC):
    """All of them, by number."""

    @property
    @abstractmethod
    def places(self) -> Sequence[Place]:
        """Each place, whether a replica stands there or not."""

    @property
    def live(self) -> list[int]:
        """The numbers of those that can be asked."""
        return [each.number for each in self.places if each.session is not None]


SESSION: Final = "x-session-id"
PREFIX: Final = 1024  # signs of a prompt that count


def key_of(headers: Mapping[str, str], body: bytes) -> str:
    """The key of a request: its header `X-Session-Id`, or its field `user`, or how its prompt begins.

    Of messages, those up to the first of a user count, so that the turns of a conversation have one key.
    """
    if headers.get(SESSION):
        return f"session {headers[SESSION]}"
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(given, dict):
        return ""
    if isinstance(given.get("user"), str) and given["user"]:
        return f"user {given['user']}"
    turns = next((given[name] for name in ("messages", "input") if isinstance(given.get(name), list)), None)
    begun = given.get("prompt", given.get("input", "")) if turns is None else _opening(turns)
    return "prompt " + (begun if isinstance(begun, str) else json.dumps(begun))[:PREFIX]


def ranked(key: str, numbers: Iterable[int]) -> list[int]:
    """These replicas, the one that the key belongs to first, and after it those that stand in for it."""
    return sorted(numbers, key=lambda number: hashlib.sha256(f"{number} {key}".encode("utf-8", "replace")).digest())


def _opening(messages: list[Any]) -> list[Any]:
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages[:1]


# Of one connection, not of the message (RFC 9110, 7.6.1), or written anew.
HOP: Final = frozenset(
    (
        "connection",
        "date",
        "expect",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
NUMBERED: Final = "/replicas/"
OF_ONE: Final = ("/metrics", "/v1/cache")  # what each replica tells of itself
RETRY_S: Final = 1.0
STREAM: Final = "text/event-stream"


class Front:
    """The application in front of replicas, each of which takes up to `most` requests at once."""

    def __init__(self, replicas: Places, most: int, limits: RequestLimits) -> None:
        self._replicas, self._most, self._limits = replicas, most, limits
        self.is_open = True
        self._app: ASGIApp = BodyLimit(self._answer, limits.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._app(scope, receive, send)
        except ClientGone:
            pass
        except ApiError as error:
            answer = error.answer()
            answer.headers["x-request-id"] = f"req_{secrets.token_hex(12)}"
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = bare_path(scope)
        if path in ("/health", "/ready"):
            await self._health(path == "/ready")(scope, receive, send)
            return
        if not self.is_open:
            raise stopping()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = b"".join([part async for part in _parts(receive)])
        except TimeoutError:
            told = f"the body did not come within {self._limits.body_seconds:g} s"
            raise ApiError(408, told, None, "body_timeout") from None
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        if path.startswith(NUMBERED):
            number, _, path = path.removeprefix(NUMBERED).partition("/")
            chosen = [self._numbered(number)]
        elif path in OF_ONE or path.startswith(f"{OF_ONE[1]}/"):
            raise ApiError(404, f"each replica has its own; ask {NUMBERED}0{path}", None, "unknown_route")
        else:
            chosen = [self._replicas.places[each] for each in ranked(key_of(headers, body), self._replicas.live)]
        target = (
            "/" + path.lstrip("/") + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        )
        await unless_gone(receive, self._handed(chosen, scope["method"], target, headers, body, send))

    async def _handed(
        self, places: list[Place], method: str, target: str, headers: CIMultiDict[str], body: bytes, send: Send
    ) -> None:
        """Ask the first of `places` that is there.

        Raises: ApiError where none is, or it dies before it has answered; or OSError in the midst of an answer.
        """
        for place in places:
            if place.session is None:
                continue
            if len(place.under_way) >= self._most:
                told = f"{len(place.under_way)} requests wait for the replica of this session already"
                raise ApiError(503, told, None, "replica_busy", RETRY_S)
            task = asyncio.create_task(self._passed(place, place.session, method, target, headers, body, send))
            place.under_way.add(task)
            try:
                await task
                return
            except aiohttp.ClientConnectorError:
                continue  # it has just died, and knows nothing of this request
            finally:
                place.under_way.discard(task)
        raise ApiError(503, "no replica is there; they are started again", None, "no_replica", 5 * RETRY_S)

    async def _passed(
        self,
        place: Place,
        session: aiohttp.ClientSession,
        method: str,
        target: str,
        headers: CIMultiDict[str],
        body: bytes,
        send: Send,
    ) -> None:
        died = ApiError(503, f"replica {place.number} died; send it again", None, "replica_died", RETRY_S)
        is_stream = has_begun = False
        kept = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP)
        try:
            async with session.request(
                method, place.url + target, data=body or None, headers=kept, allow_redirects=False
            ) as answer:
                has_begun = True
                is_stream = answer.headers.get("content-type", "").startswith(STREAM)
                passed = [(name, value) for name, value in answer.raw_headers if name.decode().lower() not in HOP]
                passed.append((b"x-replica", str(place.number).encode()))
                await send({"type": "http.response.start", "status": answer.status, "headers": passed})
                async for piece in answer.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, OSError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and place.session is session:
                raise  # the client has gone, and the replica has not
            if not has_begun:
                raise died from error
            if not is_stream:
                # The connection is closed before the length that was told: no client takes that for whole.
                raise ConnectionError("the replica died in the midst of an answer") from error
            await send({"type": "http.response.body", "body": b"\n\n" + event(died.document()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _numbered(self, number: str) -> Place:
        places = self._replicas.places
        if not number.isdecimal() or len(number) > 6 or int(number) >= len(places):
            raise ApiError(
                404, f"there is no replica {number[:20]!r}; they are 0 to {len(places) - 1}", None, "unknown_route"
            )
        return places[int(number)]

    def _health(self, is_ready: bool) -> JsonAnswer:
        states = {str(each.number): "ok" if each.session is not None else "down" for each in self._replicas.places}
        if is_ready and not self.is_open:
            raise stopping()
        if not self._replicas.live:
            raise ApiError(503, "no replica is there; they are started again", None, "no_replica", 5 * RETRY_S)
        return JsonAnswer({"status": "ready" if is_ready else "ok", "replicas": states})


async def _parts(receive: Receive) -> AsyncIterator[bytes]:
    """The pieces of a body. Raises: ClientGone where the client leaves before its end."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
