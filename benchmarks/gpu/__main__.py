"""Measure Windlass on a GPU in under ten minutes: `benchmarks/gpu.sh` calls this, and so may you.

    python -m gpu OUT                          # a CUDA machine
    python -m gpu OUT --device cpu --tiny      # the same steps, tiny: that all of it works

Every part is a process of its own with a time of its own. Time left by earlier parts goes to later ones, and
no part gets less than its share. Lines are appended to OUT/gpu.jsonl as they come, so a run that is stopped
keeps its lines. The output of a part is in OUT/PART.log. `gpu.tables` makes the documentation's section.
"""

import argparse
import datetime
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gpu import attention as gpu_attention
from gpu import checks as gpu_machine
from gpu import decode as gpu_decode
from gpu import memory as gpu_memory
from gpu import peers as gpu_peers
from gpu import recall as gpu_recall
from gpu.part import TINY, Part, Sizes, append
from windlass.core.errors import UsageError
from windlass.hf.load import device_of

SECONDS = 585.0
GRACE = 0.08  # of a part's time: it is to end by itself before it is ended


@dataclass(frozen=True)
class Share:
    """A part, and the share of the time that it gets at least."""

    measure: Callable[[Part], None]
    weight: float


def shares(sizes: Sizes) -> dict[str, Share]:
    """All parts, in order. Parts of whole models come once per shape."""
    parts = {
        "machine": Share(gpu_machine.measure, 40),
        "parity": Share(gpu_machine.parity, 60),
        "attention": Share(gpu_attention.measure, 75),
    }
    for shape in reversed(sizes.shapes):
        parts[f"decode-{shape}"] = Share(functools.partial(gpu_decode.measure, shape=shape), 75)
    for shape in reversed(sizes.shapes):
        parts[f"peers-{shape}"] = Share(functools.partial(gpu_peers.measure, shape=shape), 105)
    smallest = sizes.shapes[0]
    parts[f"recall-{smallest}"] = Share(functools.partial(gpu_recall.measure, shape=smallest), 60)
    parts[f"compiled-{smallest}"] = Share(functools.partial(gpu_decode.compiled, shape=smallest), 35)
    return parts | {"memory": Share(gpu_memory.measure, 25)}


def seconds_of(name: str, weights: dict[str, float], whole_s: float, left_s: float) -> float:
    """How long part `name` may take: what is left, less the shares of the parts that come after it."""
    names = list(weights)
    later = sum(weights[each] for each in names[names.index(name) + 1 :])
    return left_s - whole_s * later / sum(weights.values())


def run_all(options: argparse.Namespace) -> int:
    """Run the chosen parts one after the other. Returns the number of parts that did not finish."""
    out: Path = options.out / "gpu.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    append(out, {"kind": "run", "date": now, "device": options.device, "is_tiny": options.tiny})
    every = shares(TINY if options.tiny else Sizes())
    weights = {name: share.weight for name, share in every.items() if name in (options.parts or every)}
    ends, failed = time.monotonic() + options.seconds, 0
    for name in weights:
        may_s = seconds_of(name, weights, options.seconds, ends - time.monotonic())
        print(f"== {name}, up to {may_s:.0f} s", flush=True)
        started = time.monotonic()
        why = _run_one(options, name, may_s)
        if why is not None:
            failed += 1
            print(f"{name}: {why}", flush=True)
        took = time.monotonic() - started
        append(out, {"part": name, "kind": "end" if why is None else "failed", "why": why, "seconds": took})
    return failed


def _run_one(options: argparse.Namespace, name: str, may_s: float) -> str | None:
    """Run one part as a process. Returns the reason if it did not finish, or None."""
    command = [sys.executable, "-m", "gpu", str(options.out), "--only", name]
    command += ["--device", options.device, "--seconds", str((1 - GRACE) * may_s)]
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    log = options.out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command + ["--tiny"] * options.tiny, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(max(may_s, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"cut after {may_s:.0f} s"
        except BaseException:
            process.kill()
            raise
    said = log.read_text().strip().splitlines()
    return None if code == 0 else f"ended with code {code}: {said[-1] if said else 'it said nothing'}. See {log}"


def main() -> int:
    """Run all parts, or one of them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: shows that all works, measures nothing")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--parts", nargs="+", metavar="PART", help="of: " + ", ".join(shares(Sizes())))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    parts = shares(TINY if options.tiny else Sizes())
    unknown = set(options.parts or []) - set(parts)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}. There are: {', '.join(parts)}")
    try:
        device = device_of(options.device)
    except UsageError as error:
        parser.error(str(error))
    if options.only is None:
        return 1 if run_all(options) else 0
    torch.manual_seed(0)
    with torch.no_grad():
        parts[options.only].measure(
            Part(options.only, device, options.out / "gpu.jsonl", options.seconds, options.tiny)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
