"""Tokens for a model to read when nobody asked it anything."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from windlass.hf.placement import device_of_inputs
from windlass.parallel.spread import is_spread

CANDIDATES = 4  # per token that is wanted


def ordinary_ids(model: PreTrainedModel, count: int) -> Tensor:
    """(1, count) ids, the same at every call, spread over the vocabulary.

    No token that a config names: those of images, padding and the like are read in ways of their own. None whose
    embedding is all zeros. Ids repeat only in a vocabulary too small for that.
    """
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    vocabulary = weight.shape[0]
    step = max(vocabulary // (CANDIDATES * count + 1), 1)
    named = _named_ids(model)
    candidates = [each for each in range(step, vocabulary, step) if each not in named] or [0]
    real = candidates
    if not weight.is_meta:  # offloaded
        is_real = _embedded(model, torch.tensor(candidates, device=weight.device)).any(-1).tolist()
        real = [each for each, is_one in zip(candidates, is_real, strict=True) if is_one] or candidates
    picked = [real[(index * len(real)) // count % len(real)] for index in range(count)]
    return torch.tensor([picked], device=device_of_inputs(model))


@torch.no_grad()
def _embedded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The embeddings of some tokens; those that are spread over processes come together in a pass of their module."""
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    found: Tensor = embeddings(ids[None])[0] if is_spread(weight) else weight[ids]
    return found


def _named_ids(model: PreTrainedModel) -> set[int]:
    """The ids that the model's configs name: `pad_token_id`, `image_token_index`, several `eos_token_id`."""
    configs = (vars(module).get("config") for module in model.modules())
    found: set[int] = set()
    for config in {id(each): each for each in configs if isinstance(each, PreTrainedConfig)}.values():
        for name, value in vars(config).items():
            if name.endswith(("_token_id", "_token_index")):
                found.update(each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int))
    return found
