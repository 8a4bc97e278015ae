"""Start a server for a model: engine, tokenizer, socket."""

import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from uvicorn.protocols.http.h11_impl import H11Protocol

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.files import check_folder
from windlass.engine.admission import check_kinds
from windlass.engine.disk import DiskTier, salt_of
from windlass.engine.prefill import end_of_text
from windlass.engine.request import PREFIX, EngineLimits, ReuseMode
from windlass.engine.row_bytes import replace_batch
from windlass.engine.scheduler import Scheduler, Service, Watcher
from windlass.engine.speculate import check_drafts_name, load_drafts
from windlass.hf.attach import attached
from windlass.hf.forward import vocabulary_of
from windlass.serve.app import Server, make_app
from windlass.serve.errors import ServerSettings, SessionLimits
from windlass.serve.metrics import ModelFacts
from windlass.serve.prompts import PromptTokenizer
from windlass.view.server import SchedulerWatcher, ViewApp

HEAD_SECONDS: Final = 10.0  # timeout of a request's head
READ_SECONDS: Final = 60.0  # timeout of a client that does not read its answer
CUT_SECONDS: Final = 5  # timeout for answers under way, once the engine has stopped
CONNECTIONS: Final = 512
HEAD_BYTES: Final = 32 << 10
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/:?#@A-Z]+)(:[0-9]{1,5})?")
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, keys: tuple[str, ...]) -> None:
    """Raises: UsageError for an address that others can reach without a key, and for a malformed key."""
    if not keys and not is_loopback(host):
        raise UsageError(
            f"host {host} can be reached from other machines, and there is no key. Give --api-key KEY, or keep "
            "--host 127.0.0.1"
        )
    for key in keys:
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            raise UsageError("a key must have at least 8 signs of ASCII and no spaces. Choose another --api-key")


def check_origins(origins: tuple[str, ...]) -> None:
    """Raises: UsageError for an origin that no browser sends, unless it is `*`."""
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            raise UsageError(
                f"--allow-origin {origin!r} is no origin. Write https://app.example or http://localhost:3000, in small "
                "letters and without a path, or * for any page"
            )


def hosts_of(host: str, keys: tuple[str, ...]) -> tuple[str, ...] | None:
    """The names under which a server may be called: None (any name) where it requires a key."""
    return None if keys else tuple({*LOOPBACK, host})


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises: UsageError where that cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":  # the system closes a connection that takes no data
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_SECONDS * 1000))
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}. Choose another --host or --port") from error
    return listener


def address_of(host: str, listener: socket.socket) -> str:
    """Return the address for clients: `"http://127.0.0.1:8000"`."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return the configuration of uvicorn for `app`."""
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


class DrainingServer(uvicorn.Server):
    """Runs until a signal comes. Then `close` admits no more requests, and the server ends once `drain` returns."""

    def __init__(self, app: ASGIApp, close: Callable[[], None], drain: Callable[[], None]) -> None:
        super().__init__(config_of(app))
        self._close, self._drain, self._is_ending = close, drain, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.end()

    def end(self) -> None:
        """Begin to end. A second call ends at once."""
        self._close()
        if self._is_ending:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        Thread(target=self._end, name="windlass-serve-end", daemon=True).start()

    def _end(self) -> None:
        try:
            self._drain()
        finally:
            self.should_exit = True


class HttpServer(DrainingServer):
    """The server of one model: requests under way are finished or cut when it ends."""

    def __init__(self, server: Server, page: ViewApp | None = None) -> None:
        drain = partial(server.service.stop, server.settings.stop_seconds)
        super().__init__(make_app(server, page), server.gate.close, drain)


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
        # The keep-alive timeout runs until a next request begins.
        is_idle = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        if is_idle and self.cycle is self._idle_cycle:
            self.transport.close()
            return
        self._idle_cycle = self.cycle if is_idle else self
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server."""

    name: str
    """The model's name for clients."""
    rows: int
    """Texts with these `options` that the server writes at once."""
    options: CacheOptions
    limits: EngineLimits = field(default_factory=EngineLimits)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    stop_seconds: float = 10.0
    reuse_bytes: int = 0
    """Memory for cached prefixes of prompts."""
    is_shown: bool = False
    """True if the page at `/` shows the caches of all requests to everybody who may call the server."""
    kinds: tuple[tuple[int, CacheOptions], ...] = ()
    """Numbers of further rows, and their options."""
    reuse_folder: Path | None = None
    """Folder of further cached prefixes, in files (None: memory only)."""
    disk_bytes: int = 1 << 30
    """Most bytes of these files."""
    reuse: ReuseMode = PREFIX
    """Use of cached prefixes by requests that name no mode."""
    origins: tuple[str, ...] = ()
    """Origins whose pages may read answers in a browser."""
    speculate: str | None = None
    """Default for requests that set none: `lookup`, `off`, or the name of a draft model."""

    def __post_init__(self) -> None:
        """Raises: UsageError for an address that others can reach without a key, a malformed key or origin, rows that
        cannot be, or a folder or a mode of reuse without memory for it."""
        check_address(self.host, self.keys)
        check_origins(self.origins)
        check_drafts_name(self.speculate)
        check_kinds([replace_batch(options, rows) for rows, options in self.all_rows])
        if self.reuse_folder is not None:
            check_folder(self.reuse_folder, "--reuse-folder")
            if not self.reuse_bytes:
                raise UsageError("--reuse-folder needs memory beside it. Give --reuse 64MiB, or leave the folder out")
        if not self.reuse_bytes and self.reuse != PREFIX:
            raise UsageError(f"--reuse-mode {self.reuse} has no memory to use. Give --reuse 64MiB, or no mode")

    @property
    def all_rows(self) -> list[tuple[int, CacheOptions]]:
        """The number of rows of each kind and its options, the default kind first."""
        return [(self.rows, self.options), *self.kinds]

    @property
    def settings(self) -> ServerSettings:
        """The settings of the routes."""
        hosts = hosts_of(self.host, self.keys)
        # Files outlive the server, and are found by the names of their owners only.
        salt = None if self.reuse_folder is None else salt_of(self.reuse_folder)
        return ServerSettings(
            self.name,
            self.keys,
            hosts,
            stop_seconds=self.stop_seconds,
            origins=self.origins,
            reuse=self.reuse,
            salt=salt,
            folder=self.reuse_folder,
        )


