"""Blocks of a text that attend in both directions: pictures.

A model says which columns belong to one by token types, and makes a mask of them. A cache needs no matrix: it is told
the last position that each token sees.
"""

from typing import Any, Final

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import QueryPositions
from windlass.hf.mask import Mask
from windlass.hf.running_pass import RunningPass, TokenTypes

NAMES: Final = ("token_type_ids", "mm_token_type_ids")  # of an argument of models


def token_types(arguments: dict[str, Any]) -> TokenTypes | None:
    """The token types among the arguments of a pass."""
    for name in NAMES:
        if isinstance(arguments.get(name), Tensor):
            return TokenTypes(name, arguments[name].shape[1])
    return None


def sees_to(running: RunningPass, mask: Mask, window: int | None) -> QueryPositions | None:
    """The last position that each token of a pass sees; None where that is its own. `window` is the layer's.

    Raises: UsageError for a picture that a pass cuts in two, and for a mask of another kind.
    """
    if mask.is_causal:
        return None
    if mask not in running.sees_to:
        running.sees_to[mask] = _sees_to(running, mask, window)
    return running.sees_to[mask]


def _sees_to(running: RunningPass, mask: Mask, window: int | None) -> QueryPositions | None:
    step, types = running.cache.text.pending, running.types
    assert step is not None, "a mask outside of a pass"
    if types is not None:
        _check_whole(types, mask)
    elif len(mask.columns) == 1:  # attach has seen that texts without pictures are causal
        return None
    last = mask.last_seen(window)
    if last is not None and torch.equal(last, torch.arange(len(mask.columns), device=last.device).expand_as(last)):
        return None
    if types is None:
        raise UsageError(f"this model asks for a mask that is not causal, and brings none of {', '.join(NAMES)}")
    if last is None:
        raise UsageError(
            f"{types.name} make this model ask for a mask that is not one of pictures, each of which sees itself, "
            "inside of the sliding window; a KVCache can't read such a text"
        )
    positions = step.positions
    return positions.maximum(positions.gather(1, last)).where(positions >= 0, EMPTY)


def _check_whole(types: TokenTypes, mask: Mask) -> None:
    """Raises: UsageError where token types don't tell of all columns, or where the pass begins or ends in a picture."""
    start, stop = mask.columns.start, mask.columns.stop
    if start and types.columns < stop:
        raise UsageError(
            f"{types.name} covers {types.columns} columns; expected {stop}, the {start} seen and {stop - start} new: "
            "models look them up by the column of the text"
        )
    for cut in [at for at in (start, stop) if 0 < at < types.columns]:
        if bool(mask.sees(cut - 1, cut).any()):
            raise UsageError(
                f"a pass ends at column {cut}, inside of a picture, whose tokens see each other in both directions; "
                "end the pass before or after the picture: feed it in one piece, with a prefill_chunk_size that fits it"
            )
