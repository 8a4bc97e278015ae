"""What a linear scorer costs: a text read with it and with KeyDiff, in turns, and tokens written after it.

    python benchmarks/scorer.py --shape 1b --layers 2 --tokens 8192 --budget 1024
    python benchmarks/scorer.py --model needles-3m --tokens 480 --budget 120 --rounds 30 --groups 2 --dtype float32

The scorer is fitted to random tokens, which changes nothing of its cost. Prints one JSON line: median seconds of each
policy, and the median of the ratios of neighbouring runs. Whether it finds anything is a matter of `windlass eval`.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from machine import machine
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from windlass.engine.generate import prefill
from windlass.evals.calibrate import fitted
from windlass.evals.speed.rows import random_model, shape_of
from windlass.hf.load import load
from windlass.policies import linear_scorer

FITTED = 600  # tokens of the text that the scorer is fitted to


def shares_of(model: PreTrainedModel, groups: int) -> windlass.Shares | None:
    """Shares that put the heads of each layer into so many groups, from half to one and a half; None for no groups."""
    config = model.config
    heads = config.num_key_value_heads
    sizes = [0.5 + head * groups // heads / max(groups - 1, 1) for head in range(heads)]
    return windlass.Shares([sizes] * config.num_hidden_layers) if groups else None


def seconds(
    model: PreTrainedModel,
    policy: windlass.Policy,
    shares: windlass.Shares | None,
    ids: Tensor,
    decoded: int,
    budget: int,
) -> list[float]:
    """Of reading `ids`, and of each of `decoded` tokens after them."""
    cache = windlass.KVCache(model, budget, policy, chunk=512, shares=shares)
    started = time.perf_counter()
    prefill(model, cache, ids.tolist())
    read = time.perf_counter()
    for at in range(decoded):
        model(input_ids=ids[:, at : at + 1], past_key_values=cache)
    return [read - started, (time.perf_counter() - read) / max(decoded, 1)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--model", help="in place of a shape")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--decode", type=int, default=20, help="tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=0, help="of heads in a layer, of unlike shares, under the scorer")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model is not None:
        model, _ = load(options.model, options.dtype, "cpu")
    else:
        model = random_model(shape_of(options.shape, options.layers)[0], getattr(torch, options.dtype))
        windlass.attach(model)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, max(options.tokens, FITTED)), generator=draw)
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scorer.safetensors"
        linear_scorer.write(fitted(model, ids[:, :FITTED].tolist(), lambda *_: None), file)
        policies = {"key_diff": windlass.KeyDiff(), "linear_scorer": windlass.LinearScorer(str(file))}
        shares = {"key_diff": None, "linear_scorer": shares_of(model, options.groups)}
        found: dict[str, list[list[float]]] = {name: [] for name in policies}
        for _ in range(options.rounds + 1):
            for name, policy in policies.items():
                text = ids[:, : options.tokens]
                found[name].append(seconds(model, policy, shares[name], text, options.decode, options.budget))
    line = {"kind": "scorer", **machine(options.threads), "model": options.model or options.shape}
    line |= {
        name: getattr(options, name) for name in ("layers", "tokens", "budget", "groups", "decode", "rounds", "dtype")
    }
    for number, what in enumerate(("read", "token")):
        base, ours = ([each[number] for each in found[name][1:]] for name in policies)  # without the first, a warm-up
        line |= {f"{what}_s": {"key_diff": statistics.median(base), "linear_scorer": statistics.median(ours)}}
        line |= {f"{what}_ratio": statistics.median(b / a for a, b in zip(base, ours, strict=True))}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
