"""Passes over one layer of the model of a cache, and rollback: as if the tokens had never come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_layer import SHORT, Record
from tests.helpers.cache_model_reads import Reader, Recalled
from tests.helpers.cache_model_rows import Rules
from tests.helpers.cache_model_tokens import Mode, Tokens

Array = NDArray[Any]


@dataclass
class LayerModel(Reader):
    """A layer that takes passes. `sure` counts the newest records that can be rolled back by all accounts."""

    records: list[Record] = field(default_factory=list)
    sure: int = 0

    def feed(
        self, queries: Array, keys: Array, values: Array, positions: Sequence[Sequence[int]],
        prompt_ends: Sequence[int], starts: Sequence[int], mode: Mode, is_first_pass: bool,
    ) -> Array:  # fmt: skip
        """Write, attend, observe, evict, for the tokens of a short pass one by one, for a long or a first one at once.

        `starts` are the places of rows before it. Returns the outputs of queries (batch, heads, columns, head_dim),
        zeros for padding.
        """
        kind, self.mode = self.kind, mode
        assert kind is not None
        columns = len(positions[0])
        is_small = columns <= SHORT and not any(self.is_over(tokens) for lists in self.held for tokens in lists)
        grouped = queries.reshape(len(queries), kind.kv_heads, kind.group, *queries.shape[2:])
        out = np.zeros((*grouped.shape[:-1], values.shape[3]))
        coded = self.codec(self.index, keys, values)
        ends, first = list(starts), len(self.records)
        is_whole = is_first_pass or columns > SHORT
        pieces = [range(columns)] if is_whole else [range(at, at + 1) for at in range(columns)]
        for number, piece in enumerate(pieces):
            chosen = [[at for at in piece if places[at] >= 0] for places in positions]
            self.columns = len(piece)
            self.expect_step(number, len(pieces))
            ends = [end + len(own) for end, own in zip(ends, chosen, strict=True)]
            until = [min(prompt, end) for prompt, end in zip(prompt_ends, ends, strict=True)]
            self.step(grouped, keys, values, coded, positions, chosen, ends, until, out, piece[0] == 0, is_small)
        self.remember(first, columns <= SHORT)
        return out.reshape(*queries.shape[:3], -1)

    def step(
        self, queries: Array, keys: Array, values: Array, coded: tuple[Array, Array],
        positions: Sequence[Sequence[int]], chosen: list[list[int]], ends: list[int], prompt_ends: list[int],
        out: Array, is_first: bool, is_small: bool,
    ) -> None:  # fmt: skip
        """One step with the columns `chosen` of each row, whose results go to `out`."""
        record = Record(
            self.held, self.written, [len(own) for own in chosen], [], [], ends, prompt_ends, is_first, is_small
        )
        held = []
        for row, (places, columns) in enumerate(zip(positions, chosen, strict=True)):
            if columns:
                states = keys[row][:, columns], values[row][:, columns]
                pair = coded[0][row][:, columns], coded[1][row][:, columns]
                record.new.append(self.tokens(row, [places[at] for at in columns], *states, pair))
                self.remember_tokens(row, [places[at] for at in columns], *states)
            else:
                record.new.append([[] for _ in self.held[row]])
            held.append([old + new for old, new in zip(self.held[row], record.new[row], strict=True)])
        self.held = held
        self.written = [was + len(own) for was, own in zip(self.written, chosen, strict=True)]
        for row, columns in enumerate(chosen):
            masses = []
            recalled = self.recalled(row, queries[row][:, :, columns], held[row]) if columns else None
            fullest = max(map(len, held[row])) if recalled is None else most_read(held[row], recalled)
            for at, tokens in enumerate(held[row]):
                if not columns:
                    masses.append(np.zeros((1, 0, len(tokens))))
                    continue
                own = slice(None) if len(held[row]) == 1 else slice(at, at + 1)
                asked = queries[row, own][:, :, columns]
                result, mass = self.attend(asked, record.new[row][at], tokens, row, own, fullest, recalled)
                out[row, own, :, columns] = result.transpose(2, 0, 1, 3)
                masses.append(mass)
            record.mass.append(masses)
        self.observe_and_evict(record)
        self.records.append(record)

    def expect_step(self, number: int, steps: int) -> None:
        """Compare the tokens held after step `number` of so many, where the cache took as many."""
        is_noted = len(self.noted) == steps
        self.is_last = number == steps - 1
        self.is_seen = self.is_last or is_noted
        self.seen = self.noted[number] if is_noted else None
        if self.seen is not None:
            self.expected = self.seen.held

    def remember(self, first: int, is_short: bool) -> None:
        """Which records can still be rolled back by all accounts: the last pass, and whole passes before it."""
        # Without a budget a layer grows now and then, and forgets.
        room = self.rules.rollback if is_short and self.rules.budget is not None else 0
        older, oldest, at = 0, first, first
        least = first - self.sure
        while at > least:
            at -= 1
            record = self.records[at]
            older += max(record.lengths)
            if not record.is_small or older > room:
                break
            if record.is_first:
                oldest = at
        self.sure = len(self.records) - oldest

    def forget(self) -> None:
        """An edit, after which earlier steps can't be rolled back."""
        self.records, self.sure = [], 0

    @property
    def is_lossless(self) -> bool:
        """Return True if a token that goes leaves nothing behind."""
        return not (self.has_evicted or self.rules.policy.has_state)

    def is_refused(self, counts: Sequence[int]) -> bool | None:
        """Return True if a rollback must be refused, None if it may be."""
        left, is_sure = list(counts), True
        for age, record in enumerate(reversed(self.records)):
            if not any(left):
                break
            kept, gone, left = split(record, left)
            is_sure &= age < self.sure
            if any(kept) and any(gone) and self.rules.policy.has_state and record.done + max(gone) > SHORT:
                is_sure = False
        if any(left) and not self.is_lossless:
            return True
        is_recorded = is_sure and not any(left)
        is_whole_pass = list(counts) == self.last_lengths() and not any(record.done for record in self.records)
        if self.configured.store_newest and sum(counts) and not (is_recorded and is_whole_pass):
            return None
        return False if is_recorded or (self.is_lossless and self.rules.budget is None) else None

    def last_lengths(self) -> list[int]:
        """Tokens of each row that came with the last pass and still stand."""
        lengths = [0] * self.batch
        for record in reversed(self.records):
            lengths = [was + n for was, n in zip(lengths, record.lengths, strict=True)]
            if record.is_first:
                break
        return lengths

    def roll_back(self, counts: Sequence[int], ends: Sequence[int], prompt_ends: Sequence[int]) -> None:
        """Remove the newest tokens as if they had never come. `ends` are those after it."""
        left, again = list(counts), []
        if self.recalls:
            self.memory = [own.cut(own.tokens - n) for own, n in zip(self.memory, counts, strict=True)]
        sure = self.records[len(self.records) - self.sure :]
        if self.is_lossless and any(n > sum(record.lengths[row] for record in sure) for row, n in enumerate(counts)):
            self.forget()
            self.held = [
                [[token for token in own if token.position < end] for own in lists]
                for lists, end in zip(self.held, ends, strict=True)
            ]
            self.written = [max(was - n, 0) for was, n in zip(self.written, counts, strict=True)]
            return
        while any(left):
            record = self.records.pop()
            kept, gone, left = split(record, left)
            self.sure = max(self.sure - 1, 0)
            self.held, self.written = record.before, record.written
            if any(kept):
                again.append((record, kept, max(gone)))
        for number, (record, kept, done) in enumerate(reversed(again)):
            self.expect_step(number, len(again))
            self.redo(record, kept, done, ends, prompt_ends)

    def redo(self, record: Record, kept: list[int], done: int, ends: Sequence[int], prompt_ends: Sequence[int]) -> None:
        """The step of `record`, as if only its first `kept` tokens of each row had come."""
        new = [[own[:n] for own in lists] for lists, n in zip(record.new, kept, strict=True)]
        mass = [
            [
                attended_again(each[:, :n, : each.shape[2] - was + n], then, now)
                for each, then, now in zip(masses, before, held, strict=True)
            ]
            for masses, before, held, n, was in zip(
                record.mass, record.before, self.held, kept, record.lengths, strict=True
            )
        ]
        record = record._replace(
            before=self.held,
            written=self.written,
            lengths=kept,
            new=new,
            mass=mass,
            ends=[min(pair) for pair in zip(record.ends, ends, strict=True)],
            prompt_ends=[min(pair) for pair in zip(record.prompt_ends, prompt_ends, strict=True)],
            done=record.done + done,
        )
        self.held = [
            [old + added for old, added in zip(before, own, strict=True)]
            for before, own in zip(self.held, new, strict=True)
        ]
        self.written = [was + n for was, n in zip(self.written, kept, strict=True)]
        self.observe_and_evict(record)
        self.records.append(record)
        self.sure += 1

    def compress(self, rules: Rules, ends: Sequence[int], prompt_ends: Sequence[int]) -> None:
        """See `cut_to`. Earlier steps can't be rolled back."""
        self.forget()
        self.cut_to(rules, ends, prompt_ends)


