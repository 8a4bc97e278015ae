"""A pass of an attached model, as the engine and the evaluation call for it."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.core.step import READ, Pass
from windlass.hf.attach import attached


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None,
    cache: TextCache,
    columns: list[int],
    how: Pass = READ,
) -> Tensor:
    """One pass, taken as `how` says; returns (batch, len(columns), vocabulary) logits of these columns and no others.

    Without columns hidden states come back.
    """
    given = {"input_ids": ids, "attention_mask": mask}
    out: Tensor
    cache.schedule(how)
    try:
        if columns:  # for the last one, which decode asks for, nothing is sent to a device
            wanted = 1 if columns == [ids.shape[1] - 1] else torch.tensor(columns, device=ids.device)
            out = model(**given, past_key_values=cache, logits_to_keep=wanted).logits
            if out.shape[1] > len(columns):  # some models take no `logits_to_keep`, and do not say so
                out = out[:, columns]
        else:
            out = attached(model).decoder.outer(**given, past_key_values=cache).last_hidden_state
    finally:
        cache.schedule(READ)
    return out


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]
