"""Facts that a server tells: the page that Prometheus reads, and the document of its model."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from huggingface_hub import try_to_load_from_cache
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from transformers import PreTrainedModel

from windlass.engine.scheduler import Service
from windlass.hf.model_facts import trained_length

SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
GAUGES: Final = {
    "free_rows": "Rows that no request has",
    "total_rows": "Rows in all",
    "queued": "Requests that wait for a row",
    "queued_tokens": "Prompt tokens of the requests that wait",
    "bytes_held": "Bytes of all caches",
    "bytes_limit": "The most that bytes_held can be",
}
COUNTERS: Final = {
    "prompt_tokens": "Prompt tokens read",
    "written_tokens": "Tokens written",
    "cached_tokens": "Prompt tokens that were not read again",
    "errors": "Steps of the engine that failed",
    "cancelled": "Requests that were cancelled",
    "steps": "Steps of the engine",
    "evicted": "Tokens that were evicted",
}


class Metrics:
    """Counters of the server, and the status of its engine at the moment of asking."""

    content_type: Final = CONTENT_TYPE_LATEST

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(service))
        self._answers = Counter(
            "windlass_http_requests", "Answers by route and status", ("route", "status"), registry=self._registry
        )
        self._gone = Counter(
            "windlass_http_clients_gone", "Clients that left before the end of their answer", registry=self._registry
        )
        self._first = Histogram(
            "windlass_first_token_seconds", "From request to first text", registry=self._registry, buckets=SECONDS
        )
        self._gap = Histogram(
            "windlass_token_gap_seconds",
            "Between two pieces of text of a request",
            registry=self._registry,
            buckets=SECONDS,
        )

    def page(self) -> bytes:
        """All of it, in the text format of Prometheus."""
        return generate_latest(self._registry)

    def answered(self, route: str, status: int) -> None:
        """Count an answer that has begun."""
        self._answers.labels(route, str(status)).inc()

    def left(self) -> None:
        """Count a client that left."""
        self._gone.inc()

    def wrote(self, seconds: float, is_first: bool) -> None:
        """Record the seconds before a piece of text: since the request, or the piece before it."""
        (self._first if is_first else self._gap).observe(seconds)


class _Engine(Collector):
    """The engine's status at the moment of asking."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        status = self._service.status()
        yield GaugeMetricFamily("windlass_is_alive", "Whether the engine runs", float(status.is_alive))
        for name, told in GAUGES.items():
            yield GaugeMetricFamily(f"windlass_{name}", told, float(getattr(status, name)))
        for name, told in COUNTERS.items():
            yield CounterMetricFamily(f"windlass_{name}", told, float(getattr(status, f"{name}_total")))


WEIGHTS: Final = ("model*.safetensors", "pytorch_model*.bin")
CONFIG: Final = "config.json"


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model for its document.

    `created` is the time of the model's files, in seconds since 1970. `trained_length` is the number of tokens of the
    longest text that the model was trained on, or None where its config does not tell.
    """

    created: int = field(default_factory=lambda: int(time.time()))
    trained_length: int | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelFacts":
        """Return the facts of a loaded model. A model without files is as old as the server."""
        trained, found = trained_length(model.config.get_text_config()), _files_of(model.name_or_path or "")
        if not found:
            return cls(trained_length=trained)
        return cls(int(max(path.stat().st_mtime for path in found)), trained)


def model_document(name: str, facts: ModelFacts, service: Service, vocabulary: int) -> dict[str, Any]:
    """The model as `/v1/models` has it. Servers have several names for the length of a context: all are here."""
    limits, options = service.limits, service.options
    longest = limits.prompt_tokens + limits.max_tokens
    length = longest if facts.trained_length is None else min(facts.trained_length, longest)
    names = ("max_model_len", "context_length", "context_window", "max_context_length")
    return {
        "id": name,
        "object": "model",
        "created": facts.created,
        "owned_by": "windlass",
        **dict.fromkeys(names, length),
        "meta": {"n_ctx_train": facts.trained_length, "n_vocab": vocabulary},
        "windlass": {
            "budget": options.budget,
            "beyond_budget": "grows" if options.budget is None else "recalls" if options.recall else "evicts",
            "max_prompt_tokens": limits.prompt_tokens,
            "max_tokens": limits.max_tokens,
            "options": options.labels(),
            "kinds": [each.labels() for each in service.kinds],
        },
    }


def _files_of(name: str) -> list[Path]:
    """The files of a model's weights, or that of its config: a GGUF file, in a folder, or where the hub's are kept."""
    folder = Path(name)
    if name and folder.is_file():
        return [folder]
    if not name or not folder.is_dir():
        try:
            held = try_to_load_from_cache(name, CONFIG)
        except ValueError:  # no name of the hub
            return []
        if not isinstance(held, str):
            return []
        folder = Path(held).parent
    found = [path for each in WEIGHTS for path in folder.glob(each)]
    return found or [path for path in (folder / CONFIG,) if path.exists()]
