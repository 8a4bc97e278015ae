"""What the command line chose by itself, told in one line when it begins to matter."""

from collections.abc import Collection

import torch

from windlass.cache.describe import beyond_note, reading_now
from windlass.cli.terminal import note
from windlass.core.spec import AUTO
from windlass.hf.kv_cache import KVCache

HALF = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Choices:
    """Tells once, when a text has outgrown its budget or its model's trained length, how it is kept and read.

    `given` are the options that the user named: what these say is not told again.
    """

    def __init__(self, cache: KVCache, given: Collection[str]) -> None:
        self._cache, self._given, self._is_told = cache, given, False

    def tell(self) -> None:
        """To be called whenever tokens were read or written."""
        line = None if self._is_told else chosen(self._cache, self._given)
        if line is not None:
            self._is_told = True
            note(f"windlass: note: {line}")


def chosen(cache: KVCache, given: Collection[str]) -> str | None:
    """What was chosen for a text that is longer than the budget or the trained length; None while nothing was."""
    tokens, end, trained = max(cache.tokens_seen), max(cache.next_positions), cache.trained_length
    parts = []
    if cache.budget is not None and tokens > cache.budget and "policy" not in given:
        again = (
            f", and of the others {cache.options.recall:,} are read again in each step" if cache.options.recall else ""
        )
        parts.append(f"{cache.budget:,} of them are kept, chosen by {cache.policy!r} (--policy){again}")
    if trained is not None and end > trained and str(cache.positions) == AUTO:
        parts.append(f"read as {reading_now(cache)} (--positions), because this model was trained on {trained:,}")
    if parts:
        return f"{tokens:,} tokens: " + "; ".join(parts)
    return beyond_note(cache)


def dtype_note(asked: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """That a CPU computes in half precision because the weights are stored so; None where it was asked for, or not."""
    if asked != AUTO or device.type != "cpu" or dtype not in HALF:
        return None
    return f"computed in {HALF[dtype]}, as the weights are stored; --dtype float32 is more exact"
