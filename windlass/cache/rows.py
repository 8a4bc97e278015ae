"""Where the texts of a cache stand between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import QueryPositions, TokenIds, TokenMask
from windlass.core.step import Step


@dataclass
class Standing:
    """One number per row, and how many columns were fed.

    `since_edit` counts the tokens after the last edit, which are all that can be taken back.
    `prompts` are the ranges [start, end] of positions that came in steps of several tokens. `tokens`
    are the ids fed, edits aside; None once any came without ids.
    """

    tokens_seen: list[int]
    next_positions: list[int]
    prompts: list[list[list[int]]]
    columns_seen: int
    tokens: list[list[int]] | None
    since_edit: list[int]

    @classmethod
    def at_start(cls, batch: int) -> "Standing":
        """Nothing read yet."""
        return cls([0] * batch, [0] * batch, [[] for _ in range(batch)], 0, [[] for _ in range(batch)], [0] * batch)

    @property
    def prompt_ends(self) -> list[int]:
        """Per row, one past the last position that came in a step of several tokens."""
        return [spans[-1][1] if spans else 0 for spans in self.prompts]

    def columns(self, tokens: int, mask: TokenMask | None, device: torch.device) -> tuple[QueryPositions, list[int]]:
        """Positions of the next columns, EMPTY where `mask` has padding, and how many tokens each row gets."""
        starts = torch.tensor(self.next_positions, device=device)[:, None]
        if mask is None:
            return starts + torch.arange(tokens, device=device), [tokens] * len(starts)
        return (starts + mask.long().cumsum(-1) - 1).where(mask, EMPTY), mask.sum(-1).tolist()

    def step(
        self,
        positions: QueryPositions,
        lengths: Sequence[int],
        ids: TokenIds | None = None,
        is_reread: bool = False,
    ) -> Step:
        """A step of `lengths` tokens per row from here."""
        ends = [at + n for at, n in zip(self.next_positions, lengths, strict=True)]
        prompt_ends = self.prompt_ends
        if positions.shape[1] > 1:
            prompt_ends = [new if n else old for new, old, n in zip(ends, prompt_ends, lengths, strict=True)]
        device = positions.device
        next_positions, prompts = torch.tensor(ends, device=device), torch.tensor(prompt_ends, device=device)
        return Step(positions, tuple(lengths), next_positions, prompts, max(ends), ids, is_reread)

    def advance(self, step: Step) -> None:
        """The step has completed."""
        self.count(step.lengths, step.positions.shape[1])
        if step.ids is None:
            self.tokens = None
        elif self.tokens is not None:
            rows = zip(step.ids.tolist(), (step.positions >= 0).tolist(), strict=True)
            self.remember([[token for token, is_token in zip(*row, strict=True) if is_token] for row in rows])

    def count(self, lengths: Sequence[int], columns: int) -> None:
        """As many tokens per row have come, in `columns` at once; their ids are told to `remember`."""
        self.columns_seen += columns
        for row, n in enumerate(lengths):
            self.tokens_seen[row] += n
            self.since_edit[row] += n
            self.next_positions[row] += n
            if columns > 1 and n:
                spans, end = self.prompts[row], self.next_positions[row]
                start = spans.pop()[0] if spans and spans[-1][1] == end - n else end - n
                spans.append([start, end])

    def remember(self, ids: Sequence[Sequence[int]]) -> None:
        """Each row was fed these."""
        if self.tokens is not None:
            for text, row in zip(self.tokens, ids, strict=True):
                text += row

    def move_to(self, ends: Sequence[int], row: int | None = None) -> None:
        """Let the text of one row, or of all, go on at `ends`."""
        for index in range(len(ends)) if row is None else (row,):
            self.next_positions[index] = ends[index]
            end = ends[index]
            self.prompts[index] = [[start, min(stop, end)] for start, stop in self.prompts[index] if start < end]

    def edited(self, row: int | None = None) -> None:
        """One row, or all, was edited: what came before can't be taken back."""
        for index in range(len(self.since_edit)) if row is None else (row,):
            self.since_edit[index] = 0

    def forget(self, counts: Sequence[int]) -> None:
        """Take the newest `counts` tokens of each row out of the record."""
        self.columns_seen -= max(counts)
        self.tokens_seen = [seen - n for seen, n in zip(self.tokens_seen, counts, strict=True)]
        self.since_edit = [seen - n for seen, n in zip(self.since_edit, counts, strict=True)]
        if self.tokens is not None:
            self.tokens = [ids[: len(ids) - n] for ids, n in zip(self.tokens, counts, strict=True)]

    def copy_row(self, source: int, target: int) -> None:
        """Let row `target` stand where row `source` does."""
        for counts in (self.tokens_seen, self.next_positions, self.since_edit):
            counts[target] = counts[source]
        self.prompts[target] = [list(span) for span in self.prompts[source]]
        if self.tokens is not None:
            self.tokens[target] = list(self.tokens[source])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows at `rows`, which may repeat."""
        for counts in (self.tokens_seen, self.next_positions, self.since_edit):
            counts[:] = [counts[row] for row in rows]
        self.prompts = [[list(span) for span in self.prompts[row]] for row in rows]
        if self.tokens is not None:
            self.tokens = [list(self.tokens[row]) for row in rows]

    def splice(self, other: "Standing", source: int, row: int) -> None:
        """Append row `source` of another cache to row `row`."""
        self.move_to([at + other.next_positions[source] for at in self.next_positions], row)
        self.tokens_seen[row] += other.tokens_seen[source]
        self.columns_seen += other.columns_seen
        self.edited(row)
        if self.tokens is None or other.tokens is None:
            self.tokens = None
        else:
            self.tokens[row] = self.tokens[row] + other.tokens[source]


def check_positions(ours: QueryPositions, theirs: Tensor) -> None:
    """Compare the positions that a caller passed with those that follow; padding, negative in `ours`, may differ.

    Raises: UsageError, naming the first that differs.
    """
    is_wrong = (ours >= 0) & (theirs != ours)
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        given = int(theirs.expand_as(ours)[row, column])
        raise UsageError(
            f"position_ids[{row}, {column}] is {given}, but the cache continues row {row} at position "
            f"{int(ours[row, column])}; leave position_ids out, or use rollback, drop or shift to move the text"
        )
