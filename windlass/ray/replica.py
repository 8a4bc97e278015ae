"""A replica: a process of Ray's with a model, an engine, and the same server that `windlass serve` runs."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread

import ray
import torch

from windlass.core.errors import UsageError
from windlass.engine.service import Service
from windlass.hf.load import load
from windlass.serve.listen import HttpServer, bound
from windlass.serve.run import ServeOptions, server_of, started_service
from windlass.view.watch import Watch

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 1.0  # between two looks whether the engine runs


@dataclass(frozen=True)
class ReplicaOptions:
    """What a replica loads, and how it serves. `is_local`: the front runs on its machine, and nobody else asks it."""

    model: str
    dtype: str
    device: str
    weights: str
    threads: int
    serve: ServeOptions
    folder: str
    is_local: bool


class Replica:
    """What runs in a process of Ray's; its methods are called side by side."""

    def __init__(self) -> None:
        self._http: HttpServer | None = None
        self._service: Service | None = None
        self._thread: Thread | None = None
        self._is_ending = Event()

    def start(self, asked: ReplicaOptions) -> str:
        """Load the model and serve; returns where, as `http://127.0.0.1:40123`. Raises: WindlassError as `serve`."""
        if not Path(asked.folder).is_dir():
            raise UsageError(f"{asked.folder} is not on {os.uname().nodename}; run this where all machines have it")
        os.chdir(asked.folder)
        torch.set_num_threads(asked.threads)
        host = LOOPBACK if asked.is_local else ray.util.get_node_ip_address()
        options = replace(asked.serve, host=host, port=0, origins=())  # the front tells browsers
        model, tokenizer = load(asked.model, asked.dtype, asked.device, asked.weights)
        listener = bound(options.host, 0)
        watch = Watch()
        self._service = started_service(model, tokenizer, options, watch)
        self._http = server_of(model, tokenizer, options, self._service, watch)
        listener.listen()
        self._thread = Thread(target=self._http.run, args=([listener],), name="windlass-replica", daemon=True)
        self._thread.start()
        return f"http://{host}:{listener.getsockname()[1]}"

    def wait(self) -> None:
        """Returns once the server has ended. Raises: RuntimeError where its engine has stopped, or it fell over."""
        assert self._thread is not None
        assert self._service is not None
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
            if not (self._service.status().is_alive or self._is_ending.is_set()):
                raise RuntimeError("the engine has stopped")
        if not self._is_ending.is_set():
            raise RuntimeError("the server has ended")

    def end(self) -> None:
        """Take no more requests, and end once those under way are finished or cut."""
        self._is_ending.set()
        if self._http is not None:
            self._http.end()

    def process(self) -> int:
        """Its id."""
        return os.getpid()
