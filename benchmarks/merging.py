"""A pass key read through merged cells: what merging evicted tokens gains or loses against dropping them.

    python benchmarks/merging.py --samples 200 >> benchmarks/results/merging.jsonl
    python benchmarks/merging.py --policies groups --ratios 2 4 --rules none "mean_count(next)"
    python benchmarks/merging.py --policies groups --tokens 2000 --ratios 2 4 --positions "self_extend(4, 64)" \\
        --window 64 --chunk 128 --rules "mean_count(next)"
    python benchmarks/merging.py --policies pairs --table pairs.json --ratios 2 --rules none "mean_count(next)"

A stretch of the shipped novel with a pass key anywhere in it, inside the trained window of the shipped model, is
read in one step; then the cache is over budget, and what a policy ranks lowest joins cells by each rule, or
is dropped (`none`). The question comes afterwards. `alternate` is the experiment of llama.cpp PR 5719: every
second token joins its neighbour. `groups` lets other policies choose which groups of neighbours shrink, of
twice as many tokens as the text has to shrink; `pairs` reads a table of `windlass calibrate`, made of another
novel and in float32. Prints one JSON line per policy, budget and rule, with how many keys were found and a
95 % Wilson interval.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import torch
from machine import machine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import InGroups, KeyDiff, KeyNorm, KVCache, Leverage, Pairs, Policy, Recent
from windlass.cache.merging import MERGES
from windlass.cli.demo import ANSWER_TOKENS, MODEL
from windlass.core.types import Scores
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.report.summaries import wilson
from windlass.evals.texts import ASKED, hide_pass_key, in_words, novel
from windlass.hf.load import load
from windlass.policies import Needs, Random, Slots

ROWS = 20  # texts that are read together
WINDOW = 16
POLICIES = ("key_diff", "random", "recent", "alternate")
CHOOSING = (KeyDiff(), Leverage(), KeyNorm(), Random(), Recent())  # of groups


@dataclass(frozen=True)
class Alternate(Policy):
    """Keeps every `group`th token, and so leaves groups of that many to join, whatever is in them.

    Source: llama.cpp PR 5719. Differs: a group's last token is the one that stays.
    """

    group: int = 2

    needs = Needs(per_head=False)

    def score(self, slots: Slots) -> Scores:
        return (slots.positions % self.group == self.group - 1).float()


def samples(tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int) -> list[tuple[str, list[int]]]:
    """Pass keys, each with the ids of a stretch of the novel in which it is hidden; `tokens` or a few more or less."""
    draw, text = random.Random(seed), in_words(novel())
    drawn: list[tuple[str, list[int]]] = []
    around = len(encode(tokenizer, hide_pass_key("", "00000", 0.0), is_start=True))
    while len(drawn) < count:
        start = draw.randrange(len(text) - 12 * tokens)
        piece = text[start : start + 12 * tokens]
        offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        key = f"{draw.randrange(10**5):05}"
        hidden = hide_pass_key(piece[: offsets[tokens - around][0]], key, draw.random())
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
    window: int = WINDOW,
    chunk: int | None = None,
) -> int:
    """How many keys the model tells."""
    total = 0
    for start in range(0, len(texts), ROWS):
        some = texts[start : start + ROWS]
        longest = max(len(ids) for _, ids in some)
        cache = KVCache(
            model,
            budget,
            policy,
            chunk=chunk or longest,
            batch=len(some),
            merge=merge,
            positions=positions,
            window=window,
        )
        generate.prefill(model, cache, [ids for _, ids in some])
        results = generate.generate(model, tokenizer, [ASKED] * len(some), cache, ANSWER_TOKENS)
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
        kept: dict[str, list[Policy]] = {
            "key_diff": [KeyDiff()],
            "random": [Random()],
            "recent": [Recent()],
            "alternate": [Alternate(ratio)],
            "groups": [InGroups(policy, 2 * ratio) for policy in CHOOSING],
            "pairs": [Pairs(options.table)] if options.table is not None else [],
        }
        for name in options.policies:
            is_group = name == "alternate"  # its sinks and newest tokens are no groups
            rules = [None, *([] if name in ("alternate", "groups", "pairs") else MERGES), *next_only]
            for policy, rule in itertools.product(kept[name], rules):
                if options.rules is None or (rule or "none") in options.rules:
                    yield policy, budget + (options.window if is_group else 0), rule


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=[*POLICIES, "groups", "pairs"])
    parser.add_argument("--rules", nargs="+", help="of merging, none among them; by default all")
    parser.add_argument("--table", help="for pairs: a file of `windlass calibrate`")
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--chunk", type=int, help="tokens read at once; by default all")
    parser.add_argument("--positions", default="original")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    if "pairs" in options.policies and options.table is None:
        parser.error("pairs needs a --table")
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
    texts = samples(tokenizer, options.samples, options.tokens, options.seed)
    for policy, budget, rule in settings(options):
        start = time.perf_counter()
        hits = found(model, tokenizer, texts, policy, budget, rule, options.positions, options.window, options.chunk)
        line: dict[str, object] = {
            "kind": "merging",
            **machine(options.threads),
            "policy": repr(policy),
            "budget": budget,
        }
        line |= {"merge": rule or "none", "positions": options.positions, "tokens": options.tokens}
        line |= {"window": options.window, "chunk": options.chunk}
        line |= {"seed": options.seed, "samples": len(texts), "found": hits}
        line["interval"] = wilson(hits / len(texts), len(texts))
        print(json.dumps({**line, "seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
