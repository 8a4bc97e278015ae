"""Thousands of requests of all kinds on loopback, good and bad, and whether anything is left of them.

    python benchmarks/soak.py MODEL [--requests 10000] [--seconds 1200]

Starts `windlass serve MODEL` itself, and ends by itself. Clients leave at random moments, politely (FIN) or not (RST),
send what is no JSON, too long, or half a request, and read slowly; budgets and policies are drawn; one prompt has
200,000 tokens. Checked: each answer is 2xx, 4xx or 503 and valid JSON, the usage adds up, bytes never exceed the
formula, at the end all rows are free, nothing waits, and the log has no traceback. Prints one JSON line; exit code 1
where a check fails.
"""

import argparse
import json
import random
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

from serving import memory

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "another", "dog", "run", "over", "that", "old", "house")
POLICIES = ("key_diff", "recent", "h2o", "tova", "snapkv", "lag_kv", "random", "key_norm")
KINDS = {
    "good": 50,
    "streamed": 20,
    "own options": 6,
    "leaves (FIN)": 7,
    "leaves (RST)": 7,
    "no JSON": 3,
    "unknown field": 2,
    "too long": 2,
    "slow": 1,
    "half": 1,
    "too many tokens": 1,
}


class Soak:
    """The clients, and what they found."""

    def __init__(self, port: int, requests: int, seconds: float, seed: int) -> None:
        self.port, self.left, self.end = port, requests, time.monotonic() + seconds
        self.draw, self.lock = random.Random(seed), threading.Lock()
        self.kinds, self.statuses, self.faults = Counter[str](), Counter[int](), list[str]()
        self.half: list[socket.socket] = []

    def work(self) -> None:
        """One client after the other, until none is left."""
        while True:
            with self.lock:
                if self.left <= 0 or time.monotonic() > self.end:
                    return
                self.left -= 1
                kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
                draw = random.Random(self.draw.random())
                self.kinds[kind] += 1
            try:
                self.one(kind, draw)
            except (ConnectionError, TimeoutError) as error:
                self.fault(f"{kind}: {type(error).__name__} {error}")

    def fault(self, text: str) -> None:
        """Note what must not be."""
        with self.lock:
            self.faults.append(text[:300])

    def body(self, kind: str, draw: random.Random) -> dict[str, Any]:
        """A request of this kind."""
        text = " ".join(draw.choices(WORDS, k=draw.choice((3, 20, 90, 300))))
        body: dict[str, Any] = {"prompt": text, "max_tokens": draw.choice((1, 5, 20, 60))}
        body |= {"temperature": draw.choice((0, 0.8)), "stream": kind in ("streamed", "slow") or draw.random() < 0.3}
        if kind == "own options":
            body |= {"budget": draw.choice((64, 96, 200)), "policy": draw.choice(POLICIES)}
        if kind == "unknown field":
            body["no_such_field"] = 1
        if kind == "too many tokens":
            body["max_tokens"] = 10**7
        return body

    def one(self, kind: str, draw: random.Random) -> None:
        """One client from its first byte to its last."""
        own = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        data = json.dumps(self.body(kind, draw)).encode() if kind != "no JSON" else b'{"prompt": "a", ]'
        size = 10**9 if kind == "too long" else len(data)
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {size}\r\nConnection: close\r\n\r\n"
        if kind == "half":
            own.sendall(head.encode()[: draw.randrange(10, len(head))])
            with self.lock:
                self.half.append(own)
                if len(self.half) > 20:
                    self.half.pop(0).close()
            return
        own.sendall(head.encode() + data)
        if kind.startswith("leaves"):
            time.sleep(draw.choice((0, 0.01, 0.1, 0.5)))
            if kind.endswith("(RST)"):
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            own.close()
            return
        self.check(kind, self.answer(own, 0.05 if kind == "slow" else 0.0))

    def answer(self, own: socket.socket, pause: float) -> bytes:
        """All bytes of an answer."""
        parts = []
        while part := own.recv(200 if pause else 65536):
            parts.append(part)
            time.sleep(pause)
        own.close()
        return b"".join(parts)

    def check(self, kind: str, answer: bytes) -> None:
        """Look at an answer's status and at all of its JSON."""
        head, _, rest = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 "):
            self.fault(f"{kind}: no answer: {answer[:80]!r}")
            return
        status = int(head[9:12])
        with self.lock:
            self.statuses[status] += 1
        wanted = {"no JSON": (400,), "unknown field": (400,), "too many tokens": (400,), "too long": (413,)}
        if status not in wanted.get(kind, (200, 429, 503)):
            self.fault(f"{kind}: status {status}: {rest[:200]!r}")
        if b"chunked" in head.lower():
            rest = b"".join(re.split(rb"(?:^|\r\n)[0-9a-f]+\r\n", rest))
        if b"text/event-stream" in head:
            events = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: ")]
            if not events or events[-1].strip() != b"[DONE]":
                self.fault(f"{kind}: the stream ends with {rest[-120:]!r}")
            said = [json.loads(event) for event in events[:-1]]
            if any("error" in event for event in said):
                self.fault(f"{kind}: {said[-1]}")
            return
        said = json.loads(rest)
        if status == 200:
            own = said["usage"]["windlass"]
            if own["seen"] != own["kept"] + own["evicted"] or not said["choices"][0]["finish_reason"]:
                self.fault(f"{kind}: {said['usage']}")

    def metrics(self) -> dict[str, float]:
        """The gauges and counters of the engine."""
        own = socket.create_connection(("127.0.0.1", self.port), timeout=300)
        own.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        lines = re.findall(rb"^windlass_(\w+) ([0-9.e+]+)$", self.answer(own, 0.0), re.MULTILINE)
        return {name.decode(): float(value) for name, value in lines}


