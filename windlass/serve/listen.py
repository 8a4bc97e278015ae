"""The socket, and the server on it, from its start to an end that loses no answer."""

import re
import socket
import sys
from ipaddress import ip_address
from threading import Thread
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.core.errors import UsageError
from windlass.serve.app import make_app
from windlass.serve.server import Server
from windlass.view.asgi import ViewApp

HEAD_SECONDS: Final = 10.0  # in which the head of a request must have come
READ_SECONDS: Final = 60.0  # in which a client must have taken what was sent
CUT_SECONDS: Final = 5  # for answers on their way, once the engine has stopped
CONNECTIONS: Final = 512
HEAD_BYTES: Final = 32 << 10
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:?#@A-Z]+)(:[0-9]{1,5})?")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, keys: tuple[str, ...]) -> None:
    """Raises: UsageError for an address that others can reach, and no key; or a key that is no key."""
    if not keys and not is_loopback(host):
        raise UsageError(
            f"host {host} can be reached from other machines, and there is no key; give --api-key KEY, or keep "
            "--host 127.0.0.1"
        )
    for key in keys:
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("a key must have at least 8 signs of ASCII and no spaces; choose another --api-key")


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises: UsageError for what no browser sends as the origin of a page."""
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            raise UsageError(
                f"--allow-origin {origin!r} is no origin; write https://app.example or http://localhost:3000, in small "
                "letters and without a path, or * for any page"
            )


def hosts_of(host: str, keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names under which a server may be called: any, where it asks for a key."""
    return None if keys else tuple({*LOOPBACK, host})


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises: UsageError where that cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":  # a client that takes nothing is let go by the system
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_SECONDS * 1000))
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}; choose another --host or --port") from error
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """What clients call it: `"http://127.0.0.1:8000"`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def config_of(app: ASGIApp) -> uvicorn.Config:
    """How `app` is listened for."""
    return uvicorn.Config(
        app,
        http=PromptProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=CUT_SECONDS,
        h11_max_incomplete_event_size=HEAD_BYTES,
    )


class HttpServer(uvicorn.Server):
    """Runs until a signal comes: then no request is admitted, and those under way are finished or cut."""

    def __init__(self, server: Server, page: ViewApp | None = None) -> None:
        super().__init__(config_of(make_app(server, page)))
        self._server, self._is_ending = server, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, and on a second signal at once."""
        self.end(is_at_once=self._is_ending)

    def end(self, is_at_once: bool = False) -> None:
        """Admit nothing more; the server ends when the engine has."""
        self._server.gate.close()
        if is_at_once:
            self.should_exit = self.force_exit = True
        if not self._is_ending:
            self._is_ending = True
            Thread(target=self._drain, name="windlass-serve-end", daemon=True).start()

    def _drain(self) -> None:
        try:
            self._server.service.stop(self._server.settings.stop_seconds)
        finally:
            self.should_exit = True


class PromptProtocol(H11Protocol):
    """Closes connections on which the head of a request does not come in time."""

    _idle_cycle: object = None

    def connection_made(self, transport: object) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # as asyncio calls it
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        # While nothing of a next request has come, the time for keeping a connection runs.
        is_idle = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        if is_idle and self.cycle is self._idle_cycle:
            self.transport.close()
            return
        self._idle_cycle = self.cycle if is_idle else self
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
