"""Edited histories of agents and chats: tokens that are read again, and the distance to a prompt read anew.

    python -m tests.helpers.replay scripts MODEL TEXT... [--count 1000]    # generated tool loops, tokens alone
    python -m tests.helpers.replay distance MODEL TEXT... [--count 20]     # with the model

TEXT are files of prose. Each prints JSON lines.
"""

import argparse
import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.engine.prefill import Reader, feed
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.recompute import Alignment, EditPlan, shared
from windlass.engine.request import PREFIX, Request, Reuse, ReuseMode
from windlass.engine.text import Stops
from windlass.hf.load import load

HABITS: Final = ("thoughts", "reminder", "pruned", "early word", "hash", "branch", "retry", "plain")
FURTHER: Final = 64  # tokens whose predictions are compared
SINKS: Final = 4
OPENING: Final = "<|im_start|>assistant\n"
OPTIONS: Final = CacheOptions(budget=8192, policy="key_diff", rollback=0)
Ids = tuple[int, ...]
Words = Callable[[int], str]


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
    def prompt(self) -> str:
        """What the client sends."""
        head = f"Request {self.draw.getrandbits(64):x}. " * (self.habit == "hash")
        system = Message("system", f"{head}Today is day {self.day}. {SYSTEM}")
        reminder = [Message("user", f"Remember: {SYSTEM[:240]}")] * (self.habit == "reminder")
        return "".join(map(str, [system, *self.messages, *reminder])) + OPENING

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


SYSTEM: Final = "You call tools to do what the user asks. Think before you call one, and say what you have found. " * 6


def prose(files: Sequence[Path], draw: random.Random) -> Words:
    """Successive pieces of the files, from a drawn place on."""
    words = [word for file in files for word in file.read_text().split()]
    at = draw.randrange(len(words))

    def taken(count: int) -> str:
        nonlocal at
        at = (at + count) % (len(words) - 1000)
        return " ".join(words[at : at + count])

    return taken


def turns(tokenizer: PreTrainedTokenizerBase, loop: Loop, count: int) -> Iterator[tuple[Ids, Ids, int]]:
    """The tokens of each prompt and answer, and the number of tokens of the prompt's new message."""
    for number in range(count):
        new = loop.turn()
        prompt = tuple(tokenizer(loop.prompt)["input_ids"])
        added = len(tokenizer(new + OPENING)["input_ids"]) if number else len(prompt)
        yield prompt, tuple(tokenizer(loop.answer())["input_ids"]), added


