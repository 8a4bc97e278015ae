"""State of the texts of a cache's rows between two steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.parse import DEFAULT_SINKS
from windlass.core.positions import EMPTY, Picture, Places, places_of_axes
from windlass.core.step import Pass, RowSinks, Step
from windlass.core.types import QueryPositions, TokenIds, TokenMask, Tokens

Padding = tuple[tuple[int, int], ...] | None
"""Ranges [start, end) of padded columns (None: unknown after an edit or in a loaded file)."""


def extended(padding: Padding, start: int, columns: int, is_token: Sequence[bool] | None) -> Padding:
    """`padding` with that of the next `columns`, from `start`. Without `is_token` all of these are padding."""
    if padding is None:
        return None
    if is_token is None:
        is_token = [False] * columns
    ranges = list(padding)
    for column, is_real in enumerate(is_token, start):
        if is_real:
            continue
        is_next = bool(ranges) and ranges[-1][1] == column
        first = ranges.pop()[0] if is_next else column
        ranges.append((first, column + 1))
    return tuple(ranges)


def check_mask(paddings: Sequence[Padding], mask: TokenMask) -> None:
    """Compare a (batch, columns) mask of columns that were fed before with the record of how they were fed.

    Raises: UsageError, naming the first that differs: a token can't be hidden later, padding can't become one.
    """
    expected = torch.ones(mask.shape, dtype=torch.bool)
    for row, padding in enumerate(paddings):
        for start, end in padding or ():
            expected[row, start:end] = False
    is_wrong = mask != expected.to(mask.device)
    if not bool(is_wrong.any()):
        return
    for row, column in is_wrong.nonzero().tolist():
        if paddings[row] is None:
            continue
        if expected[row, column]:
            why = (
                "was fed as a token, which a KVCache hides no more: take it out with drop, or feed it as padding. If "
                "generate took it for padding by its id, pass an attention_mask"
            )
        else:
            why = "was fed as padding and is not held. Feed a token where it is to be seen"
        raise UsageError(f"attention_mask[{row}, {column}] is {int(mask[row, column])}, but this column {why}")


MOST_CHECKPOINTS: Final = 8  # of one row


@dataclass(frozen=True, eq=False)
class StateCheckpoint:
    """Copies of the states of recurrent layers after a row's first `tokens`, by name in each layer.

    Nobody writes into them, so that copies of the row share them.
    """

    tokens: int
    states: tuple[dict[str, Tensor], ...]

    def __deepcopy__(self, memo: dict[int, object]) -> StateCheckpoint:
        return self


def thinned(checkpoints: Sequence[StateCheckpoint]) -> tuple[StateCheckpoint, ...]:
    """At most `MOST_CHECKPOINTS` of these, which are in the order of their text, the newest among them.

    The first to go is the one without which the fewest tokens lie between two others.
    """
    left = list(checkpoints)
    while len(left) > MOST_CHECKPOINTS:
        ends = [0, *(each.tokens for each in left)]
        del left[min(range(len(left) - 1), key=lambda at: ends[at + 2] - ends[at])]
    return tuple(left)


@dataclass(frozen=True, eq=False)
class RowState:
    """State of one row's text.

    `columns` counts the columns fed, padding included, and `since_edit` the tokens after its last edit, which are all
    that can be rolled back. `prompts` are the ranges [start, end) of positions that came in passes of several tokens,
    drafts aside. `ids` are the tokens fed, edits aside, None where any came without ids. `padding` has the ranges of
    columns that were no tokens. `pictures` are those of the text, dropped ones included: the text after them goes on at
    places that differ from its positions. The first `sinks` positions are never evicted (default: the number in the
    cache's options), nor are those in the ranges of `pins`. `checkpoints` are those of recurrent layers, in order.
    """

    tokens_seen: int = 0
    next_position: int = 0
    columns: int = 0
    since_edit: int = 0
    prompts: tuple[tuple[int, int], ...] = ()
    ids: Tokens | None = None
    padding: Padding = ()
    pictures: tuple[Picture, ...] = ()
    sinks: int | None = None
    pins: tuple[tuple[int, int], ...] = ()
    checkpoints: tuple[StateCheckpoint, ...] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> RowState:
        return self

    @property
    def tokens(self) -> list[int] | None:
        """The ids of the tokens fed. None: they are not known."""
        return None if self.ids is None else [*self.ids]

    def __eq__(self, other: object) -> bool:
        """Return True if both are in the same state."""
        return isinstance(other, RowState) and self._key == other._key

    @property
    def _key(self) -> tuple[object, ...]:
        counts = self.tokens_seen, self.next_position, self.columns, self.since_edit
        return *counts, self.prompts, self.ids, self.pictures, self.sinks, self.pins

    @property
    def offset(self) -> int:
        """The place of the next token of text, minus its position. It is 0 except after a picture."""
        return self.pictures[-1].offset if self.pictures else 0

    @property
    def next_place(self) -> int:
        """The place at which the next token of text is read."""
        return self.next_position + self.offset

    @property
    def prompt_end(self) -> int:
        """One past the last position that came in a step of several tokens."""
        return self.prompts[-1][1] if self.prompts else 0

    def fed(self, tokens: int, columns: int, prompt: int, is_token: Sequence[bool] | None = None) -> RowState:
        """The row after `tokens` more, in `columns` at once, the first `prompt` of a prompt. `told` adds their ids.

        `is_token` marks the columns with tokens, where some have one and others are padding.
        """
        start, prompts = self.next_position, self.prompts
        if prompt:
            is_continued = bool(prompts) and prompts[-1][1] == start
            first = prompts[-1][0] if is_continued else start
            prompts = (*(prompts[:-1] if is_continued else prompts), (first, start + prompt))
        return RowState(
            tokens_seen=self.tokens_seen + tokens,
            next_position=start + tokens,
            columns=self.columns + columns,
            since_edit=self.since_edit + tokens,
            prompts=prompts,
            ids=self.ids,
            padding=self.padding if tokens == columns else extended(self.padding, self.columns, columns, is_token),
            pictures=self.pictures,
            sinks=self.sinks,
            pins=self.pins,
            checkpoints=self.checkpoints,
        )

    def told(self, ids: Sequence[int] | None) -> RowState:
        """The row with the ids of the tokens that were fed last."""
        return replace(self, ids=None if ids is None or self.ids is None else self.ids + ids)

    def moved_to(self, end: int) -> RowState:
        """The row with its text ending at position `end`. Raises: UsageError for an end inside of a picture."""
        for start, stop, _ in self.pictures:
            if start < end < stop:
                raise UsageError(
                    f"the text would end at {end}, inside of the picture from {start} up to {stop}, where no model "
                    f"defines the next position. End it at {start} or {stop}"
                )
        prompts = tuple((start, min(stop, end)) for start, stop in self.prompts if start < end)
        pictures = tuple(picture for picture in self.pictures if picture.stop <= end)
        return replace(self, next_position=end, prompts=prompts, pictures=pictures)

    def rolled_back(self, tokens: int) -> RowState:
        """The row without its newest `tokens`."""
        left = self.columns - tokens
        is_known = self.padding is not None and all(end <= left for _, end in self.padding)
        return replace(
            self.moved_to(self.next_position - tokens),
            tokens_seen=self.tokens_seen - tokens,
            columns=left,
            since_edit=self.since_edit - tokens,
            ids=None if self.ids is None else self.ids[: max(len(self.ids) - tokens, 0)],
            padding=self.padding if is_known else None,
            checkpoints=tuple(each for each in self.checkpoints if each.tokens <= self.tokens_seen - tokens),
        )

    @property
    def is_marked(self) -> bool:
        """Return True if there is a checkpoint at its end, or none is needed."""
        return not self.tokens_seen or any(each.tokens == self.tokens_seen for each in self.checkpoints)

    def marked(self, states: tuple[dict[str, Tensor], ...]) -> RowState:
        """The row with one more checkpoint, of these states, at its end."""
        return replace(self, checkpoints=thinned((*self.checkpoints, StateCheckpoint(self.tokens_seen, states))))

    def filled(self, ids: Sequence[int], can_roll_back: bool) -> RowState:
        """The row once the gaps of its text are read, as if it had read these ids in their order.

        `can_roll_back`: whether they can be rolled back, which they cannot where a recall store has them in the order
        in which they came.
        """
        return replace(self, since_edit=len(ids) * can_roll_back, padding=(), ids=Tokens.of(ids))

    def joined(self, other: RowState, at: int) -> RowState:
        """The row with the text of `other` inserted at position `at`. Text from there on moves behind it.

        Its ids are inserted there, too, if this row's ids stand at their positions. Otherwise they are appended.
        """
        before, added = self.ids, other.ids
        place = at if self.tokens_seen == self.next_position else self.tokens_seen
        ids = None if before is None or added is None else before[:place] + added + before[place:]
        return replace(
            self.moved_to(self.next_position + other.next_position),
            tokens_seen=self.tokens_seen + other.tokens_seen,
            columns=self.columns + other.columns,
            since_edit=0,
            ids=ids,
            padding=None,
        )


@dataclass(frozen=True)
class RowTable:
    """All rows of a batch. A change gives another table, so that a cache changes in one assignment."""

    rows: tuple[RowState, ...]

    @classmethod
    def at_start(cls, batch: int) -> RowTable:
        """A table of rows that have read nothing."""
        return cls(tuple(RowState(ids=Tokens()) for _ in range(batch)))

    @classmethod
    def after_prompt(cls, batch: int, tokens: int) -> RowTable:
        """A table whose rows have read `tokens` tokens of unknown ids, in one step."""
        return cls((RowState(tokens, tokens, tokens, tokens, ((0, tokens),)),) * batch)

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

    def sinks(self, device: torch.device) -> RowSinks | None:
        """The number of first positions that each row never evicts. None: no row has a number of its own."""
        if all(row.sinks is None for row in self.rows):
            return None
        counts = tuple(DEFAULT_SINKS if row.sinks is None else row.sinks for row in self.rows)
        ranges = max(len(row.pins) for row in self.rows)
        pins = [[*row.pins, *[(0, 0)] * (ranges - len(row.pins))] for row in self.rows]
        return RowSinks(
            counts=counts,
            tensor=torch.tensor(counts, device=device),
            pins=torch.tensor(pins, device=device) if ranges else None,
        )

    @property
    def most_kept(self) -> int:
        """The most positions of any row that are never evicted, where rows have sinks of their own."""
        return max((row.sinks or 0) + sum(stop - start for start, stop in row.pins) for row in self.rows)

    @property
    def prompts(self) -> list[tuple[tuple[int, int], ...]]:
        """Per row, the ranges of positions that came in steps of several tokens."""
        return [row.prompts for row in self.rows]

    @property
    def columns_seen(self) -> int:
        """Columns fed so far, padding and evicted tokens included: all rows are fed side by side.

        Where rows were rolled back by different numbers, the least of them counts.
        """
        return min(row.columns for row in self.rows)

    @property
    def tokens(self) -> list[list[int]] | None:
        """Per row, the ids fed, edits aside. None: some tokens came without ids."""
        return None if self.ids is None else [[*each] for each in self.ids]

    @property
    def ids(self) -> list[Tokens] | None:
        """The same, without copies."""
        known = [row.ids for row in self.rows if row.ids is not None]
        return known if len(known) == len(self.rows) else None

    def columns(self, tokens: int, mask: TokenMask | None, device: torch.device) -> tuple[QueryPositions, list[int]]:
        """Positions of the next columns, EMPTY where `mask` has padding, and how many tokens each row gets."""
        starts = torch.tensor(self.next_positions, device=device)[:, None]
        if mask is None:
            return starts + torch.arange(tokens, device=device), [tokens] * len(starts)
        return (starts + mask.long().cumsum(-1) - 1).where(mask, EMPTY), mask.sum(-1).tolist()

    @property
    def has_pictures(self) -> bool:
        """Return True if any text has read a picture."""
        return any(row.pictures for row in self.rows)

    def places(self, positions: QueryPositions, axes: Tensor | None = None) -> Places | None:
        """The places at which the next tokens, at `positions`, are read. None: at their positions.

        `axes` (axes, batch, tokens) are the positions that a model gives them, if it does.

        Raises: UsageError where these do not go on from here.
        """
        if axes is None and not self.has_pictures:
            return None
        offsets = torch.tensor([row.offset for row in self.rows], device=positions.device)[:, None]
        is_token = positions >= 0
        if axes is not None and not bool(((axes == positions + offsets) | ~is_token).all()):
            return places_of_axes(positions, axes, [row.next_place for row in self.rows])
        if not self.has_pictures:
            return None
        end = max(row.next_place for row in self.rows) + positions.shape[1]
        return Places.of_text(positions, offsets, end)

    def step(
        self,
        positions: QueryPositions,
        lengths: Sequence[int],
        ids: TokenIds | None,
        how: Pass,
        places: Places | None = None,
    ) -> Step:
        """A step of `lengths` tokens per row from here, read at `places`."""
        ends = [row.next_position + n for row, n in zip(self.rows, lengths, strict=True)]
        device = positions.device
        step = Step(
            positions=positions,
            lengths=tuple(lengths),
            next_positions=torch.tensor(ends, device=device),
            prompt_ends=torch.tensor(self.prompt_ends, device=device),
            end=max(ends),
            ids=ids,
            is_second_pass=how.is_second_pass,
            defer_eviction=how.defer_eviction,
            drafts=max(min(how.drafts, positions.shape[1] - 1), 0),
            is_prompt=how.is_prompt or not any(self.tokens_seen),
            places=places,
            sinks=self.sinks(device),
            may_have_gaps=any(row.since_edit < row.tokens_seen for row in self.rows),
        )
        if not any(step.prompt_lengths):
            return step
        pairs = zip(self.rows, step.prompt_lengths, strict=True)
        prompt_ends = [row.next_position + n if n else row.prompt_end for row, n in pairs]
        return replace(step, prompt_ends=torch.tensor(prompt_ends, device=device))

    def standstill(self, device: torch.device) -> Step:
        """A step of no tokens, at the rows' current ends."""
        positions = torch.empty(len(self.rows), 0, dtype=torch.long, device=device)
        return self.step(positions, [0] * len(self.rows), None, Pass())

    def fed(
        self,
        lengths: Sequence[int],
        columns: int,
        prompts: Sequence[int],
        is_token: Sequence[Sequence[bool]] | None = None,
    ) -> RowTable:
        """The table after `lengths` more tokens per row, in `columns` at once. `told` adds their ids.

        The first `prompts` of them belong to a prompt. `is_token` marks the columns with tokens, and is needed where a
        row got some tokens and some padding.
        """
        before = self.columns_seen
        flags = [is_token[at] if is_token is not None and n else None for at, n in enumerate(lengths)]
        each = zip(self.rows, lengths, prompts, flags, strict=True)
        rows = [row.fed(n, columns, prompt, own) for row, n, prompt, own in each]
        # Rows at different columns number the coming columns differently.
        return RowTable(
            tuple(
                new if old.columns == before or new.padding == () else replace(new, padding=None)
                for old, new in zip(self.rows, rows, strict=True)
            )
        )

    def shown(self, pictures: Sequence[Sequence[Picture]]) -> RowTable:
        """The table with more pictures in each row."""
        pairs = zip(self.rows, pictures, strict=True)
        return RowTable(tuple(replace(row, pictures=(*row.pictures, *more)) for row, more in pairs))

    def told(self, ids: Sequence[Sequence[int]] | None) -> RowTable:
        """The table with the ids of the tokens that were fed last, or None where they are not known."""
        if ids is None:
            return RowTable(tuple(row.told(None) for row in self.rows))
        return RowTable(tuple(row.told(own) for row, own in zip(self.rows, ids, strict=True)))

    def moved_to(self, ends: Sequence[int], row: int | None) -> RowTable:
        """The table with the texts of one row, or of all, ending at `ends`.

        Raises: UsageError for a row with pins, which would then be of other tokens.
        """
        if any(each.pins for each in (self.rows if row is None else [self.rows[row]])):
            raise UsageError(
                "an edit would move tokens away from the positions that are pinned. Call set_sinks without pins first"
            )
        return self.changed(lambda index, one: one.moved_to(ends[index]), row)

    def edited(self, row: int | None) -> RowTable:
        """The table after an edit of one row, or of all. Earlier tokens can't be rolled back."""
        return self.changed(lambda _, one: replace(one, since_edit=0, padding=None, checkpoints=()), row)

    def rolled_back(self, counts: Sequence[int]) -> RowTable:
        """The table without the newest `counts` tokens of each row."""
        return self.changed(lambda index, one: one.rolled_back(counts[index]), None)

    def changed(self, change: Callable[[int, RowState], RowState], row: int | None) -> RowTable:
        """The table after a `change` of one row, or of all."""
        pairs = enumerate(self.rows)
        return RowTable(tuple(change(at, one) if row is None or at == row else one for at, one in pairs))

    def spliced(self, added: RowState, row: int, position: int) -> RowTable:
        """The table with the text of `added` at a `position` of one row. Its columns count in all rows."""
        return self.changed(
            lambda at, one: (
                one.joined(added, position)
                if at == row
                else replace(one, columns=one.columns + added.columns, padding=None)
            ),
            None,
        )

    def selected(self, rows: Sequence[int]) -> RowTable:
        """The rows at `rows`, which may repeat."""
        return RowTable(tuple(self.rows[row] for row in rows))


def check_positions(ours: QueryPositions, given: Tensor) -> None:
    """Compare the positions that a caller passed with those that follow. Padding, negative in `ours`, may differ.

    Raises: UsageError, naming the first that differs, or another shape.
    """
    if given.ndim != 2 or given.shape[1] != ours.shape[1] or given.shape[0] not in (1, ours.shape[0]):
        raise UsageError(
            f"position_ids are {tuple(given.shape)}, expected {tuple(ours.shape)} (batch, tokens): one for each new "
            "token. Leave position_ids out, for the cache knows them"
        )
    is_wrong = (ours >= 0) & (given != ours)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        found = int(given.expand_as(ours)[row, column])
        raise UsageError(
            f"position_ids[{row}, {column}] is {found}, but the cache continues row {row} at position "
            f"{int(ours[row, column])}. Leave position_ids out, or use rollback, drop or shift to move the text"
        )
