"""How far tokens' values in one layer are from what they would be here: which of them are worth a second reading.

Source: CacheBlend, Yao et al. 2024 (arXiv:2405.16444), section 4.3.
Differs: the pass ends where the layer is reached, so no token attends there; what each token sees is decided by
position.
"""

from typing import NamedTuple, NoReturn, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.rewrite import Standing, write_over
from windlass.cache.slot_layer import SlotLayer
from windlass.core.shapes import NewKeys, NewValues, Queries
from windlass.core.step import AttentionCall, Step, no_inference_mode


class Reached(Exception):
    """A pass has come to the layer that is looked at, and is not to go on."""


class _Found(NamedTuple):
    queries: Queries
    keys: NewKeys
    values: NewValues
    step: Step
    call: AttentionCall


@final
class Divergence:
    """What passes that end at attention layer `index` of the model bring to it; `layer` are its slots."""

    def __init__(self, index: int, layer: SlotLayer) -> None:
        self.index, self._layer = index, layer
        self._found: list[_Found] = []

    def reached(self, queries: Queries, keys: NewKeys, values: NewValues, step: Step, call: AttentionCall) -> NoReturn:
        """Note what comes to the layer. Raises: Reached, which takes the pass back."""
        self._found.append(_Found(queries.clone(), keys.clone(), values.clone(), step, call))
        raise Reached

    def of_row(self, row: int) -> Tensor:
        """The squared distance of each token's new value from the one that is held, summed over heads, in order.

        What a head has evicted counts 0.
        """
        store, distances = self._layer.store, []
        held = store.values()
        for found in self._found:
            standing = Standing.of(self._layer.positions, found.step.positions)
            before = kernels.read(held, standing.slots).float()
            after = found.keys[..., -store.latent :] if store.latent else found.values
            squares = (after.float() - before).square().sum(-1) * standing.is_held
            distances.append(squares.sum(1)[row, found.step.positions[row] >= 0])
        return torch.cat(distances)

    @no_inference_mode
    def keep(self) -> None:
        """Let the layer have the new keys and values of all tokens, which are those of a text read anew."""
        for found in self._found:
            write_over(self._layer, found.queries, found.keys, found.values, found.step, found.call)
