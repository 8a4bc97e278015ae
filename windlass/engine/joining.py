"""The passes that read tokens of joined parts again, where they stand."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.divergence import Divergence, Reached
from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.step import Pass, Step
from windlass.engine.chunks_recompute import Span
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache

LOOKED_AT: Final = 1  # the attention layer in which `Divergent` compares values


def begin_of_text(model: PreTrainedModel) -> int | None:
    """The token that begins a text, as the model's config names it."""
    found = model.config.get_text_config().bos_token_id
    return None if found is None else int(found)


def own_starts(begins: int | None, firsts: Sequence[int], spans: Sequence[Span]) -> set[int]:
    """The positions of tokens that begin a text, in parts that do not begin one here; `firsts` are their first ids."""
    pairs = zip(firsts, spans, strict=True)
    return {span.start for first, span in pairs if first == begins and span.start > 0 and not span.is_exact}


def passes(cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int) -> Iterator[Step]:
    """Steps that read the tokens at these positions, which rise, where they stand: what each sees is there already."""
    ends, prompt_ends = torch.tensor(cache.next_positions), torch.tensor(cache.rows.prompt_ends)
    for start in range(0, len(positions), cache.chunk):
        places = torch.tensor(positions[start : start + cache.chunk])
        at = torch.full((cache.batch_size, len(places)), EMPTY)
        at[row] = places
        tokens = torch.zeros_like(at)
        tokens[row] = torch.tensor([ids[place] for place in places.tolist()])
        yield Step(
            at.to(cache.device),
            tuple(len(places) * (index == row) for index in range(cache.batch_size)),
            ends.to(cache.device),
            prompt_ends.to(cache.device),
            max(cache.next_positions),
            tokens.to(cache.device),
            defer_eviction=True,
            is_prompt=True,
            is_rewrite=True,
        )


def read_step(model: PreTrainedModel, cache: KVCache, step: Step) -> None:
    """Let the model read one of these steps."""
    assert step.ids is not None, "a step of tokens without ids"
    forward(model, step.ids, None, cache, [], Pass(step=step))


def divergence(
    model: PreTrainedModel, cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int
) -> Tensor:
    """Of the tokens at these positions, how far their values in the second layer are from what they would be.

    That layer has the new ones afterwards.
    """
    layers = cache.by_layer
    if len(layers) <= LOOKED_AT:
        raise UsageError("recompute=divergent compares values of the second attention layer, and this model has one")
    layer = layers[LOOKED_AT].whole
    if layer is None:
        raise UsageError("recompute=divergent can't be combined with shares; use first(16), or leave shares out")
    found = Divergence(LOOKED_AT, layer)
    cache.divergence = found
    try:
        for step in passes(cache, positions, ids, row):
            with suppress(Reached):
                read_step(model, cache, step)
    finally:
        cache.divergence = None
    distances = found.of_row(row)
    found.keep()
    if cache.heads is not None and cache.heads.is_split:  # a distance is one over all heads
        return cache.heads.ranks.sum(distances)
    return distances
