"""What one row of a cache holds at a moment, copied out of it between two steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NamedTuple, TypedDict

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
SIZES_COST: Final = 0.001  # the share of time that measuring what a cache takes may take
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


class RecalledPlane(NamedTuple):
    """How many tokens the newest step may have read again in each of some kv `heads` of a layer."""

    layer: int
    heads: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One row of a cache between two steps.

    `positions` are those of all planes' slots one after another, EMPTY in a free slot; `numbers` what a policy or a
    merge keeps of the same slots, NaN where a layer keeps none. `recalled` are the positions that the newest step read
    beside its slots, head after head of `recalled_planes`, EMPTY for none. `tokens` are the ids of the text from
    `text_from` on. `is_edited`: positions are no longer the places of `tokens`. `bytes_held` is of all `rows` of the
    cache.
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
    seconds: float
    recalled_planes: tuple[RecalledPlane, ...] = ()
    recalled: Positions = field(default_factory=NOTHING.copy)


class Camera:
    """Takes snapshots of one row of a cache, of which others may be told the `number`.

    What the cache takes is measured when its slots are others than before, and now and then: that asks each tensor.
    """

    def __init__(self, cache: CacheState, row: int = 0, number: int = 0) -> None:
        self._cache, self._row, self._number = cache, row, number
        self._slots: list[int] = []
        self._planes: tuple[Plane, ...] = ()
        self._measure_at = 0.0
        self._bytes_held, self._formula = 0, ("", 0)

    def snapshot(self, text_from: int = 0) -> Snapshot:
        """A copy of what the row holds, to be taken between two passes.

        The ids of its text are told from shortly before `text_from` on.
        """
        cache, now = self._cache, monotonic()
        layers = [layer for layer in cache.layers if not layer.is_empty]
        slots = [number for layer in layers for number in layer.positions.shape]
        if slots != self._slots or now >= self._measure_at:
            self._slots = slots
            self._planes = tuple(plane for layer in layers for plane in planes_of(layer))
            self._bytes_held, self._formula = sum(bytes_by_part(cache).values()), formula(layers)
            self._measure_at = now + (monotonic() - now) / SIZES_COST
        text = cache.rows.rows[self._row]
        start = max(0, min(text_from, text.known_ids) - OVERLAP)
        positions = _joined([layer.positions[self._row] for layer in layers], torch.int32)
        return Snapshot(
            number=self._number,
            planes=self._planes,
            positions=np.maximum(positions, EMPTY) if layers else NOTHING,
            numbers=self._numbers(layers),
            text_from=start,
            tokens=[] if text.ids is None else text.ids[start : text.known_ids],
            seen=text.tokens_seen,
            next_position=text.next_position,
            mode=reading_now(cache),
            is_edited=text.next_position != text.tokens_seen or text.ids is None,
            bytes_held=self._bytes_held,
            rows=cache.batch_size,
            formula=self._formula,
            seconds=now,
            **self._recalled(layers),
        )

    def _recalled(self, layers: Sequence[SlotLayer]) -> "_Recalled":
        planes, found = [], []
        for layer in layers:
            if layer.table.recall is not None:
                own = layer.table.recall.last_recalled[self._row]
                planes.append(RecalledPlane(layer.index, heads_of(layer), own.shape[1]))
                found.append(own)
        return {"recalled_planes": tuple(planes), "recalled": _joined(found, torch.int32)}

    def _numbers(self, layers: Sequence[SlotLayer]) -> dict[str, Numbers]:
        names = dict.fromkeys(name for layer in layers for name in layer.table.state if name not in HIDDEN)
        found = {}
        for name in names:
            parts = [
                layer.table.state[name][self._row]
                if name in layer.table.state
                else torch.full(layer.positions.shape[1:], torch.nan, device=layer.positions.device)
                for layer in layers
            ]
            found[name] = _joined(parts, torch.float32)
        return found


def planes_of(layer: SlotLayer) -> list[Plane]:
    """The planes of a layer that has been written, in the order of its positions."""
    heads = heads_of(layer)
    groups = [heads] if layer.table.score_heads == 1 else [(head,) for head in heads]
    return [Plane(layer.index, own, layer.table.slots, layer.sliding_window or 0) for own in groups]


def heads_of(layer: SlotLayer) -> tuple[int, ...]:
    """The kv heads of a layer that has been written."""
    return layer.heads or tuple(range(layer.store.layout[0]))


class _Recalled(TypedDict):
    recalled_planes: tuple[RecalledPlane, ...]
    recalled: Positions


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """One copy out of the device, for all layers."""
    if not parts:
        return NOTHING
    return torch.cat([part.flatten().to(parts[0].device) for part in parts]).to("cpu", dtype).numpy()


def formula(layers: Sequence[SlotLayer]) -> tuple[str, int]:
    """What the layers take, as people read it, and in bytes: nothing but sizes that do not change with the text.

    What is kept so that steps can be rolled back stands beside it in `bytes_held`.
    """
    counts: dict[tuple[int, int, int], int] = {}
    beside = 0
    for layer in layers:
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
