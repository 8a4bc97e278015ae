"""Edited histories of agents and chats: tokens that are read again, and the distance to a prompt read anew.

    python -m tests.helpers.replay scripts MODEL TEXT... [--count 1000]    # generated tool loops, tokens alone
    python -m tests.helpers.replay distance MODEL TEXT... [--count 20] [--first 0] [--turns 10]  # with the model
    python -m tests.helpers.replay summary MODEL FILE...                   # of the lines of `distance`
    python -m tests.helpers.replay seconds MODEL TEXT... --server NAME=URL... [--count 8]  # of servers, in turn

TEXT are files of prose. Each prints JSON lines.
"""

import argparse
import json
import random
import statistics
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.core.types import shared
from windlass.engine.prefill import Reader, feed
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.recompute import Alignment, EditPlan, Sinks
from windlass.engine.request import PREFIX, Request, Reuse, ReuseMode
from windlass.engine.text import Stops
from windlass.hf.load import load

HABITS: Final = ("thoughts", "reminder", "pruned", "early word", "hash", "branch", "retry", "plain")
MODES: Final = ("edited(0)", "edited(16)", "edited(64)", "edited(256)")
FURTHER: Final = 64  # tokens whose predictions are compared
LONGEST: Final = 8192  # tokens of the model's window
SINKS: Final = Sinks(4, 4)
OPENING: Final = "<|im_start|>assistant\n"
SYSTEM: Final = "You call tools to do what the user asks. Think before you call one, and say what you have found. " * 6
OPTIONS: Final = CacheOptions(budget=8192, policy="key_diff", rollback=0)
Ids = tuple[int, ...]
Words = Callable[[int], str]
Tokenizer = Callable[[str], Ids]


@dataclass
class Message:
    """A message of a conversation. A `thought` stands before its text until it is stripped."""

    role: str
    text: str
    thought: str = ""

    def __str__(self) -> str:
        inside = f"<think>{self.thought}</think>\n" * bool(self.thought) + self.text
        return f"<|im_start|>{self.role}\n{inside}<|im_end|>\n"


