"""What one row of a cache holds at a moment, copied out of it between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.cache.describe import bytes_by_part, reading_now
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.state import CacheState
from windlass.core.places import PLACES
from windlass.core.rotary_index import EMPTY

HIDDEN: Final = frozenset({TOKEN_INDEX, *PLACES})  # state that is not a policy's, nor of a merge
NOTHING: Final = np.empty(0, np.int32)
OVERLAP: Final = 256  # ids that are told again: a text that was rolled back may have others now

Positions = NDArray[np.int32]
Numbers = NDArray[np.float32]


class Plane(NamedTuple):
    """Slots that some kv `heads` of a layer have in common: alike in all of them, or of one head.

    `sliding_window` is the model's own there, 0 for none.
    """

    layer: int
    heads: tuple[int, ...]
    slots: int
    sliding_window: int = 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One row of a cache between two steps.

    `positions` are those of all planes' slots one after another, EMPTY in a free slot; `numbers` what a policy or a
    merge keeps of the same slots, NaN where a layer keeps none. `tokens` are the ids of the text from `text_from` on.
    `is_edited`: positions are no longer the places of `tokens`. `bytes_held` is of all `rows` of the cache.
    """

    number: int
    planes: tuple[Plane, ...]
    positions: Positions
    numbers: dict[str, Numbers]
    text_from: int
    tokens: list[int]
    seen: int
    next_position: int
    mode: str
    is_edited: bool
    bytes_held: int
    rows: int
    formula: tuple[str, int]
    seconds: float = field(default_factory=monotonic)


def planes_of(cache: CacheState, row: int) -> list[tuple[Plane, Tensor, dict[str, Tensor]]]:
    """The planes of all layers that have been written, from the bottom up, with their positions and state."""
    found = []
    for layer in cache.layers:
        if layer.is_empty:
            continue
        table = layer.table
        heads = layer.heads or tuple(range(_kv_heads(layer)))
        window = layer.sliding_window or 0
        groups = [heads] if table.score_heads == 1 else [(head,) for head in heads]
        for at, own in enumerate(groups):
            state = {name: tensor[row, at] for name, tensor in table.state.items() if name not in HIDDEN}
            found.append((Plane(layer.index, own, table.slots, window), table.positions[row, at], state))
    return found


def _kv_heads(layer: SlotLayer) -> int:
    return layer.store.layout[0]


def snapshot(cache: CacheState, row: int = 0, number: int = 0, text_from: int = 0) -> Snapshot:
    """A copy of what a row of the cache holds, to be taken between two passes.

    The ids of its text are told from shortly before `text_from` on. What each step recalls is not told: the compiled
    step does not say which tokens that were.
    """
    planes, text = planes_of(cache, row), cache.rows.rows[row]
    names = dict.fromkeys(name for _, _, state in planes for name in state)
    none = torch.full((max((plane.slots for plane, _, _ in planes), default=0),), torch.nan)
    numbers = {
        name: _joined([state.get(name, none[: plane.slots]) for plane, _, state in planes], torch.float32)
        for name in names
    }
    start = max(0, min(text_from, text.known_ids) - OVERLAP)
    return Snapshot(
        number=number,
        planes=tuple(plane for plane, _, _ in planes),
        positions=np.maximum(_joined([own for _, own, _ in planes], torch.int32), EMPTY) if planes else NOTHING,
        numbers=numbers,
        text_from=start,
        tokens=[] if text.ids is None else text.ids[start : text.known_ids],
        seen=text.tokens_seen,
        next_position=text.next_position,
        mode=reading_now(cache),
        is_edited=text.next_position != text.tokens_seen or text.ids is None,
        bytes_held=sum(bytes_by_part(cache).values()),
        rows=cache.batch_size,
        formula=formula(cache.layers),
    )


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """One copy out of the device, for all planes."""
    return torch.cat([part.to(parts[0].device) for part in parts]).to("cpu", dtype).numpy()


def formula(layers: Sequence[SlotLayer]) -> tuple[str, int]:
    """What the layers take, as people read it, and in bytes: nothing but sizes that do not change with the text.

    What is kept so that steps can be rolled back stands beside it in `bytes_held`.
    """
    counts: dict[tuple[int, int, int], int] = {}
    beside = 0
    for layer in layers:
        if layer.is_empty:
            continue
        batch, _, slots = layer.positions.shape
        tensors = list(layer.tensors().values())
        own = sum(_allocated(each) for each in tensors if each.ndim > 2 and each.shape[2] == slots)
        key = batch, slots, own // (batch * slots)
        counts[key] = counts.get(key, 0) + 1
        beside += sum(map(_allocated, tensors)) - key[2] * batch * slots
    parts = [
        f"{count} layer{'s' * (count > 1)} x {batch} row{'s' * (batch > 1)} x {slots:,} slots x {each:,} bytes"
        for (batch, slots, each), count in counts.items()
    ]
    parts += [f"{beside:,} bytes beside them"] if beside else []
    return " + ".join(parts) or "nothing yet", beside + sum(
        count * batch * slots * each for (batch, slots, each), count in counts.items()
    )


def _allocated(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def about(cache: CacheState, number: int = 0) -> dict[str, Any]:
    """What a page has to know of a cache, for the header of its frames."""
    return {
        "number": number,
        "model": cache.model_name,
        "layers": len(cache.by_layer),
        "trained_length": cache.trained_length,
        **cache.options.labels(),
    }
