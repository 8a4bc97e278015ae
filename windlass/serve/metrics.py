"""The page that Prometheus reads."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from windlass.engine.service import Service

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
    """What the server counts by itself, and what its engine tells when it is asked."""

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
        """An answer has begun."""
        self._answers.labels(route, str(status)).inc()

    def left(self) -> None:
        """A client has gone."""
        self._gone.inc()

    def wrote(self, seconds: float, is_first: bool) -> None:
        """Text came, `seconds` after the request or the text before it."""
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
