"""Which columns of a row were padding when they were fed: a later attention mask must say the same of them."""

from collections.abc import Sequence

import torch

from windlass.core.errors import UsageError
from windlass.core.shapes import TokenMask

Padding = tuple[tuple[int, int], ...] | None
"""Ranges [start, end) of columns; None where an edit or a file left it unknown."""


def extended(padding: Padding, start: int, columns: int, is_token: Sequence[bool] | None) -> Padding:
    """`padding` and that of the next `columns`, from `start`; without `is_token` all of them are padding."""
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
    """Compare a (batch, columns) mask of columns that were fed before with what they were fed as.

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
                "was fed as a token, which a KVCache hides no more: take it out with drop, or feed it as padding; if "
                "generate took it for padding by its id, pass an attention_mask"
            )
        else:
            why = "was fed as padding and is not held; feed a token where it is to be seen"
        raise UsageError(f"attention_mask[{row}, {column}] is {int(mask[row, column])}, but this column {why}")
