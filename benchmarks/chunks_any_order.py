"""Parts of a text that are read once each and joined: facts found, by what is read again, against a text read anew.

    python benchmarks/chunks_any_order.py >> benchmarks/results/chunks_any_order.jsonl
    python benchmarks/chunks_any_order.py --time >> benchmarks/results/chunks_any_order.jsonl

Texts of five parts of a novel, with named numbers: one inside of each part, and one across each border, of which the
name stands in one part and the digits in the next. Prints one JSON line per way of joining, with 95 % Wilson intervals.
`--time`: seconds of a join over those of reading the same tokens anew, of works that take turns.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import torch
from cacheblend import blended
from machine import machine
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from turns import in_turn, medians, quartiles

import windlass
from windlass import KVCache, chunks
from windlass.engine.text import encode
from windlass.evals import texts as keys
from windlass.evals.report.summaries import wilson
from windlass.evals.speed.rows import random_model, shape_of
from windlass.evals.tasks.niah import ABOVE

PARTS = 5
LONGEST = 960  # tokens of a text: with a question and its answer they are in the trained length of 1,024
VOCABULARY = 2000  # ids of random texts
MODES = ("none", "first(1)", "first(4)", "first(16)", "first(64)", "divergent(0.16)", "all")


@dataclass(frozen=True)
class Text:
    """Parts of ids, the first of which begins the text; questions with the number that each asks for."""

    parts: tuple[tuple[int, ...], ...]
    inside: tuple[tuple[str, str], ...]
    across: tuple[tuple[str, str], ...]

    @property
    def ids(self) -> list[int]:
        """The whole text."""
        return [token for part in self.parts for token in part]


def text_of(novel: Sequence[str], tokenizer: PreTrainedTokenizerBase, draw: random.Random, tokens: int) -> Text:
    """Parts of about `tokens` tokens, from any sentences of a novel on."""

    def ids(text: str) -> list[int]:
        return encode(tokenizer, text, is_start=False)

    names = iter(keys.distinct(draw, keys.pair, 2 * PARTS - 1))
    inside, across, parts = [], [], list[list[int]]()
    begun: list[int] = []
    for number in range(PARTS):
        at = draw.randrange(len(novel) - tokens)
        sentences = [ids(" " + sentence) for sentence in novel[at : at + tokens // 4]]
        name, value = next(names), keys.number(draw)
        fact = ids(" " + ABOVE.needle.format(one="number", many="numbers", key=name, value=value))
        part, place, depth = begun, 0, draw.uniform(0.2, 0.8)
        while len(part) < depth * tokens:
            part, place = part + sentences[place], place + 1
        part = part + fact
        inside.append((name, value))
        while len(part) < tokens:
            part, place = part + sentences[place], place + 1
        if number < PARTS - 1:
            name, value = next(names), keys.number(draw)
            told = ABOVE.needle.format(one="number", many="numbers", key=name, value=value)
            whole, first = ids(" " + told), ids(" " + told.partition(":")[0] + ":")
            assert whole[: len(first)] == first, "a colon that joins what follows"
            part, begun = part + first, whole[len(first) :]
            across.append((name, value))
        parts.append(part)
    parts[0] = [tokenizer.bos_token_id, *parts[0]]
    return Text(tuple(map(tuple, parts)), tuple(inside), tuple(across))


@dataclass(frozen=True)
class Joined:
    """A cache with a text, how many of its tokens were read again, and how many it has."""

    cache: KVCache
    read_again: int
    tokens: int


Way = Callable[[PreTrainedModel, Text], Joined]


def fresh(model: PreTrainedModel, text: Text) -> Joined:
    """All of it read anew."""
    cache = KVCache(model)
    windlass.prefill(model, cache, [text.ids])
    return Joined(cache, len(text.ids), len(text.ids))


def ours(mode: str, sees_start: bool) -> Way:
    """Parts read alone, or behind the token that begins a text, which is not kept."""

    def way(model: PreTrainedModel, text: Text) -> Joined:
        prefix = text.parts[0][:1] if sees_start else ()
        parts = [chunks.encode(model, part, prefix=prefix if number else ()) for number, part in enumerate(text.parts)]
        cache = KVCache(model)
        done = chunks.join(model, cache, parts, mode)
        return Joined(cache, len(done.recomputed), done.tokens)

    return way


def epic(tokens: int) -> Way:
    """EPIC's LegoLink: each part keeps a token of its own that begins a text, the first of those read again."""

    def way(model: PreTrainedModel, text: Text) -> Joined:
        start = text.parts[0][:1]
        parts = [
            chunks.encode(model, part if number == 0 else (*start, *part)) for number, part in enumerate(text.parts)
        ]
        cache = KVCache(model)
        done = chunks.join(model, cache, parts, f"first({tokens})")
        return Joined(cache, len(done.recomputed), done.tokens)

    return way


def cacheblend(model: PreTrainedModel, text: Text) -> Joined:
    """CacheBlend's rule with the mask of its code."""
    made, count = blended(model, text.parts, text.parts[0][0], 0.16)
    return Joined(KVCache.from_rotated(model, made), count, len(text.ids))


