"""Commands that are several processes: their words, their answers, and their ends."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.helpers.models import MODEL
from tests.helpers.processes import descendants, is_alive
from tests.helpers.serving import ask, complete, soon

pytestmark = pytest.mark.slow
PROMPT = "The river was quiet, and the boat lay by the bank. Harris said that"
CACHE = ("--budget", "40", "--policy", "key_diff", "--dtype", "float32")


def torchrun(*arguments: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = ("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    return [sys.executable, "-m", "torch.distributed.run", *ranks, "-m", "windlass", *arguments]


def environment() -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextmanager
def serving(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server of several processes, all of which end with the block, and its port."""
    said = folder / "said"
    with said.open("w") as file:
        started = subprocess.Popen(command, stdout=file, stderr=file, text=True, env=environment())
    try:
        assert soon(lambda: "http://127.0.0.1:" in said.read_text() or started.poll() is not None, 120)
        assert started.poll() is None, said.read_text()
        yield started, int(said.read_text().partition("http://127.0.0.1:")[2].partition("/")[0])
    finally:
        for each in (*descendants(started.pid), started.pid):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        started.wait()


def test_two_ranks_write_the_text_of_one_process() -> None:
    generate = ("generate", MODEL, PROMPT, *CACHE, "--max-tokens", "16", "--quiet")
    wanted, ran = (
        subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
        for command in (
            [sys.executable, "-m", "windlass", *generate],
            torchrun(*generate, "--tensor-parallel"),
        )
    )
    assert (wanted.returncode, ran.returncode) == (0, 0), (wanted.stderr, ran.stderr)
    assert len(wanted.stdout) > 30
    assert ran.stdout == wanted.stdout, "said once, by rank 0"


def test_a_server_on_two_ranks_ends_when_one_dies(tmp_path: Path) -> None:
    command = torchrun("serve", MODEL, *CACHE, "--rows", "2", "--port", "0", "--tensor-parallel")
    with serving(command, tmp_path) as (server, port):
        answer = ask(port, "/v1/completions", complete(prompt=PROMPT, max_tokens=8))
        assert (answer.status, answer.document["usage"]["completion_tokens"]) == (200, 8)
        assert ask(port, "/health").status == 200
        os.kill(_rank(server.pid, 1), signal.SIGKILL)
        assert soon(lambda: server.poll() is not None, 60), "rank 0 and torchrun go on"
        assert server.returncode == 1


def test_ranks_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    command = torchrun("serve", MODEL, *CACHE, "--rows", "2", "--port", "0", "--tensor-parallel")
    with serving(command, tmp_path) as (server, _):
        ranks = [_rank(server.pid, rank) for rank in (0, 1)]
        server.kill()
        try:
            assert soon(lambda: not any(map(is_alive, ranks)), 25), (tmp_path / "said").read_text()
        finally:
            for each in filter(is_alive, ranks):
                os.kill(each, signal.SIGKILL)


def _rank(launcher: int, rank: int) -> int:
    """The process of a rank that torchrun has started."""
    named = {each: Path(f"/proc/{each}/environ").read_bytes() for each in descendants(launcher)}
    [found] = [each for each, variables in named.items() if f"\0RANK={rank}\0".encode() in b"\0" + variables]
    return found


def test_replicas_answer_behind_one_address(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "windlass", "serve", MODEL, *CACHE, "--rows", "1", "--port", "0"]
    with serving([*command, "--replicas", "2", "--threads", "1"], tmp_path) as (server, port):
        assert ask(port, "/ready").document == {"status": "ready", "replicas": {"0": "ok", "1": "ok"}}
        answers = [
            ask(port, "/v1/completions", complete(prompt=PROMPT, max_tokens=5, temperature=0, user=f"{n}"))
            for n in range(6)
        ]
        assert {answer.status for answer in answers} == {200}
        assert len({answer.document["choices"][0]["text"] for answer in answers}) == 1
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0, (tmp_path / "said").read_text()
