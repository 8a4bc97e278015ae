"""Which digits of a hidden number are still held at the end of a text, where evicted tokens are dropped or merged.

    python benchmarks/merged_digits.py windlass/assets/finder-3m --tasks "magic_single(agent.txt)" \\
        >> benchmarks/results/merged_digits.jsonl

For each digit of the first number that is asked for: the share of layers and kv heads that hold a token at its place.
A kept token that has taken others in stands between them, and so not at its place any more. `count_only` is a control:
the kept token takes the weight of the evicted ones, and its key and value stay what they were. Numbers shorter than
the longest are left out. Prints one JSON line for each task and rule.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import final

import torch
from machine import machine
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KVCache
from windlass.cache.merging import Merge, MergeBatch
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit, load_task
from windlass.hf.load import load

CHUNK = 128


@final
@dataclass(frozen=True)
class CountOnly(Merge):
    """The kept token weighs as much as all that were merged into it, and is otherwise left alone."""

    name = "count_only"
    is_counted = True

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.targets.states


RULES: tuple[str | Merge | None, ...] = (None, CountOnly(target="next"), "mean(next)", "mean_count(next)")


def places_of(value: str, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The index of each digit's token where the number stands first; none where digits are no tokens of their own."""
    texts = [str(tokenizer.decode([token])).strip() for token in ids]
    for start in range(len(ids)):
        places = [place for place in range(start, min(start + len(value) + 1, len(ids))) if texts[place]]
        if "".join(texts[place] for place in places[: len(value)]) == value:
            return places[: len(value)]
    return []


def held(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: str,
    rule: str | Merge | None,
    options: argparse.Namespace,
) -> Iterator[list[float]]:
    """Of each text, for each digit, the share of layers and kv heads that hold it at its place."""
    label, task = load_task(spec)
    for number in range(options.samples):
        sample = fit(SampleSpec(task, label, options.length, options.seed, number), tokenizer).sample
        ids = encode(tokenizer, sample.context, is_start=True)
        places = places_of(sample.turns[0].expected[0], ids, tokenizer)
        cache = KVCache(
            model, budget=len(ids) // options.ratio, policy=options.policy, merge=rule, positions="original"
        )
        for piece in torch.tensor([ids]).split(CHUNK, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        heads = torch.stack([head for layer in cache.layers for head in layer.positions[0].long()])
        yield [float((heads == place).any(1).float().mean()) for place in places]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tasks", nargs="+", required=True)
    parser.add_argument("--policy", default="key_diff")
    parser.add_argument("--ratio", type=int, default=8, help="which part of a text is kept")
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32")
    for spec in options.tasks:
        for rule in RULES:
            texts = [shares for shares in held(model, tokenizer, spec, rule, options) if shares]
            digits = max(map(len, texts))
            texts = [shares for shares in texts if len(shares) == digits]
            line = {"kind": "merged_digits", **machine(options.threads), "model": options.model.rpartition("/")[2]}
            line |= {"task": spec.rpartition(":")[2], "policy": options.policy, "merge": str(rule or "none")}
            line |= {"budget": f"{options.ratio}x", "length": options.length, "samples": len(texts)}
            line["held"] = [round(fmean(each), 4) for each in zip(*texts, strict=True)]
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
