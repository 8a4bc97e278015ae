"""From a model to a server that runs: its engine, its words, its socket."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.files import check_folder
from windlass.engine.admission import check_kinds
from windlass.engine.disk import DiskTier, salt_of
from windlass.engine.feed import end_of_text
from windlass.engine.row_bytes import replace_batch
from windlass.engine.scheduler import Scheduler
from windlass.engine.service import Service, Watcher
from windlass.engine.status import EngineLimits
from windlass.hf.forward import vocabulary_of
from windlass.serve.listen import HttpServer, address_of, bound, check_address, check_origins, hosts_of
from windlass.serve.models import ModelFacts
from windlass.serve.server import Server
from windlass.serve.settings import ServerSettings
from windlass.serve.words import Words
from windlass.view.asgi import ViewApp
from windlass.view.watch import Watch


@dataclass(frozen=True)
class ServeOptions:
    """How a server is started. `name`: the model's, for clients; `rows` of these `options`: texts at once; `kinds` are
    further rows, of other options. `reuse_bytes` are for the beginnings of prompts, which go to files of
    `reuse_folder`, too, of `disk_bytes` in all, if there is one. `is_shown`: the page at `/` shows what all requests
    hold, to whoever has a key. Pages of these `origins` may read answers in a browser."""

    name: str
    rows: int
    options: CacheOptions
    limits: EngineLimits = field(default_factory=EngineLimits)
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    stop_seconds: float = 10.0
    reuse_bytes: int = 0
    is_shown: bool = False
    kinds: tuple[tuple[int, CacheOptions], ...] = ()
    reuse_folder: Path | None = None
    disk_bytes: int = 1 << 30
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises: UsageError for an address that others can reach, and no key; for rows that cannot be; for a folder,
        and no memory for reuse."""
        check_address(self.host, self.keys)
        check_origins(self.origins)
        check_kinds([replace_batch(options, rows) for rows, options in self.all_rows])
        if self.reuse_folder is not None:
            check_folder(self.reuse_folder, "--reuse-folder")
            if not self.reuse_bytes:
                raise UsageError("--reuse-folder needs memory beside it; give --reuse 64MiB, or leave the folder out")

    @property
    def all_rows(self) -> list[tuple[int, CacheOptions]]:
        """So many rows of each kind, those of most requests first."""
        return [(self.rows, self.options), *self.kinds]

    @property
    def settings(self) -> ServerSettings:
        """What of it the routes go by."""
        hosts = hosts_of(self.host, self.keys)
        # Files outlive the server, and are found by the names of their owners only.
        salt = None if self.reuse_folder is None else salt_of(self.reuse_folder)
        return ServerSettings(
            self.name, self.keys, hosts, stop_seconds=self.stop_seconds, origins=self.origins, salt=salt
        )


Start = Callable[[PreTrainedModel, PreTrainedTokenizerBase, ServeOptions, Watcher], Service]


def started_service(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: ServeOptions, watcher: Watcher
) -> Service:
    """The engine, which runs already."""
    scheduler = scheduler_of(model, tokenizer, asked, watcher)
    scheduler.start()
    return scheduler


def scheduler_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: ServeOptions, watcher: Watcher | None
) -> Scheduler:
    """The engine, which is still to be started."""
    disk = None if asked.reuse_folder is None else DiskTier(asked.reuse_folder, asked.disk_bytes, model)
    return Scheduler(model, tokenizer, asked.all_rows, asked.limits, asked.reuse_bytes, watcher, disk)


def server_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asked: ServeOptions, service: Service, watch: Watch
) -> HttpServer:
    """The server of an engine that runs, not yet on a socket."""
    words = Words(tokenizer, end_of_text(model), vocabulary_of(model), marks_messages=asked.reuse_bytes > 0)
    settings = replace(asked.settings, facts=ModelFacts.of(model))
    return HttpServer(Server(service, words, settings), ViewApp(watch, tokenizer, service.status, asked.is_shown))


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: ServeOptions,
    started: Start = started_service,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until a signal ends it; `say` is told the address, once clients are answered there. Returns the exit code.

    Raises: UsageError where the address cannot be had.
    """
    listener = bound(asked.host, asked.port)
    with listener:
        watch = Watch()
        service = started(model, tokenizer, asked, watch)
        try:
            http = server_of(model, tokenizer, asked, service, watch)
            limit, rows = service.status().bytes_limit, service.status().total_rows
            listener.listen()  # from here on clients can connect; they are answered in a moment
            say(f"{address_of(asked.host, listener)}/v1 ({asked.name}, {rows} rows, {limit:,} bytes)")
            http.run(sockets=[listener])
        finally:
            service.stop()
    return 0
