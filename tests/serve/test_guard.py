"""Keys, names, bodies that are too large or too slow, and lines of the log."""

import logging
from collections.abc import Iterator, Sequence

import pytest

from tests.helpers.serving import RawClient, ScriptedService, Served, ask, chat, complete, events, says, serving, soon
from windlass.core.errors import UsageError
from windlass.engine.request import Failure, Request
from windlass.serve import run
from windlass.serve.errors import RequestLimits
from windlass.serve.run import check_address, hosts_of

KEY, OTHER = "a-long-enough-key", "another-long-key"
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/ready", "/metrics")
LIMITS = RequestLimits(body_bytes=2000, body_seconds=0.3)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    with serving(ScriptedService(says("fine")), keys=(KEY, OTHER), request=LIMITS) as server:
        yield server


@pytest.mark.parametrize("path", [*ROUTES, "/v1/cache", "/", "/docs", "/v1/chat/completions/"])
def test_every_route_asks_for_a_key(guarded: Served, path: str) -> None:
    wrong: tuple[dict[str, str], ...]
    wrong = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"Authorization": f"Basic {KEY}"})
    for headers in (*wrong, {"Authorization": "Bearer "}, {"Authorization": f"Bearer {KEY}x"}):
        answer = ask(guarded.port, path, **headers)
        assert (answer.status, answer.document["error"]["code"]) == (401, "invalid_api_key")
        assert KEY not in str(answer)
    assert ask(guarded.port, path, Authorization=f"Bearer {KEY}").status != 401


def test_but_health(guarded: Served) -> None:
    assert ask(guarded.port, "/health").status == 200


def test_keys_are_tenants(guarded: Served) -> None:
    for key in (KEY, OTHER):
        assert ask(guarded.port, "/v1/completions", complete(), Authorization=f"Bearer {key}").status == 200
    first, second = (request.tenant for request in guarded.service.requests[-2:])
    assert first != second
    assert KEY not in first


def test_without_a_key_the_server_has_a_name() -> None:
    """Else a page in a browser could read this machine's server under the name of its own host."""
    with serving(ScriptedService(says("fine")), hosts=hosts_of("127.0.0.1", ())) as served:
        for host in ("evil.example", "localhost.evil.example:8000", ""):
            assert ask(served.port, "/v1/models", Host=host).status == 403
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000"):
            assert ask(served.port, "/v1/models", Host=host).status == 200


def test_no_page_of_another_site_may_read_an_answer(guarded: Served) -> None:
    answer = ask(guarded.port, "/v1/models", Authorization=f"Bearer {KEY}", Origin="http://evil.example")
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_body_that_is_too_large(guarded: Served) -> None:
    key = f"Bearer {KEY}"
    told = RawClient(guarded.port)
    told.send("POST", "/v1/completions", b"", Authorization=key, Content_Length="2001")
    assert told.answer().document["error"]["code"] == "body_too_large"
    told.close()
    counted = RawClient(guarded.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: {key}\r\nContent-Type: application/json\r\n"
    counted.socket.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    for _ in range(3):
        counted.socket.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n")
    assert counted.answer().status == 413
    counted.close()
    fits = ask(guarded.port, "/v1/completions", complete(prompt="x" * 1900), Authorization=key)
    assert fits.status == 200


def test_a_body_that_does_not_come(guarded: Served) -> None:
    slow = RawClient(guarded.port)
    slow.send("POST", "/v1/completions", b"", Authorization=f"Bearer {KEY}", Content_Length="50")
    assert slow.answer().status == 408
    slow.close()


def test_a_head_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HEAD_SECONDS", 0.2)
    service = ScriptedService(says("fine"))
    with serving(service) as served:
        silent, half = RawClient(served.port), RawClient(served.port)
        half.socket.sendall(b"GET /health HTTP/1.1\r\nHost: ")
        service.script = events(None)
        busy = RawClient(served.port)
        busy.post("/v1/completions", complete())
        assert silent.is_closed()
        assert half.is_closed()
        assert soon(lambda: len(service.requests) == 1)
        assert not soon(lambda: bool(service.cancelled), 0.6)  # a request under way may take longer
        service.release()
        for each in (silent, half, busy):
            each.close()


def test_a_head_that_is_too_large(guarded: Served) -> None:
    large = RawClient(guarded.port)
    large.socket.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 200_000)
    assert large.is_closed()
    large.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com", ""])
def test_another_address_needs_a_key(host: str) -> None:
    with pytest.raises(UsageError, match=r"there is no key\. Give --api-key"):
        check_address(host, ())
    check_address(host, (KEY,))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_this_machine_needs_none(host: str) -> None:
    check_address(host, ())


@pytest.mark.parametrize("key", ["", "short", "with a space", "schlüssel-lang", "tab\there-and-there"])
def test_a_key_that_is_none(key: str) -> None:
    with pytest.raises(UsageError, match="at least 8 signs"):
        check_address("127.0.0.1", (key,))


def test_a_log_has_no_text_of_a_request(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    service = ScriptedService(events(Failure("a step failed", is_ours=True)))

    secret = str(3**40)  # the log has lines of code, and none of them has this number

    def fails(requests: Sequence[Request], *_: object) -> None:
        raise RuntimeError(f"of the prompt {requests[0].prompt}: {secret}")

    with caplog.at_level(logging.DEBUG), serving(service) as served:
        assert ask(served.port, "/v1/chat/completions", chat()).status == 500
        monkeypatch.setattr(service, "submit_all", fails)
        messages = [{"role": "user", "content": secret}]
        answer = ask(served.port, "/v1/chat/completions", chat(messages=messages))
    assert answer.status == 500
    number = answer.headers["x-request-id"]
    assert number in answer.document["error"]["message"]
    assert "Traceback" not in str(answer.body)
    [record] = [record for record in caplog.records if record.name == "windlass.serve"]
    assert number in record.getMessage()
    assert "RuntimeError" in record.getMessage()
    assert secret not in caplog.text
