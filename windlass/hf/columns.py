"""Recurrent layers that forget their state in a pass of several tokens: such a pass is read token by token."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from windlass.hf.cache_argument import NAMES
from windlass.hf.replaced import Replaced

STATES: Final = "hidden_states"
MASK: Final = "attention_mask"
CACHES: Final = frozenset({*NAMES, "cache_params"})  # what models call the cache that they hand to a layer


@final
class Columns:
    """Calls a module for one token after the other where its layer has read a token: then `states_of` has states.

    Padding leaves the states of its row as they are.
    """

    def __init__(self, module: nn.Module, states_of: Callable[[int], Sequence[Tensor]]) -> None:
        self._module, self._states_of = module, states_of
        self._signature = inspect.signature(module.forward)
        self.replaced = Replaced(module, "forward", self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the module returns for each token, side by side. The arguments are its own."""
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        inputs, mask, layer = given[STATES], given.get(MASK), self._module.layer_idx
        assert isinstance(layer, int), "a recurrent layer without a number"
        if inputs.shape[1] == 1 or not self._states_of(layer):
            whole: Tensor = self.replaced.original(*args, **kwargs)
            return whole
        is_token = inputs.new_ones(inputs.shape[:2]) if mask is None else mask[:, -inputs.shape[1] :]
        outs = []
        for column, tokens in enumerate(inputs.split(1, 1)):
            before = [state.clone() for state in self._states_of(layer)]
            outs.append(self.replaced.original(**{**given, STATES: tokens, MASK: None}))
            for state, was in zip(self._states_of(layer), before, strict=True):
                is_read = is_token[:, column].bool().view(-1, *[1] * (state.ndim - 1))
                state.copy_(state.where(is_read, was))
        return torch.cat(outs, 1)


def columns_of(
    modules: Iterable[nn.Module], layers: Iterable[int], states_of: Callable[[int], Sequence[Tensor]]
) -> list[Columns]:
    """Those of the modules that hold the states of these layers, each now installed."""
    numbers, found = set(layers), []
    for module in modules:
        names = inspect.signature(module.forward).parameters.keys()
        if module.layer_idx in numbers and STATES in names and MASK in names and names & CACHES:
            found.append(Columns(module, states_of))
    return found
