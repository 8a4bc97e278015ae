"""A server that is killed: the next one goes on with its sessions, and reads nothing again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.models import MODEL
from tests.helpers.serving import RawClient, ask, chat, soon

WIDE, NARROW = 400, 48
CODE = f"""
import sys
from pathlib import Path
from tests.helpers.chats import with_template
from windlass.cache.options import CacheOptions
from windlass.engine.request import EngineLimits
from windlass.hf.load import load
from windlass.serve.run import ServeOptions, serve

model, _ = load({MODEL!r}, "float32")
wide, narrow = (CacheOptions(budget=budget, policy="key_diff", chunk=16) for budget in ({WIDE}, {NARROW}))
options = ServeOptions(
    "finder-3m", 1, wide, EngineLimits(max_tokens=4000), port=0, kinds=((1, narrow),), reuse_bytes=64 << 20,
    reuse_folder=Path(sys.argv[1]),
)
raise SystemExit(serve(model, with_template(), options, say=lambda line: print(line, flush=True)))
"""
TURNS = ("He was sitting in the boat, and the river was wide.", "And then?", "Where was she?")


@contextmanager
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, str(folder)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)
    assert started.stdout is not None
    try:
        line = started.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), line
        yield started, int(line.partition("127.0.0.1:")[2].partition("/")[0])
    finally:
        started.kill()
        started.communicate()


def turn(port: int, session: str, budget: int, text: str) -> tuple[str, int, int]:
    """The answer, and the tokens of the prompt: all, and those that were not read."""
    fields: dict[str, Any] = {"session": session, "budget": budget, "max_tokens": 24, "temperature": 0, "user": session}
    answer = ask(port, "/v1/chat/completions", chat(messages=[{"role": "user", "content": text}], **fields))
    assert answer.status == 200, answer.body
    usage = answer.document["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.document["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


def have_row(folder: Path, tokens: int, rows: int) -> bool:
    """Return True if so many rows of so many tokens are written."""
    return sum(int(path.name.split("-")[2]) == tokens for path in folder.glob("*.safetensors")) == rows


def test_a_session_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Within the budget and beyond it. A turn under way at the kill leaves no trace."""
    sessions, killed, whole = (("wide", WIDE), ("narrow", NARROW)), {}, {}
    with process(tmp_path) as (server, port):
        for rows, (name, budget) in enumerate(sessions, 1):
            killed[name] = [turn(port, name, budget, text) for text in TURNS[:2]]
            tokens = killed[name][1][1] + 23  # the last one is not fed
            assert soon(partial(have_row, tmp_path, tokens, rows), 30.0)
        for name, budget in sessions:
            whole[name] = [turn(port, f"whole-{name}", budget, text) for text in TURNS]
        client = RawClient(port)
        fields: dict[str, Any] = {"session": "wide", "user": "wide", "stream": True, "max_tokens": 4000}
        client.post("/v1/chat/completions", chat(**fields, logit_bias={"1": -100}))
        client.until(b'"content":"')
        server.send_signal(signal.SIGKILL)
        server.wait()
        client.close()
    log = next(path for path in tmp_path.glob("session-*.jsonl") if b'"name":"narrow"' in path.read_bytes())
    with log.open("ab") as file:
        file.write(b'{"messages":[{"role":"user","content":"Wh')
    with process(tmp_path) as (_, port):
        for name, budget in sessions:
            told = ask(port, f"/v1/sessions/{name}?user={name}").document["messages"]
            assert [each["content"] for each in told] == [
                text for asked, (said, *_) in zip(TURNS, killed[name], strict=False) for text in (asked, said)
            ]
            text, prompt, cached = turn(port, name, budget, TURNS[2])
            assert [*killed[name], (text, prompt, cached)] == whole[name]
            assert cached == killed[name][1][1] + 23
            assert prompt - cached < 24