Start = Callable[[PreTrainedModel, PreTrainedTokenizerBase, ServeOptions, Watcher], Service]


def start_service(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ServeOptions, watcher: Watcher
) -> Service:
    """The engine, which runs already."""
    scheduler = scheduler_of(model, tokenizer, options, watcher)
    scheduler.start()
    return scheduler


def scheduler_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ServeOptions, watcher: Watcher | None
) -> Scheduler:
    """The engine, which is still to be started."""
    disk = None if options.reuse_folder is None else DiskTier(options.reuse_folder, options.disk_bytes, model)
    drafts = load_drafts(options.speculate, model, tokenizer, options.options)
    return Scheduler(
        model,
        tokenizer,
        rows=options.all_rows,
        limits=options.limits,
        reuse_bytes=options.reuse_bytes,
        watcher=watcher,
        disk=disk,
        speculate=drafts,
    )


def server_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: ServeOptions,
    service: Service,
    sessions: SessionLimits | None = None,
) -> Server:
    """The routes of an engine that runs, with the `sessions` that it remembers (default: the usual limits)."""
    sessions = options.settings.sessions if sessions is None else sessions
    prompts = PromptTokenizer(
        tokenizer, end_of_text(model), vocabulary_of(model), marks_messages=options.reuse_bytes > 0
    )
    return Server(service, prompts, replace(options.settings, facts=ModelFacts.of(model), sessions=sessions))


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: ServeOptions,
    started: Start = start_service,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until a signal ends it. Once clients can connect, `say` gets the address. Returns the exit code.

    Raises: UsageError where the address cannot be had.
    """
    listener = bind(options.host, options.port)
    with listener:
        watch = SchedulerWatcher()
        service = started(model, tokenizer, options, watch)
        try:
            page = ViewApp(watch, tokenizer, service.status, options.is_shown)
            http = HttpServer(server_of(model, tokenizer, options, service), page)
            limit, rows = service.status().bytes_limit, service.status().total_rows
            listener.listen()  # from here on clients can connect, and wait until the server answers
            say(f"{address_of(options.host, listener)}/v1 ({options.name}, {rows} rows, {limit:,} bytes)")
            http.run(sockets=[listener])
        finally:
            service.stop()
    return 0


LOG: Final = logging.getLogger("windlass.serve")
GRACE: Final = 5.0  # seconds for which a server reports that its engine has failed
FAILED: Final = 1  # the exit code


def serve_together(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: ServeOptions,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until a signal ends rank 0. All processes call this. Returns the exit code: 1 where a rank was lost.

    After the loss of a rank, requests under way get an error, `/health` answers 503 for five seconds, and the server
    ends. Other ranks leave signals to rank 0.

    Raises: UsageError where the address cannot be had. Also for a view, which would show the heads of one rank, and for
    memory for reuse, where a client would delete prefixes on rank 0 alone.
    """
    if options.is_shown:
        raise UsageError("--view would show the heads of rank 0 alone. Leave it out with --tensor-parallel")
    if options.reuse_bytes:
        raise UsageError("--reuse keeps prefixes of rank 0 alone. Leave it out with --tensor-parallel")
    heads = attached(model).heads
    if heads is None or heads.ranks.is_first:
        return _led(model, tokenizer, options, say)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    scheduler = scheduler_of(model, tokenizer, options, None)
    scheduler.run()
    return FAILED if scheduler.has_failed else 0


def _led(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ServeOptions, say: Callable[[str], None]
) -> int:
    engines: list[Scheduler] = []
    has_ended = Event()

    def started(
        model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: ServeOptions, watcher: Watcher
    ) -> Service:
        engines.append(scheduler_of(model, tokenizer, options, watcher))
        engines[0].start()
        Thread(target=_end_with, args=(engines[0], has_ended), name="windlass-ranks", daemon=True).start()
        return engines[0]

    try:
        code = serve(model, tokenizer, options, started, say)
    finally:
        has_ended.set()
    return FAILED if engines[0].has_failed else code


def _end_with(engine: Scheduler, has_ended: Event) -> None:
    """End the server, as a signal does, once its engine has failed and some time was left to tell so."""
    engine.wait()
    if engine.has_failed and not has_ended.wait(GRACE):
        LOG.error("the server ends, for another rank was lost")
        os.kill(os.getpid(), signal.SIGTERM)
