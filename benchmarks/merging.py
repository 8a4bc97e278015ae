"""A pass key read through merged cells: what merging evicted tokens gains or loses against dropping them.

    python benchmarks/merging.py --samples 200 >> benchmarks/results/merging.jsonl

A stretch of the shipped novel with a pass key anywhere in it, inside the trained window of passkey-3m, is
read in one step; then the cache is over budget, and what a policy ranks lowest joins cells by each rule, or
is dropped (`none`). The question comes afterwards. `Alternate` is the experiment of llama.cpp PR 5719: every
second token joins its neighbour. Prints one JSON line per policy, budget and rule, with how many keys were
found and a 95 % Wilson interval.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from machine import machine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KeyDiff, KVCache, Policy, Recent, engine
from windlass.demo import ANSWER_TOKENS, MODEL, QUESTION, hide, in_words, novel
from windlass.merge import MERGES
from windlass.open_model import open_model
from windlass.policies import Random, Slots
from windlass.report.summaries import wilson
from windlass.shapes import Scores
from windlass.text import encode

ROWS = 20  # texts that are read together
WINDOW = 16
POLICIES = ("key_diff", "random", "recent", "alternate")


@dataclass(frozen=True)
class Alternate(Policy):
    """Keeps every `group`th token, and so leaves groups of that many to join, whatever is in them.

    Source: llama.cpp PR 5719. Differs: a group's last token is the one that stays.
    """

    group: int = 2
    per_head = False

    def score(self, slots: Slots) -> Scores:
        return (slots.positions % self.group == self.group - 1).float()


def samples(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
    """Pass keys, each with the ids of a stretch of the novel in which it is hidden; `tokens` or a few more or less."""
    draw, text, drawn = random.Random(seed), in_words(novel()), []
    around = len(encode(tokenizer, hide("", "00000", 0.0), is_start=True))
    while len(drawn) < count:
        start = draw.randrange(len(text) - 12 * tokens)
        piece = text[start : start + 12 * tokens]
        offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        key = f"{draw.randrange(10**5):05}"
        hidden = hide(piece[: offsets[tokens - around][0]], key, draw.random())
        drawn.append((key, encode(tokenizer, hidden, is_start=True)))
    return drawn


def found(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[tuple[str, list[int]]],
    policy: Policy,
    budget: int | None,
    merge: str | None,
    positions: str,
) -> int:
    """How many keys the model tells."""
    total = 0
    for start in range(0, len(texts), ROWS):
        some = texts[start : start + ROWS]
        longest = max(len(ids) for _, ids in some)
        cache = KVCache(
            model, budget, policy, chunk=longest, batch=len(some), merge=merge, positions=positions, window=WINDOW
        )
        engine.prefill(model, cache, [ids for _, ids in some])
        results = engine.generate(model, tokenizer, [QUESTION] * len(some), cache, ANSWER_TOKENS)
        for (key, _), result in zip(some, results, strict=True):
            answer = result.text.strip()
            total += answer.startswith(key) and not answer[len(key) :][:1].isdigit()
    return total


def settings(options: argparse.Namespace) -> Iterator[tuple[Policy, int | None, str | None]]:
    """Policies with budgets and rules; first the full cache."""
    yield Recent(), None, None
    next_only = [f"{name}(next)" for name in MERGES]
    for ratio in options.ratios:
        budget = options.tokens // ratio
        kept = {"key_diff": KeyDiff(), "random": Random(), "recent": Recent(), "alternate": Alternate(ratio)}
        for name in options.policies:
            is_group = name == "alternate"  # its sinks and newest tokens are no groups
            for rule in (None, *([] if is_group else MERGES), *next_only):
                yield kept[name], budget + (WINDOW if is_group else 0), rule


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES)
    parser.add_argument("--positions", default="original")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = open_model(str(folder), "float32")
    texts = samples(tokenizer, options.samples, options.tokens, options.seed)
    for policy, budget, rule in settings(options):
        start = time.perf_counter()
        hits = found(model, tokenizer, texts, policy, budget, rule, options.positions)
        line = {"kind": "merging", **machine(options.threads), "policy": repr(policy), "budget": budget}
        line |= {"merge": rule or "none", "positions": options.positions, "tokens": options.tokens}
        line |= {
            "seed": options.seed,
            "samples": len(texts),
            "found": hits,
            "interval": wilson(hits / len(texts), len(texts)),
        }
        print(json.dumps({**line, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
