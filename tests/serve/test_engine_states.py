"""A queue that is full, an engine that has died, texts that fail, and the end of the server."""

import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.serving import RawClient, ScriptedService, Served, ask, chat, complete, events, says, serving, soon
from windlass.engine.request import Failure, Piece, Progress

ROUTES = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("fine")), ping_seconds=0.05, stop_seconds=2.0) as server:
        yield server


def asked(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if "chat" in path else complete(**fields)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_a_full_queue(served: Served, path: str, is_streamed: bool) -> None:
    served.service.is_full = True
    answer = ask(served.port, path, asked(path, stream=is_streamed))
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert (answer.document["error"]["code"], answer.document["error"]["type"]) == ("queue_full", "rate_limit_error")
    served.service.is_full = False
    assert ask(served.port, path, asked(path)).status == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_dead_engine(served: Served, path: str) -> None:
    served.service.is_alive = False
    assert ask(served.port, path, asked(path)).status == 503
    for route in ("/health", "/ready"):
        answer = ask(served.port, route)
        assert (answer.status, answer.document["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_engine_that_dies_without_a_word(served: Served, is_streamed: bool) -> None:
    """Whoever waits is told, though no event comes any more."""
    served.service.script = events(Progress(1, 2), None)
    client = RawClient(served.port)
    client.post(ROUTES[0], chat(stream=is_streamed))
    assert soon(lambda: len(served.service.requests) == 1)
    served.service.is_alive = False
    answer = client.answer()
    client.close()
    if is_streamed:
        last = answer.body.strip().split(b"\n\n")[-1]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    else:
        assert (answer.status, answer.document["error"]["code"]) == (503, "engine_dead")


@pytest.mark.parametrize(("is_ours", "status"), [(True, 500), (False, 400)])
def test_a_text_that_fails(served: Served, is_ours: bool, status: int) -> None:
    message = 'it took "too long"\n\\ and more'
    served.service.script = events(Piece(5, "a"), Failure(message, is_ours))
    answer = ask(served.port, ROUTES[0], chat())
    assert (answer.status, answer.document["error"]["message"]) == (status, message)
    streamed = ask(served.port, ROUTES[0], chat(stream=True))
    assert streamed.status == 200
    *chunks, last = streamed.body.strip().split(b"\n\n")
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == message
    assert b"[DONE]" not in streamed.body
    assert b'"content":"a"' in b"".join(chunks)


def test_one_text_that_fails_ends_the_others(served: Served) -> None:
    scripts = iter([events(Failure("no", True)), events(Piece(5, "a"), None)])
    served.service.script = lambda request: next(scripts)(request)
    assert ask(served.port, ROUTES[1], complete(n=2)).status == 500
    assert served.service.is_idle()
    assert len(served.service.cancelled) == 1


def test_a_silent_stream_lives(served: Served) -> None:
    served.service.script = events(Progress(3, 9), None, Piece(5, "a"), Failure("end", True))
    client = RawClient(served.port)
    client.post(ROUTES[0], chat(stream=True))
    assert b": read 3 of 9\n\n" in client.until(b": waiting\n\n")
    client.until(b": waiting\n\n")
    served.service.release()
    client.until(b"end")
    client.close()


def test_the_end_finishes_what_was_admitted(served: Served) -> None:
    served.service.script = events(Progress(1, 2), None, *(event for event in says("abc")(_request(served))))
    client = RawClient(served.port)
    client.post(ROUTES[1], complete())
    assert soon(lambda: len(served.service.requests) == 2)
    served.http.end()
    for path in (*ROUTES, "/ready"):
        answer = ask(served.port, path, None if path == "/ready" else asked(path))
        assert (answer.status, answer.document["error"]["code"], "retry-after" in answer.headers) == (
            503,
            "stopping",
            True,
        )
    assert ask(served.port, "/health").status == 200
    served.service.release()
    assert client.answer().document["choices"][0]["text"] == "abc"
    client.close()
    assert soon(lambda: served.http.should_exit)
    assert served.service.stopped == [2.0]


def _request(served: Served) -> Any:
    ask(served.port, ROUTES[1], complete())
    return served.service.requests[0]


def test_the_end_cuts_what_takes_longer() -> None:
    with serving(ScriptedService(events(Piece(5, "a"), None)), stop_seconds=0.1) as served:
        client = RawClient(served.port)
        client.post(ROUTES[1], complete(stream=True))
        client.until(b"a")
        threading.Thread(target=served.http.end).start()
        client.until(b"the server ends")
        client.close()


def test_a_second_signal_ends_it_at_once() -> None:
    service = ScriptedService(events(Piece(5, "a"), None))
    with serving(service, stop_seconds=600.0) as served:
        client = RawClient(served.port)
        client.post(ROUTES[1], complete(stream=True))
        client.until(b'"text":"a"')
        served.http.handle_exit(signal.SIGTERM, None)
        assert ask(served.port, "/ready").document["error"]["code"] == "stopping"
        assert not served.http.should_exit
        served.http.handle_exit(signal.SIGTERM, None)
        assert client.is_closed()
        assert service.stopped == [600.0]
        client.close()
        service.release()


def test_metrics(served: Served) -> None:
    def counted() -> dict[tuple[str, str, str], float]:
        families = text_string_to_metric_families(ask(served.port, "/metrics").body.decode())
        samples = [each for family in families for each in family.samples]
        return {(one.name, one.labels.get("route", ""), one.labels.get("status", "")): one.value for one in samples}

    before = counted()
    ask(served.port, ROUTES[0], chat())
    ask(served.port, ROUTES[0], chat(temperature=-1))
    ask(served.port, "/made/up/path")
    served.service.script = events(None)
    gone = RawClient(served.port)
    gone.post(ROUTES[0], chat())
    assert soon(lambda: len(served.service.requests) == 2)
    gone.close()
    assert soon(lambda: counted()[("windlass_http_clients_gone_total", "", "")] == 1.0)
    after = counted()
    assert after[("windlass_http_requests_total", ROUTES[0], "200")] == 1.0
    assert after[("windlass_http_requests_total", ROUTES[0], "400")] == 1.0
    assert after[("windlass_http_requests_total", "other", "404")] == 1.0
    assert after[("windlass_first_token_seconds_count", "", "")] == 1.0
    assert (after[("windlass_bytes_held", "", "")], after[("windlass_bytes_limit", "", "")]) == (8192.0, 16384.0)
    assert after[("windlass_is_alive", "", "")] == 1.0
    assert after[("windlass_evicted_total", "", "")] == 16.0
    assert all(after[name] >= before[name] for name in before if name[0].endswith("_total"))


def test_the_rows(served: Served) -> None:
    served.service.script = events(None)
    client = RawClient(served.port)
    client.post(ROUTES[0], chat())
    assert soon(lambda: len(served.service.requests) == 1)
    told = ask(served.port, "/v1/cache").document
    assert told["rows"] == [{"number": 1, "phase": "writing", "lane": "a", "seen": 5, "kept": 4, "bytes": 4096}]
    assert (told["free_rows"], told["total_rows"], told["bytes_limit"]) == (3, 4, 16384)
    assert (told["options"]["policy"], told["options"]["budget"]) == ("Recent()", 96)
    client.close()
