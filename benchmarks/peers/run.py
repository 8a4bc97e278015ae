"""Decode and prefill of Windlass and of public peers, in one run that alternates between them.

    PYTHONPATH=benchmarks python -m peers.run                # the shape 1b, all peers
    PYTHONPATH=benchmarks python -m peers.run --shape 7b-mha --layers 4 --depths 0 4096 --peers windlass llama-cpp
    PYTHONPATH=benchmarks python -m peers.run --shape tiny --depths 0 64 --rounds 2 --out /dev/null

Every peer is a process that keeps its model. Only one works at a time, the others sleep. A test at
a depth is run once by each to warm up, then by each in turn, round after round, in an order that
moves on by one. Prints llama-bench's table (mean and standard deviation) and appends every sample
to `--out` as a JSON line. `tables.py` makes the documentation's tables of it.

Before anything is timed, all peers read the same tokens, and their logits have to agree. Peers of other
packages live in `.venv-peers`, which `make bench-peers` fills. Missing ones are left out.

`--fill` does not read the text before a test where a cache can be filled. In every round memory is read, too, by
`PlainRead`.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.plain_read import PlainRead
from peers.shape import PEERS, Shape, shape_of
from peers.weights import write_weights
from peers.worker import About, Answer

from windlass.evals.report.page import row

# Workers run in environments of their own, which find the modules of this folder by this path.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
# Python's own and the environment's, the worker's module, its kind.
WORKERS = {
    "windlass": (Path(sys.executable), "torch_worker", "windlass"),
    "transformers-dynamic": (Path(sys.executable), "torch_worker", "dynamic"),
    "transformers-static": (Path(sys.executable), "torch_worker", "static"),
    "llama-cpp": (PEERS / "llama-cpp" / "bin" / "python", "llama_worker", "f16-flash"),
    "llama-cpp-plain": (PEERS / "llama-cpp" / "bin" / "python", "llama_worker", "f16-plain"),
}
WITH_CODES = ("windlass",)  # peers that have weights of 4 bits here
# A library's threads spin for some milliseconds before they sleep.
PAUSE_S = 0.05
CHECKED_TOKENS = 48
# Each library rounds to codes of its own: random weights in 4 bits move the logits of sixteen layers far.
LEAST_AGREEMENT = {"auto": 0.995, "int8": 0.98, "int4": 0.5}


class Worker:
    """A process that runs one peer."""

    def __init__(self, name: str, shape: Shape, threads: int, more: Sequence[str] = ()) -> None:
        """`more`: what else its command line says, see `peers.worker`."""
        python, module, kind = WORKERS[name]
        command = [str(python), "-m", f"peers.{module}", shape.name, f"--layers={shape.layers}", f"--threads={threads}"]
        command += [f"--kind={kind}"] if kind else []
        command += more
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.name = name
        self.about = About(**json.loads(self._line()))

    def ask(self, test: str, tokens: int, depth: int) -> Answer:
        """Have the test run once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"test": test, "tokens": tokens, "depth": depth}) + "\n")
        self.process.stdin.flush()
        return Answer(**json.loads(self._line()))

    def takes(self, test: str, tokens: int, depth: int) -> bool:
        """Return True if it reads as much in reasonable time."""
        read = depth + (tokens if test == "pp" else 0)
        return self.about.most_prompt is None or read <= self.about.most_prompt

    def stop(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line: str = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the worker of {WORKERS[self.name][1]} ended with status {self.process.wait()}")
        return line


def is_there(name: str, weights: str) -> bool:
    """Return True if this peer can take part. Prints on stderr why it cannot."""
    python = WORKERS[name][0]
    if not python.exists():
        print(f"{name} is left out: there is no {python}", file=sys.stderr)
    elif weights != "auto" and name not in WITH_CODES:
        print(f"{name} is left out: it is not measured with weights of {weights}", file=sys.stderr)
    else:
        return True
    return False


def machine(threads: int, shape: Shape) -> dict[str, Any]:
    """The first line of a run: where, when and what."""
    cpu = Path("/proc/cpuinfo")
    names = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    return {
        "kind": "run",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "threads": threads,
        "shape": shape.name,
        "layers": shape.layers,
        "params": shape.params,
        "weight_bytes": shape.nbytes,
    }


def prepare(shape: Shape, names: list[str]) -> None:
    """Write the weights that these peers load."""
    write_weights(shape)
    modules = {WORKERS[name][1] for name in names}
    about = [shape.name, f"--layers={shape.layers}"]
    if "llama_worker" in modules and not (shape.folder / "model.gguf").exists():
        command = [str(WORKERS["llama-cpp"][0]), "-m", "peers.gguf_weights", *about]
        subprocess.run(command, env=ENVIRONMENT, check=True)


def check(workers: list[Worker], least: float) -> None:
    """Have all peers read one text.

    Raises: RuntimeError when the logits of one correlate with the first's by less than `least`.
    """
    read = [worker.ask("logits", CHECKED_TOKENS, 0).logits or [] for worker in workers]
    for worker, logits in zip(workers, read, strict=True):
        agreement = statistics.correlation(read[0], logits)
        print(f"logits of {worker.name} and {workers[0].name} correlate: {agreement:.5f}", file=sys.stderr)
        if agreement < least:
            raise RuntimeError(f"{worker.name} and {workers[0].name} compute different logits from the same weights")


def measure(
    workers: list[Worker], test: str, tokens: int, depth: int, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per second of each worker, one per round. Each sample is also appended to `out`."""
    taking, memory = [worker for worker in workers if worker.takes(test, tokens, depth)], options.memory
    rates: dict[str, list[float]] = {worker.name: [] for worker in taking}
    for worker in taking:
        worker.ask(test, tokens, depth)
    for turn in range(options.rounds):
        at = turn % max(len(taking), 1)
        for worker in taking[at:] + taking[:at]:
            time.sleep(PAUSE_S)
            answer = worker.ask(test, tokens, depth)
            rates[worker.name].append(tokens / answer.seconds)
            sample = {"kind": "sample", "peer": worker.about.peer, "test": test, "tokens": tokens, "depth": depth}
            timed = {"seconds": answer.seconds, "cpu_s": answer.cpu_s, "idle_cpu_s": answer.idle_cpu_s}
            write(options.out, {**sample, "round": turn, **timed})
        about = {"kind": "read", "test": test, "tokens": tokens, "depth": depth, "round": turn}
        write(options.out, {**about, "gb_per_s": memory.gb_per_s()})
    return rates


def write(out: Path, line: dict[str, Any]) -> None:
    """Append one line."""
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 4096, 16384])
    parser.add_argument("--prompts", type=int, nargs="*", default=[16, 512, 4096], help="lengths")
    parser.add_argument("--prompts-at-depth", action="store_true", help="read prompts at every depth, not at 0 only")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16], help="how many to decode")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--peers", nargs="+", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument("--weights", default="auto", choices=list(LEAST_AGREEMENT), help="auto: bfloat16")
    parser.add_argument("--fill", action="store_true", help="fill caches, where that can be done, and read no text")
    parser.add_argument("--out", type=Path, default=PEERS / "samples.jsonl")
    options = parser.parse_args()
    shape = shape_of(options.shape, options.layers)
    names = [name for name in options.peers if is_there(name, options.weights)]
    prepare(shape, names)
    more = [f"--weights={options.weights}", *["--fill"] * options.fill]
    options.memory = PlainRead(options.threads)
    workers = [Worker(name, shape, options.threads, more) for name in names]
    check(workers, LEAST_AGREEMENT[options.weights])
    about_run = {**machine(options.threads, shape), "rounds": options.rounds, "weights": options.weights}
    write(options.out, about_run)
    for worker in workers:
        about = worker.about
        said = {"version": about.version, "settings": about.settings, "threads": about.threads}
        write(options.out, {"kind": "peer", "peer": about.peer, **said})
    print(row(["model", "size", "params", "backend", "threads", "test", "t/s"]))
    print(row(["---", "--:", "--:", "---", "--:", "--:", "--:"]))
    kind = "BF16" if options.weights == "auto" else options.weights
    sizes = [f"llama {shape.name} {kind}", f"{shape.nbytes / 2**30:.2f} GiB", f"{shape.params / 1e9:.2f} B"]
    for depth in options.depths:
        prompts = options.prompts if depth == 0 or options.prompts_at_depth else []
        tests = [("pp", tokens) for tokens in prompts] + [("tg", tokens) for tokens in options.tokens]
        for test, tokens in tests:
            rates = measure(workers, test, tokens, depth, options)
            label = f"{test}{tokens}" + (f" @ d{depth}" if depth else "")
            for worker in workers:
                if worker.name in rates:
                    each = rates[worker.name]
                    rate = f"{statistics.mean(each):.2f} ± {statistics.pstdev(each):.2f}"
                    print(row([*sizes, worker.about.peer, str(worker.about.threads), label, rate]), flush=True)
    for worker in workers:
        worker.stop()


if __name__ == "__main__":
    main()