def main() -> int:
    """Soak, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--long-tokens", type=int, default=200_000)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryFile() as log:
        command = ["windlass", "serve", options.model, "--rows", "8", "--budget", "256", "--port", str(options.port)]
        command = [sys.executable, "-m", *command]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            line = soaked(options, server)
        finally:
            server.terminate()
            server.wait(60)
        log.seek(0)
        line["tracebacks"] = log.read().count(b"Traceback")
    print(json.dumps(line), flush=True)
    is_clean = not line["faults"] and not line["tracebacks"] and line["rows_leaked"] == line["queued"] == 0
    return 0 if is_clean and line["bytes_most"] <= line["bytes_limit"] else 1


def soaked(options: argparse.Namespace, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Run all clients; what they and the server's own page tell."""
    soak = Soak(options.port, options.requests, options.seconds, options.seed)
    end = time.monotonic() + 120
    while True:
        try:
            before = soak.metrics()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    start = time.monotonic()
    threads = [threading.Thread(target=soak.work) for _ in range(options.clients)]
    long = threading.Thread(target=long_prompt, args=(soak, options.long_tokens))
    for thread in (*threads, long):
        thread.start()
    most, sizes = 0.0, []
    while any(thread.is_alive() for thread in (*threads, long)):
        time.sleep(0.5)
        most = max(most, soak.metrics()["bytes_held"])
        sizes.append((time.monotonic() - start, memory(server.pid)["rss"]))
    for own in soak.half:
        own.close()
    time.sleep(2)
    after = soak.metrics()
    half = [size for _, size in sizes[len(sizes) // 2 :]]
    return {
        "kind": "soak",
        "requests": sum(soak.kinds.values()),
        "seconds": time.monotonic() - start,
        "kinds": dict(soak.kinds),
        "statuses": {str(status): count for status, count in soak.statuses.items()},
        "faults": soak.faults[:20],
        "bytes_limit": before["bytes_limit"],
        "bytes_most": most,
        "bytes_before": before["bytes_held"],
        "bytes_after": after["bytes_held"],
        "rows_leaked": int(after["total_rows"] - after["free_rows"]),
        "queued": int(after["queued"]),
        "rss_middle": half[0] if half else 0,
        "rss_end": half[-1] if half else 0,
    }


def long_prompt(soak: Soak, tokens: int) -> None:
    """One request with so many token ids, beside all others."""
    body = json.dumps({"prompt": [5 + i % 900 for i in range(tokens)], "max_tokens": 4}).encode()
    own = socket.create_connection(("127.0.0.1", soak.port), timeout=1200)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    own.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    soak.check("good", soak.answer(own, 0.0))


if __name__ == "__main__":
    sys.exit(main())
