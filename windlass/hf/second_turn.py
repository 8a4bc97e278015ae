"""The second `generate` of transformers on one cache: is its text the one that the cache has read, and more?

`generate` slices off as many columns as the cache has read, whatever they are. Of another text it would feed the rest
to the cache, or nothing at all.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError
from windlass.hf.axes import tell_deltas
from windlass.hf.cache_argument import GENERATE, with_cache_as

WAY_OUT: Final = "pass the whole conversation, as it was read, and what is new, or call cache.reset() first"
UNKNOWN: Final = -1  # in place of the id of padding, or of a token that came without one


class CheckedGenerate:
    """`generate` of an attached model, which first compares its text with what the cache has read.

    It stands on the model in place of the model's own, until `remove`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._own = model, vars(model).get("generate")
        bound: Any = model.generate
        self._generate: Callable[..., Any] = bound
        vars(model)["generate"] = self.generate

    def remove(self) -> None:
        """Leave the model as it was found."""
        del vars(self._model)["generate"]
        if self._own is not None:
            vars(self._model)["generate"] = self._own

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, whose arguments these are. Raises: UsageError for a text that does not go on."""
        kwargs = with_cache_as(GENERATE, kwargs)
        cache, mask, embeds = (kwargs.get(name) for name in (GENERATE, "attention_mask", "inputs_embeds"))
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        columns: Any = ids if embeds is None else embeds
        # A mask of more columns than there are ids tells that only what is new was passed.
        is_whole = isinstance(columns, Tensor) and (mask is None or mask.shape[1:2] == columns.shape[1:2])
        if isinstance(cache, TextCache) and is_whole:
            check_continues(cache, columns.shape[1], None if columns is embeds else ids)
            if cache.columns_seen and not cache.batch_size % len(columns):
                tell_deltas(self._model, cache, len(columns))
        return self._generate(*args, **kwargs)


def check_continues(cache: TextCache, columns: int, ids: Tensor | None) -> None:
    """Raises: UsageError where a text of `columns`, with these `ids` (rows, columns), does not go on from the cache's.

    Rows, or columns, of which the cache does not know what they were are not compared.
    """
    seen = cache.columns_seen
    if not seen:
        return
    if columns <= seen:
        raise UsageError(
            f"generate was given a text of {columns} tokens, and this cache has read {seen} before; {WAY_OUT}"
        )
    if ids is None or cache.batch_size % len(ids):
        return
    read = torch.tensor([_columns_of(cache, row)[:seen] for row in range(cache.batch_size)])
    given = ids[:, :seen].cpu().repeat_interleave(cache.batch_size // len(ids), 0)  # as `generate` does for beams
    is_other = (read != UNKNOWN) & (read != given)
    if bool(is_other.any()):
        row, column = is_other.nonzero()[0].tolist()
        raise UsageError(
            f"generate was given another text than this cache has read: token {column} of row {row} is "
            f"{int(given[row, column])}, and was {int(read[row, column])}; {WAY_OUT}"
        )


def _columns_of(cache: TextCache, row: int) -> list[int]:
    """The id that a row was fed in each column; UNKNOWN where it was padding, and where it is not known."""
    its = cache.rows.rows[row]
    tokens = its.tokens
    padding = {column for start, end in its.padding or () for column in range(start, end)}
    if tokens is None or len(tokens) + len(padding) != its.columns:
        return [UNKNOWN] * its.columns
    ids = iter(tokens)
    return [UNKNOWN if column in padding else next(ids) for column in range(its.columns)]
