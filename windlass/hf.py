"""The seam to transformers: the only file that knows how its models are built.

A model is neither forked nor copied. In a forward pass with our cache, and in no other, its rotary
module returns the identity, so that the keys it hands to `past_key_values.update` are not rotated,
and its attention function is ours, which lets the cache write, attend, observe and evict.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel

from windlass.errors import UnsupportedModel, UsageError
from windlass.hf_cache import TransformersCache
from windlass.rotary import LAYOUTS, Layout, Rotary, rotate
from windlass.step import AttentionCall

NAME = "windlass"  # of the attention function, and of the attribute on an attached model
PROBE_POSITION = 7  # small enough for any trained length, large enough to tell two rotary bases apart


@dataclass(eq=False)
class Seam:
    """What `attach` found out about a model, and the cache of the pass that is running."""

    rotaries: list[Rotary | None]  # per layer; None where a layer does not rotate
    configs: list[PreTrainedConfig]
    signature: inspect.Signature
    active: TransformersCache | None = None
    saved: list[str | None] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)

    def before(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder: a pass with our cache begins."""
        self.finish(is_complete=False)
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        bound = {**bound.pop("kwargs", {}), **bound}
        cache = bound.get("past_key_values")
        if not isinstance(cache, TransformersCache):
            return
        if decoder.training and torch.is_grad_enabled():
            raise UsageError("a KVCache is for inference: call model.eval(), or leave past_key_values out to train")
        if bound.get("output_attentions"):
            raise UsageError("output_attentions is not available with a KVCache: it never holds the whole matrix")
        ids, embeds, mask = bound.get("input_ids"), bound.get("inputs_embeds"), bound.get("attention_mask")
        columns = ids if ids is not None else embeds
        if columns is None:
            raise UsageError("the model was called with neither input_ids nor inputs_embeds")
        batch, tokens = columns.shape[:2]
        cache.begin(batch, tokens, _real_columns(mask, cache, tokens), bound.get("position_ids"), ids)
        self.active = cache
        self.saved = [config._attn_implementation for config in self.configs]
        _use_attention(self.configs, [NAME] * len(self.configs))

    def after(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """Forward hook of the decoder, called after an Exception too: the pass ends."""
        self.finish(is_complete=output is not None)

    def finish(self, is_complete: bool) -> None:
        """End the pass that runs, if one does.

        PyTorch calls no hook after a KeyboardInterrupt: whoever notices one calls this, the next
        pass at the latest.
        """
        if self.active is not None:
            cache, self.active = self.active, None
            _use_attention(self.configs, self.saved)
            cache.end(is_complete)

    def identity(self, rotary: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of the rotary modules: no rotation while a pass with our cache runs."""
        if self.active is None:
            return output
        cos, sin = output
        return torch.ones_like(cos), torch.zeros_like(sin)


def attach(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` work with a `KVCache`; returns the same model.

    Without our cache the model does exactly what it did before, in training too. Attaching twice
    changes nothing. Two single-token passes find out how each layer rotates its keys.

    Raises: UnsupportedModel, naming the model and the reason.
    """
    if isinstance(getattr(model, NAME, None), Seam):
        return model
    _refuse(model)
    decoder = model.get_decoder() if model.can_generate() else model
    modules = [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not modules:
        raise UnsupportedModel(f"{_name(model)} has no rotary embedding: its positions are not RoPE")
    configs = {id(module.config): module.config for module in model.modules() if _has_config(module)}
    seam = Seam(_probe(model, decoder, modules), list(configs.values()), inspect.signature(decoder.forward))
    seam.handles = [module.register_forward_hook(seam.identity) for module in modules]
    seam.handles.append(decoder.register_forward_pre_hook(seam.before, with_kwargs=True))
    seam.handles.append(decoder.register_forward_hook(seam.after, with_kwargs=True, always_call=True))
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            setattr(module, NAME, seam)
    setattr(model, NAME, seam)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`; returns the same model. Its caches can no longer be used with it."""
    for handle in seam_of(model).handles:
        handle.remove()
    for module in model.modules():
        if isinstance(getattr(module, NAME, None), Seam):
            delattr(module, NAME)
    return model


def seam_of(model: PreTrainedModel) -> Seam:
    """What `attach` left on the model. Raises: UsageError when it is not attached."""
    seam = getattr(model, NAME, None)
    if not isinstance(seam, Seam):
        raise UsageError(f"{_name(model)} is not attached to windlass; call windlass.attach(model) first")
    return seam


def forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, cache: TransformersCache, columns: list[int]
) -> Tensor:
    """One pass; returns (batch, len(columns), vocabulary) logits of these columns and computes no others.

    Without columns the vocabulary is left out altogether, and hidden states come back. A pass that
    is interrupted leaves the cache as it was.
    """
    out: Tensor
    try:
        if columns:
            wanted = torch.tensor(columns, device=ids.device)
            out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=wanted).logits
        else:
            decoder = model.get_decoder()
            out = decoder(input_ids=ids, attention_mask=mask, past_key_values=cache).last_hidden_state
    except BaseException:
        seam_of(model).finish(is_complete=False)
        raise
    return out


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers; `kwargs` are other functions' options."""
    seam = getattr(module, NAME)
    assert isinstance(seam, Seam) and seam.active is not None, "windlass attention outside of a pass with its cache"
    layer = module.layer_idx
    assert isinstance(layer, int)
    rotary = seam.rotaries[layer]
    if rotary is not None:
        pairs = rotary.pairs
        query, key = rotary.layout.to_halves(query, pairs), rotary.layout.to_halves(key, pairs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.no_grad():
        out = seam.active.attend(layer, query, key, value, AttentionCall(scale, sliding_window, softcap, s_aux))
    return out.transpose(1, 2), None


def _no_mask(*args: object, **kwargs: object) -> None:
    """The mask function registered with transformers: visibility is decided by position, by the cache."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def _real_columns(mask: Any, cache: TransformersCache, tokens: int) -> Tensor | None:
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
    reason = None
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder: its cross-attention has no text positions"
    elif getattr(config, "kv_lora_rank", None):
        reason = "uses multi-head latent attention (MLA): its keys are part rotated, part compressed"
    elif any("mrope_section" in scheme for scheme in schemes):
        reason = "uses multi-dimensional positions (M-RoPE): a token has no single place in the text"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "does not let its attention function be chosen"
    if reason is not None:
        raise UnsupportedModel(f"{_name(model)} {reason}")


class _ProbeCache(DynamicCache):
    """Remembers the keys that each layer hands over."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen[layer_idx] = key_states.float()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def _probe(model: PreTrainedModel, decoder: nn.Module, modules: list[nn.Module]) -> list[Rotary | None]:
    """How each layer rotates: found by comparing its keys with and without, never by its name.

    One token alone attends to itself whatever its rotation, so both passes see the same hidden
    states in every layer.
    """
    calls: list[tuple[nn.Module, str | None, Tensor, Tensor]] = []

    def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise UnsupportedModel(f"{_name(model)}: its rotary module does not return (cos, sin)")
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        cos, sin = output
        calls.append((module, layer_type, cos.float(), sin.float()))
        scale = torch.sqrt(cos.square() + sin.square())
        return (scale, torch.zeros_like(sin)) if is_identity else None

    config = model.config.get_text_config()
    embeds = torch.randn(
        1, 1, decoder.get_input_embeddings().weight.shape[-1], generator=torch.Generator().manual_seed(0)
    ).to(model.device, model.dtype)
    at = torch.full((1, 1), PROBE_POSITION, device=model.device)
    handles = [module.register_forward_hook(listen, with_kwargs=True) for module in modules]
    keys = []
    try:
        with _eval_mode(model):
            for is_identity in (False, True):
                calls.clear()
                cache = _ProbeCache()
                decoder(inputs_embeds=embeds, position_ids=at, past_key_values=cache, use_cache=True)
                keys.append(cache.seen)
    finally:
        for handle in handles:
            handle.remove()
    rotated, plain = keys
    missing = set(range(config.num_hidden_layers)) - set(rotated)
    if missing:
        raise UnsupportedModel(f"{_name(model)}: layers {sorted(missing)} keep no keys and values of their own")
    found: dict[tuple[int, str | None, str], Rotary] = {}
    return [_rotary_of(model, calls, rotated[i], plain[i], found) for i in range(config.num_hidden_layers)]


def _rotary_of(
    model: PreTrainedModel,
    calls: list[tuple[nn.Module, str | None, Tensor, Tensor]],
    rotated: Tensor,
    plain: Tensor,
    found: dict[tuple[int, str | None, str], Rotary],
) -> Rotary | None:
    """The module and layout that turn `plain` into `rotated`, or None when they are equal."""
    tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2

    def is_close(candidate: Tensor) -> bool:
        return bool((candidate - rotated).norm() <= tolerance * rotated.norm())

    for module, layer_type, cos, sin in calls:
        scale = torch.sqrt(cos.square() + sin.square())  # already in `plain`
        for layout in LAYOUTS:
            turn = layout.columns(cos / scale), layout.columns(sin / scale)
            pairs = turn[0].shape[-1]
            if 2 * pairs <= plain.shape[-1] and is_close(_turned(plain, turn, layout, pairs)):
                key = (id(module), layer_type, layout.name)
                return found.setdefault(key, Rotary(module, layer_type, layout, pairs))
    if is_close(plain):
        return None
    raise UnsupportedModel(f"{_name(model)}: its keys are not turned by RoPE in any layout that windlass knows")


def _turned(plain: Tensor, turn: tuple[Tensor, Tensor], layout: Layout, pairs: int) -> Tensor:
    cos, sin = turn
    return layout.from_halves(rotate(layout.to_halves(plain, pairs), cos[:, None], sin[:, None]), pairs)


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; every module's own mode is put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


def _use_attention(configs: list[PreTrainedConfig], names: list[str | None]) -> None:
    for config, name in zip(configs, names, strict=True):
        config._attn_implementation_internal = name


def _has_config(module: nn.Module) -> bool:
    return isinstance(getattr(module, "config", None), PreTrainedConfig)


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
