"""Linear layers of few rows: our kernel, PyTorch's product, and a plain read of the weights.

    python benchmarks/linear.py >> benchmarks/results/linear.jsonl

Several matrices of one shape are read one after the other, so that none is left in the CPU's caches from the last time.
The three alternate; medians. Random weights. PyTorch multiplies codes by its own kernels (`_weight_int8pack_mm`,
`_weight_int4pack_mm_for_cpu`); those of int4 have a scale and a zero point for 128 inputs, which count as read. Prints
one JSON line per shape, dtype and number of rows.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import linear as pytorch_linear

from windlass.core.inputs import LinearInput, LinearLayer, Nibbles
from windlass.kernels import cpu

BYTES = 2**29  # that all matrices together hold at least
SHAPES = {"1b gate": (8192, 2048), "1b down": (2048, 8192), "1b query": (2048, 2048), "8b gate": (14336, 4096)}
FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "int8": 8, "int4": 4}
GROUP, BLOCK = 128, 64  # of int4


def calls_of(shape: tuple[int, int], dtype: str, rows: int) -> list[LinearInput]:
    """As many matrices of random weights as fill BYTES, and inputs."""
    outputs, width = shape
    count = range(max(2, 8 * BYTES // (outputs * width * BITS[dtype])))
    inputs = torch.randn(rows, width).to(FLOATS.get(dtype, torch.bfloat16))
    if dtype == "int8":
        codes = [torch.randint(-127, 128, shape, dtype=torch.int8) for _ in count]
        return [LinearInput(inputs, LinearLayer(each, None, torch.rand(outputs).bfloat16())) for each in codes]
    if dtype == "int4":
        nibbles = [torch.randint(0, 256, (outputs, width // 2), dtype=torch.uint8) for _ in count]
        pairs = [torch.rand(width // GROUP, outputs, 2).bfloat16() for _ in count]
        return [
            LinearInput(inputs, LinearLayer(Nibbles(*each, GROUP, BLOCK))) for each in zip(nibbles, pairs, strict=True)
        ]
    return [LinearInput(inputs, LinearLayer(torch.randn(shape).to(inputs.dtype))) for _ in count]


def tensors_of(call: LinearInput) -> list[Tensor]:
    """What a linear layer has to read, but for one number per output."""
    return (
        [call.layer.weights.codes, call.layer.weights.pairs]
        if isinstance(call.layer.weights, Nibbles)
        else [call.layer.weights]
    )


def pytorch(call: LinearInput) -> None:
    """PyTorch's product."""
    weights = call.layer.weights
    if isinstance(weights, Nibbles):
        torch.ops.aten._weight_int4pack_mm_for_cpu(call.inputs, weights.codes, weights.group, weights.pairs)
    elif call.layer.scales is None:
        pytorch_linear(call.inputs, weights)
    else:
        torch.ops.aten._weight_int8pack_mm(call.inputs, weights, call.layer.scales)


def measure(calls: list[LinearInput], rounds: int) -> dict[str, float]:
    """Median seconds per matrix of each."""
    works: dict[str, Callable[[LinearInput], object]] = {
        "windlass": cpu.linear,
        "pytorch": pytorch,
        "read": lambda call: [each.view(torch.float32).sum() for each in tensors_of(call)],
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
    parser.add_argument("--dtypes", nargs="+", default=[*BITS], choices=[*BITS])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.manual_seed(0)
    for shape in options.shapes:
        for dtype in options.dtypes:
            for rows in options.rows:
                calls = calls_of(SHAPES[shape], dtype, rows)
                line = {
                    "kind": "linear",
                    **machine(torch.get_num_threads()),
                    "kernel": cpu.instruction_set(),
                    "shape": shape,
                    "dtype": dtype,
                    "rows": rows,
                    "bytes": sum(each.nbytes for each in tensors_of(calls[0])),
                    "seconds": measure(calls, options.rounds),
                }
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
