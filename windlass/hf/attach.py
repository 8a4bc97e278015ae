"""Attaching to a model: with `probe`, the only file that knows how the models of transformers are built.

A model is neither forked nor copied. In a forward pass with our cache, and in no other, its rotary
module returns the identity, so that the keys it hands to `past_key_values.update` are not rotated,
and its attention function is ours, which lets the cache write, attend, observe and evict.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.core.errors import UnsupportedModel, UsageError
from windlass.core.step import AttentionCall
from windlass.hf.probe import Mask, Probe, rotaries_of, run
from windlass.positions.rotary import Rotary

NAME = "windlass"  # of the attention function, and of the attribute on an attached model


class AttachedModel:
    """What `attach` found out about a model, and the cache of the pass that is running."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, rotary_modules: list[nn.Module]) -> None:
        configs = (vars(module).get("config") for module in model.modules())
        self._configs = list({id(c): c for c in configs if isinstance(c, PreTrainedConfig)}.values())
        self._decoder = decoder
        self._own_forward = vars(decoder).get("forward")
        self._forward: Callable[..., Any] = decoder.forward
        self._signature = inspect.signature(decoder.forward)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._rotary_hook, with_kwargs=True) for module in rotary_modules
        ]
        decoder.forward = self.forward
        self.rotaries: list[Rotary | None] = []  # per layer; None where a layer does not rotate
        self.key_means: list[Tensor | None] | None = None  # measured when a store first asks for it
        self.current_cache: TextCache | None = None
        self.probe: Probe | None = None

    def remove(self) -> None:
        """Leave the decoder as it was found."""
        for handle in self._handles:
            handle.remove()
        del self._decoder.forward
        if self._own_forward is not None:
            self._decoder.forward = self._own_forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The decoder's forward pass; with our cache, a step of it.

        Not hooks of the module: those are not called when a pass is interrupted. The arguments are those
        of the model at hand, passed on as they come.
        """
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        bound = {**bound.pop("kwargs", {}), **bound}
        cache = bound.get("past_key_values")
        if not isinstance(cache, TextCache):
            return self._forward(*args, **kwargs)
        fed = self._checked(cache, bound)
        names, before = self._attention_names(), cache.text
        # A pass that fails, or is interrupted at any line, leaves no trace.
        try:
            try:
                cache.begin(*fed)
                self.current_cache = cache
                self._use_attention([NAME] * len(names))
                output = self._forward(*args, **kwargs)
            finally:
                self.current_cache = None
                self._use_attention(names)
            cache.commit()
            return output
        except BaseException:
            self.current_cache = None
            self._use_attention(names)
            cache.take_back(before)
            raise

    def probed(self, model: PreTrainedModel, is_identity: bool) -> Probe:
        """One pass of one token, with or without rotation."""
        names = self._attention_names()
        self.probe = Probe(is_identity)
        try:
            self._use_attention([NAME] * len(names))
            return run(self.probe, model, self._decoder)
        finally:
            self.probe = None
            self._use_attention(names)

    def _checked(
        self, cache: TextCache, bound: dict[str, Any]
    ) -> tuple[int, int, Tensor | None, Tensor | None, Tensor | None]:
        """What `TextCache.begin` takes of a pass with these arguments. Raises: UsageError for one that can't be."""
        if cache.model_id is not self:
            raise UsageError("this KVCache was made for another model, or before this one was attached; make a new one")
        if self.current_cache is not None:
            raise UsageError("a pass with a KVCache runs in another thread; give each thread a model of its own")
        if self._decoder.training and torch.is_grad_enabled():
            raise UsageError("a KVCache is for inference: call model.eval(), or leave past_key_values out to train")
        if bound.get("output_attentions", getattr(self._decoder.config, "output_attentions", False)):
            raise UsageError("output_attentions is not available with a KVCache: it never holds the whole matrix")
        ids, embeds, mask = bound.get("input_ids"), bound.get("inputs_embeds"), bound.get("attention_mask")
        columns = ids if ids is not None else embeds
        if columns is None:
            raise UsageError("the model was called with neither input_ids nor inputs_embeds")
        batch, tokens = columns.shape[:2]
        return batch, tokens, _real_columns(mask, cache, tokens), bound.get("position_ids"), ids

    def _attention_names(self) -> list[str | None]:
        return [config._attn_implementation for config in self._configs]

    def _use_attention(self, names: Sequence[str | None]) -> None:
        for config, name in zip(self._configs, names, strict=True):
            config._attn_implementation_internal = name

    def _rotary_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the rotary modules: no rotation while a pass with a cache of un-rotated keys runs.

        `args` and `kwargs` are the module's own, which differ from model to model.
        """
        if self.probe is not None:
            return self.probe.rotary_output(module, args, kwargs, output)
        if self.current_cache is None or self.current_cache.is_rotated:
            return output
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` work with a `KVCache`; returns the same model.

    Without our cache the model does exactly what it did before, in training too. Attaching twice
    changes nothing. Two passes of one token find out how each layer rotates its keys. While a pass
    with our cache runs, no other thread may use the model: with a cache it is refused.

    Raises: UnsupportedModel, naming the model and the reason; the model is then as it was.
    """
    if isinstance(getattr(model, NAME, None), AttachedModel):
        return model
    _refuse(model)
    decoder = model.get_decoder() if model.can_generate() else model
    modules = [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not modules:
        raise UnsupportedModel(f"{_name(model)} has no rotary module: its positions are not RoPE, or built in")
    attachment = AttachedModel(model, decoder, modules)
    for module in (model, *decoder.modules()):
        if module is model or isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, NAME, attachment)
    try:
        attachment.rotaries = rotaries_of(model, attachment.probed(model, False), attachment.probed(model, True))
    except UnsupportedModel as error:
        detach(model)
        raise UnsupportedModel(f"{_name(model)} {error}") from None
    except UsageError as error:
        detach(model)
        raise UnsupportedModel(f"{_name(model)}: {error}") from None
    except Exception as error:
        detach(model)
        raise UnsupportedModel(
            f"{_name(model)} can't be run with attention replaced: {type(error).__name__}: {error}"
        ) from error
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`; returns the same model. Its caches can no longer be used with it."""
    attached(model).remove()
    for module in model.modules():
        if isinstance(getattr(module, NAME, None), AttachedModel):
            delattr(module, NAME)
    return model


def attached(model: PreTrainedModel) -> AttachedModel:
    """What `attach` left on the model. Raises: UsageError when it is not attached."""
    attachment = getattr(model, NAME, None)
    if not isinstance(attachment, AttachedModel):
        raise UsageError(f"{_name(model)} is not attached to windlass; call windlass.attach(model) first")
    return attachment


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,  # noqa: ARG001  # models pass options of other attention functions
) -> tuple[Tensor, None]:
    """The attention function registered with transformers.

    A `sliding_window` among them is not believed: not all models that have one pass it on, and some
    pass it in every layer. The mask is what their own attention obeys.
    """
    attachment, layer = getattr(module, NAME), module.layer_idx
    assert isinstance(attachment, AttachedModel), "windlass attention outside of an attached model"
    assert isinstance(layer, int), "an attention layer without a number"
    if attachment.probe is not None:
        return attachment.probe.attention(layer, query, key, value, attention_mask), None
    assert attachment.current_cache is not None, "windlass attention outside of a pass with its cache"
    assert isinstance(attention_mask, Mask), "a mask that was not there when the model was attached"
    rotary = attachment.rotaries[layer]
    if rotary is not None:
        pairs = rotary.rotary_pairs
        query, key = rotary.layout.to_halves(query, pairs), rotary.layout.to_halves(key, pairs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(scale, attention_mask.window, softcap, s_aux)
    out = attachment.current_cache.attend(layer, query, key, value, call)
    return out.transpose(1, 2).contiguous(), None


def _mask(
    *,
    mask_function: Callable[..., Tensor],
    allow_is_causal_skip: bool,
    local_size: int | None = None,
    **kwargs: object,  # noqa: ARG001  # what a matrix would need
) -> Mask:
    """The mask function registered with transformers: visibility is decided by position, by the cache."""
    if not allow_is_causal_skip:
        raise UsageError(
            "this model asks for a mask that is not causal (for images, perhaps); a KVCache reads text only"
        )
    return Mask(local_size, mask_function)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)


def _real_columns(mask: Any, cache: TextCache, tokens: int) -> Tensor | None:
    """Which of the pass's columns are not padding; None when all are."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise UsageError("attention_mask must be two-dimensional (batch, tokens): a KVCache makes its own causal mask")
    seen = cache.columns_seen
    if mask.shape[1] not in (tokens, seen + tokens):
        raise UsageError(
            f"attention_mask covers {mask.shape[1]} columns; expected {seen + tokens}, the {seen} seen and {tokens} new"
        )
    return mask[:, -tokens:].bool()


def _refuse(model: PreTrainedModel) -> None:
    """Raise for architectures that are known not to work, each with its reason."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    schemes = [rope, *(scheme for scheme in rope.values() if isinstance(scheme, dict))]
    kinds = getattr(config, "layer_types", None) or []
    reason = None
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder: its cross-attention has no text positions"
    elif getattr(config, "kv_lora_rank", None):
        reason = "uses multi-head latent attention (MLA): its keys are part rotated, part compressed"
    elif any("mrope_section" in scheme for scheme in schemes):
        reason = "uses multi-dimensional positions (M-RoPE): a token has no single place in the text"
    elif getattr(model, "_is_stateful", False) or {"conv", "linear_attention"} & set(kinds):
        reason = "is recurrent in some layers: tokens can't be taken out of their state"
    elif "chunked_attention" in kinds:
        reason = "attends within fixed chunks of the text: only full and sliding-window attention are known"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "does not let its attention function be chosen"
    if reason is not None:
        raise UnsupportedModel(f"{_name(model)} {reason}")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
