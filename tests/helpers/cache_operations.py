"""Edits of a cache and its model."""

import copy
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DynamicCache

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_pair import MODES, Pair, is_refused
from tests.helpers.cache_setup import BASE, HEAD_DIM, Setup
from windlass import KVCache


class Run(Pair):
    """A cache and its model, with every edit."""

    def both(self, work: Callable[[], object], truth: Callable[[], object], refused: bool | None, what: str) -> None:
        """Run an operation in the cache, and in the model unless it is refused (None: it may be)."""
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
        self._cut("drop", start, end, self.row(d))

    def do_keep(self, a: int, b: int, c: int, d: int) -> None:
        start, end = self.span(b, c)
        if c % 3:
            start, end = min(start, 3), max(end, 3)
        self._cut("keep", start, end, self.row(d))

    def _cut(self, name: str, start: int, end: int, row: int | None) -> None:
        refused = self.model.cut_is_refused(name, start, end, row)
        cache, model = (getattr(each, name) for each in (self.cache, self.model))
        self.both(
            lambda: cache(start, end, row), lambda: model(start, end, row), refused, f"{name}({start}, {end}, {row})"
        )

    def do_shift(self, a: int, b: int, c: int, d: int) -> bool | None:
        start, end = self.span(b, c)
        by, row = a % 23 - 11, self.row(d)
        model = self.model
        refused = model.shift_is_refused(start, end, by, row)
        work = lambda: self.cache.shift(start, end, by, row)  # noqa: E731
        self.both(work, lambda: model.shift(start, end, by, row), refused, f"shift({start}, {end}, {by}, {row})")
        return None

    def do_divide(self, a: int, b: int, c: int, d: int) -> bool | None:
        if self.setup.recall and self.model.mode.reads_ranks:
            return False
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

    def do_mode(self, a: int, b: int, c: int, d: int) -> bool | None:
        """Another mode. At ranks, tokens that share a position change places once some are recalled: see docs."""
        mode = MODES[b % len(MODES)]
        if self.setup.recall and self.model.has_ties and mode.reads_ranks:
            return False
        self.cache.positions, self.model.mode = str(mode), mode
        return None

    def do_compress(self, a: int, b: int, c: int, d: int) -> None:
        longest = max((len(own) for layer in self.model.layers for lists in layer.held for own in lists), default=0)
        top = self.model.options.budget or max(longest, 8)
        budget = max(1, top - b % 4 if c % 4 else top + 2 - b % (top + 1))
        window = None if d % 2 else 1 + d // 2 % 4

        def truth() -> None:
            self.expect()
            self.model.set_budget(budget, window)
            self.take_budgets()
            self.model.compress()
            self.adopt_merges()

        refused = self.model.compress_is_refused(budget, window)
        self.both(lambda: self.cache.compress(budget, window), truth, refused, f"compress({budget}, {window})")

    def do_splice(self, a: int, b: int, c: int, d: int) -> bool | None:
        """Insert another cache's tokens after those of a row, now and then a row of its own."""
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
        """Settings and text of another cache of the same model."""
        own, draw = self.setup, random.Random(b * 7919 + d)
        policy, merge = draw.choice([own.policy, "recent", "key_diff"]), draw.choice([own.merge, None, None])
        budget = draw.choice([8, 12, None]) if merge is None else 9
        store = draw.choice([own.store, own.store, "plain", "int8"]) if merge is None else own.store
        recall = own.recall if draw.random() < 0.9 else 8 - min(own.recall, 8)
        if recall:
            budget = budget or 8
        recall_store = draw.choice([own.recall_store, "int4", "plain"]) if recall else "int4"
        return replace(
            own, batch=draw.choice([1, 2]), policy=policy, merge=merge, budget=budget, store=store, window=2, sinks=1,
            mode=MODES[0], recall=recall, recall_store=recall_store, recall_in_files=own.recall_in_files and recall > 0,
            shares=own.shares if draw.random() < 0.9 else None,
        )  # fmt: skip

    def do_adapter(self, a: int, b: int, c: int, d: int) -> bool | None:
        """Another adapter, another scale, none, or one that is merged into the weights."""
        return None if self.setup.has_adapters and self.setup.adapted.change(b) else False

    def do_file(self, a: int, b: int, c: int, d: int) -> bool | None:
        """Saved, loaded, and gone on with. With other adapters than it was saved with it must not be loaded."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "cache")
            self.cache.save(path)
            if self.setup.has_adapters and c % 2:
                before = self.setup.adapted.state
                self.setup.adapted.change(b)
                after = self.setup.adapted.state
                if is_refused(lambda: KVCache.load(path, self.setup.its_model)):
                    if after == before:
                        raise Difference("a file is refused with the adapters that it was saved with")
                    return None
                if after.weights != before.weights:
                    raise Difference(f"a file of {before} is loaded with {after}")
            self.cache = KVCache.load(path, self.setup.its_model, recall_folder=self.setup.recall_folder)
        if any(row.ids is None for row in self.model.rows):  # a file has the ids of all rows, or of none
            self.model.rows = [row._replace(ids=None) for row in self.model.rows]
        for layer in self.model.layers:
            layer.forget()
        return None

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
        self.model.take_over([(keys, values) for _, keys, values in self.arrays(states)], self.kinds, batch, tokens)
        return None

    def rotated(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys (batch, kv_heads, tokens, head_dim) of positions 0, 1, 2, ... as the model rotates them."""
        if self.setup.rotaries()[layer] is None:
            return keys
        pairs = HEAD_DIM // 2
        at = torch.arange(keys.shape[2], dtype=torch.float64)[:, None]
        angles = at * torch.tensor([BASE ** (-2 * pair / HEAD_DIM) for pair in range(pairs)], dtype=torch.float64)
        first, second = keys.double().split(pairs, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).float()
