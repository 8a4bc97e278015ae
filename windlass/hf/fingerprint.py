"""A hash that tells one model from another."""

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.hf.adapters import computing
from windlass.hf.weights import parts_of
from windlass.parallel.spread import whole_of

SAMPLES = 256  # values of each parameter in a fingerprint, about

# Options of a run, of training or of a library version, which change no key: not in the fingerprint.
VOLATILE_KEYS = frozenset(
    {
        *(
            "architectures",
            "chunk_size_feed_forward",
            "distributed_config",
            "dtype",
            "id2label",
            "initializer_range",
            "label2id",
        ),
        *("output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict"),
        *("transformers_version", "use_cache"),
    }
)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the model's architecture and of a sample of every parameter.

    Equal for the same weights in the same dtype, wherever they lie and whatever loaded them. It costs about
    `SAMPLES` values of each parameter, however large that is: time grows with the number of parameters, not with
    their size. Of a model that is spread over processes it is the same, and a collective call that gathers each
    parameter in turn. Of adapters (PEFT) it has those that are active, with their scales: one that is idle or switched
    off changes nothing, and merged weights, which round otherwise, are those of another model.

    Raises: UsageError for weights that accelerate keeps elsewhere.
    """
    config = model.config.get_text_config().to_diff_dict()
    digest = hashlib.sha256(json.dumps(_without_volatile(config), sort_keys=True, default=str).encode())
    parts = [(name, _sampled(name, tensor, model)) for name, tensor in computing(model)]
    for _, part in sorted(parts):  # those of several active adapters have one name
        digest.update(part)
    return digest.hexdigest()


def _sampled(name: str, tensor: Tensor, model: PreTrainedModel) -> bytes:
    """The name of a tensor, and the layout and a sample of each of its parts."""
    if tensor.is_meta:
        raise UsageError(f"{name} of this {type(model).__name__} is offloaded; the fingerprint needs all weights here")
    found = b""
    for part, held in parts_of(whole_of(tensor)).items():
        values = held.detach().flatten()
        # An odd stride: an even one could meet the same column of every row, and no other.
        sample = values[:: max(1, len(values) // SAMPLES) | 1].cpu().contiguous()
        found += f"{name}{part} {tuple(held.shape)} {held.dtype}".encode() + bytes(raw_bytes(sample))
    return found


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's chat template, also where it has none."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in order; no copy where it is contiguous."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _without_volatile(config: dict[str, Any]) -> dict[str, Any]:
    """A config without names, paths, versions and options of a run."""
    return {
        key: _without_volatile(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (str(key).startswith("_") or str(key).endswith("_token_id") or key in VOLATILE_KEYS)
    }
