"""Random operations on caches of a real model, beside plain transformers reading each row alone under a mask."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.contents import content, is_same
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import MODEL, masked
from windlass import KVCache, UsageError
from windlass.policies import Recent

SINKS, WORDS, FAR, LONGEST = 2, 2000, 10**6, 150
TOLERANCE = 1e-3  # of a standard deviation of the logits: sums are in another order
SEQUENCES, OPERATIONS = 12, 50
WEIGHTS = {
    "decode": 30, "draft": 8, "prompt": 5, "rollback": 14, "interrupt": 5, "drop": 6, "copy": 4, "select": 3,
    "compress": 3, "file": 2, "twin": 2, "reset": 1,
}  # fmt: skip


@cache
def plain() -> PreTrainedModel:
    made: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return made.eval()


@cache
def attached() -> PreTrainedModel:
    return windlass.attach(copy.deepcopy(plain()))


@dataclass
class Row:
    """A text: its ids, from which query on each is gone, and how far back the budget of each query reached."""

    ids: list[int] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    reach: list[int] = field(default_factory=list)
    fixed: int = 0  # tokens before the last edit, which cannot be rolled back

    def cut(self, tokens: int) -> None:
        for each in (self.ids, self.gone, self.reach):
            del each[len(each) - tokens :]

    def truth(self) -> Tensor:
        """Logits of all tokens."""
        places, gone, reach = torch.arange(len(self.ids)), torch.tensor(self.gone), torch.tensor(self.reach)
        query, key = places[:, None], places[None]
        seen = (key <= query) & (query < gone[None]) & ((key < SINKS) | (query - key <= reach[:, None]))
        return masked(plain(), torch.tensor([self.ids]), seen)[0]


class Pair:
    """A cache and its rows as lists. Each operation is one of `WEIGHTS`."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.folder = random.Random(seed), folder
        self.budget, self.batch = self.draw.choice([None, 16, 24]), self.draw.choice([1, 1, 2, 3])
        self.cache = KVCache(
            attached(), self.budget, Recent(), SINKS, window=3, chunk=self.draw.choice([1, 20]), positions="original",
            batch=self.batch,
        )  # fmt: skip
        self.rows = [Row() for _ in range(self.batch)]
        self.last = [0] * self.batch  # tokens of the latest pass, -1 where it cannot be rolled back as a whole
        self.done, self.refused = Counter[str](), Counter[str]()
        self.operations: dict[str, Callable[[], None]] = {
            "decode": lambda: self.feed([0 if self.batch > 1 and self.chance(0.2) else 1 for _ in self.rows]),
            "draft": lambda: self.feed_some(self.draw.randint(2, 9)),
            "prompt": lambda: self.feed_some(self.draw.randint(10, 30)),
            "rollback": self.rollback,
            "interrupt": self.interrupt,
            "drop": self.drop,
            "copy": self.copy,
            "select": self.select,
            "compress": self.compress,
            "file": self.file,
            "twin": self.twin,
            "reset": self.reset,
        }

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def step(self) -> None:
        """One operation. A refusal leaves everything as it was."""
        [name] = self.draw.choices([*WEIGHTS], [*WEIGHTS.values()])
        lengths = [len(row.ids) for row in self.rows]
        name = "prompt" if not any(lengths) else "reset" if max(lengths) > LONGEST else name
        before = content(copy.deepcopy(self.cache)) if name in ("rollback", "drop", "compress") else None
        try:
            self.operations[name]()
        except UsageError:
            self.refused[name] += 1
            assert before is not None, f"{name} was refused"
            assert is_same(content(copy.deepcopy(self.cache)), before), f"{name} was refused and left a trace"
        self.done[name] += 1
        assert self.cache.next_positions == [len(row.ids) for row in self.rows], name
        assert self.cache.tokens == [row.ids for row in self.rows], name

    def feed_some(self, columns: int) -> None:
        lengths = [columns] * self.batch
        if self.chance(0.5):
            lengths = [self.draw.choice([0, columns, self.draw.randint(0, columns)]) for _ in self.rows]
        if any(lengths):
            self.feed(lengths)

    def words(self, columns: int) -> Tensor:
        return torch.tensor([[self.draw.randint(5, WORDS) for _ in range(columns)] for _ in self.rows])

    def feed(self, lengths: list[int]) -> None:
        """A pass, padded on the left, whose logits are all those of the plain model."""
        columns = max(*lengths, 1)
        ids, mask = self.words(columns), torch.tensor([[0] * (columns - n) + [1] * n for n in lengths])
        with torch.no_grad():
            logits = attached()(input_ids=ids, attention_mask=mask, past_key_values=self.cache).logits
        self.fed(ids, lengths)
        for row, own, n in zip(self.rows, logits, lengths, strict=True):
            if n:
                truth = row.truth()[-n:]
                assert float((own[columns - n :] - truth).abs().max()) <= TOLERANCE * float(truth.std())

    def fed(self, ids: Tensor, lengths: list[int]) -> None:
        reach = FAR if self.budget is None else self.budget - SINKS
        for row, own, n in zip(self.rows, ids.tolist(), lengths, strict=True):
            row.ids += own[len(own) - n :] if n else []
            row.gone += [FAR] * n
            row.reach += [reach] * n
        self.last = lengths

    def interrupt(self) -> None:
        columns = self.draw.choice([1, 1, 4, 12])
        ids = self.words(columns)
        with torch.no_grad():
            if interrupted_at(
                self.draw.randint(1, 2500), lambda: attached()(input_ids=ids, past_key_values=self.cache)
            ):
                self.last = [-1] * self.batch
            else:
                self.fed(ids, [columns] * self.batch)

    def rollback(self) -> None:
        latest = [max(n, 0) for n in self.last]
        some = [n if self.chance(0.5) else 0 for n in latest]
        few = [min(self.draw.randint(0, 3), len(row.ids) - row.fixed) for row in self.rows]
        counts = self.draw.choice([latest, some, few])
        self.cache.rollback(counts)
        for row, n in zip(self.rows, counts, strict=True):
            assert n <= len(row.ids) - row.fixed, f"rollback({counts}) goes beyond an edit, and was done"
            row.cut(n)
        if any(counts):
            self.last = [-1] * self.batch

    def drop(self) -> None:
        at = self.draw.randrange(self.batch)
        row = self.rows[at]
        if self.budget is not None or len(row.ids) < 6:
            return
        start = self.draw.randint(0, len(row.ids) - 4)
        end = self.draw.randint(start + 1, min(start + 5, len(row.ids) - 1))
        self.cache.drop(start, end, at)
        row.gone[start:end] = [min(gone, len(row.ids)) for gone in row.gone[start:end]]
        row.fixed = len(row.ids)

    def copy(self) -> None:
        source, target = (self.draw.randrange(self.batch) for _ in range(2))
        self.cache.copy(source, target)
        self.rows[target] = copy.deepcopy(self.rows[source])

    def select(self) -> None:
        chosen = [self.draw.randrange(self.batch) for _ in range(self.batch)]
        self.cache.select_rows(torch.tensor(chosen))
        self.rows = [copy.deepcopy(self.rows[at]) for at in chosen]

    def compress(self) -> None:
        budget = self.draw.choice([14, 16, 20])
        if any(gone < FAR for row in self.rows for gone in row.gone) or (self.budget or FAR) < budget:
            return
        self.cache.compress(budget)
        self.budget = budget
        for row in self.rows:
            row.fixed = len(row.ids)

    def file(self) -> None:
        self.cache.save(self.folder / "cache")
        self.cache = KVCache.load(self.folder / "cache", attached())

    def twin(self) -> None:
        twin = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = twin

    def reset(self) -> None:
        self.cache.reset()
        self.rows, self.last = [Row() for _ in self.rows], [0] * self.batch


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_a_real_model_reads_on_after_any_operation(seed: int, tmp_path: Path) -> None:
    pair = Pair(seed, tmp_path)
    for _ in range(OPERATIONS):
        pair.step()
    assert pair.done["decode"] > 5
    assert pair.refused.total() < OPERATIONS // 2
