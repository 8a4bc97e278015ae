"""Whether the first layer's keys and values are worth a table by token id, and what no products of q, k, v would save.

    python benchmarks/first_layer.py >> benchmarks/results/first_layer.jsonl

Before RoPE a key of the first layer depends on the token's id alone, and so does its value. In turn: the two products
that compute them for one token, a row taken out of a table of all of them, all products of queries, keys and values of
the model, and a whole token of `windlass` behind a random text. Models are made with `--layers` layers; what the others
of the shape would take is added. Prints one JSON line per shape and kind of weights.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch
from machine import machine
from torch import nn
from transformers import PreTrainedModel
from turns import in_turn, medians

import windlass
from windlass.core.inputs import LinearInput, LinearLayer
from windlass.evals.speed.measure import Timer
from windlass.evals.speed.rows import BenchRow, BenchSetup, random_model, shape_of
from windlass.evals.speed.workloads import Workload
from windlass.hf.kv_cache import layer_shapes
from windlass.kernels import cpu

SHAPES = ("1b", "8b", "7b-mha")


def products(linears: list[nn.Linear], inputs: torch.Tensor) -> Callable[[], None]:
    """One row through each of them, by our kernel."""
    calls = [LinearInput(inputs, LinearLayer(linear.weight.detach())) for linear in linears]

    def work() -> None:
        for call in calls:
            cpu.linear(call)

    return work


def measure(model: PreTrainedModel, depth: int, rounds: int, threads: int) -> dict[str, float]:
    """Median seconds of each."""
    layers, hidden = model.get_decoder().layers, model.config.hidden_size
    vocabulary = model.config.vocab_size
    attention = [layer.self_attn for layer in layers]
    inputs = torch.randn(1, hidden, dtype=torch.bfloat16)
    width = sum(linear.out_features for linear in (attention[0].k_proj, attention[0].v_proj))
    table, ids = torch.zeros(vocabulary, width, dtype=torch.bfloat16), torch.randint(vocabulary, (4096,)).tolist()
    timer = Timer(model, layer_shapes(model), BenchRow(Workload(False, 1, depth), BenchSetup(threads=threads), {}))
    timer.warm_up(time.perf_counter)
    first = [attention[0].k_proj, attention[0].v_proj]
    projections = [linear for each in attention for linear in (each.q_proj, each.k_proj, each.v_proj)]
    place = torch.empty(1, width, dtype=torch.bfloat16)

    def gather() -> None:
        torch.index_select(table, 0, torch.tensor([ids.pop()]), out=place)

    works = {
        "token": lambda: timer.run(time.perf_counter),
        "products": products(first, inputs),
        "gather": gather,
        "q, k, v": products(projections, inputs),
        "head": products([model.get_output_embeddings()], inputs),
    }
    after = {name: (timer.take_back if name == "token" else lambda: None) for name in works}
    return medians(in_turn(works, rounds, after))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.manual_seed(0)
    for name in options.shapes:
        whole = shape_of(name, None)[0]
        model = windlass.attach(random_model(shape_of(name, options.layers)[0], torch.bfloat16))
        seconds = measure(model, options.depth, options.rounds, options.threads)
        # A token of all layers: a layer takes what is left of the token beside its head.
        per_layer = (seconds["token"] - seconds["head"]) / options.layers
        token = seconds["head"] + whole.layers * per_layer
        (held, *_) = whole.cached_layers(torch.bfloat16)
        entries = model.config.vocab_size * held.kv_heads * (held.head_dim + held.value_dim)
        line = {"kind": "first_layer", **machine(options.threads), "kernel": cpu.instruction_set(), "shape": name}
        line |= {"measured_layers": options.layers, "layers": whole.layers, "depth": options.depth}
        line |= {"rounds": options.rounds, "seconds": seconds, "token_s": token, "table_bytes": 2 * entries}
        line |= {"table_gain": max(0.0, seconds["products"] - seconds["gather"]) / token}
        line |= {"most_gain": seconds["q, k, v"] / options.layers * whole.layers / token}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
