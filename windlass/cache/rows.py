"""Where the texts of a cache's batch rows stand between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import QueryPositions, TokenIds, TokenMask
from windlass.core.step import Pass, Step


@dataclass(frozen=True, eq=False)
class Row:
    """Where the text of one row stands.

    `columns` counts what it was fed, padding included, and `since_edit` the tokens after its last edit, which
    are all that can be rolled back. `prompts` are the ranges [start, end) of positions that came in steps of
    several tokens. The first `known_ids` of `ids` are the tokens fed, edits aside; None where any came without ids.
    """

    tokens_seen: int = 0
    next_position: int = 0
    columns: int = 0
    since_edit: int = 0
    prompts: tuple[tuple[int, int], ...] = ()
    ids: list[int] | None = None
    known_ids: int = 0

    @property
    def tokens(self) -> list[int] | None:
        """The ids of the tokens fed; None where they are not known."""
        return None if self.ids is None else self.ids[: self.known_ids]

    def __eq__(self, other: object) -> bool:
        """Whether both stand alike; what lies in `ids` beyond `known_ids` does not count."""
        return isinstance(other, Row) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        counts = self.tokens_seen, self.next_position, self.columns, self.since_edit
        return *counts, self.prompts, self.tokens

    @property
    def prompt_end(self) -> int:
        """One past the last position that came in a step of several tokens."""
        return self.prompts[-1][1] if self.prompts else 0

    def fed(self, tokens: int, columns: int) -> Row:
        """After `tokens` more, in `columns` at once; their ids are told to `told`."""
        end, prompts = self.next_position + tokens, self.prompts
        if columns > 1 and tokens:
            is_continued = bool(prompts) and prompts[-1][1] == end - tokens
            start = prompts[-1][0] if is_continued else end - tokens
            prompts = (*(prompts[:-1] if is_continued else prompts), (start, end))
        return Row(
            self.tokens_seen + tokens,
            end,
            self.columns + columns,
            self.since_edit + tokens,
            prompts,
            self.ids,
            self.known_ids,
        )

    def told(self, ids: Sequence[int] | None) -> Row:
        """With the ids of the tokens that were fed last.

        The list grows in place and is shared with the row before, which counts fewer of its entries: a row that
        is taken back needs no copy, and appending takes no time that grows with the text.
        """
        if ids is None or self.ids is None:
            return replace(self, ids=None, known_ids=0)
        self.ids[self.known_ids :] = ids
        return replace(self, known_ids=self.known_ids + len(ids))

    def moved_to(self, end: int) -> Row:
        """Going on at position `end`."""
        prompts = tuple((start, min(stop, end)) for start, stop in self.prompts if start < end)
        return replace(self, next_position=end, prompts=prompts)

    def rolled_back(self, tokens: int) -> Row:
        """Without its newest `tokens`."""
        return replace(
            self.moved_to(self.next_position - tokens),
            tokens_seen=self.tokens_seen - tokens,
            columns=self.columns - tokens,
            since_edit=self.since_edit - tokens,
            known_ids=max(self.known_ids - tokens, 0),
        )

    def copied(self) -> Row:
        """The same with a list of ids of its own."""
        return replace(self, ids=self.tokens)

    def followed_by(self, other: Row) -> Row:
        """With the text of `other` after it."""
        ids = None if self.tokens is None or other.tokens is None else [*self.tokens, *other.tokens]
        return replace(
            self.moved_to(self.next_position + other.next_position),
            tokens_seen=self.tokens_seen + other.tokens_seen,
            columns=self.columns + other.columns,
            since_edit=0,
            ids=ids,
            known_ids=0 if ids is None else len(ids),
        )


@dataclass(frozen=True)
class RowTable:
    """All rows of a batch. A change gives another table: a cache goes from one to the next in one assignment."""

    rows: tuple[Row, ...]

    @classmethod
    def at_start(cls, batch: int) -> RowTable:
        """Nothing read yet."""
        return cls(tuple(Row(ids=[]) for _ in range(batch)))

    @classmethod
    def after_prompt(cls, batch: int, tokens: int) -> RowTable:
        """Each row has read `tokens` tokens of unknown ids, in one step."""
        return cls((Row(tokens, tokens, tokens, tokens, ((0, tokens),)),) * batch)

    @property
    def tokens_seen(self) -> list[int]:
        """Per row, tokens written since the start, evicted ones included."""
        return [row.tokens_seen for row in self.rows]

    @property
    def next_positions(self) -> list[int]:
        """Per row, the position of the next token."""
        return [row.next_position for row in self.rows]

    @property
    def prompt_ends(self) -> list[int]:
        """Per row, one past the last position that came in a step of several tokens."""
        return [row.prompt_end for row in self.rows]

    @property
    def prompts(self) -> list[tuple[tuple[int, int], ...]]:
        """Per row, the ranges of positions that came in steps of several tokens."""
        return [row.prompts for row in self.rows]

    @property
    def columns_seen(self) -> int:
        """Columns fed so far, padding and evicted tokens included: all rows are fed side by side.

        Where rows were rolled back by different numbers, those that all of them still have.
        """
        return min(row.columns for row in self.rows)

    @property
    def tokens(self) -> list[list[int]] | None:
        """Per row, the ids fed, edits aside; None once any came without ids."""
        known = [tokens for tokens in (row.tokens for row in self.rows) if tokens is not None]
        return known if len(known) == len(self.rows) else None

    def columns(self, tokens: int, mask: TokenMask | None, device: torch.device) -> tuple[QueryPositions, list[int]]:
        """Positions of the next columns, EMPTY where `mask` has padding, and how many tokens each row gets."""
        starts = torch.tensor(self.next_positions, device=device)[:, None]
        if mask is None:
            return starts + torch.arange(tokens, device=device), [tokens] * len(starts)
        return (starts + mask.long().cumsum(-1) - 1).where(mask, EMPTY), mask.sum(-1).tolist()

    def step(self, positions: QueryPositions, lengths: Sequence[int], ids: TokenIds | None, how: Pass) -> Step:
        """A step of `lengths` tokens per row from here."""
        ends = [row.next_position + n for row, n in zip(self.rows, lengths, strict=True)]
        prompt_ends = self.prompt_ends
        if positions.shape[1] > 1:
            prompt_ends = [new if n else old for new, old, n in zip(ends, prompt_ends, lengths, strict=True)]
        device = positions.device
        next_positions, prompts = torch.tensor(ends, device=device), torch.tensor(prompt_ends, device=device)
        is_second, is_deferred = how.is_second_pass, how.defer_eviction
        return Step(positions, tuple(lengths), next_positions, prompts, max(ends), ids, is_second, is_deferred)

    def standstill(self, device: torch.device) -> Step:
        """A step of no tokens: where the rows stand now."""
        positions = torch.empty(len(self.rows), 0, dtype=torch.long, device=device)
        return self.step(positions, [0] * len(self.rows), None, Pass())

    def fed(self, lengths: Sequence[int], columns: int) -> RowTable:
        """After as many more tokens per row, in `columns` at once; their ids are told to `told`."""
        return RowTable(tuple(row.fed(n, columns) for row, n in zip(self.rows, lengths, strict=True)))

    def told(self, ids: Sequence[Sequence[int]] | None) -> RowTable:
        """With the ids of the tokens that were fed last, or None where they are not known."""
        if ids is None:
            return RowTable(tuple(row.told(None) for row in self.rows))
        return RowTable(tuple(row.told(own) for row, own in zip(self.rows, ids, strict=True)))

    def moved_to(self, ends: Sequence[int], row: int | None) -> RowTable:
        """The texts of one row, or of all, going on at `ends`."""
        return self.changed(lambda index, one: one.moved_to(ends[index]), row)

    def edited(self, row: int | None) -> RowTable:
        """One row, or all, edited: what came before can't be rolled back."""
        return self.changed(lambda _, one: replace(one, since_edit=0), row)

    def rolled_back(self, counts: Sequence[int]) -> RowTable:
        """Without the newest `counts` tokens of each row."""
        return self.changed(lambda index, one: one.rolled_back(counts[index]), None)

    def changed(self, change: Callable[[int, Row], Row], row: int | None) -> RowTable:
        """With `change` of one row, or of all."""
        pairs = enumerate(self.rows)
        return RowTable(tuple(change(at, one) if row is None or at == row else one for at, one in pairs))

    def spliced(self, added: Row, row: int) -> RowTable:
        """With the text of `added` after that of one row; the columns it came in count for all."""
        return self.changed(
            lambda at, one: one.followed_by(added) if at == row else replace(one, columns=one.columns + added.columns),
            None,
        )

    def selected(self, rows: Sequence[int]) -> RowTable:
        """The rows at `rows`, which may repeat."""
        return RowTable(tuple(self.rows[row].copied() for row in rows))

    def to_json(self) -> dict[str, Any]:
        """What a prompt-cache file says of the rows, but for the ids and the columns of each."""
        return {
            "tokens_seen": self.tokens_seen,
            "next_positions": self.next_positions,
            "prompts": [[list(span) for span in spans] for spans in self.prompts],
            "columns_seen": self.columns_seen,
            "tokens": None,
            "since_edit": [row.since_edit for row in self.rows],
        }

    @classmethod
    def from_json(
        cls, told: dict[str, Any], tokens: Sequence[list[int]] | None, columns: Sequence[int] | None
    ) -> RowTable:
        """The rows that `to_json` told of, with their ids and columns; without `columns` all were fed equally many."""
        columns = columns or [told["columns_seen"]] * len(told["tokens_seen"])
        return cls(
            tuple(
                Row(
                    seen,
                    told["next_positions"][row],
                    columns[row],
                    told["since_edit"][row],
                    tuple((start, end) for start, end in told["prompts"][row]),
                    None if tokens is None else tokens[row],
                    0 if tokens is None else len(tokens[row]),
                )
                for row, seen in enumerate(told["tokens_seen"])
            )
        )


def check_positions(ours: QueryPositions, given: Tensor) -> None:
    """Compare the positions that a caller passed with those that follow; padding, negative in `ours`, may differ.

    Raises: UsageError, naming the first that differs.
    """
    is_wrong = (ours >= 0) & (given != ours)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        found = int(given.expand_as(ours)[row, column])
        raise UsageError(
            f"position_ids[{row}, {column}] is {found}, but the cache continues row {row} at position "
            f"{int(ours[row, column])}; leave position_ids out, or use rollback, drop or shift to move the text"
        )
