"""llama.cpp pull request 5719 under self-extend: the cells that then share a position are merged.

    python benchmarks/self_extend_merging.py windlass/assets/passkey-3m --tokens 768 --chunk 64 \\
        >> benchmarks/results/self_extend_merging.jsonl
    python benchmarks/self_extend_merging.py needles-3m --tokens 1536 --chunk 128 \\
        >> benchmarks/results/self_extend_merging.jsonl

The text of its pass-key test, one and a half times as long as the model was trained on, as 6,067 tokens were for
LLaMA-2. As its example does, before each chunk the positions of the chunk before it are divided by `--group`, and the
tokens that then share a position are merged in every layer and head, or all but one of them dropped (`none`). The
controls: `apart` merges nothing; `full` divides nothing, either; `halved` drops nothing, and reads a text half as long.
With `--sinks` those first places are left alone. Prints one JSON line per rule, with how many keys were found and a
95 % Wilson interval.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from machine import machine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KVCache, Policy
from windlass.cache.compress import cut_to_budget
from windlass.core.types import Scores
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit
from windlass.evals.report.summaries import wilson
from windlass.evals.task import Sample
from windlass.evals.tasks.passkey import PassKey
from windlass.hf.load import load
from windlass.policies import Needs, Slots
from windlass.policies.base import scatter_sorted

ROWS = 20  # texts that are read together
RULES = ("none", "sum", "mean", "mean_count", "pick")
ANSWER = 64  # tokens of question and answer at most
CONTROLS = ("full", "apart", "halved")
FREE = 2**30  # above any position


@dataclass(frozen=True)
class LastOfPlace(Policy):
    """Keeps the last of the tokens that share a position."""

    needs = Needs(per_head=False)

    def score(self, slots: Slots) -> Scores:
        order = slots.positions.where(slots.positions >= 0, FREE).argsort(dim=-1, stable=True)
        positions = slots.positions.gather(-1, order)
        return scatter_sorted((positions != positions.roll(-1, -1)).float(), order)


def read(
    model: PreTrainedModel, prompts: Sequence[list[int]], rule: str, group: int, chunk: int, sinks: int
) -> KVCache:
    """A cache that has read the prompts, chunk by chunk."""
    room = max(map(len, prompts)) + ANSWER  # a budget that is never exceeded: what goes is let go between the chunks
    merge = None if rule in ("none", *CONTROLS) else f"{rule}(next)"
    cache = KVCache(
        model,
        room,
        LastOfPlace(),
        sinks=sinks,
        window=1,
        chunk=chunk,
        positions="original",
        batch=len(prompts),
        rollback=0,
        merge=merge,
    )
    grouped, shortest = 0, min(map(len, prompts))
    for start in range(0, shortest - chunk, chunk):
        generate.prefill(model, cache, [ids[start : start + chunk] for ids in prompts])
        if rule in ("full", "halved"):
            continue
        cache.shift(grouped, grouped + chunk, (group - 1) * grouped)
        cache.divide(group * grouped, group * grouped + chunk, group)
        grouped += chunk // group
        if rule != "apart":
            cut(cache, grouped + (group - 1) * sinks, room)
    generate.prefill(model, cache, [ids[start + chunk :] for ids in prompts])
    return cache


def cut(cache: KVCache, budget: int, room: int) -> None:
    """Let go of all but `budget` tokens now, and of none up to `room`."""
    cache.options = replace(cache.options, budget=budget)
    cut_to_budget(cache)
    cache.options = replace(cache.options, budget=room)
    for layer in cache.layers:
        layer.rules = layer.rules.with_budget(room)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--chunk", type=int, required=True)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 4])
    parser.add_argument("--rules", nargs="+", default=[*CONTROLS, *RULES])
    parser.add_argument("--words", action="store_true", help="three words as a key in place of a number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32")
    task = PassKey(is_words=options.words)
    for rule in options.rules:
        length = options.tokens // (2 if rule == "halved" else 1)
        drawn = samples(tokenizer, task, length, options.seed, options.samples)
        for sinks in options.sinks[:1] if rule in CONTROLS else options.sinks:
            start, hits, held = time.perf_counter(), 0.0, 0
            for first in range(0, len(drawn), ROWS):
                some = drawn[first : first + ROWS]
                prompts = [encode(tokenizer, each.context, is_start=True) for each in some]
                cache = read(model, prompts, rule, options.group, options.chunk, sinks)
                held = max(held, *(int((layer.positions >= 0).sum(-1).max()) for layer in cache.layers))
                asked = [each.turns[0].question + each.turns[0].prefix for each in some]
                results = generate.generate(model, tokenizer, asked, cache, task.answer_tokens)
                hits += sum(task.score(each.turns[0], got.text) for each, got in zip(some, results, strict=True))
            line = {"kind": "self_extend_merging", **machine(options.threads), "model": options.model.split("/")[-1]}
            line |= {"merge": rule, "sinks": sinks, "group": options.group, "tokens": length, "chunk": options.chunk}
            line |= {"task": "passkey_words" if options.words else "passkey", "seed": options.seed, "slots": held}
            line |= {
                "samples": len(drawn),
                "score": hits / len(drawn),
                "interval": wilson(hits / len(drawn), len(drawn)),
            }
            print(json.dumps({**line, "seconds": time.perf_counter() - start}), flush=True)


def samples(tokenizer: PreTrainedTokenizerBase, task: PassKey, length: int, seed: int, count: int) -> list[Sample]:
    """Texts of `length` tokens with question and answer."""
    return [fit(SampleSpec(task, "passkey", length, seed, number), tokenizer).sample for number in range(count)]


if __name__ == "__main__":
    with torch.inference_mode():
        main()
