"""Positions of several axes (M-RoPE), which models give the tokens of pictures.

Rotations add: a token at (t, h, w) is turned by t on all channel pairs, and by (0, h - t, w - t) on those of each axis.
The second turn is made by the model's own rotary module when a key is written. The first one is made when it is read,
as that of any key.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError
from windlass.hf.passes import POSITIONS, model_input, our_cache, real_columns
from windlass.positions.rotary import Rotary

DELTAS: Final = "rope_deltas"  # of a model's text: how far places lag behind columns. Not of a cache, so any text's
EXACT: Final = 1e-5
TRIED: Final = ((3, 9, 4, 30, 7), (5, 2, 4, 31, 90), (11, 6, 4, 0, 8), (1, 12, 5, 3, 2))  # positions, by axis


class AxisRotation(Enum):
    """Rotation of the rotary modules in a pass: their own, none, or by the differences between axes."""

    OWN = auto()
    NONE = auto()
    DIFFERENCES = auto()


def turn_of(cache: TextCache | None) -> AxisRotation:
    """Rotation of the rotary modules in a pass with this cache, or None for a pass with another cache or none."""
    if cache is None or cache.is_rotated:
        return AxisRotation.OWN
    step = cache.text.pending
    has_pictures = step is not None and step.places is not None and step.places.has_pictures
    return AxisRotation.DIFFERENCES if has_pictures else AxisRotation.NONE


@dataclass(frozen=True)
class Axes:
    """The number of axes of a model's positions, 0 for plain ones, and whether its rotations add up, axis by axis."""

    count: int
    is_sum: bool

    @classmethod
    def found(cls, count: int, rotaries: Sequence[Rotary | None], device: torch.device) -> Axes:
        """The axes of a model on `device` whose rotary modules were given positions of `count` axes."""
        rotating = [rotary for rotary in rotaries if rotary is not None]
        if not 0 < count <= len(TRIED) or not rotating:
            return cls(count, False)
        at = torch.tensor(TRIED[:count], device=device)[:, None]
        return cls(count, all(_is_sum(rotary, at) for rotary in rotating))

    def split(self, given: Tensor | None, first: int) -> tuple[Tensor | None, Tensor | None]:
        """A pass's positions (batch, tokens), counted from 0 and not from `first`, and those on several axes.

        Models put the former before the axes, or leave them out, or give one for all axes.

        Raises: UsageError for other shapes, and for axes that differ in a model whose turns do not add up.
        """
        if given is not None and given.is_floating_point():  # as some models count them
            given = _whole(given)
        if given is None or given.ndim != 3:
            return None if given is None else given - first, None
        if not self.is_sum:
            if torch.equal(given, given[:1].expand_as(given)):
                return given[0] - first, None
            raise UsageError(
                "position_ids differ between their axes, as in a picture, and this model does not turn keys "
                "by one axis after the other. Read text alone, or leave past_key_values out"
            )
        if given.shape[0] not in (1, self.count, self.count + 1):
            raise UsageError(
                f"position_ids are {tuple(given.shape)}, and this model has {self.count} axes. Expected (axes, batch, "
                "tokens), or leave position_ids out"
            )
        return (given[0], given[1:]) if given.shape[0] == self.count + 1 else (None, given)


class RopeDeltas:
    """Clears the `rope_deltas` of another text from a decoder's wrapper while a pass with our cache runs.

    A wrapper with `rope_deltas` counts the positions of a continued text by those of the text that it read last.
    Without them it leaves positions to the decoder, and so to the cache, or counts those of the new tokens from 0, as
    in a pass with pictures. Those are relative. Some wrappers count by the mask, and so they are given the mask of the
    new columns alone.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if DELTAS in vars(module)]
        self._kept: dict[nn.Module, Tensor | None] = {}
        self.is_relative = False
        self.handles: list[RemovableHandle] = []
        for module in modules:
            self.handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give the call the positions of its columns. Raises: UsageError for a mask that no pass can take."""
        cache = our_cache(kwargs)
        if cache is not None and cache.columns_seen and kwargs.get("position_ids") is None:
            args, kwargs = _of_new_columns(module, cache, args, kwargs)
            self.is_relative = True
            self._kept[module], vars(module)[DELTAS] = vars(module)[DELTAS], None
        return args, kwargs

    def _after(self, module: nn.Module, _args: Any, _kwargs: dict[str, Any], _output: Any) -> None:
        if module in self._kept:
            vars(module)[DELTAS] = self._kept.pop(module)
            self.is_relative = bool(self._kept)


def _of_new_columns(
    module: nn.Module, cache: TextCache, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Arguments of a pass whose text continues, with the mask of its new columns alone.

    Raises: UsageError for a mask of another shape, or one that contradicts the mask of earlier columns.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    mask = bound.arguments.get("attention_mask")
    if mask is None:
        return args, kwargs
    tokens = model_input(bound.arguments)[0].shape[1]
    real_columns(mask, cache, tokens)
    bound.arguments["attention_mask"] = mask[:, -tokens:]
    return bound.args, bound.kwargs


def tell_deltas(model: nn.Module, cache: TextCache, rows: int) -> None:
    """Let a wrapper go on with the text that `cache` has read, in `generate`, which has one of `rows` for its beams."""
    every = cache.batch_size // rows
    lags = [[row.next_place - row.tokens_seen] for row in cache.rows.rows[::every]]
    for module in model.modules():
        if DELTAS in vars(module):
            vars(module)[DELTAS] = torch.tensor(lags, device=cache.device)


def axes_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The number of axes of the positions that a rotary module was given, or 0 for plain positions."""
    given = kwargs.get(POSITIONS, args[1] if len(args) > 1 else None)
    return given.shape[0] if isinstance(given, Tensor) and given.ndim == 3 else 0


def turned_by_differences(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The output of a rotary module for the distance of each axis from the first, without the scale of its tables."""

    if POSITIONS in kwargs:
        differences = kwargs[POSITIONS] - kwargs[POSITIONS][:1]
        cos, sin = module.forward(*args, **{**kwargs, POSITIONS: differences})
    else:
        states, places, *others = args
        cos, sin = module.forward(states, places - places[:1], *others, **kwargs)
    scale = (cos.float().square() + sin.float().square()).sqrt()
    return (cos / scale).to(cos.dtype), (sin / scale).to(sin.dtype)


def _whole(positions: Tensor) -> Tensor:
    """The positions as whole numbers. Raises: UsageError for positions between them."""
    if not torch.equal(positions, positions.round()):
        raise UsageError("position_ids are not whole numbers, as a KVCache keeps them. Leave past_key_values out")
    return positions.long()


@torch.no_grad()
def _is_sum(rotary: Rotary, axes: Tensor) -> bool:
    """True if a module's table at positions of several axes is that of the first, turned on by the differences."""
    first, layout = axes[:1].expand_as(axes), rotary.layout
    whole, place, rest = (rotary.asked(each) for each in (axes, first, axes - first))
    for table in whole:
        columns = layout.columns(table, table)[0]
        pairs = torch.cat((columns, columns), -1) if layout.stop < 1 else columns.repeat_interleave(layout.step, -1)
        if not torch.allclose(pairs, table, atol=EXACT):
            return False
    (cos, sin), (place_cos, place_sin), (rest_cos, rest_sin) = whole, place, rest
    scale = (cos.square() + sin.square()).sqrt()
    sums = place_cos * rest_cos - place_sin * rest_sin, place_sin * rest_cos + place_cos * rest_sin
    return all(torch.allclose(a / scale, b, atol=EXACT) for a, b in zip(sums, (cos, sin), strict=True))
