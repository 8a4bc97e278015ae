"""A pass with a cache while it runs, which torch.compile must leave alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.cache.cache import TextCache
from windlass.cache.state import Text
from windlass.core.picks import Picker
from windlass.core.shapes import QueryPositions
from windlass.hf.mask import Mask

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

BUSY: Final = (
    "a pass with a KVCache runs in this model, in another thread or around this call; "
    "give each thread a model of its own"
)


@dataclass(frozen=True)
class TokenTypes:
    """What tells a model which columns are pictures: the argument's name, and how many columns it covers."""

    name: str
    columns: int


@dataclass(eq=False)
class RunningPass:
    """A pass with a cache, the thread that it runs in, and where the cache's text stood before it.

    `is_alone` tells that the decoder was called by itself, not by the whole model.

    `sees_to` has for each mask that is not causal the last positions that the tokens see; `keys` what layers were
    handed whose keys others share; `pickers` the indexers that were called, by what calls them.
    """

    cache: TextCache
    thread: int | None = None
    before: Text | None = None
    is_alone: bool = False
    types: TokenTypes | None = None
    sees_to: dict[Mask, QueryPositions | None] = field(default_factory=dict)
    keys: dict[int, Tensor] = field(default_factory=dict)
    pickers: dict[object, Picker] = field(default_factory=dict)


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, which runs as it is where torch.compile compiles the model around it.

    Kernels are given the addresses of tensors, and a compiled frame frees what it holds by address alone.
    """
    kept: Callable[Arguments, Result] = torch.compiler.disable(function)
    return kept
