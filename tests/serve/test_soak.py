"""Some hundred requests of all kinds, good and bad, at the real engine: all are answered rightly, none leaks."""

import json
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from time import sleep
from typing import Any

import pytest

from tests.helpers.chats import with_template
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import Answer, RawClient, ask, soon
from windlass.engine.scheduler import Scheduler
from windlass.hf.load import load

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog", "run", "over", "that", "old", "house")
POLICIES = ("key_diff", "recent", "h2o", "tova", "snapkv", "lag_kv", "random", "key_norm")
# Weights of the kinds of a client.
KINDS = {
    "good": 40,
    "stream": 20,
    "own options": 8,
    "leaves by FIN": 8,
    "leaves by RST": 8,
    "no JSON": 4,
    "unknown field": 4,
    "too long": 3,
    "too many tokens": 3,
    "slow": 2,
    "half": 2,
}
REFUSED = {"no JSON": 400, "unknown field": 400, "too many tokens": 400, "too long": 413}
PATH, REQUESTS, CLIENTS = "/v1/completions", 300, 6


@dataclass
class Soak:
    """Clients side by side, and their findings: `kinds` of requests, `statuses` of answers, `faults`."""

    port: int
    draw: random.Random
    left: int = REQUESTS
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    half: list[RawClient] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def work(self) -> None:
        """One client after the other, until no request is left."""
        while True:
            with self.lock:
                if self.left == 0:
                    return
                self.left -= 1
                [kind] = self.draw.choices([*KINDS], [*KINDS.values()])
                draw = random.Random(self.draw.random())
                self.kinds[kind] += 1
            try:
                self._request(kind, draw)
            except (AssertionError, OSError, ValueError, KeyError) as error:
                self._fault(kind, repr(error))

    def _fault(self, kind: str, text: str) -> None:
        with self.lock:
            self.faults.append(f"{kind}: {text[:300]}")

    def _request(self, kind: str, draw: random.Random) -> None:
        client, body = RawClient(self.port), document(kind, draw)
        client.socket.settimeout(90.0)
        if kind == "half":
            client.socket.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"[:70]
            )
            with self.lock:
                self.half.append(client)
            return
        if kind == "too long":
            client.send("POST", PATH, b"", Content_Length=str(10**9))
        elif kind == "no JSON":
            client.send("POST", PATH, b'{"prompt": "a", ]')
        else:
            client.post(PATH, body)
        if kind.startswith("leaves"):
            sleep(draw.choice((0, 0.01, 0.1, 0.3)))
            client.close(is_reset=kind.endswith("RST"))
            return
        if body["stream"] and kind not in REFUSED:
            self._check_stream(kind, client, 0.02 if kind == "slow" else 0.0)
        else:
            self._check(kind, client.answer())
        client.close()

    def _check_stream(self, kind: str, client: RawClient, pause: float) -> None:
        events = []
        while True:
            line = client.until(b"\n").strip()
            sleep(pause)
            if line.startswith(b"HTTP/1.1 "):
                with self.lock:
                    self.statuses[int(line.split()[1])] += 1
            if line == b"data: [DONE]":
                break
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
        if not events or any("error" in event for event in events):
            self._fault(kind, f"stream {events[-1:]}")

    def _check(self, kind: str, answer: Answer) -> None:
        with self.lock:
            self.statuses[answer.status] += 1
        if answer.status != REFUSED.get(kind, 200):
            self._fault(kind, f"{answer.status} {answer.body!r}")
        elif answer.status == 200:
            usage, [choice] = answer.document["usage"], answer.document["choices"]
            told = usage["windlass"]
            if told["seen"] != told["kept"] + told["evicted"] or choice["finish_reason"] not in ("stop", "length"):
                self._fault(kind, f"{usage} {choice}")
        elif not answer.document["error"]["message"]:
            self._fault(kind, "an error without a message")


def document(kind: str, draw: random.Random) -> dict[str, Any]:
    """A request of this kind."""
    body: dict[str, Any] = {
        "prompt": " ".join(draw.choices(WORDS, k=draw.choice((3, 20, 90)))),
        "max_tokens": draw.choice((1, 5, 20)),
        "temperature": draw.choice((0, 0.8)),
        "stream": kind in ("stream", "slow"),
    }
    if kind == "own options":
        body |= {"budget": draw.choice((24, 32, 40)), "policy": draw.choice(POLICIES)}
    if kind == "unknown field":
        body["no_such_field"] = 1
    if kind == "too many tokens":
        body["max_tokens"] = 10**7
    return body


def watch(engine: Scheduler, is_over: threading.Event, above: list[str]) -> None:
    """Note each moment in which the caches hold more bytes than their limit."""
    while not is_over.wait(0.05):
        status = engine.status()
        if status.bytes_held > status.bytes_limit:
            above.append(f"{status.bytes_held} bytes of {status.bytes_limit}")


@pytest.mark.slow
def test_nothing_is_left_of_hundreds_of_clients() -> None:
    """Clients that leave, read slowly, or send nonsense: answers are valid, and at the end all rows are free."""
    model, tokenizer = load(MODEL, "float32")[0], with_template()
    with engine_served(model, tokenizer) as (port, engine):
        soak, is_over, above = Soak(port, random.Random(0)), threading.Event(), list[str]()
        threads = [threading.Thread(target=soak.work) for _ in range(CLIENTS)]
        watcher = threading.Thread(target=watch, args=(engine, is_over, above))
        for thread in (*threads, watcher):
            thread.start()
        for thread in threads:
            thread.join(110.0)
        is_over.set()
        watcher.join(10.0)
        for client in soak.half:
            client.close()
        assert soak.faults == []
        assert above == []
        assert {*soak.kinds} == {*KINDS}
        assert {*soak.statuses} == {200, 400, 413}
        assert soon(lambda: engine.status().free_rows == 2 and engine.status().queued == 0, 20.0)
        assert engine.status().errors_total == 0
        answer = ask(port, PATH, document("good", random.Random(1)))
        assert answer.document["usage"]["windlass"]["kept"] > 0
