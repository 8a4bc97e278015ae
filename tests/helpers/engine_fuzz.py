"""Random operations on an engine that reuses rows exactly, and on one that reads each prompt anew.

    python -m tests.helpers.engine_fuzz --operations 30000 --seed 0

Prints a JSON line for each thousand operations, with all differences.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from tests.helpers.schedulers import events_of, options_of
from windlass.core.types import shared
from windlass.engine.disk import DiskTier
from windlass.engine.prefix_entry import EntrySelector
from windlass.engine.request import EXACT, Failure, Finish, Piece, Request, Reuse, Ticket
from windlass.engine.scheduler import Scheduler
from windlass.engine.text import Stops
from windlass.testing import VOCABULARY, tiny_model

KINDS = (options_of(budget=24), options_of(budget=150), options_of(budget=24, recall=8), options_of(policy="h2o"))
TENANTS = ("a/", "a/anna", "b/")
TALKS, LONGEST, MEMORY, DISK = 4, 160, 400_000, 2_000_000
Ids = tuple[int, ...]
Place = tuple[str, int]  # tenant and conversation


@cache
def parts() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer of all engines."""
    return windlass.attach(tiny_model("llama")), AutoTokenizer.from_pretrained(MODEL)


@cache
def twin() -> PreTrainedModel:
    """The same model, for a thread of its own."""
    made = tiny_model("llama")
    made.load_state_dict(parts()[0].state_dict())
    return windlass.attach(made)


@dataclass
class Talk:
    """Messages of a conversation, and the kind of its rows."""

    kind: int
    messages: list[Ids] = field(default_factory=list)

    def request(self, place: Place, tokens: int) -> Request:
        """The request for the next answer."""
        prompt, ends = sum(self.messages, ()), list[int]()
        for each in self.messages[:-1]:
            ends.append(len(each) + (ends[-1] if ends else 0))
        reuse = Reuse(mode=EXACT, name=f"{place[1] % 2}")
        options, stops = KINDS[self.kind], Stops(frozenset())
        return Request(prompt, options, tokens, stops, tenant=place[0], reuse=reuse, ends=tuple(ends), top_logprobs=2)


