"""Middleware before the routes: pure ASGI, so that routes still see when a client has gone."""

import hashlib
import hmac
import logging
import secrets
import traceback
from collections.abc import Callable, Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.serve.errors import ApiError
from windlass.serve.metrics import Metrics
from windlass.serve.stream import ClientGone

OPEN: Final = "/health"  # the one route that asks for no key
TENANT: Final = "windlass.tenant"  # key in a scope: the owner of the request
LOG: Final = logging.getLogger("windlass.serve")


class RequestLog:
    """Gives each request an id, counts its answer, and answers for exceptions that nothing else handled.

    `route_of` returns the route under which a path is counted. The log has the id and where an error came from, but
    never the error's message, which may quote a prompt.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, route_of: Callable[[str], str]) -> None:
        self._app, self._metrics, self._route_of = app, metrics, route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = bare_path(scope)
        number, route = f"req_{secrets.token_hex(12)}", self._route_of(scope["path"])
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._metrics.answered(route, message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", number.encode())]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientGone:
            self._metrics.left()
        except ApiError as error:
            if not has_begun:
                await error.answer(scope["path"])(scope, receive, watched)
        except Exception as error:
            where = "".join(traceback.format_tb(error.__traceback__))
            LOG.error("%s %s: %s\n%s", number, route, type(error).__name__, where)
            if not has_begun:
                ours = ApiError(500, f"an error of the server. Its log has more under {number}", None, "internal_error")
                await ours.answer(scope["path"])(scope, receive, watched)


def bare_path(scope: Scope) -> str:
    """The path of a request without slashes at its end, which routes do without.

    Not of a DELETE: a client that has no id to put behind the slash would delete all.
    """
    path: str = scope["path"]
    return path if scope["method"] == "DELETE" else path.rstrip("/") or "/"


class Authentication:
    """Admits requests whose `Host` is one of `hosts`, and which bring one of `keys`, if there are any.

    `is_public` tells whether a path needs no key. `/health` never needs one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        hosts: Iterable[str] | None,
        is_public: Callable[[str], bool],
        salt: bytes | None = None,
    ) -> None:
        self._is_public = is_public
        self._app, self._hosts = app, None if hosts is None else frozenset(hosts)
        self._salt = salt or secrets.token_bytes(16)  # names of tenants reveal no keys
        self._keys = [self._digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            self._check_host(headers.get(b"host", b""))
            is_open = scope["path"] == OPEN or self._is_public(scope["path"])
            scope[TENANT] = "" if is_open else self._tenant(headers)
        await self._app(scope, receive, send)

    def _check_host(self, host: bytes) -> None:
        # A page in a browser may let its own name lead to this machine, and read our answers (DNS rebinding).
        if self._hosts is not None and _name_of(host.decode("latin-1")) not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            raise ApiError(403, f"this server is called {names}. Call it so, or start it with a key", None, "bad_host")

    def _tenant(self, headers: dict[bytes, bytes]) -> str:
        """The tenant of a request, empty without keys. Raises: ApiError where there is no key that fits."""
        if not self._keys:
            return ""
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        bearer = given.strip() if kind.lower() == b"bearer" else b""
        digest = self._digest(bearer or headers.get(b"x-api-key", b"").strip())
        # Compares all of them, so that timing reveals nothing.
        fits = [hmac.compare_digest(digest, each) for each in self._keys]
        if not any(fits):
            raise ApiError(
                401,
                "no key that fits. Send the header Authorization: Bearer KEY, or x-api-key: KEY",
                None,
                "invalid_api_key",
            )
        return digest.hex()[:16]

    def _digest(self, key: bytes) -> bytes:
        return hashlib.sha256(self._salt + key).digest()


class BodyLimit:
    """Refuses a body of more than `most` bytes, by its `content-length` or as it comes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = dict(scope["headers"]).get(b"content-length", b"")
        if told.isdigit() and (len(told) > 18 or int(told) > self._most):
            raise self._too_large()
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._most} bytes. Send less", None, "body_too_large")


def _name_of(host: str) -> str:
    """The name in a `Host` header, without the port."""
    if host.startswith("["):
        return host.partition("]")[0][1:].lower()
    return host.partition(":")[0].lower()
