"""Attention masks as rules. A cache decides by positions which keys are visible, so no matrix is made."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from windlass.core.errors import UsageError

QUERIES: Final = 256  # rows of a matrix made at once


@dataclass(frozen=True, eq=False)
class Mask:
    """Rule that our mask function hands to our attention function, in place of a matrix.

    It is the mask of a pass of `rows`, with the new columns in `columns`. `is_causal`: no query sees later keys.
    Otherwise `window` may be None where there is one.
    """

    ndim: ClassVar[int] = 4  # some wrappers tell a mask from padding by this

    window: int | None
    is_seen: Callable[..., Tensor]  # of (batch, head, query, key) indices
    is_causal: bool
    rows: int
    columns: range
    device: torch.device
    _whole: "Mask | None" = None

    def __getitem__(self, index: tuple[slice | int, ...]) -> "Mask":
        """The mask of the pass's last columns alone, where a layer needs only these queries, or of any head.

        Raises: UsageError for any other part, which a model would take of a matrix.
        """
        batch, head, queries, keys = (index + (slice(None),) * 4)[:4]
        part = replace(self, columns=self.columns[queries], _whole=self.whole) if isinstance(queries, slice) else None
        is_whole = batch == slice(None) and head in (slice(None), 0) and keys == slice(None)
        if part is None or not is_whole or part.columns.stop != self.columns.stop:
            raise UsageError(f"this model takes a part of its attention mask, {index}, and a KVCache makes no matrix")
        return part

    @property
    def whole(self) -> "Mask":
        """The mask of all columns of the pass."""
        return self if self._whole is None else self._whole

    def is_sliding_window(self) -> bool:
        """Return True if a query sees the newest `window` keys (None: all) up to its own, and no others.

        Of a mask that is not causal, whether it is in this pass.
        """
        if not self.is_causal:
            last = self.last_seen(self.window)
            return last is not None and torch.equal(
                last, torch.arange(len(self.columns), device=last.device).expand_as(last)
            )
        query = 1000 if self.window is None else 2 * self.window
        oldest = 0 if self.window is None else query - self.window + 1
        keys = torch.tensor([max(oldest - 1, 0), oldest, query - 1, query, query + 1])
        zero = torch.tensor(0)
        return torch.equal(self.is_seen(zero, zero, torch.tensor(query), keys), (keys >= oldest) & (keys <= query))

    def is_chunked(self) -> bool:
        """Return True if a query sees the keys up to its own of the same chunk of `window` columns, and no others."""
        if not self.is_causal or self.window is None:
            return False
        zero, keys = torch.tensor(0), torch.arange(3 * self.window)
        return all(
            torch.equal(
                self.is_seen(zero, zero, torch.tensor(query), keys),
                (keys <= query) & (keys // self.window == query // self.window),
            )
            for query in (2 * self.window - 1, 2 * self.window, 2 * self.window + self.window // 2)
        )

    def last_seen(self, window: int | None) -> Tensor | None:
        """Per row and new column, the last of the new columns that it sees, as its number among them.

        None if that and `window`, counted back from the column itself (None: unlimited), do not decide which columns it
        sees.
        """
        found, keys = [], torch.arange(self.columns.stop, device=self.device)
        for start in range(self.columns.start, self.columns.stop, QUERIES):
            queries = range(start, min(start + QUERIES, self.columns.stop))
            seen = self.matrix(queries)
            last = len(keys) - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
            oldest = 0 if window is None else keys[queries.start : queries.stop, None] - window + 1
            if not torch.equal(seen, (keys <= last[..., None]) & (keys >= oldest)):
                return None
            found.append(last - self.columns.start)
        return torch.cat(found, 1)

    def sees(self, query: int, key: int) -> Tensor:
        """Per row, True if the column `query` sees the column `key`. Padding counts as a token."""
        rows, zero, query_, key_ = (
            torch.tensor(each, device=self.device) for each in (range(self.rows), 0, query, key)
        )
        return self.is_seen(rows, zero, query_, key_).expand(self.rows)

    def matrix(self, queries: range) -> Tensor:
        """Visible columns as a matrix (rows, queries, columns up to the pass's last). Padding counts as a token."""
        rows, its, keys = (
            torch.arange(each.start, each.stop, device=self.device)
            for each in (range(self.rows), queries, range(self.columns.stop))
        )
        seen = self.is_seen(rows[:, None, None], torch.zeros_like(rows[:1]), its[:, None], keys)
        return seen.expand(self.rows, len(queries), len(keys))


def mask(
    *,
    batch_size: int,
    q_length: int,
    q_offset: int,
    mask_function: Callable[..., Tensor],
    allow_is_causal_skip: bool,
    device: torch.device,
    attention_mask: object = None,
    local_size: int | None = None,
    **kwargs: object,  # noqa: ARG001  # arguments for a dense mask
) -> Mask:
    """The mask function registered with transformers: visibility is decided by position, by the cache."""
    if isinstance(attention_mask, Mask):  # made outside of the decoder, which hands it on
        return attention_mask
    columns = range(q_offset, q_offset + q_length)
    causal: Callable[..., object] = causal_mask_function
    is_causal = allow_is_causal_skip or mask_function is causal
    return Mask(local_size, mask_function, is_causal, batch_size, columns, device)
