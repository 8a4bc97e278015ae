"""Linear layers of few rows: our kernel, PyTorch's product, and a plain read of the weights.

    python benchmarks/linear.py >> benchmarks/results/linear.jsonl

Several matrices of one shape are read one after the other, so that none is left in the CPU's caches from the last time.
The three alternate; medians. Random weights. PyTorch multiplies int8 codes by its own kernel for them
(`_weight_int8pack_mm`). Prints one JSON line per shape, dtype and number of rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from machine import machine
from torch.nn.functional import linear as pytorch_linear

from windlass.core.linear import LinearInput
from windlass.kernels import cpu

BYTES = 2**29  # that all matrices together hold at least
SHAPES = {"1b gate": (8192, 2048), "1b down": (2048, 8192), "1b query": (2048, 2048), "8b gate": (14336, 4096)}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "int8": torch.int8}


def calls_of(shape: tuple[int, int], dtype: torch.dtype, rows: int) -> list[LinearInput]:
    """As many matrices of random weights as fill BYTES, and inputs."""
    outputs, width = shape
    count = max(2, BYTES // (outputs * width * dtype.itemsize))
    inputs = torch.randn(rows, width).to(torch.bfloat16 if dtype is torch.int8 else dtype)
    if dtype is torch.int8:
        codes = [torch.randint(-127, 128, shape, dtype=dtype) for _ in range(count)]
        return [LinearInput(inputs, each, None, torch.rand(outputs)) for each in codes]
    return [LinearInput(inputs, torch.randn(shape).to(dtype)) for _ in range(count)]


def pytorch(call: LinearInput) -> None:
    """PyTorch's product."""
    if call.scales is None:
        pytorch_linear(call.inputs, call.weights)
    else:
        torch.ops.aten._weight_int8pack_mm(call.inputs, call.weights, call.scales.bfloat16())


def measure(calls: list[LinearInput], rounds: int) -> dict[str, float]:
    """Median seconds per matrix of each."""
    works: dict[str, Callable[[LinearInput], object]] = {
        "windlass": cpu.linear,
        "pytorch": pytorch,
        "read": lambda call: call.weights.view(torch.float32).sum(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            for call in calls:
                work(call)
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - start) / len(calls))
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--dtypes", nargs="+", default=[*DTYPES], choices=[*DTYPES])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    for shape in options.shapes:
        for dtype in options.dtypes:
            for rows in options.rows:
                calls = calls_of(SHAPES[shape], DTYPES[dtype], rows)
                line = {
                    "kind": "linear",
                    **machine(torch.get_num_threads()),
                    "kernel": cpu.instruction_set(),
                    "shape": shape,
                    "dtype": dtype,
                    "rows": rows,
                    "bytes": calls[0].weights.nbytes,
                    "seconds": measure(calls, options.rounds),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
