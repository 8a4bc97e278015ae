"""Passes of a model: in one shot, in chunks, under a mask of our own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from families.tiny import WORDS
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, and_masks

from windlass import KVCache


def text(tokens: int, seed: int) -> Tensor:
    """A row of words."""
    return torch.randint(1, WORDS, (1, tokens), generator=torch.Generator().manual_seed(seed))


def one_shot(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False, **options).logits
    return logits


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """Per logit, in standard deviations of theirs."""
    assert ours.shape == theirs.shape, f"{ours.shape} for {theirs.shape}"
    return (ours.float() - theirs.float()).abs() / theirs.float().std()


def fed(
    model: PreTrainedModel,
    cache: KVCache | None,
    ids: Tensor,
    chunk: int,
    mask: Tensor | None = None,
    placed: bool = False,
) -> Tensor:
    """Logits of all columns, fed `chunk` at a time, with the caller's own positions if `placed`.

    Without a cache of ours, into one of transformers' own.
    """
    held: object = DynamicCache(config=model.config.get_text_config(decoder=True)) if cache is None else cache
    pieces = []
    for start in range(0, ids.shape[1], chunk):
        end = min(start + chunk, ids.shape[1])
        options: dict[str, Tensor] = {}
        if mask is not None:
            options["attention_mask"] = mask[:, :end]
            if placed:
                options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, start:end]
        pieces.append(model(input_ids=ids[:, start:end], past_key_values=held, use_cache=True, **options).logits)
    return torch.cat(pieces, 1)


@contextmanager
def narrowed(rule: Callable[..., Tensor]) -> Iterator[list[int]]:
    """Restrict plain eager attention by `rule`. Yields a list that grows with each mask made."""
    masks: dict[str, Any] = AttentionMaskInterface._global_mapping
    own, uses = masks["eager"], list[int]()

    # The arguments of transformers' own mask function, passed on unchanged.
    def mask(*args: Any, mask_function: Callable[..., Tensor], **kwargs: Any) -> Any:
        uses.append(1)
        kwargs["allow_is_causal_skip"] = False
        return own(*args, mask_function=and_masks(mask_function, rule), **kwargs)

    masks["eager"] = mask
    try:
        yield uses
    finally:
        masks["eager"] = own
