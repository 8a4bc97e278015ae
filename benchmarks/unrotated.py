"""Keys stored un-rotated against keys stored rotated: a token, or a prompt, of each in turn, in one process.

    python benchmarks/unrotated.py --depths 128 1024 8192 32768 >> benchmarks/results/unrotated.jsonl
    python benchmarks/unrotated.py --weights int4 >> benchmarks/results/unrotated.jsonl
    python benchmarks/unrotated.py --shape 7b-mha --layers 4 --prompt 512 >> benchmarks/results/unrotated.jsonl

The same model and kernels; `RotatedStorage` is the baseline. A token whose keys are stored un-rotated goes through all
layers in one call, and that of the baseline through the model's own modules; with `--by-module` both do, so that the
rotation is all that differs. Texts are random and are not read. Prints one JSON line
per depth: the median seconds, and the quartiles of what rotated keys take over what un-rotated ones take, above 1
where un-rotated ones are faster.
"""

import argparse
import json
from dataclasses import replace

import torch
from machine import machine
from transformers import PreTrainedModel
from turns import in_turn, medians, quartiles

import windlass
from windlass.evals.speed.measure import Timer
from windlass.evals.speed.rows import BenchRow, BenchSetup, random_model, shape_of
from windlass.evals.speed.workloads import STORAGES, Workload
from windlass.hf.kv_cache import layer_shapes
from windlass.hf.weights import quantize


def timer_of(model: PreTrainedModel, workload: Workload, setup: BenchSetup) -> Timer:
    """One that has run once."""
    timer = Timer(model, layer_shapes(model), BenchRow(workload, setup, {}))
    timer.warm_up(lambda: 0.0)
    return timer


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="auto", choices=["auto", "int8", "int4"], help="auto: bfloat16")
    parser.add_argument("--depths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--prompt", type=int, help="read prompts of so many tokens instead of writing")
    parser.add_argument("--by-module", action="store_true", help="of either, call all modules of the model")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    model = random_model(shape_of(options.shape, options.layers)[0], torch.bfloat16)
    quantize(model, options.weights)
    windlass.attach(model)
    if options.by_module:
        for layer in model.get_decoder().layers:
            layer.register_forward_hook(lambda *_: None)  # a layer that is hooked is called as it is
    setup = BenchSetup(threads=options.threads)
    for depth in options.depths:
        workload = Workload(options.prompt is not None, options.prompt or 1, depth)
        timers = {name: timer_of(model, workload, replace(setup, storage=name)) for name in STORAGES}
        works = {name: lambda timer=timer: timer.run(lambda: 0.0) for name, timer in timers.items()}
        seconds = in_turn(works, options.pairs, {name: timer.take_back for name, timer in timers.items()})
        line = {"kind": "unrotated", **machine(options.threads), "shape": options.shape, "layers": options.layers}
        line |= {
            "by_module": options.by_module,
            "weights": options.weights,
            "depth": depth,
            "prompt": options.prompt,
            "pairs": options.pairs,
        }
        line |= {"seconds": medians(seconds), "ratios": quartiles(seconds["rotated"], seconds["unrotated"])}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
