"""Named numbers in a long text, each asked for, with a recall store and without: one JSON line per text and store.

    PYTHONPATH=benchmarks python -m quality.recall_facts MODEL TEXT... [--tokens 95000]

Of each text as many tokens are read as asked for, its own digits left in; several files are joined for a longer one
(`--joined`). `none` has as many slots as the others have slots and recalled tokens. All questions go on from the cache
as the text left it.
"""

import argparse
import copy
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import machine
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from windlass import KVCache
from windlass.evals import texts as keys
from windlass.evals.tasks.niah import ABOVE

NONE = "none"
ANSWER = 8  # tokens


def sentences(text: str, start: int, tokens: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """As many sentences of a text as have `tokens` tokens."""
    body, count = list[str](), 0
    for sentence in re.split(r"(?<=[.!?]) ", re.sub(r"\s+", " ", text)[start:]):
        body.append(sentence)
        count += len(tokenizer(sentence + " ", add_special_tokens=False).input_ids)
        if count > tokens:
            break
    return body


def cache_of(model: PreTrainedModel, store: str, options: argparse.Namespace) -> KVCache:
    """With a recall store of that kind, or with more slots."""
    budget, usual = options.budget, {"policy": options.policy, "chunk": options.chunk, "shares": options.shares}
    if store == NONE:
        return KVCache(model, budget=budget + options.recall, **usual)
    return KVCache(
        model, budget=budget, recall=options.recall, recall_store=store, recall_folder=options.folder, **usual
    )


def lines(text: str, seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The facts that each store finds in one text."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
    draw = random.Random(seed)
    body = sentences(text, draw.randrange(1000), options.tokens, tokenizer)
    names = keys.distinct(draw, keys.pair, options.facts)
    values = [keys.number(draw) for _ in names]
    places = sorted(draw.sample(range(len(body)), options.facts), reverse=True)
    for place, name, value in zip(places, names, values, strict=True):
        body.insert(place, ABOVE.needle.format(many="numbers", key=name, value=value))
    ids = tokenizer(" ".join(body), return_tensors="pt").input_ids
    for store in options.stores:
        cache, start = cache_of(model, store, options), time.perf_counter()
        for piece in ids.split(options.chunk, 1):
            model(piece, past_key_values=cache, logits_to_keep=1)
        read = time.perf_counter() - start
        found, seconds = 0, list[float]()
        for name, value in zip(names, values, strict=True):
            asked = ABOVE.question_one.format(one="number", query=name) + ABOVE.prefix_one.format(
                one="number", query=name
            )
            found += value in answered(model, tokenizer, copy.deepcopy(cache), asked, seconds)
        yield {
            "store": store,
            "seed": seed,
            "tokens": ids.shape[1],
            "facts": options.facts,
            "found": found,
            "read_s": read,
            "token_s": sorted(seconds)[len(seconds) // 2],
            "bytes_held": cache.bytes_held,
            "recall_bytes": cache.recall_bytes,
        }


def answered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: KVCache, asked: str, seconds: list[float]
) -> str:
    """The greedy answer; how long each token took is added to `seconds`."""
    ids, tokens = tokenizer(asked, return_tensors="pt").input_ids, list[int]()
    for _ in range(ANSWER):
        start = time.perf_counter()
        logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        if tokens:
            seconds.append(time.perf_counter() - start)
        ids = logits.argmax(-1, keepdim=True)
        tokens.append(int(ids))
    return str(tokenizer.decode(tokens))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--joined", action="store_true")
    parser.add_argument("--tokens", type=int, default=95_000)
    parser.add_argument("--facts", type=int, default=40)
    parser.add_argument("--stores", nargs="+", default=["int4", "int8", NONE])
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--recall", type=int, default=128)
    parser.add_argument("--policy", default="keydiff")
    parser.add_argument("--shares", help="a file of windlass calibrate --shares")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    texts = [path.read_text() for path in options.texts]
    for number, text in enumerate([" ".join(texts)] if options.joined else texts):
        name = "+".join(path.stem for path in options.texts) if options.joined else options.texts[number].stem
        line = {"kind": "recall_facts", **machine(options.threads), "model": Path(options.model).name, "text": name}
        line |= {"budget": options.budget, "recall": options.recall, "folder": options.folder is not None}
        line |= {"policy": options.policy, "shares": options.shares}
        for found in lines(text, options.seed + number, options):
            print(json.dumps(line | found), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
