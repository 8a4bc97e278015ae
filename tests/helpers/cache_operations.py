"""Edits of a cache and its model, random sequences of all operations, and the shortest that still fails."""

import copy
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DynamicCache

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_model_rules import MergeModel
from tests.helpers.cache_pair import MODES, Operation, Pair, is_refused
from tests.helpers.cache_setup import BASE, HEAD_DIM, MODELS, POLICIES, Setup
from windlass import KVCache, prompt_cache


class Run(Pair):
    """A cache and its model, with every edit."""

    def both(self, work: Callable[[], object], truth: Callable[[], object], refused: bool | None, what: str) -> None:
        """Do it in the cache, and in the model unless it is refused; None: it may be."""
        was_refused = is_refused(work)
        if refused is not None and was_refused != refused:
            raise Difference(f"{what} is {'refused' if was_refused else 'done'}, expected otherwise")
        if not was_refused:
            truth()

    def do_rollback(self, a: int, b: int, c: int, d: int) -> bool | None:
        """The last step, a part of it, some tokens of some rows, or too many."""
        model = self.model
        if self.setup.policy == "random" and len(model.rows) > 1:  # its choices between steps are not seen
            return False
        lengths = [0] * len(model.rows)
        for layer in model.layers[:1]:
            if layer.records:
                lengths = layer.last_lengths()
        counts = {
            0: lengths,
            1: [min(n, 1 + b % 5) for n in lengths],
            2: [1 + b % 3] * len(lengths),
            3: [(b >> (4 * row)) % 4 for row in range(len(lengths))],
            4: [1 + b % 40] * len(lengths),
            5: [min(n, (b >> (3 * row)) % 9) for row, n in enumerate(lengths)],
        }[c % 6]
        refused = model.rollback_is_refused(counts)
        told = counts[0] if len(set(counts)) == 1 and d % 2 else list(counts)
        self.expect_rollback(refused, counts, told)
        return None

    def expect_rollback(self, refused: bool | None, counts: list[int], told: int | list[int]) -> None:
        def truth() -> None:
            self.expect()
            self.model.rollback(counts)
            self.adopt_merges()

        with self.noting():
            self.both(lambda: self.cache.rollback(told), truth, refused, f"rollback({told})")

    def span(self, b: int, c: int) -> tuple[int, int]:
        """A range, often at the end of the text or at its beginning."""
        last = max(self.model.ends, default=0)
        start = b % (last + 2)
        return start, (max(start, last) if c % 4 == 0 else start + c % (last + 4 - start if c % 4 < 3 else 6))

    def row(self, d: int) -> int | None:
        return None if d % 2 else d // 2 % len(self.model.rows)

    def do_drop(self, a: int, b: int, c: int, d: int) -> None:
        start, end = self.span(b, c)
        if c % 3:  # a few tokens: longer ranges leave nothing to go on with
            end = min(end, start + 3)
        self.cache.drop(start, end, self.row(d))
        self.model.drop(start, end, self.row(d))

    def do_keep(self, a: int, b: int, c: int, d: int) -> None:
        start, end = self.span(b, c)
        if c % 3:
            start, end = min(start, 3), max(end, 3)
        self.cache.keep(start, end, self.row(d))
        self.model.keep(start, end, self.row(d))

    def do_shift(self, a: int, b: int, c: int, d: int) -> bool | None:
        start, end = self.span(b, c)
        by, row = a % 23 - 11, self.row(d)
        model = self.model
        refused = model.shift_is_refused(start, end, by, row)
        work = lambda: self.cache.shift(start, end, by, row)  # noqa: E731
        self.both(work, lambda: model.shift(start, end, by, row), refused, f"shift({start}, {end}, {by}, {row})")
        return None

    def do_divide(self, a: int, b: int, c: int, d: int) -> bool | None:
        start, end = self.span(b, c)
        by, row = 1 + a % 3, self.row(d)
        model = self.model
        refused = model.leaves_tokens_past_the_end("divide", start, end, by, row)
        work = lambda: self.cache.divide(start, end, by, row)  # noqa: E731
        self.both(work, lambda: model.divide(start, end, by, row), refused, f"divide({start}, {end}, {by}, {row})")
        return None

    def do_copy(self, a: int, b: int, c: int, d: int) -> None:
        source, target = b % len(self.model.rows), c % len(self.model.rows)
        self.cache.copy(source, target)
        self.model.copy(source, target)

    def do_select(self, a: int, b: int, c: int, d: int) -> None:
        rows = [(b >> (4 * at)) % len(self.model.rows) for at in range(1 + c % 3)]
        self.cache.select_rows(torch.tensor(rows))
        self.model.select_rows(rows)

    def do_reset(self, a: int, b: int, c: int, d: int) -> None:
        self.reset()

    def do_mode(self, a: int, b: int, c: int, d: int) -> None:
        self.cache.positions = str(MODES[b % len(MODES)])
        self.model.mode = MODES[b % len(MODES)]

    def do_compress(self, a: int, b: int, c: int, d: int) -> None:
        longest = max((len(own) for layer in self.model.layers for lists in layer.held for own in lists), default=0)
        top = self.model.options.budget or max(longest, 8)
        budget = max(1, top - b % 4 if c % 4 else top + 2 - b % (top + 1))
        window = None if d % 2 else 1 + d // 2 % 4

        def truth() -> None:
            self.expect()
            self.model.compress(budget, window)
            self.adopt_merges()

        refused = self.model.compress_is_refused(budget, window)
        self.both(lambda: self.cache.compress(budget, window), truth, refused, f"compress({budget}, {window})")

    def do_splice(self, a: int, b: int, c: int, d: int) -> bool | None:
        """Another cache's tokens after those of a row; now and then a row of its own."""
        row = c % len(self.model.rows)
        if d % 11 == 0:
            other: Pair = self
        else:
            other = Run(self.donor(b, d), is_donor=True)
            other.do_prompt(a + 1, b, c, d)
            other.do_decode(a + 2, b, c, d)
            if d % 3 == 0:
                other.apply(("drop", a + 3, b, c, d))
        source = b % len(other.model.rows)
        if self.model.rows[row].end + other.model.rows[source].end > 2000:
            return False
        is_same = type(self.cache.store) is type(other.cache.store)
        self.both(
            lambda: self.cache.splice(other.cache, source, row),
            lambda: self.model.splice(other.model, source, row, is_same),
            self.model.splice_is_refused(other.model),
            f"splice of {other.setup}",
        )
        self.operations += 0 if other is self else other.operations + 2
        return None

    def donor(self, b: int, d: int) -> Setup:
        """What another cache of the same model is made of."""
        own, draw = self.setup, random.Random(b * 7919 + d)
        policy, merge = draw.choice([own.policy, "recent", "key_diff"]), draw.choice([own.merge, None, None])
        budget = draw.choice([8, 12, None]) if merge is None else 9
        store = draw.choice([own.store, own.store, "plain", "int8"]) if merge is None else own.store
        return replace(
            own, batch=draw.choice([1, 2]), policy=policy, merge=merge, budget=budget, store=store, window=2, sinks=1,
            mode=MODES[0],
        )  # fmt: skip

    def do_file(self, a: int, b: int, c: int, d: int) -> None:
        """Saved, loaded, and gone on with."""
        with tempfile.TemporaryDirectory() as folder:
            prompt_cache.save(self.cache, Path(folder, "cache"), self.setup.its_model)
            self.cache = prompt_cache.load(Path(folder, "cache"), self.setup.its_model)
        if any(row.ids is None for row in self.model.rows):  # a file has the ids of all rows, or of none
            self.model.rows = [row._replace(ids=None) for row in self.model.rows]
        for layer in self.model.layers:
            layer.forget()

    def do_twin(self, a: int, b: int, c: int, d: int) -> None:
        """A copy, gone on with in place of the first, which is written to as well."""
        twin = copy.deepcopy(self.cache)
        self.cache.drop(0, 2)
        self.cache = twin

    def do_import(self, a: int, b: int, c: int, d: int) -> bool | None:
        """A `DynamicCache`, its keys rotated, taken over."""
        is_exact = self.setup.dtype == "float32" and self.setup.store == "plain"  # else rounding chooses codes
        if not is_exact or self.is_donor:
            return False
        tokens, batch = 1 + b % 25, self.cache.batch_size
        states = self.states(a, tokens)
        source = DynamicCache(config=self.setup.its_model.config)
        for at, (_, keys, values) in enumerate(states):
            source.update(self.rotated(at, keys), values, at)
        self.cache = KVCache.from_rotated(self.setup.its_model, source, self.cache.options)
        self.model.reset()
        self.model.take_over(
            [(keys.double().numpy(), values.double().numpy()) for _, keys, values in states], self.kinds, batch, tokens
        )
        return None

    def rotated(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys (batch, kv_heads, tokens, head_dim) of positions 0, 1, 2, ... as the model rotates them."""
        if self.kinds[layer].angles is None:
            return keys
        pairs = HEAD_DIM // 2
        at = torch.arange(keys.shape[2], dtype=torch.float64)[:, None]
        angles = at * torch.tensor([BASE ** (-2 * pair / HEAD_DIM) for pair in range(pairs)], dtype=torch.float64)
        first, second = keys.double().split(pairs, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()


WEIGHTS = {
    "decode": 40, "draft": 6, "prompt": 3, "rollback": 16, "interrupt": 4, "drop": 7, "keep": 1.5, "shift": 7,
    "divide": 3, "copy": 3, "select": 2, "reset": 0.4, "mode": 4, "compress": 2, "splice": 1.5, "file": 0.5, "twin": 1,
    "import": 0.7, "model": 2,
}  # fmt: skip


def random_setup(draw: random.Random) -> Setup:
    """A pair of any kind."""
    store = draw.choice(["plain"] * 6 + ["int8", "int4", "int4(sinks=2, newest=5)", "int8(newest=4)"])
    budget = draw.choice([None, 8, 9, 12, 12, 20])
    merge = None
    if budget is not None and "(" not in store and draw.random() < 0.25:
        merge = MergeModel(
            draw.choice(["mean_count", "mean", "sum", "pick"]),
            draw.choice(["nearest", "next"]),
            draw.choice([-1.0, 0.3]),
        )
    dtype = draw.choice(["float32"] * 4 + ["bfloat16"])
    if merge is not None and merge.name == "sum":  # sums grow beyond what a bound in bfloat16 could say
        dtype = "float32"
    return Setup(
        model=draw.choice(["plain", "plain", "windowed", *MODELS]),
        dtype=dtype,
        batch=draw.choice([1, 1, 2, 2, 3]),
        budget=budget,
        policy=draw.choice(list(POLICIES)),
        sinks=draw.choice([0, 1, 2]),
        window=draw.choice([None, 1, 3, 5]),
        chunk=draw.choice([1, 20, 64]),
        rollback=draw.choice([0, 3, 16]),
        mode=draw.choice(MODES),
        store=store,
        merge=merge,
        softcap=draw.choice([None, None, 1.5]),
        has_sink_logits=draw.random() < 0.2,
        repeats=draw.random() < 0.2,
        trained_length=draw.choice([4096, 13, 23, 60]),
    )


def random_operations(draw: random.Random, count: int) -> list[Operation]:
    names = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)
    numbers = ([draw.randrange(2**20) for _ in range(4)] for _ in names)
    return [(name, a, b, c, d) for name, (a, b, c, d) in zip(["prompt", *names], numbers, strict=False)]


def first_difference(setup: Setup, operations: Sequence[Operation]) -> tuple[int, str] | None:
    """The index of the operation after which cache and model differ, and how; None where they never do."""
    run = Run(setup)
    for at, operation in enumerate(operations):
        try:
            run.apply(operation)
        except Difference as difference:
            return at, str(difference)
    return None


def shortest(setup: Setup, operations: Sequence[Operation]) -> list[Operation]:
    """A sequence that fails, and no longer does so when any one operation is left out."""
    found = first_difference(setup, operations)
    assert found is not None, "a sequence that does not fail"
    left = list(operations[: found[0] + 1])
    size = max(1, len(left) // 2)
    while True:
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            found = first_difference(setup, fewer)
            if found is not None:
                left = fewer[: found[0] + 1]
                break
        else:
            if size == 1:
                return left
            size = max(1, size // 2)


def sequences(seed: int) -> Iterator[tuple[int, Setup, list[Operation]]]:
    """Random sequences without end, each with the seed that gives it again."""
    for number in range(seed, 2**62):
        yield (number, *sequence(number))


def sequence(seed: int) -> tuple[Setup, list[Operation]]:
    draw = random.Random(seed)
    return random_setup(draw), random_operations(draw, draw.choice([20, 60, 150]))
