"""Random operations on caches of tiny real models of the newer kinds, beside plain transformers reading each row alone.

    PYTHONPATH=benchmarks python benchmarks/fuzz_models.py --minutes 10 --seed 0

Kinds: recurrent layers, latents (MLA), shared keys, attention within chunks, positions of several axes; some of them
with recall of all that was evicted. A row is a list of ids, and for each of its tokens what it saw: from when on others
were dropped, and how far back its budget reached. Its logits are those of one pass of the plain model under that mask.
A refusal must leave no trace, and is counted. `--replay SEED` runs one sequence again. Exits with 1 if any sequence
differs.
"""

import argparse
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from families.passes import distance
from fuzz_rows import SINKS, Row, bound
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))  # helpers of the tests

from tests.helpers.interrupts import interrupted_at
from windlass import KVCache, Recent, UsageError, prompt_cache
from windlass.cache.options import DEFAULT_RECALL_STORE

RECURRENT = ("qwen3_next", "lfm2", "falcon_h1", "zamba2", "jamba")
FAMILIES = (*RECURRENT, "deepseek_v3", "gemma3n", "gemma4_e", "llama4", "qwen2_5_vl", "qwen3_vl")
RECALLING = ("deepseek_v3", "gemma3n", "gemma4_e", "qwen2_5_vl", "qwen3_vl")  # all that is evicted is read again
LONGEST = 90
TOLERANCES = {"plain": 1e-3, "int8": 0.5}  # of a standard deviation; states round by how a text is cut
FAR = 10**6
WEIGHTS = {
    "decode": 30, "draft": 8, "prompt": 5, "rollback": 14, "interrupt": 5, "drop": 6, "other_edit": 4, "copy": 4,
    "select": 3, "compress": 3, "file": 2, "twin": 2, "reset": 1,
}  # fmt: skip


class Difference(AssertionError):
    """A cache is not what plain transformers says."""


