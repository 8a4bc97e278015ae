"""Pass keys in one text, read through a cache of 256 slots: ten depths, ten keys at each.

    PYTHONPATH=benchmarks python -m quality.long_text >> benchmarks/results/long_text.jsonl
    PYTHONPATH=benchmarks python -m quality.long_text --text NOVEL --as-it-is --tokens 25076 --keys 3

The shipped novel, or another text, with its numerals in words or as it is; the shipped model, `compact` positions. The
text before a depth is read once; what follows is read in ten rows, each after another key. Prints one JSON line per
policy and depth. `--fitted` reads with the scorer and the shares that come with the model, too.
"""

import argparse
import copy
import json
import os
import random
import time
from importlib import resources
from pathlib import Path

import torch
from machine import machine

from windlass import KVCache
from windlass.cache.options import CacheOptions
from windlass.cli.demo import ANSWER_TOKENS, MODEL, fitted
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.texts import ASKED, BEFORE, HIDDEN, in_words, novel
from windlass.hf.load import load


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--keys", type=int, default=10)
    parser.add_argument("--policies", nargs="+", default=["key_diff", "recent"])
    parser.add_argument("--fitted", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--as-it-is", action="store_true")
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
        scorer, shares = fitted(folder)
    text = novel() if options.text is None else options.text.read_text()
    body = text if options.as_it_is else in_words(text)
    ids = encode(tokenizer, f"{BEFORE} {body}", is_start=True)[: options.tokens]
    ends = [at + 1 for at, token in enumerate(ids) if str(tokenizer.decode([token])).endswith(".")]
    usual = {"budget": options.budget, "chunk": options.chunk, "positions": "compact", "rollback": 0}
    memories = [CacheOptions(**usual, policy=policy) for policy in options.policies]
    if options.fitted:
        memories.append(CacheOptions(**usual, policy=scorer, shares=shares))
    for memory in memories:
        draw = random.Random(0)
        cache = KVCache.from_options(model, memory)
        read = 0
        for number in range(options.depths):
            start = time.perf_counter()
            depth = (number + 0.5) / options.depths
            place = min(ends, key=lambda end: abs(end - depth * len(ids)))
            generate.prefill(model, cache, [ids[read:place]])
            read = place
            keys = [f"{draw.randrange(10**5):05}" for _ in range(options.keys)]
            rows = copy.deepcopy(cache)
            rows.select_rows(torch.zeros(len(keys), dtype=torch.long))
            told = [encode(tokenizer, HIDDEN.format(key=key), is_start=False) for key in keys]
            generate.prefill(model, rows, [sentence + ids[place:] for sentence in told])
            results = generate.generate(model, tokenizer, [ASKED] * len(keys), rows, ANSWER_TOKENS)
            answers = [result.text.strip() for result in results]
            hits = [
                answer.startswith(key) and not answer[len(key) :][:1].isdigit()
                for key, answer in zip(keys, answers, strict=True)
            ]
            policy = repr(cache.policy).replace(f"{folder}/", "")  # a scorer tells where its file is
            line = {"kind": "long_text", "policy": policy, "budget": options.budget, "tokens": len(ids)}
            line |= {"text": "shipped" if options.text is None else options.text.stem, "as_it_is": options.as_it_is}
            line |= {"shares": None if memory.shares is None else str(memory.shares)}
            line |= {"positions": str(cache.positions), "chunk": options.chunk, "depth": depth}
            line |= {"keys": len(keys), "found": sum(hits), "seconds": time.perf_counter() - start}
            print(json.dumps({**line, **machine(options.threads)}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