def ways() -> dict[str, Way]:
    """All that are measured, by their labels."""
    found: dict[str, Way] = {"fresh": fresh}
    found |= {mode: ours(mode, sees_start=True) for mode in MODES}
    found |= {
        f"{mode}, parts without a start": ours(mode, sees_start=False) for mode in ("none", "first(1)", "first(16)")
    }
    found |= {f"EPIC, first {tokens}": epic(tokens) for tokens in (1, 16)}
    return found | {"CacheBlend 0.16, as published": cacheblend}


def asked(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: KVCache, facts: Sequence[tuple[str, str]]
) -> tuple[list[bool], Tensor]:
    """Which numbers are found, each asked for on a copy of the cache; and the logits along each of them.

    A number is what greedy decoding gives if each of its tokens is the likeliest behind those before it.
    """
    questions = [
        ABOVE.question_one.format(one="number", query=name) + ABOVE.prefix_one.format(one="number", query=name)
        for name, _ in facts
    ]
    cache.select_rows(torch.zeros(len(facts), dtype=torch.long))
    logits = [windlass.prefill(model, cache, [encode(tokenizer, each, is_start=False) for each in questions])]
    answers = torch.tensor([encode(tokenizer, " " + value, is_start=False) for _, value in facts])
    for token in answers[:, :-1].split(1, 1):
        logits.append(windlass.prefill(model, cache, token.tolist()))
    along = torch.stack(logits, 1)
    return (along.argmax(-1) == answers).all(-1).tolist(), along


def quality(options: argparse.Namespace) -> None:
    """Facts found by each way."""
    model, tokenizer = windlass.load(options.model, "float32")
    for file in options.novels:
        novel = re.split(r"(?<=[.!?])\s+", Path(file).read_text())
        draw = random.Random(options.seed)
        drawn = (text_of(novel, tokenizer, each, options.tokens) for each in repeat(draw))
        texts = list(islice((text for text in drawn if len(text.ids) <= LONGEST), options.texts))
        truths: list[Tensor] = []
        for name, way in ways().items():
            found: dict[str, list[bool]] = {"inside": [], "across": []}
            divergences, again, tokens = [], 0, 0
            for number, text in enumerate(texts):
                joined = way(model, text)
                again, tokens = again + joined.read_again, tokens + joined.tokens
                right, logits = asked(model, tokenizer, joined.cache, (*text.inside, *text.across))
                found["inside"] += right[:PARTS]
                found["across"] += right[PARTS:]
                if name == "fresh":
                    truths.append(logits.double().log_softmax(-1))
                ours_log = logits.double().log_softmax(-1)
                divergences.append((truths[number].exp() * (truths[number] - ours_log)).sum(-1).mean())
            line: dict[str, Any] = {"way": name, "novel": Path(file).stem, "texts": len(texts)}
            for kind, each in found.items():
                low, high = wilson(sum(each) / len(each), len(each))
                line |= {kind: sum(each), f"{kind}_asked": len(each), f"{kind}_95": [round(low, 4), round(high, 4)]}
            divergence = float(torch.stack(divergences).mean())
            line |= {"kl": divergence, "share_read_again": again / tokens, "tokens": tokens / len(texts)}
            line |= {"model": Path(options.model).name, "seed": options.seed, **machine(torch.get_num_threads())}
            print(json.dumps(line), flush=True)


def timed(options: argparse.Namespace) -> None:
    """Seconds of joins, parts being read before, over those of a text read anew."""
    name = Path(options.model).name
    if options.shape:
        shape, name = shape_of(options.shape, options.layers)
        model = windlass.attach(random_model(shape, torch.float32))
    else:
        model, _ = windlass.load(options.model, "float32")
    draw = random.Random(options.seed)
    texts = [[draw.randrange(3, VOCABULARY) for _ in range(options.tokens)] for _ in range(PARTS)]
    parts = [chunks.encode(model, each) for each in texts]
    whole = [[token for each in texts for token in each]]
    shares: dict[str, float] = {}

    def joining(mode: str) -> Callable[[], object]:
        def work() -> None:
            cache = KVCache(model)
            shares[mode] = len(chunks.join(model, cache, parts, mode).recomputed) / len(whole[0])

        return work

    works: Mapping[str, Callable[[], object]] = {
        "fresh": lambda: windlass.prefill(model, KVCache(model), whole),
        **{mode: joining(mode) for mode in options.modes},
    }
    seconds = in_turn(works, options.rounds)
    for way, each in seconds.items():
        line = {"way": way, "time_over_fresh": quartiles(each, seconds["fresh"]), "seconds": medians(seconds)[way]}
        line |= {"share_read_again": shares.get(way, 1.0), "tokens": len(whole[0]), "rounds": options.rounds}
        line |= {"model": name}
        print(json.dumps(line | machine(torch.get_num_threads())), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="windlass/assets/finder-3m")
    parser.add_argument("--novels", nargs="+", default=[])
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=115, help="of a part, about")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--shape", help="for --time: a model of random weights of this shape")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.time:
        timed(options)
    else:
        quality(options)


if __name__ == "__main__":
    main()
