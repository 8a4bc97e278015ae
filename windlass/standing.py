"""Where the texts of a cache stand between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.shapes import QueryPositions
from windlass.step import Step


@dataclass
class Standing:
    """One number per row, and how many columns were fed.

    `prompt_ends` is one past the last position that came in a step of several tokens. `tokens` are
    the ids fed, edits aside; None once any came without ids.
    """

    tokens_seen: list[int]
    next_positions: list[int]
    prompt_ends: list[int]
    columns_seen: int
    tokens: list[list[int]] | None

    @classmethod
    def at_start(cls, batch: int) -> "Standing":
        """Nothing read yet."""
        return cls([0] * batch, [0] * batch, [0] * batch, 0, [[] for _ in range(batch)])

    def step(self, positions: QueryPositions, lengths: Sequence[int]) -> Step:
        """A step of `lengths` tokens per row from here."""
        ends = [at + n for at, n in zip(self.next_positions, lengths, strict=True)]
        prompt_ends = list(self.prompt_ends)
        if positions.shape[1] > 1:
            prompt_ends = [new if n else old for new, old, n in zip(ends, prompt_ends, lengths, strict=True)]
        device = positions.device
        next_positions, prompts = torch.tensor(ends, device=device), torch.tensor(prompt_ends, device=device)
        return Step(positions, tuple(lengths), next_positions, prompts, max(ends))

    def advance(self, step: Step, ids: Tensor | None) -> None:
        """The step has completed; `ids` are its (batch, tokens) ids, if it had any."""
        self.columns_seen += step.positions.shape[1]
        for row, n in enumerate(step.lengths):
            self.tokens_seen[row] += n
            self.next_positions[row] += n
            if step.positions.shape[1] > 1 and n:
                self.prompt_ends[row] = self.next_positions[row]
        if ids is None or self.tokens is None:
            self.tokens = None
            return
        for text, row_ids, is_real in zip(self.tokens, ids.tolist(), (step.positions >= 0).tolist(), strict=True):
            text += [token for token, is_token in zip(row_ids, is_real, strict=True) if is_token]

    def move_to(self, ends: Sequence[int], row: int | None = None) -> None:
        """Let the text of one row, or of all, go on at `ends`."""
        for index in range(len(ends)) if row is None else (row,):
            self.next_positions[index] = ends[index]
            self.prompt_ends[index] = min(self.prompt_ends[index], ends[index])

    def forget(self, counts: Sequence[int]) -> None:
        """Take the newest `counts` tokens of each row out of the record."""
        self.columns_seen -= max(counts)
        self.tokens_seen = [seen - n for seen, n in zip(self.tokens_seen, counts, strict=True)]
        if self.tokens is not None:
            self.tokens = [ids[: len(ids) - n] for ids, n in zip(self.tokens, counts, strict=True)]

    def copy_row(self, source: int, target: int) -> None:
        """Let row `target` stand where row `source` does."""
        for counts in (self.tokens_seen, self.next_positions, self.prompt_ends):
            counts[target] = counts[source]
        if self.tokens is not None:
            self.tokens[target] = list(self.tokens[source])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep the rows at `rows`, which may repeat."""
        for counts in (self.tokens_seen, self.next_positions, self.prompt_ends):
            counts[:] = [counts[row] for row in rows]
        if self.tokens is not None:
            self.tokens = [list(self.tokens[row]) for row in rows]

    def splice(self, other: "Standing", source: int, row: int) -> None:
        """Append row `source` of another cache to row `row`."""
        self.move_to([at + other.next_positions[source] for at in self.next_positions], row)
        self.tokens_seen[row] += other.tokens_seen[source]
        if self.tokens is None or other.tokens is None:
            self.tokens = None
        else:
            self.tokens[row] = self.tokens[row] + other.tokens[source]
