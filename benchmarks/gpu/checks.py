"""Parts of `python -m gpu`: the machine and what its memory can do, and whether the kernels are right on it."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from machine import machine

import windlass
from gpu.part import Part

ROOT = Path(__file__).parents[2]
OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")


def measure(part: Part) -> None:
    """The device's name and sizes, versions, and the rates of a copy and of a plain read."""
    about: dict[str, object] = {"device": "cpu"}
    if part.is_gpu:
        properties = torch.cuda.get_device_properties(part.device)
        about = {
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    source = torch.randn(part.sizes.copied_bytes // 4, device=part.device)
    target = torch.empty_like(source)
    timed = part.alternate({"copy": lambda: target.copy_(source), "read": source.sum})
    moved = {"copy": 2 * source.nbytes, "read": source.nbytes}
    rates = {f"{name}_gb_per_s": size / timed[name]["median_s"] / 1e9 for name, size in moved.items()}
    versions = {"triton": version("triton"), "windlass": windlass.__version__}
    part.write("machine", **machine(torch.get_num_threads()), **versions, **about, **rates, timed=timed)


def parity(part: Part) -> None:
    """The tests that need a GPU, counted as far as they came."""
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    # The options of pyproject.toml need packages for development. Most of the time goes to compiling kernels.
    options = ["-m", "gpu", "-v", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default"]
    options += ["-n", str(min(12, os.cpu_count() or 1))] if find_spec("xdist") else []
    # The first shows the output of a run that is cut, the second is for the tests' deterministic algorithms.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(part.left_s, 1)
        )
        said, end = done.stdout, f"exit code {done.returncode}"
        if done.returncode not in (0, 1):
            end += f": {(done.stderr or said).strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        end = "cut: out of time"
    said = re.sub(r"^\[gw\d+\].*?([A-Z]+) (\S+::.*)", r"\2 \1", said, flags=re.MULTILINE)  # as a single process says it
    outcomes = re.findall(rf"^\S+::.* ({'|'.join(OUTCOMES)})", said, re.MULTILINE)
    counts = {name.lower(): outcomes.count(name) for name in OUTCOMES}
    failed = re.findall(r"^(\S+::.*) (?:FAILED|ERROR)", said, re.MULTILINE)
    part.write("parity", **counts, end=end, first_failed=failed[:20])
    print(f"{counts}, {end}", *failed[:20], sep="\n", flush=True)
