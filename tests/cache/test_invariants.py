"""Random sequences of steps, rollbacks and edits against a list in plain Python, with invariants after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.helpers.models import Models
from windlass import KVCache, UsageError
from windlass.policies import NAMES, Policy
from windlass.policies.wrappers import keeps_newest
from windlass.testing import SLIDING_WINDOW, VOCABULARY

BATCH, SINKS, WINDOW = 2, 2, 3
PHASES = [Phase.generate]  # the same sequences every time: shrinking one would take minutes


@dataclass
class Row:
    """Tokens that a row was fed, and those that `Recent` holds."""

    at: int = 0
    held: list[int] = field(default_factory=list)  # positions, which `divide` may repeat
    text: dict[int, list[int]] = field(default_factory=dict)  # ids by position, evicted ones too
    past: list[tuple[list[int], int, list[int], int]] = field(default_factory=list)  # held, at, ids, columns

    def feed(self, ids: list[int], columns: int, limits: Limits) -> None:
        """A step: these tokens come, then whatever is over budget goes."""
        self.past.append((list(self.held), self.at, ids, columns))
        for token in ids:
            self.text.setdefault(self.at, []).append(token)
            self.held.append(self.at)
            self.at += 1
        order = sorted(self.held, key=lambda p: (limits.rank(p, self.at), p))
        self.held = order[max(0, len(order) - limits.budget) :]

    def roll_back(self, count: int, limits: Limits) -> None:
        """Forget the newest tokens: whole steps, and the last of them as if it had been shorter."""
        self.text = {p: ids for p, ids in self.text.items() if p < self.at - count}
        while count:
            self.held, self.at, ids, columns = self.past.pop()
            if len(ids) > count:
                ids = ids[: len(ids) - count]
                count = 0
                for position in range(self.at, self.at + len(ids)):
                    self.text.pop(position)
                self.feed(ids, columns, limits)
            else:
                count -= len(ids)

    def move(self, change: Callable[[int], int | None], at: int) -> None:
        """An edit of positions, where None drops a token."""
        text: dict[int, list[int]] = {}
        for position, ids in self.text.items():
            to = change(position)
            if to is not None:
                text.setdefault(to, []).extend(ids)
        self.text, self.at, self.past = text, at, []
        self.held = [to for to in map(change, self.held) if to is not None]

    def twin(self) -> Row:
        return Row(self.at, list(self.held), {p: list(ids) for p, ids in self.text.items()}, [])


@dataclass(frozen=True)
class Limits:
    """Limits of a layer, which holds only a sliding window if that fits in the budget."""

    budget: int
    sinks: int
    window: int
    sliding_window: int | None

    def rank(self, position: int, end: int) -> float:
        if self.sliding_window is not None and position <= end - self.sliding_window:
            return -1
        return float("inf") if position < self.sinks or position >= end - self.window else position


def limits_of(model: PreTrainedModel, budget: int) -> Limits:
    sliding = SLIDING_WINDOW if model.config.model_type == "mistral" else None
    if sliding is not None and sliding <= budget:
        return Limits(sliding, 0, 0, sliding)
    return Limits(budget, SINKS, WINDOW, sliding)


class Run:
    """A cache and its simulation, side by side."""

    def __init__(self, model: PreTrainedModel, budget: int, policy: Policy, rollback: int) -> None:
        options: dict[str, Any] = {"policy": policy, "sinks": SINKS, "window": WINDOW, "chunk": 20}
        self.model, self.policy, self.limits = model, policy, limits_of(model, budget)
        self.cache = KVCache(model, budget, **options, batch=BATCH, rollback=rollback)
        self.other = KVCache(model, budget + 20, **options)
        self.other_ids = torch.randint(VOCABULARY, (1, 50)).tolist()[0]
        self._forward(self.other, [self.other_ids], 50)
        self.other.drop(40, 45)
        self.rows = [Row() for _ in range(BATCH)]
        self.last: list[int] | None = None  # lengths of the last step, if it can be taken back
        self.is_edited = False
        every = KVCache(model, policy=policy, batch=VOCABULARY)
        self._forward(every, [[token] for token in range(VOCABULARY)], 1)
        layer, rows = every.layers[0], torch.arange(VOCABULARY)
        # Of the first layer: they depend on the id alone. (kv_heads, vocabulary, head_dim)
        self.keys = layer.store.keys()[rows, :, layer.positions[:, 0].argmax(-1)].transpose(0, 1)

    def _forward(self, cache: KVCache, ids: list[list[int]], columns: int) -> None:
        padded = torch.tensor([row + [0] * (columns - len(row)) for row in ids])
        mask = torch.tensor([[1] * len(row) + [0] * (columns - len(row)) for row in ids])
        with torch.no_grad():
            self.model(padded, attention_mask=mask, past_key_values=cache)

    def step(self, columns: int, shorter: int, which: int) -> None:
        lengths = [columns] * BATCH
        lengths[which] = max(0, columns - shorter)
        ids = [torch.randint(VOCABULARY, (n,)).tolist() for n in lengths]
        self._forward(self.cache, ids, columns)
        for row, tokens in zip(self.rows, ids, strict=True):
            row.feed(tokens, columns, self.limits)
        self.last = lengths
        for layer in self.cache.layers:
            assert (layer.positions >= 0).sum(-1).max() <= self.limits.budget
        if not self.is_edited:
            for row, positions in zip(self.rows, self.cache.layers[0].positions, strict=True):
                needed = {p for p in row.text if self.limits.rank(p, row.at) == float("inf")}
                assert all(needed <= set(head) for head in positions.tolist())

    def fail(self, columns: int) -> None:
        """A step that is interrupted in the last layer."""
        with _broken(self.model), pytest.raises(KeyboardInterrupt):
            self._forward(self.cache, [[1] * columns] * BATCH, columns)
        self.last = None

    def rollback(self, one: int, other: int) -> None:
        counts = [one, other]
        try:
            self.cache.rollback(counts)
        except UsageError:
            possible = self.last is not None and all(n <= was for n, was in zip(counts, self.last, strict=True))
            assert not possible, "the last step can be taken back"
            return
        for row, count in zip(self.rows, counts, strict=True):
            row.roll_back(count, self.limits)
        if any(counts):
            self.last = None

    def edit(self, name: str, start: int, length: int, by: int) -> None:
        end = start + length
        changes: dict[str, Callable[[int], int | None]] = {
            "drop": lambda p: None if start <= p < end else p,
            "keep": lambda p: p if start <= p < end else None,
            "shift": lambda p: p + by if start <= p < end else p,
            "divide": lambda p: p // by if start <= p < end else p,
        }
        try:
            getattr(self.cache, name)(start, end, *([by] if name in ("shift", "divide") else []))
        except UsageError:
            return
        for row in self.rows:
            ends = {
                "drop": start if start < row.at <= end else row.at,
                "keep": min(row.at, end),
                "shift": row.at + by if start < row.at <= end else row.at,
                "divide": (row.at - 1) // max(by, 1) + 1 if start < row.at <= end else row.at,
            }
            row.move(changes[name], ends[name])
        self.is_edited, self.last = True, None

    def splice(self, row: int) -> None:
        self.cache.splice(self.other, row=row)
        into, at = self.rows[row], self.rows[row].at
        for position, token in enumerate(self.other_ids):
            into.text.setdefault(at + position, []).append(token)
        into.held += [at + p for p in self.other.layers[0].positions[0, 0].tolist() if p >= 0]
        into.at, into.past = at + 50, []
        self.is_edited, self.last = True, None

    def arrange(self, rows: tuple[int, int]) -> None:
        """By `copy` or by `select_rows`, which here come to the same."""
        if rows == (0, 1):
            self.cache.copy(0, 1)
            rows = (0, 0)
        else:
            self.cache.select_rows(torch.tensor(rows))
        self.rows = [self.rows[row].twin() for row in rows]
        self.last = None

    def check(self) -> None:
        assert self.cache.next_positions == [row.at for row in self.rows]
        layer = self.cache.layers[0]
        if layer.is_empty:
            return
        assert layer.table.occupancy_bound >= (layer.positions >= 0).sum(-1).max()
        for b, row in enumerate(self.rows):
            for h, keys in enumerate(layer.store.keys()[b]):
                positions = layer.positions[b, h % layer.positions.shape[1]].tolist()
                held = sorted(p for p in positions if p >= 0)
                if keeps_newest(self.policy):
                    assert held == sorted(row.held)
                for slot, position in enumerate(positions):
                    if position >= 0:
                        near = self.keys[h, row.text[position]] - keys[slot]
                        assert near.abs().amax(-1).min() < 1e-5, f"slot {slot} does not hold position {position}"
                assert all(held.count(p) <= len(row.text[p]) for p in held), "a token is held twice"


@contextmanager
def _broken(model: PreTrainedModel) -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    mlp = model.model.layers[-1].mlp
    mlp.forward = interrupt
    try:
        yield
    finally:
        del mlp.forward


small = st.integers(0, 40)
STEP = st.tuples(
    st.just("step"), st.sampled_from([1, 1, 1, 1, 2, 3, 9, 15, 16, 17, 30]), st.sampled_from([0, 0, 0, 1, 4, 30]),
    st.integers(0, 1),
)  # fmt: skip
ROLLBACK = st.tuples(st.just("rollback"), st.integers(0, 6), st.integers(0, 6))
OTHER = st.one_of(
    st.tuples(st.just("fail"), st.sampled_from([1, 5, 20])),
    st.tuples(st.just("edit"), st.sampled_from(["drop", "keep"]), small, small, st.just(0)),
    st.tuples(st.just("edit"), st.just("shift"), small, st.sampled_from([5, 400]), st.integers(-20, 20)),
    st.tuples(st.just("edit"), st.just("divide"), small, small, st.integers(1, 3)),
    st.tuples(st.just("splice"), st.integers(0, 1)),
    st.tuples(st.just("arrange"), st.sampled_from([(0, 1), (1, 0), (1, 1)])),
)
RUNS = st.lists(st.one_of(STEP, STEP, STEP, ROLLBACK, ROLLBACK, OTHER), min_size=4, max_size=24)


def follow(run: Run, actions: list[tuple[object, ...]]) -> None:
    for name, *arguments in actions:
        getattr(run, str(name))(*arguments)
        run.check()


@pytest.mark.parametrize(("family", "budget"), [("llama", 12), ("mistral", 12), ("mistral", 8)])
def test_recent_holds_what_a_list_would(attached_model: Models, family: str, budget: int) -> None:
    """Whatever happened before: positions, keys and the text's end are those of the simulation."""

    @given(RUNS, st.sampled_from([0, 3, 16, 100]))
    @settings(max_examples=30, deadline=None, derandomize=True, phases=PHASES)
    def check(actions: list[tuple[object, ...]], rollback: int) -> None:
        torch.manual_seed(0)
        follow(Run(attached_model(family), budget, NAMES["recent"](), rollback), actions)

    check()


def test_no_policy_loses_or_doubles_a_token(attached_model: Models) -> None:
    """A slot holds the token its position says, never more than the budget, sinks and window always."""

    @given(RUNS, st.sampled_from(list(NAMES.values())), st.sampled_from([0, 3, 16, 100]))
    @settings(max_examples=40, deadline=None, derandomize=True, phases=PHASES)
    def check(actions: list[tuple[object, ...]], policy: type[Policy], rollback: int) -> None:
        torch.manual_seed(0)
        follow(Run(attached_model("llama"), 12, policy(), rollback), actions)

    check()
