"""`KVCache.compress(fit=True)`: the text is read a second time, for values that make up for the tokens that go."""

import copy
from dataclasses import replace
from typing import Final

import torch

from windlass.cache.compress import compress
from windlass.cache.fitting import Fitting
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT, READ, no_inference_mode
from windlass.hf.attached_model import AttachedModel
from windlass.hf.model_cache import ModelCache

CHUNK: Final = (
    128  # tokens of the second reading at once; the whole text is as far from each of its queries, or nearly so
)


@no_inference_mode
@torch.no_grad()
def compress_fitted(cache: ModelCache, budget: int, window: int | None) -> None:
    """Cut to a budget, and give what stays values that were fitted; see `KVCache.compress`."""
    texts = _texts(cache)
    cut = copy.deepcopy(cache)
    compress(cut, budget, window)
    ends = torch.tensor(cache.next_positions, device=cache.device)
    fitting = Fitting.beside(cache.layers, cut.layers, ends)
    if any(sums is not None for sums in fitting.sums):
        _read_again(cache, texts, fitting)
    fitted = [None if sums is None else sums.values() for sums in fitting.sums]
    compress(cache, budget, window)
    for layer, kept, values in zip(cache.layers, cut.layers, fitted, strict=True):
        if values is not None:
            slots, places = min(layer.table.slots, kept.table.slots), layer.store.in_place()
            assert places is not None, "values that are not held as they are"
            assert torch.equal(layer.positions[..., :slots], kept.positions[..., :slots]), (
                "a cut that kept other tokens"
            )
            places[1][:, :, :slots] = values[:, :, :slots]


def _texts(cache: ModelCache) -> list[list[int]]:
    """The ids of each row. Raises: UsageError where the text can't be read again, or its values not be replaced."""
    texts, what = cache.tokens, "compress(fit=True)"
    if cache.recurrent:
        raise UsageError(
            f"{what} reads the text a second time, and layer {cache.recurrent[0].index} keeps a state that would read "
            "it twice, too; leave fit out"
        )
    if any(layer.rules.has_places for layer in cache.layers) or texts is None:
        raise UsageError(
            f"{what} reads the text a second time, which takes the ids of all of its tokens, and this one came with "
            "pictures or without ids; leave fit out"
        )
    for layer in cache.layers:
        if layer.is_empty:
            continue
        if layer.store.in_place() is None:
            raise UsageError(
                f"{what} writes values that are held as they are, and the store {cache.store.name!r} holds them "
                'otherwise in this model; take store="plain", or leave fit out'
            )
        held = (layer.positions >= 0).sum(-1).amin(1).tolist()
        if layer.rules.most_visible is None and (held != cache.tokens_seen or held != cache.next_positions):
            raise UsageError(
                f"{what} needs the whole text, and layer {layer.index} holds {_listed(held)} of "
                f"{_listed(cache.tokens_seen)} tokens; make the cache without a budget, and compress it before any edit"
            )
    return texts


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _read_again(cache: ModelCache, texts: list[list[int]], fitting: Fitting) -> None:
    """Show the text to every layer for a second time; the cache holds afterwards what it held."""
    attachment = cache.model_id
    assert isinstance(attachment, AttachedModel), "a cache of no model"
    outer = attachment.decoder.outer
    how = replace(PROMPT, is_second_pass=True, defer_eviction=cache.budget is not None)
    cache.fitting = fitting
    cache.reserve(CHUNK)
    try:
        for start in range(0, max(map(len, texts)), CHUNK):
            pieces = [text[start : start + CHUNK] for text in texts]
            width = max(map(len, pieces))
            ids = [piece + [0] * (width - len(piece)) for piece in pieces]
            mask = [[1] * len(piece) + [0] * (width - len(piece)) for piece in pieces]
            fed = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            cache.schedule(how)
            outer(**{name: each.to(cache.device) for name, each in fed.items()}, past_key_values=cache)
    finally:
        cache.schedule(READ)
        cache.fitting = None