@dataclass
class Loop:
    """A tool loop whose client edits its history by one habit before each turn."""

    habit: str
    words: Words
    draw: random.Random
    messages: list[Message] = field(default_factory=list)
    day: int = 0

    @property
    def history(self) -> list[Message]:
        """The messages that the client sends."""
        head = f"Request {self.draw.getrandbits(64):x}. " * (self.habit == "hash")
        system = Message("system", f"{head}Today is day {self.day}. {SYSTEM}")
        reminder = [Message("user", f"Remember: {SYSTEM[:240]}")] * (self.habit == "reminder")
        return [system, *self.messages, *reminder]

    @property
    def prompt(self) -> str:
        """The prompt that the client sends."""
        return "".join(map(str, self.history)) + OPENING

    @property
    def sent(self) -> list[dict[str, str]]:
        """The same as documents, in which the outputs of tools are messages of the user."""
        thought = "(I think: {}) "
        return [
            {
                "role": "user" if each.role == "tool" else each.role,
                "content": thought.format(each.thought) * bool(each.thought) + each.text,
            }
            for each in self.history
        ]

    def turn(self) -> str:
        """Edit the history, and add a message of the user or the output of a tool. Returns this message."""
        old, habit, is_rare = self.messages, self.habit, self.draw.random() < 0.3
        if habit == "retry" and old and is_rare:
            self.messages = old[:-1]
            return ""
        if habit == "thoughts":
            old = [Message(each.role, each.text) for each in old]
        elif habit == "pruned" and len(old) > 4:
            old = [Message(each.role, "[pruned]") if each.role == "tool" else each for each in old[:-4]] + old[-4:]
        elif habit == "early word":
            self.day += is_rare
        elif habit == "branch" and len(old) > 5 and is_rare:
            old = old[: 2 * self.draw.randrange(1, len(old) // 2)]
        role, most = ("tool", 400) if old and self.draw.random() < 0.7 else ("user", 60)
        self.messages = [*old, Message(role, self.words(self.draw.randrange(20, most)))]
        return str(self.messages[-1])

    def answer(self) -> str:
        """The text that the model writes, which then belongs to the history."""
        thought = self.words(self.draw.randrange(20, 120)) if self.habit == "thoughts" else ""
        made = Message("assistant", self.words(self.draw.randrange(10, 60)), thought)
        self.messages = [*self.messages, made]
        return str(made).removeprefix(OPENING).removesuffix("\n")

    def turns(self, ids: Tokenizer, count: int) -> Iterator[tuple[Ids, Ids, int]]:
        """The tokens of each prompt and answer, and the number of tokens of the prompt's new message."""
        for number in range(count):
            new = self.turn()
            prompt = ids(self.prompt)
            yield prompt, ids(self.answer()), len(ids(new + OPENING)) if number else len(prompt)


def prose(files: Sequence[Path], draw: random.Random) -> Words:
    """Successive pieces of the files, from a drawn place on."""
    words = [word for file in files for word in file.read_text().split()]
    at = draw.randrange(len(words))

    def taken(count: int) -> str:
        nonlocal at
        at = (at + count) % (len(words) - 1000)
        return " ".join(words[at : at + count])

    return taken


def scripts(ids: Tokenizer, files: Sequence[Path], count: int) -> None:
    """Tokens of all prompts, those that no earlier text of the loop has, and those read with reuse of each mode."""
    names = ("prompt", "new", "prefix", *MODES)
    totals = {habit: dict.fromkeys(names, 0) for habit in HABITS}
    for number in range(count):
        draw, rows, habit = random.Random(number), list[Ids](), HABITS[number % len(HABITS)]
        for prompt, answer, new in Loop(habit, prose(files, draw), draw).turns(ids, draw.randrange(5, 41)):
            alignment, size = Alignment(prompt), len(prompt)
            prefix = max((min(shared(row, prompt), size - 1) for row in rows), default=0)
            runs, found = [alignment.to(row) for row in rows], [size, new, size - prefix]
            for mode in map(ReuseMode.of, MODES):
                plans = (EditPlan.of(each, size, SINKS, mode.edit_window) for each in runs)
                found.append(size - max([prefix, *(plan.cached for plan in plans)]))
            for name, tokens in zip(names, found, strict=True):
                totals[habit][name] += tokens
            rows.append(prompt + answer[:-1])
    for habit, total in totals.items():
        print(json.dumps({"habit": habit, "scripts": count // len(HABITS), **total}))


@torch.no_grad()
def read(model: PreTrainedModel, prompt: Ids, own: Snapshots | None, mode: ReuseMode, ends: Ids = ()) -> Reader:
    """A reader that has read a prompt."""
    reuse = Reuse(mode=mode, store=False)  # so that no row is moved
    request = Request(prompt, OPTIONS, 1, Stops(frozenset()), reuse=reuse, ends=ends)
    reader = Reader(model, request, own or Snapshots(PrefixCache(0)))
    while not reader.is_done:
        reader.read()
    return reader


def rows_of(model: PreTrainedModel, texts: Sequence[Ids], mode: ReuseMode) -> Snapshots:
    """The rows of texts, read one after the other."""
    own = Snapshots(PrefixCache(1 << 33))
    for text in texts:
        own.keep(read(model, text, own, mode).entry)
    return own


@torch.no_grad()
def predictions(model: PreTrainedModel, reader: Reader, further: Ids) -> torch.Tensor:
    """Log probabilities of the tokens after the prompt, each after those before it."""
    assert reader.logits is not None
    logits = feed(model, reader.cache, [list(further[:-1])], [*range(len(further) - 1)], PROMPT)[0]
    return torch.cat([reader.logits[None], logits]).float().log_softmax(-1)


def distance(
    model: PreTrainedModel, ids: Tokenizer, files: Sequence[Path], texts: range, only: str, most: int, modes: list[str]
) -> None:
    """A line for each text, edit and mode: KL of further tokens to a prompt read anew, and equal first choices.

    Loops have five turns at least and `most` at most.
    """
    for number in texts:
        held: dict[tuple[tuple[Ids, ...], str], Snapshots] = {}
        for edit, (rows, prompt, further, new) in edits(ids, files, number, most).items():
            if only not in edit:
                continue
            fresh = predictions(model, read(model, prompt, None, PREFIX), further)
            readers = {} if only else {"anew in other chunks": read(model, prompt, None, PREFIX, (301, 777))}
            for label in modes:
                mode, key = ReuseMode.of(label), (tuple(rows), label if len(rows) > 1 else "")
                held[key] = held.get(key) or rows_of(model, rows, mode)
                readers[label] = read(model, prompt, held[key], mode)
            for label, reader in readers.items():
                read_again, own = len(prompt) - reader.cached - new, predictions(model, reader, further)
                kl, is_equal = (fresh.exp() * (fresh - own)).sum(-1), fresh.argmax(-1) == own.argmax(-1)
                told = {"text": number, "edit": edit, "reuse": label, "turns": len(rows) + 1}
                told |= {"prompt": len(prompt), "again": read_again}
                told |= {"equal": float(is_equal.float().mean()), "kl": [round(each, 6) for each in kl.tolist()]}
                print(json.dumps(told), flush=True)


def summary(files: Sequence[Path]) -> None:
    """Means over the texts of each edit and mode, and intervals of 95 % by drawing texts again."""
    found = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for row in {line: json.loads(line) for file in files for line in file.read_text().splitlines()}.values():
        for edit in (row["edit"], *["all loops"] * row["edit"].startswith("loop")):
            found[edit, row["reuse"]].append(row)
    for (edit, label), rows in sorted(found.items()):
        told: dict[str, Any] = {"edit": edit, "reuse": label, "texts": len(rows)}
        every = sorted(each for row in rows for each in row["kl"])
        told |= {"kl": interval([statistics.mean(row["kl"]) for row in rows]), "kl_p99": every[int(0.99 * len(every))]}
        told |= {"equal": interval([row["equal"] for row in rows])}
        told |= {"again": sum(row["again"] for row in rows) / sum(row["prompt"] for row in rows)}
        print(json.dumps(told))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """A mean, and its interval of 95 % by 2,000 bootstrap samples."""
    draw = random.Random(0)
    means = sorted(statistics.mean(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.mean(values), means[50], means[1949]


def edits(ids: Tokenizer, files: Sequence[Path], number: int, most: int) -> dict[str, tuple[list[Ids], Ids, Ids, int]]:
    """Texts, one after the other, the prompt that they become, its further text, and the number of its new tokens.

    Three single edits of a text about a novel, and a loop of one habit, which ends where the model's window does.
    """
    words = prose([files[number % len(files)]], random.Random(number))
    system, reminder = str(Message("system", SYSTEM)), str(Message("user", f"Remember: {words(40)}"))
    a, b, c, d = (str(Message(("assistant", "user")[at % 2], words(n))) for at, n in enumerate((260, 90, 280, 80), 1))
    e = str(Message("user", words(320))) + OPENING
    further, whole = ids(words(FURTHER))[:FURTHER], ids(system + a + b + c + d + e)
    other = system.replace("tools", "functions", 1)
    moved = e.removesuffix(OPENING) + reminder + OPENING
    draw, habit = random.Random(number), HABITS[number % len(HABITS)]
    loop = Loop(habit, prose(files, draw), draw)
    turns = loop.turns(ids, draw.randrange(5, most + 1))
    *before, (prompt, answer, new) = takewhile(lambda turn: len(turn[0] + turn[1]) <= LONGEST, turns)
    return {
        "a turn is dropped": ([whole], ids(system + a + d + e), further, 0),
        "an early word is changed": ([whole], ids(other + a + b + c + d + e), further, 0),
        "a reminder moves to the end": (
            [ids(system + a + b + reminder + c + d + e)],
            ids(system + a + b + c + d + moved),
            further,
            0,
        ),
        f"loop, {habit}": ([row + its[:-1] for row, its, _ in before], prompt, answer[:FURTHER], new),
    }


def seconds(ids: Tokenizer, files: Sequence[Path], servers: dict[str, str], count: int) -> None:
    """Seconds of each turn of loops until a token is there, at each server in turn, by whether its history was edited.

    The server that is asked first changes from turn to turn. A turn without an edit begins with the messages before it.
    Last come, for each other server, the quartiles of its seconds over those of the first one for the same turn.
    """
    found = defaultdict[tuple[str, bool, str], list[tuple[float, int]]](list)
    ratios, (first, *others) = defaultdict[tuple[bool, str], list[float]](list), servers
    models = {
        name: json.load(urllib.request.urlopen(f"{url}/v1/models"))["data"][0]["id"] for name, url in servers.items()
    }
    for number in range(count):
        draw, before, habit = random.Random(number), list[dict[str, str]](), HABITS[number % len(HABITS)]
        loop = Loop(habit, prose(files, draw), draw)
        for turn in range(draw.randrange(5, 15)):
            loop.turn()
            sent = loop.sent
            size, is_edited = len(ids(" ".join(each["content"] for each in sent))), sent[: len(before)] != before
            taken = dict[str, float]()
            for name in sorted(servers, key=lambda name: (list(servers).index(name) + turn) % len(servers)):
                taken[name] = asked(servers[name], models[name], sent)
            if turn:
                for name in servers:
                    found[habit, is_edited, name].append((taken[name], size))
                for name in others:
                    ratios[is_edited, name].append(taken[name] / taken[first])
            loop.answer()
            before = sent
    for (habit, is_edited, name), rows in found.items():
        told = {"habit": habit, "edited": is_edited, "server": name, "turns": len(rows)}
        told |= {
            "seconds": statistics.median(row[0] for row in rows),
            "tokens": statistics.mean(row[1] for row in rows),
        }
        print(json.dumps(told))
    for (is_edited, name), each in ratios.items():
        quartiles = statistics.quantiles(each, n=4)
        print(json.dumps({"edited": is_edited, "server": name, "turns": len(each), f"to {first}": quartiles}))


def asked(url: str, model: str, messages: Sequence[dict[str, str]]) -> float:
    """Seconds until a server has read messages and written a token."""
    body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scripts", "distance", "seconds", "summary"))
    parser.add_argument("model", help="folder of a chat model")
    parser.add_argument("texts", type=Path, nargs="+", help="files of prose")
    parser.add_argument("--count", type=int, default=20, help="texts, or scripts of all habits together")
    parser.add_argument("--first", type=int, default=0, help="number of the first text of `distance`")
    parser.add_argument("--server", action="append", default=[], help="NAME=URL, several times")
    parser.add_argument("--only", default="", help="edits of `distance`, by a part of their names")
    parser.add_argument("--turns", type=int, default=10, help="most turns of its loops")
    parser.add_argument("--mode", action="append", help="of reuse, several times (default: all)")
    given = parser.parse_args()
    if given.what == "summary":
        summary(given.texts)
        return
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(given.model)
    ids: Tokenizer = lambda text: tuple(tokenizer(text)["input_ids"])  # noqa: E731
    if given.what == "scripts":
        scripts(ids, given.texts, given.count)
    elif given.what == "seconds":
        seconds(ids, given.texts, dict(each.split("=", 1) for each in given.server), given.count)
    else:
        distance(
            load(given.model, "bfloat16")[0],
            ids,
            given.texts,
            range(given.first, given.first + given.count),
            given.only,
            given.turns,
            given.mode or [*MODES],
        )


if __name__ == "__main__":
    main()
