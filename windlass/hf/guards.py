"""What a pass is called with. What a KVCache cannot honour is refused by name, before anything changes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.cache.padding import check_mask
from windlass.core.check import check_kind
from windlass.core.errors import UsageError
from windlass.hf.running_pass import not_compiled

PREFIXES: Final = ("PREFIX_TUNING", "CARTRIDGE")  # PEFT's names of adapters that are a cache


def check_call(called: Sequence[nn.Module], arguments: dict[str, Any]) -> None:
    """Raises: UsageError for arguments of a forward pass of the modules `called` that no cache of ours can honour.

    The first of them is the decoder.
    """
    if called[0].training and torch.is_grad_enabled():
        raise UsageError("a KVCache is for inference: call model.eval(), or leave past_key_values out to train")
    asked = any(getattr(module.config, "output_attentions", False) for module in called)
    if arguments.get("output_attentions", asked):
        raise UsageError("output_attentions is not available with a KVCache: it never holds the whole matrix")
    if arguments.get("use_cache") is False:
        raise UsageError(
            "use_cache=False asks for a pass without a cache, but past_key_values is a KVCache; leave one of them out"
        )


def fed(arguments: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What a pass reads, ids or embeddings; and the ids. Raises: UsageError for no tokens."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    columns = ids if ids is not None else embeds
    if columns is None:
        raise UsageError("the model was called with neither input_ids nor inputs_embeds")
    if not columns.shape[1]:
        raise UsageError("the model was called with no tokens; pass those that are new")
    return columns, ids


@not_compiled
def note_drafts(cache: TextCache, wanted: object) -> None:
    """Assisted decoding asks for the logits of its drafts and of the token before: so many are `wanted`."""
    if cache.expects_drafts and isinstance(wanted, int):
        cache.schedule(replace(cache.next_pass, drafts=max(wanted - 1, 0)))


def check_model(model: object) -> None:
    """Raises: UsageError for what is no model of transformers, nor one of PEFT's around it."""
    # A wrapper gives the config of the model inside.
    kinds = nn.Module if isinstance(getattr(model, "config", None), PreTrainedConfig) else PreTrainedModel
    way_out = "windlass.load(folder) gives a model and its tokenizer"
    check_kind("model", model, kinds, "a model of transformers", way_out)


def check_adapter(model: PreTrainedModel) -> None:
    """Raises: UsageError for a model of PEFT whose adapter is keys and values that it puts into a cache."""
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "peft_type", None) in PREFIXES:
        refuse_prefix()


def refuse_prefix() -> NoReturn:
    """Raises: UsageError."""
    raise UsageError(
        "PEFT's prefix tuning replaces the cache by one of its own, with keys that are rotated and have no positions: "
        "leave the KVCache out, or give it to the base model; LoRA, IA3 and prompt tuning work with a KVCache"
    )


def real_columns(mask: Any, cache: TextCache, tokens: int) -> Tensor | None:
    """Which of the pass's columns are not padding; None when all are.

    Raises: UsageError for a mask of another shape, or one that contradicts what earlier columns were fed as.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UsageError("attention_mask must be two-dimensional (batch, tokens): a KVCache makes its own causal mask")
    seen, is_real = cache.columns_seen, mask.bool()
    if mask.shape[1] not in (tokens, seen + tokens):
        raise UsageError(
            f"attention_mask covers {mask.shape[1]} columns; expected {seen + tokens}, the {seen} seen and {tokens} new"
        )
    if mask.shape[1] > tokens and mask.shape[0] == cache.batch_size:  # another batch is refused with its own words
        check_mask([row.padding for row in cache.rows.rows], is_real[:, :seen])
    return is_real[:, -tokens:]


def inference_only(output: Tensor, *inputs: Tensor) -> Tensor:
    """`output`, whose backward pass raises where `inputs` ask for gradients: what a cache reads has none."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in inputs):
        guarded: Tensor = _InferenceOnly.apply(output, *inputs)
        return guarded
    return output


class _InferenceOnly(torch.autograd.Function):
    """The first of its inputs, as if it came from all; it has no gradient."""

    @staticmethod
    def forward(ctx: object, output: Tensor, *inputs: Tensor) -> Tensor:  # noqa: ARG004  # PyTorch's signature
        return output.view_as(output)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> NoReturn:  # noqa: ARG004
        raise UsageError(
            "a KVCache is for inference: no gradient passes through the attention of a pass with one; "
            "leave past_key_values out of a pass that needs gradients"
        )
