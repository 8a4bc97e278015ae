"""A server on loopback with the real engine behind it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jaxtyping
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.serving import NAME
from windlass.cache.options import CacheOptions
from windlass.engine.disk import DiskTier, salt_of
from windlass.engine.request import EngineLimits
from windlass.engine.scheduler import Scheduler
from windlass.serve.app import Server
from windlass.serve.errors import ServerSettings
from windlass.serve.prompts import PromptTokenizer
from windlass.serve.run import HttpServer, bind

OPTIONS = CacheOptions(budget=48, policy="recent", chunk=16)


@contextmanager
def engine_served(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    options: CacheOptions = OPTIONS,
    reuse_bytes: int = 0,
    folder: Path | None = None,
    max_tokens: int = 4000,
    **settings: Any,
) -> Iterator[tuple[int, Scheduler]]:
    """Two rows with these options, and a folder for the prefix cache: a port and an engine."""
    jaxtyping.config.update("jaxtyping_disable", True)  # of the engine's thread, which reads one setting for all
    limits, disk = EngineLimits(max_tokens=max_tokens), None if folder is None else DiskTier(folder, 1 << 30, model)
    settings |= {} if folder is None else {"salt": salt_of(folder)}
    engine = Scheduler(model, tokenizer, [(2, options)], limits, reuse_bytes, disk=disk)
    engine.start()
    listener = bind("127.0.0.1", 0)
    http = HttpServer(Server(engine, PromptTokenizer(tokenizer, [1], 2048), ServerSettings(NAME, **settings)))
    listener.listen()  # clients may come before the thread runs
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1], engine
    finally:
        http.end()
        thread.join(20.0)
        assert not thread.is_alive()
        assert not engine.status().is_alive