class EngineFuzz:
    """Operations by one seed. `differences` has a line for each answer that is not that of a prompt read anew, and for
    each request that was spared more tokens than its own tenant has sent."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._draw, self._runs = folder, random.Random(seed), 0
        self._talks = dict[Place, Talk]()
        self._known: dict[tuple[str, str, int], list[Ids]] = {}  # texts of a tenant, a name and a kind
        self._engine, self._twin = self._opened(folder / "0"), self._opened(folder / "twin", twin())
        self._at = folder / "0"
        self.differences, self.counts, self.spared, self.tokens = list[str](), Counter[str](), 0, 0

    def _opened(self, folder: Path, model: PreTrainedModel | None = None) -> Scheduler:
        (own, tokenizer), kinds = parts(), [*zip((2, 1, 1, 1), KINDS, strict=True)]
        model = own if model is None else model
        folder.mkdir(exist_ok=True)
        engine = Scheduler(model, tokenizer, kinds, reuse_bytes=MEMORY, disk=DiskTier(folder, DISK, model))
        engine.start()
        return engine

    def run(self, operations: int) -> None:
        """Do so many."""
        names = ["turn"] * 8 + ["together"] * 3 + ["edit", "edit", "rewind", "branch", "retry", "retry", "cancel"]
        names += ["delete", "forget"]
        for _ in range(operations):
            name = self._draw.choice(names) if self._draw.random() > 0.01 else self._draw.choice(("kill", "restart"))
            self.counts[name] += 1
            place = (self._draw.choice(TENANTS), self._draw.randrange(TALKS))
            talk = self._talks.setdefault(place, Talk(self._draw.randrange(len(KINDS))))
            getattr(self, f"_{name}")(place, talk)

    def close(self) -> None:
        """End the engines."""
        self._engine.stop()
        self._twin.stop()

    def _ids(self) -> Ids:
        """A message. Many begin alike, and some are those of other tenants."""
        size, draw = self._draw.randrange(1, 30), random.Random(self._draw.randrange(6))
        own = [draw.randrange(2, VOCABULARY) for _ in range(size)]
        return tuple(own if self._draw.random() < 0.6 else [*own[:-1], self._draw.randrange(2, VOCABULARY)])

    def _submitted(self, place: Place, talk: Talk) -> tuple[Place, Talk, Request, Ticket]:
        if sum(map(len, talk.messages)) > LONGEST:
            talk.messages = talk.messages[:1]
        talk.messages = talk.messages or [self._ids()]
        request = talk.request(place, self._draw.randrange(1, 9))
        return place, talk, request, self._engine.submit(request)

    def _finished(self, place: Place, talk: Talk, request: Request, ticket: Ticket) -> None:
        events = events_of(ticket)
        end, name = events[-1], (place[0], request.reuse.name, talk.kind)
        told = f"{place} {talk.kind} {len(request.prompt)} {request.ends} after {sum(self.counts.values())}"
        if not isinstance(end, Finish):
            assert isinstance(end, Failure)
            self.differences.append(f"{told}: {end.message}")
            return
        found = [each for each in events if isinstance(each, Piece)]
        again = self._twin.submit(replace(request, reuse=Reuse(lookup=False, store=False)))
        if found != [each for each in events_of(again) if isinstance(each, Piece)]:
            self.differences.append(f"{told}: other tokens, {end.usage.cached} cached")
        own = self._known.setdefault(name, [])
        if end.usage.cached > max((shared(each, tuple(request.prompt)) for each in own), default=0):
            self.differences.append(f"{told}: {end.usage.cached} cached, which this tenant has not sent")
        self.spared, self.tokens = self.spared + end.usage.cached, self.tokens + len(request.prompt)
        answer = tuple(each.token for each in found)
        self._known[name] = [*own[-400:], (*request.prompt, *answer)]
        talk.messages = [*talk.messages, answer]

    def _turn(self, place: Place, talk: Talk) -> None:
        talk.messages.append(self._ids())
        self._finished(*self._submitted(place, talk))

    def _together(self, place: Place, talk: Talk) -> None:
        others = self._draw.sample(sorted(self._talks), min(len(self._talks), 3))
        under_way = [self._submitted(each, self._talks[each]) for each in {*others, place}]
        for each in under_way:
            self._finished(*each)

    def _retry(self, place: Place, talk: Talk) -> None:
        talk.messages = talk.messages[:-1]
        self._finished(*self._submitted(place, talk))

    def _cancel(self, place: Place, talk: Talk) -> None:
        _, _, request, ticket = self._submitted(place, talk)
        self._known.setdefault((place[0], request.reuse.name, talk.kind), []).append(tuple(request.prompt))
        if self._draw.random() < 0.5:
            ticket.take(0.01)
        self._engine.cancel(ticket)

    def _edit(self, _: Place, talk: Talk) -> None:
        if talk.messages:
            talk.messages[self._draw.randrange(len(talk.messages))] = self._ids()

    def _rewind(self, _: Place, talk: Talk) -> None:
        talk.messages = talk.messages[: self._draw.randrange(len(talk.messages) + 1)]

    def _branch(self, place: Place, talk: Talk) -> None:
        self._talks[place[0], self._draw.randrange(TALKS)] = Talk(talk.kind, list(talk.messages))

    def _delete(self, place: Place, _: Talk) -> None:
        del self._talks[place]

    def _forget(self, place: Place, _: Talk) -> None:
        owner = place[0].partition("/")[0]
        self._engine.forget(EntrySelector(owner, self._draw.choice((None, "0", "1"))))
        if self._engine.stored(EntrySelector(owner)) and self._draw.random() < 0.1:
            self._engine.forget(EntrySelector(owner))

    def _restart(self, *_: Any) -> None:
        self._engine.stop()
        self._engine = self._opened(self._at)

    def _kill(self, *_: Any) -> None:
        """The next engine finds the files as they are at this moment."""
        self._runs += 1
        target, source = self._folder / str(self._runs), self._at
        target.mkdir()
        for path in sorted(source.iterdir(), key=lambda each: each.name.startswith(".")):
            try:
                shutil.copy2(path, target)
            except FileNotFoundError:  # deleted meanwhile
                continue
        self._engine.stop()
        shutil.rmtree(source)
        self._engine, self._at = self._opened(target), target


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, done, differences = time.process_time(), 0, list[str]()
    while done < given.operations:
        with tempfile.TemporaryDirectory() as folder:
            fuzz = EngineFuzz(Path(folder), given.seed * 1_000_000 + done)
            fuzz.run(1000)
            fuzz.close()
        done += 1000
        differences += [f"{given.seed * 1_000_000 + done - 1000}: {each}" for each in fuzz.differences]
        told = {"operations": done, "seconds": round(time.process_time() - began), "differences": differences[:9]}
        told |= {"cached": round(fuzz.spared / fuzz.tokens, 3), "counts": dict(fuzz.counts)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