def most_read(lists: list[Tokens], recalled: list[Recalled]) -> int:
    """The most tokens that a head of a row reads, with recalled ones."""
    each = lists if len(lists) > 1 else lists * len(recalled)
    return max(len(own) + len(more[0]) for own, more in zip(each, recalled, strict=True))


def split(record: Record, counts: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Split `counts` tokens to roll back: of each row, those that stay of the step, go, and are left for others."""
    pairs = list(zip(record.lengths, counts, strict=True))
    return (
        [max(was - n, 0) for was, n in pairs],
        [min(was, n) for was, n in pairs],
        [max(n - was, 0) for was, n in pairs],
    )


def attended_again(mass: Array, then: Tokens, now: Tokens) -> Array:
    """`mass` (heads, queries, tokens) of the tokens that a list held `then`, for those that it holds `now`.

    A row over budget after a splice is cut in a step of other rows. Taken back, that step leaves the row with tokens
    that its own later steps did not attend.
    """
    places = {token.number: place for place, token in enumerate(then)}  # positions repeat after divide
    assert len(places) == len(then)
    if [token.number for token in now] == [*places]:
        return mass
    result = np.zeros((*mass.shape[:2], len(now) + mass.shape[2] - len(then)))
    result[..., len(now) :] = mass[..., len(then) :]
    for at, token in enumerate(now):
        if token.number in places:
            result[..., at] = mass[..., places[token.number]]
    return result
