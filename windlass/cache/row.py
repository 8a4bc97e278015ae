"""Where the text of one batch row stands between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from windlass.cache.padding import Padding, extended
from windlass.core.errors import UsageError
from windlass.core.places import Picture


@dataclass(frozen=True, eq=False)
class Row:
    """Where the text of one row stands.

    `columns` counts what it was fed, padding included, and `since_edit` the tokens after its last edit, which
    are all that can be rolled back. `prompts` are the ranges [start, end) of positions that came in passes of
    several tokens, drafts aside. The first `known_ids` of `ids` are the tokens fed, edits aside; None where any came
    without ids. `padding` tells which of the columns were no tokens. `pictures` are those of the text, dropped ones
    included: the text after them goes on at places that differ from its positions. The first `sinks` positions are
    never evicted; None: as many as the cache's options say.
    """

    tokens_seen: int = 0
    next_position: int = 0
    columns: int = 0
    since_edit: int = 0
    prompts: tuple[tuple[int, int], ...] = ()
    ids: list[int] | None = None
    known_ids: int = 0
    padding: Padding = ()
    pictures: tuple[Picture, ...] = ()
    sinks: int | None = None

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
        return *counts, self.prompts, self.tokens, self.pictures, self.sinks

    @property
    def offset(self) -> int:
        """The place of the next token of text, minus its position; not 0 only after a picture."""
        return self.pictures[-1].offset if self.pictures else 0

    @property
    def next_place(self) -> int:
        """Where the next token of text is read."""
        return self.next_position + self.offset

    @property
    def prompt_end(self) -> int:
        """One past the last position that came in a step of several tokens."""
        return self.prompts[-1][1] if self.prompts else 0

    def fed(self, tokens: int, columns: int, prompt: int, is_token: Sequence[bool] | None = None) -> Row:
        """After `tokens` more, in `columns` at once, the first `prompt` a prompt's; their ids are told to `told`.

        `is_token` tells which columns they are, where some are and some are not.
        """
        start, prompts = self.next_position, self.prompts
        if prompt:
            is_continued = bool(prompts) and prompts[-1][1] == start
            first = prompts[-1][0] if is_continued else start
            prompts = (*(prompts[:-1] if is_continued else prompts), (first, start + prompt))
        return Row(
            self.tokens_seen + tokens,
            start + tokens,
            self.columns + columns,
            self.since_edit + tokens,
            prompts,
            self.ids,
            self.known_ids,
            self.padding if tokens == columns else extended(self.padding, self.columns, columns, is_token),
            self.pictures,
            self.sinks,
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
        """Going on at position `end`. Raises: UsageError for one inside of a picture."""
        for start, stop, _ in self.pictures:
            if start < end < stop:
                raise UsageError(
                    f"the text would end at {end}, inside of the picture from {start} up to {stop}, where no model "
                    f"says how it goes on; end it at {start} or {stop}"
                )
        prompts = tuple((start, min(stop, end)) for start, stop in self.prompts if start < end)
        pictures = tuple(picture for picture in self.pictures if picture.stop <= end)
        return replace(self, next_position=end, prompts=prompts, pictures=pictures)

    def rolled_back(self, tokens: int) -> Row:
        """Without its newest `tokens`."""
        left = self.columns - tokens
        is_known = self.padding is not None and all(end <= left for _, end in self.padding)
        return replace(
            self.moved_to(self.next_position - tokens),
            tokens_seen=self.tokens_seen - tokens,
            columns=left,
            since_edit=self.since_edit - tokens,
            known_ids=max(self.known_ids - tokens, 0),
            padding=self.padding if is_known else None,
        )

    def copied(self) -> Row:
        """The same with a list of ids of its own."""
        return replace(self, ids=self.tokens)

    def joined(self, other: Row, at: int) -> Row:
        """With the text of `other` at position `at`, and what stood there and behind it moved to behind that.

        Its ids get there, too, if those of this row stand at their positions; else behind them.
        """
        before, added = self.tokens, other.tokens
        place = at if self.tokens_seen == self.next_position else self.tokens_seen
        ids = None if before is None or added is None else [*before[:place], *added, *before[place:]]
        return replace(
            self.moved_to(self.next_position + other.next_position),
            tokens_seen=self.tokens_seen + other.tokens_seen,
            columns=self.columns + other.columns,
            since_edit=0,
            ids=ids,
            known_ids=0 if ids is None else len(ids),
            padding=None,
        )