class Run:
    """One sequence of operations on one cache."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.family = self.draw.choice(FAMILIES)
        self.budget = self.draw.choice([None, None, 16, 20])
        self.model, self.batch = bound(self.family), self.draw.choice([1, 2, 3])
        self.recall = self.draw.choice([0, 96]) if self.family in RECALLING and self.budget is not None else 0
        store = self.draw.choice([*TOLERANCES]) if self.recall else DEFAULT_RECALL_STORE
        self.tolerance = TOLERANCES.get(store, TOLERANCES["plain"])
        self.cache = KVCache(
            self.model, self.budget, Recent(), SINKS, window=3, chunk=self.draw.choice([1, 20]), positions="original",
            batch=self.batch, recall=self.recall, recall_store=store,
        )  # fmt: skip
        self.rows = [Row() for _ in range(self.batch)]
        self.last = [0] * self.batch
        self.done, self.refused = Counter[str](), Counter[str]()

    @property
    def is_recurrent(self) -> bool:
        return bool(self.cache.recurrent)

    @property
    def is_wrapped(self) -> bool:
        """Whether the model hands its decoder embeddings alone, and no ids."""
        return self.family.endswith("_vl")

    def step(self) -> str:
        name = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if not any(row.ids for row in self.rows):
            name = "prompt"
        if max(len(row.ids) for row in self.rows) > LONGEST:
            name = "reset"
        before = self.snapshot()
        try:
            getattr(self, f"do_{name}")()
        except UsageError as error:
            self.refused[name] += 1
            if not alike(before, self.snapshot()):
                raise Difference(f"{name} was refused and left a trace: {error}") from error
        self.done[name] += 1
        self.compare()
        return name

    def compare(self) -> None:
        for what, ours, truth in (
            ("next_positions", self.cache.next_positions, [len(row.ids) for row in self.rows]),
            ("tokens", self.cache.tokens, self.cache.tokens if self.is_wrapped else [row.ids for row in self.rows]),
        ):
            if ours != truth:
                raise Difference(f"{what} is {ours}, expected {truth}")

    def snapshot(self) -> list[Tensor]:
        layers = [layer for layer in self.cache.layers if not layer.is_empty]
        found = [torch.tensor(self.cache.next_positions), torch.tensor(self.cache.columns_seen)]
        for layer in layers:
            found += [layer.positions.clone(), layer.store.packed_keys().floats().clone()]
        return found + [state.clone() for each in self.cache.recurrent for state in each.tensors().values()]

    # Passes

    def do_decode(self) -> None:
        self.feed([0 if self.batch > 1 and self.draw.random() < 0.2 else 1 for _ in self.rows], 1)

    def do_draft(self) -> None:
        self.feed_some(self.draw.randint(2, 9))

    def do_prompt(self) -> None:
        self.feed_some(self.draw.randint(10, 30))

    def feed_some(self, columns: int) -> None:
        lengths = [columns] * self.batch
        if self.draw.random() < 0.5:
            lengths = [self.draw.choice([0, columns, self.draw.randint(0, columns)]) for _ in self.rows]
        self.feed(lengths, columns)

    def feed(self, lengths: list[int], columns: int) -> None:
        ids = torch.tensor([[self.draw.randint(1, 80) for _ in range(columns)] for _ in self.rows])
        mask = torch.tensor([[0] * (columns - n) + [1] * n for n in lengths])
        with torch.no_grad():
            logits = self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache).logits
        self.fed(ids, lengths)
        for number, (row, n) in enumerate(zip(self.rows, lengths, strict=True)):
            if n:
                apart = float(
                    distance(logits[number : number + 1, columns - n :], row.truth(self.family)[:, -n:]).max()
                )
                if not apart <= self.tolerance:
                    raise Difference(f"row {number} of {lengths} is {apart:.1e} of a standard deviation off")

    def fed(self, ids: Tensor, lengths: list[int]) -> None:
        reach = FAR if self.budget is None or self.recall else self.budget - SINKS
        for row, own, n in zip(self.rows, ids.tolist(), lengths, strict=True):
            row.ids += own[len(own) - n :] if n else []
            row.gone += [FAR] * n
            row.reach += [reach] * n
        self.last = lengths

    def do_interrupt(self) -> None:
        columns = self.draw.choice([1, 1, 4, 12])
        ids = torch.tensor([[self.draw.randint(1, 80) for _ in range(columns)] for _ in self.rows])
        with torch.no_grad():
            work = lambda: self.model(input_ids=ids, past_key_values=self.cache)  # noqa: E731
            if interrupted_at(self.draw.randint(1, 2500), work):
                self.last = [-1] * self.batch
            else:
                self.fed(ids, [columns] * self.batch)

    # Edits

    def do_rollback(self) -> None:
        counts = self.draw.choice(
            [
                [max(n, 0) for n in self.last],
                [max(n, 0) if self.draw.random() < 0.5 else 0 for n in self.last],
                [min(self.draw.randint(0, 3), len(row.ids) - row.fixed) for row in self.rows],
            ]
        )
        self.cache.rollback(counts)
        if any(n > len(row.ids) - row.fixed for n, row in zip(counts, self.rows, strict=True)):
            raise Difference(f"rollback({counts}) goes beyond an edit, and was done")
        for row, n in zip(self.rows, counts, strict=True):
            if n:
                row.cut(n)
        if any(counts):
            self.last = [-1] * self.batch

    def do_drop(self) -> None:
        at = self.draw.randrange(self.batch)
        row = self.rows[at]
        if self.budget is not None or len(row.ids) < 6:
            return
        start = self.draw.randint(0, len(row.ids) - 4)
        end = self.draw.randint(start + 1, min(start + 5, len(row.ids) - 1))
        self.cache.drop(start, end, at)
        row.gone[start:end] = [min(gone, len(row.ids)) for gone in row.gone[start:end]]
        row.fixed = len(row.ids)

    def do_other_edit(self) -> None:
        if not self.is_recurrent:
            return
        edits = [
            lambda: self.cache.keep(1, 3), lambda: self.cache.shift(0, 99, 2), lambda: self.cache.divide(0, 99, 2),
            lambda: self.cache.splice(self.cache), lambda: self.cache.to_rotated(),
            lambda: self.cache.activate_past_recording(),
        ]  # fmt: skip
        self.draw.choice(edits)()
        raise Difference("an edit that a state can't honour was done")

    def do_copy(self) -> None:
        source, target = (self.draw.randrange(self.batch) for _ in range(2))
        self.cache.copy(source, target)
        self.rows[target] = copy.deepcopy(self.rows[source])

    def do_select(self) -> None:
        chosen = [self.draw.randrange(self.batch) for _ in range(self.batch)]
        self.cache.select_rows(torch.tensor(chosen))
        self.rows = [copy.deepcopy(self.rows[at]) for at in chosen]

    def do_compress(self) -> None:
        if any(gone < FAR for row in self.rows for gone in row.gone):
            return
        budget = self.draw.choice([16, 18, 20])
        self.cache.compress(budget)
        self.budget = budget
        for row in self.rows:
            row.fixed = len(row.ids)

    def do_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            prompt_cache.save(self.cache, Path(folder, "cache"), self.model)
            self.cache = prompt_cache.load(Path(folder, "cache"), self.model)

    def do_twin(self) -> None:
        twin = copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = twin

    def do_reset(self) -> None:
        self.cache.reset()
        self.rows, self.last = [Row() for _ in self.rows], [0] * self.batch


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def run(seed: int, is_told: bool = False) -> tuple[Run, str | None]:
    """A sequence, and what differs after it."""
    pair = Run(seed)
    for number in range(40):
        try:
            name = pair.step()
        except Exception as error:  # whatever it raises is a finding
            return pair, f"{type(error).__name__} after {number} operations: {error}"
        if is_told:
            print(number, name, pair.cache.next_positions, dict(pair.refused))
    return pair, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, help="the seed of one sequence")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.replay is not None:
        pair, found = run(given.replay, is_told=True)
        print(pair.family, pair.budget, found)
        return found is not None
    end, seed, differences = time.monotonic() + 60 * given.minutes, given.seed, 0
    totals: dict[str, Counter[str]] = {}
    while time.monotonic() < end:
        pair, found = run(seed)
        total = totals.setdefault(pair.family, Counter())
        total.update(
            sequences=1, operations=pair.done.total(), refusals=pair.refused.total(), differences=int(found is not None)
        )
        if found is not None:
            differences += 1
            print(f"seed {seed} ({pair.family}, budget {pair.budget}): {found}", flush=True)
        seed += 1
    for family, total in sorted(totals.items()):
        print(json.dumps({"family": family, "from": given.seed, **total}))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