def scripts(tokenizer: PreTrainedTokenizerBase, files: Sequence[Path], count: int) -> None:
    """Tokens of all prompts, those that no earlier text of the loop has, and those read with reuse of each mode."""
    names = ("prompt", "new", "prefix", "edited")
    totals = {habit: dict.fromkeys(names, 0) for habit in HABITS}
    for number in range(count):
        draw, rows, habit = random.Random(number), list[Ids](), HABITS[number % len(HABITS)]
        for prompt, answer, new in turns(tokenizer, Loop(habit, prose(files, draw), draw), draw.randrange(5, 41)):
            alignment, size = Alignment(prompt), len(prompt)
            prefix = max((min(shared(row, prompt), size - 1) for row in rows), default=0)
            plans = [EditPlan.of(alignment.to(row), size, SINKS, 0) for row in rows]
            edited = max([prefix, *(plan.cached for plan in plans)])
            for name, tokens in zip(names, (size, new, size - prefix, size - edited), strict=True):
                totals[habit][name] += tokens
            rows.append(prompt + answer[:-1])
    for habit, total in totals.items():
        print(json.dumps({"habit": habit, "scripts": count // len(HABITS), **total}))


@torch.no_grad()
def read(
    model: PreTrainedModel, prompt: Ids, snapshots: Snapshots, mode: ReuseMode, ends: tuple[int, ...] = ()
) -> Reader:
    """A reader that has read a prompt."""
    reuse = Reuse(mode=mode, store=False)  # so that no row is moved
    request = Request(prompt, OPTIONS, 1, Stops(frozenset()), reuse=reuse, ends=ends)
    reader = Reader(model, request, snapshots)
    while not reader.is_done:
        reader.read()
    return reader


@torch.no_grad()
def predictions(model: PreTrainedModel, reader: Reader, further: Ids) -> torch.Tensor:
    """Log probabilities of the tokens after the prompt, each after those before it."""
    assert reader.logits is not None
    logits = feed(model, reader.cache, [list(further[:-1])], [*range(len(further) - 1)], PROMPT)[0]
    return torch.cat([reader.logits[None], logits]).float().log_softmax(-1)


def distance(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: Sequence[Path], count: int) -> None:
    """KL to a prompt read anew and equal first choices, of single edits, and for one text in four of loops.

    The figures so far are printed after each text.
    """
    found = Distances(model)
    for number in range(count):
        held = dict[Ids, Snapshots]()
        for at, (edit, (old, new, further)) in enumerate(edits(tokenizer, files, number).items()):
            if old not in held:
                held[old] = Snapshots(PrefixCache(1 << 33))
                held[old].keep(read(model, old, held[old], PREFIX).entry)
            found.add(edit, new, further, dict.fromkeys(("edited", "edited(16)"), held[old]), has_chunks=not at)
        for habit in ("thoughts", "pruned") if number % 4 == 1 else ():
            draw = random.Random(number)
            *before, (prompt, answer, _) = turns(tokenizer, Loop(habit, prose(files, draw), draw), 8)
            rows = {label: Snapshots(PrefixCache(1 << 33)) for label in ("edited", "edited(16)")}
            for label, own in rows.items():
                for row, its, _ in before:
                    own.keep(read(model, row + its[:-1], own, ReuseMode.of(label)).entry)
            found.add(f"a loop of 8 turns, {habit}", prompt, answer[:FURTHER], rows)
        found.show()


@dataclass(frozen=True)
class Distances:
    """Predictions after edited texts, beside those after a prompt read anew."""

    model: PreTrainedModel
    found: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)

    @torch.no_grad()
    def add(self, edit: str, prompt: Ids, further: Ids, rows: dict[str, Snapshots], has_chunks: bool = False) -> None:
        """Compare predictions of `further` by rows of each mode, and where it `has_chunks` by other passes."""
        nothing = Snapshots(PrefixCache(0))
        fresh = predictions(self.model, read(self.model, prompt, nothing, PREFIX), further)
        readers = {label: read(self.model, prompt, own, ReuseMode.of(label)) for label, own in rows.items()}
        if has_chunks:
            readers["anew in other chunks"] = read(self.model, prompt, nothing, PREFIX, (301, 777))
        for label, reader in readers.items():
            count, own = len(prompt) - reader.cached, predictions(self.model, reader, further)
            kl = (fresh.exp() * (fresh - own)).sum(-1).tolist()
            equal = float((fresh.argmax(-1) == own.argmax(-1)).float().mean())
            told = {"kl": kl, "equal": equal, "read": count, "prompt": len(prompt)}
            self.found.setdefault((edit, label), []).append(told)

    def show(self) -> None:
        """Print a line for each edit and mode."""
        for (edit, label), rows in self.found.items():
            kl = sorted(each for row in rows for each in row["kl"])
            told = {"kl": statistics.mean(kl), "kl_p99": kl[int(0.99 * len(kl))]}
            told |= {name: statistics.mean(row[name] for row in rows) for name in ("equal", "read", "prompt")}
            print(json.dumps({"edit": edit, "reuse": label, "texts": len(rows), **told}), flush=True)


def edits(tokenizer: PreTrainedTokenizerBase, files: Sequence[Path], number: int) -> dict[str, tuple[Ids, Ids, Ids]]:
    """A conversation about a novel, its edits, and what follows them."""
    draw = random.Random(number)
    words = prose([files[number % len(files)]], draw)
    system, reminder = Message("system", SYSTEM), Message("user", f"Remember: {words(40)}")
    said = [Message(role, words(count)) for role, count in (("user", 260), ("assistant", 90), ("user", 280))]
    said += [Message("assistant", words(80)), Message("user", words(320))]
    further = tuple(tokenizer(words(FURTHER))["input_ids"][:FURTHER])

    def ids(*messages: Message, is_open: bool = True) -> Ids:
        text = "".join(map(str, messages)) + OPENING * is_open
        return tuple(tokenizer(text)["input_ids"])

    changed = Message("system", SYSTEM.replace("tools", "functions", 1))
    return {
        "a turn is dropped": (ids(system, *said), ids(system, *said[:1], *said[3:]), further),
        "an early word is changed": (ids(system, *said), ids(changed, *said), further),
        "a reminder moves to the end": (
            ids(system, *said[:2], reminder, is_open=False) + ids(*said[2:]),
            ids(system, *said, reminder),
            further,
        ),
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scripts", "distance"))
    parser.add_argument("model", type=Path, help="folder of a chat model")
    parser.add_argument("texts", type=Path, nargs="+", help="files of prose")
    parser.add_argument("--count", type=int, default=20, help="texts, or scripts of all habits together")
    asked = parser.parse_args()
    if asked.what == "scripts":
        scripts(AutoTokenizer.from_pretrained(asked.model), asked.texts, asked.count)
    else:
        distance(*load(str(asked.model), "bfloat16"), asked.texts, asked.count)


if __name__ == "__main__":
    main()
