"""CacheBlend's rule as it is published, by transformers alone: which tokens are read again, and what they see.

The first layer reads all tokens. In the second those are chosen whose values differ most from the values of the parts,
and the later layers run for these alone. Their rows are masked as the last rows of a lower triangle: of `m` chosen
among `n` tokens the one at row `i` sees what stands before place `n - m + i + 1`: more than what stands before itself.

Source: Yao et al. 2024 (arXiv:2405.16444); the mask is that of its published code.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel


class WrittenAt(DynamicCache):
    """Rotated keys and values of a whole text; a pass writes those of the tokens at `places`."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = tokens, torch.arange(0)
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """What transformers' caches do."""
        if layer_idx not in self.states:
            shape = 1, key_states.shape[1], self.tokens, key_states.shape[3]
            self.states[layer_idx] = key_states.new_zeros(shape), value_states.new_zeros(shape)
        for held, new in zip(self.states[layer_idx], (key_states, value_states), strict=True):
            held[:, :, self.places] = new
        return self.states[layer_idx]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Tokens, of which none counts as new."""
        return self.tokens

    def as_dynamic(self) -> DynamicCache:
        """The same as transformers' own cache."""
        made = DynamicCache()
        for layer, (keys, values) in sorted(self.states.items()):
            made.update(keys.clone(), values.clone(), layer)
        return made


def blended(model: PreTrainedModel, parts: Sequence[Sequence[int]], bos: int, share: float) -> tuple[DynamicCache, int]:
    """A text of `parts`, each read alone behind `bos`, blended; and how many tokens were read again.

    The first part has its own `bos`, the others lose it.
    """
    ids = [token for part in parts for token in part]
    cache, start = WrittenAt(len(ids)), 0
    for number, part in enumerate(parts):
        read = [*part] if number == 0 else [bos, *part]
        at = torch.arange(start + len(part) - len(read), start + len(part))
        with torch.no_grad():
            out = model(torch.tensor([read]), position_ids=at[None], use_cache=True)
        cache.places = torch.arange(start, start + len(part))
        for layer, held in enumerate(out.past_key_values.layers):
            cache.update(held.keys[:, :, -len(part) :], held.values[:, :, -len(part) :], layer)
        start += len(part)
    with torch.no_grad():
        fresh = model(torch.tensor([ids]), use_cache=True).past_key_values
    distances = (fresh.layers[1].values - cache.states[1][1]).square().sum((0, 1, 3))
    count = ceil(share * len(ids))
    chosen = distances.argsort(descending=True)[:count].sort().values
    cache.places = torch.arange(len(ids))
    for layer in range(2):  # all tokens have gone through the first layer, and have keys and values in the second
        cache.update(fresh.layers[layer].keys, fresh.layers[layer].values, layer)
    cache.places = chosen
    every = torch.arange(len(ids))
    own, published = every <= chosen[:, None], every < (len(ids) - count + 1 + torch.arange(count))[:, None]
    masks = [torch.zeros(each.shape).masked_fill(~each, -torch.inf)[None, None] for each in (own, published)]
    layers = list(model.model.layers)
    with torch.no_grad(), _masked(layers, masks):
        given = torch.tensor(ids)[chosen][None]
        model(given, attention_mask=masks[1], position_ids=chosen[None], past_key_values=cache)
    return cache.as_dynamic(), count


@contextmanager
def _masked(layers: Sequence[nn.Module], masks: Sequence[Tensor]) -> Iterator[None]:
    """While it lasts, the first layer is given the first mask, and the others the second."""

    def given(mask: Tensor) -> Any:
        # A pre-hook is given the arguments of its module, whatever they are.
        return lambda _, args, kwargs: (args, {**kwargs, "attention_mask": mask})

    handles = [
        layer.register_forward_pre_hook(given(masks[min(number, 1)]), with_kwargs=True)
        for number, layer in enumerate(layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
