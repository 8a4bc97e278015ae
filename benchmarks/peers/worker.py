"""The loop of a worker: one peer with one model, commands on stdin, answers on stdout, both JSON lines.

A command is `{"test": "tg", "tokens": 16, "depth": 4096}`: `pp` reads a prompt of `tokens`, `tg` feeds
them one by one, `logits` reads them and answers with the logits after the last. All of it happens
behind `depth` tokens, which are read when the depth changes and never timed (with `--fill` they are not
read where a library's cache can be filled: speed does not depend on what it holds). Standard library only.
"""

import argparse
import json
import random
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peers.shape import Shape, shape_of

# Tokens that llama.cpp and Windlass compute at once by default.
CHUNK = 512


@dataclass(frozen=True)
class About:
    """A worker's description, sent before the first command.

    `most_prompt`: longest prompt that it reads in reasonable time (None: any).
    """

    peer: str
    version: str
    settings: str
    threads: int
    most_prompt: int | None = None


@dataclass(frozen=True)
class Answer:
    """A worker's answer to a command.

    `cpu_s`: processor time of the run. `idle_cpu_s`: processor time since the answer before, used while
    another worker was measured. `hold_s`: time of reading `depth` tokens before, 0 if they were held.
    `peak_bytes`: most memory of the process since it answered first, files that it maps included, 0 where the system
    does not report it.
    """

    seconds: float
    cpu_s: float
    idle_cpu_s: float
    peak_bytes: int
    hold_s: float
    logits: list[float] | None = None


class Peer(ABC):
    """A model and the state of one text."""

    about: About

    @abstractmethod
    def hold(self, ids: list[int]) -> None:
        """Forget everything, then hold the state after `ids`."""

    def fill(self, ids: list[int]) -> None:
        """As `hold`, with any keys and values in the place of those of `ids` where the library can be given some."""
        self.hold(ids)

    @abstractmethod
    def restore(self, room: int) -> None:
        """Go back to the state that is held, with room for so many tokens more."""

    @abstractmethod
    def feed(self, ids: list[int]) -> None:
        """Read `ids` in one step. The logits after the last are computed when this returns."""

    @abstractmethod
    def logits(self) -> list[float]:
        """The logits after the last token that was fed."""

    def read(self, ids: list[int], size: int | None = None) -> None:
        """Feed `ids` in steps of `size` (None: in the library's own way, here CHUNK)."""
        for at in range(0, len(ids), size or CHUNK):
            self.feed(ids[at : at + (size or CHUNK)])


def options() -> tuple[Shape, argparse.Namespace]:
    """The shape, and what else the command line of a worker says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kind", default="", help="what a worker with several kinds is to be")
    parser.add_argument("--weights", default="auto", choices=["auto", "int8", "int4"], help="auto: bfloat16")
    parser.add_argument("--batch", type=int, default=1, help="texts at once, of windlass and OpenVINO")
    parser.add_argument("--budget", type=int, help="most tokens held after a prompt, of windlass and OpenVINO")
    parser.add_argument("--policy", default="recent", help="of windlass with a budget")
    parser.add_argument("--fill", action="store_true", help="do not read the text before a test where that can be had")
    read = parser.parse_args()
    return shape_of(read.shape, read.layers), read


def serve(peer: Peer, vocabulary: int, is_filled: bool = False) -> None:
    """Answer commands until stdin ends. `is_filled`: caches are filled, not read into, where the peer can."""
    forget_peak()
    print(json.dumps(asdict(peer.about)), flush=True)
    held, slept_at = -1, time.process_time()
    for line in sys.stdin:
        idle_cpu_s = time.process_time() - slept_at
        command: dict[str, Any] = json.loads(line)
        tokens, depth, test = command["tokens"], command["depth"], command["test"]
        begun, is_held = time.perf_counter(), depth == held
        if not is_held:
            (peer.fill if is_filled else peer.hold)(random_ids(depth, vocabulary, seed=1))
            held = depth
        hold_s = 0.0 if is_held else time.perf_counter() - begun
        ids = random_ids(tokens, vocabulary, seed=2)
        peer.restore(tokens)
        cpu, start = time.process_time(), time.perf_counter()
        peer.read(ids, size=1 if test == "tg" else None)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
        logits = peer.logits() if test == "logits" else None
        print(json.dumps(asdict(Answer(seconds, cpu_s, idle_cpu_s, peak_bytes(), hold_s, logits))), flush=True)
        slept_at = time.process_time()


def random_ids(tokens: int, vocabulary: int, seed: int) -> list[int]:
    """The same ids for every peer."""
    return random.Random(seed).choices(range(vocabulary), k=tokens)


def forget_peak() -> None:
    """Count the process's peak memory from here: what loading took is none of it. Linux."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def peak_bytes() -> int:
    """Most memory of this process since then, 0 where the system does not report it."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
