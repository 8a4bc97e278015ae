"""Parts of texts, and transformers' own results: with explicit places, masks, and overwritten tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import windlass
from windlass import CacheOptions, KVCache, chunks
from windlass.core.positions import EMPTY
from windlass.engine.chunks import Part
from windlass.engine.recompute import read_step, rewrite_steps
from windlass.stores.base import Parts
from windlass.testing import SLIDING_WINDOW, VOCABULARY

SIZES = (23, 17, 31, 9)
ORDER = (2, 0, 3, 1)


class WrittenAt(DynamicCache):
    """Keys and values of a whole text, rotated where they stand: a pass writes those of the tokens at `places`."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = tokens, torch.arange(0)
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self.states:
            shape = 1, key_states.shape[1], self.tokens
            keys = key_states.new_zeros(*shape, key_states.shape[3])
            self.states[layer_idx] = keys, value_states.new_zeros(*shape, value_states.shape[3])
        for held, new in zip(self.states[layer_idx], (key_states, value_states), strict=True):
            held[:, :, self.places] = new
        return self.states[layer_idx]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self.tokens


def read_at(
    model: PreTrainedModel, cache: WrittenAt, ids: Sequence[int], places: Sequence[int], first: int = 0
) -> Tensor:
    """Logits of the tokens at `places`, each of which sees tokens from `first` up to its own place."""
    at, every = torch.tensor(places), torch.arange(cache.tokens)
    cache.places = at
    seen = (every <= at[:, None]) & (every >= first)
    near = seen & (every > at[:, None] - SLIDING_WINDOW)
    full, sliding = (torch.zeros(each.shape).masked_fill(~each, -torch.inf)[None, None] for each in (seen, near))
    kinds = set(getattr(model.config, "layer_types", None) or ())
    mask = {"full_attention": full, "sliding_attention": sliding} if "sliding_attention" in kinds else full
    with torch.no_grad():
        given = torch.tensor([[*ids]])
        return model(given, attention_mask=mask, position_ids=at[None], past_key_values=cache).logits[0]


def joined_by_hand(
    model: PreTrainedModel, parts: Sequence[Sequence[int]], again: Sequence[int], question: Sequence[int]
) -> Tensor:
    """Logits of a question behind parts that were read alone, at their places, and then those at `again` once more."""
    ids = [token for part in parts for token in part] + [*question]
    cache, start = WrittenAt(len(ids)), 0
    for part in parts:
        read_at(model, cache, part, range(start, start + len(part)), first=start)
        start += len(part)
    if again:
        read_at(model, cache, [ids[place] for place in again], again)
    return read_at(model, cache, question, range(start, len(ids)))


def slots_in_order(cache: KVCache, layer: int, row: int = 0) -> Parts:
    """A row's tokens in a layer's store, in the order of the text, and their positions."""
    table = cache.layers[layer].table
    held = table.positions[row : row + 1]
    order = held.where(held >= 0, 2**31 - 1).argsort(-1)[..., : int((held >= 0).sum(-1).max())]
    positions = held.gather(-1, order)
    return {**table.store.take(row, order), "positions": positions.where(positions >= 0, EMPTY)}


def divergence(fresh: Tensor, ours: Tensor) -> float:
    """KL of next-token distributions."""
    truth, logs = fresh.double().log_softmax(-1), ours.double().log_softmax(-1)
    return float((truth.exp() * (truth - logs)).sum(-1).mean())


def ids_of(parts: Sequence[Part]) -> list[int]:
    """The text of parts, one behind the other."""
    return [token for part in parts for token in part.ids]


def texts(seed: int = 0, sizes: tuple[int, ...] = SIZES) -> list[list[int]]:
    """Random parts, none of which has a token 0."""
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (size,), generator=drawn).tolist() for size in sizes]


def fresh(model: PreTrainedModel, ids: list[int], question: list[int], options: CacheOptions | None = None) -> Tensor:
    """The logits of a model that reads all of it anew."""
    return windlass.prefill(model, KVCache.from_options(model, options or CacheOptions()), [ids + question])


def joined(
    model: PreTrainedModel, parts: list[Part], mode: str, options: CacheOptions | None = None
) -> tuple[KVCache, chunks.JoinReport]:
    """A new cache with `parts`."""
    cache = KVCache.from_options(model, options or CacheOptions())
    return cache, chunks.join(model, cache, parts, mode)


def read_again(model: PreTrainedModel, cache: KVCache, ids: Mapping[int, int]) -> None:
    """Let the model read the tokens of row 0 at these positions again, where they stand."""
    for step in rewrite_steps(cache, sorted(ids), ids, 0):
        read_step(model, cache, step)
