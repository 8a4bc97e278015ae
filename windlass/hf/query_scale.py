"""Queries that a model scales by the columns that its cache has seen: a token's position is another number.

After left padding of some rows, or edits, a row's tokens do not stand where their columns are. Where a model takes
`position_ids`, it gets them; where a layer asks its cache for a length instead, its scale is divided out here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from windlass.core.errors import UnsupportedModel
from windlass.hf.probe import Probe

MANY: Final = 2**20 - 1  # columns: more than any step of a scale is long


@dataclass(frozen=True)
class QueryScale:
    """A factor that grows with the logarithm of the position, in steps of `floor_scale` tokens, as Llama 4 has it."""

    floor_scale: float
    attn_scale: float

    def at(self, positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1) / self.floor_scale)) * self.attn_scale + 1

    def moved(self, queries: Tensor, columns_seen: int, positions: Tensor) -> Tensor:
        """Queries that were scaled by columns, after so many others, as they are at (batch, tokens) `positions`."""
        columns = torch.arange(queries.shape[2], device=queries.device) + columns_seen
        factor = self.at(positions.clamp(min=0)) / self.at(columns)  # 1, to the bit, where they are the same
        return (queries.float() * factor[:, None, :, None]).to(queries.dtype)


def query_scales(probe: Probe, after: Callable[[int], Probe], tolerance: float) -> dict[int, QueryScale]:
    """How layers scale queries by the length that their cache tells, found by `after` many columns.

    Raises: UnsupportedModel for a layer in which more depends on that length than a scale that is known.
    """
    asking = sorted(probe.asked_lengths & probe.queries.keys())
    if not asking:
        return {}
    later = after(MANY)
    scales = {layer: _scale_of(probe.modules[layer]) for layer in asking}
    for layer, scale in scales.items():
        factor = 1.0 if scale is None else float(scale.at(torch.tensor(MANY)) / scale.at(torch.tensor(0)))
        expected = probe.queries[layer] * factor, probe.keys[layer]
        if not all(map(_alike, (later.queries[layer], later.keys[layer]), expected, (tolerance, tolerance))):
            raise UnsupportedModel(
                f"asks in layer {layer} how many columns its cache has seen, and makes of it more than a known scale"
            )
    return {layer: scale for layer, scale in scales.items() if scale is not None}


def _scale_of(module: nn.Module) -> QueryScale | None:
    """The scale of an attention module that has the numbers of one, and uses it."""
    floor_scale, attn_scale = (getattr(module, name, None) for name in ("floor_scale", "attn_scale"))
    is_used = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
    if not is_used or not isinstance(floor_scale, (int, float)) or not isinstance(attn_scale, (int, float)):
        return None
    return QueryScale(float(floor_scale), float(attn_scale))


def _alike(states: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((states - expected).norm() <= tolerance * expected.norm())
