"""How a model rotates its keys, found by running it with one token.

One token alone attends to itself, so its attention is its value, whatever its position, rotation and
mask. Two passes of one token therefore see the same hidden states in every layer, with and without
rotation, and their keys tell how each layer rotates.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.core.rotate import rotate
from windlass.positions.rotary import LAYOUTS, Layout, Rotary

POSITION = 7  # small enough for any trained length, large enough to tell two rotary bases apart


@dataclass(frozen=True)
class Mask:
    """What our mask function hands to our attention function: a rule, not a matrix."""

    window: int | None
    is_seen: Callable[..., Tensor]  # of (batch, head, query, key) indices

    def is_sliding_window(self) -> bool:
        """Whether a query sees the newest `window` keys (None: all) up to its own, and no others."""
        query = 1000 if self.window is None else 2 * self.window
        oldest = 0 if self.window is None else query - self.window + 1
        keys = torch.tensor([max(oldest - 1, 0), oldest, query - 1, query, query + 1])
        zero = torch.tensor(0)
        return torch.equal(self.is_seen(zero, zero, torch.tensor(query), keys), (keys >= oldest) & (keys <= query))


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module: the layer type that it was called for, and the cos and sin that it returned."""

    module: nn.Module
    layer_type: str | None
    cos: Tensor
    sin: Tensor

    @property
    def scale(self) -> Tensor:
        """What the scheme multiplies keys and queries by; it stays when the rotation is left out."""
        return torch.sqrt(self.cos.square() + self.sin.square())


class Probe:
    """One pass of one token, and the keys and rotary calls seen in it.

    `AttachedModel` calls it in place of rotation and attention.
    """

    def __init__(self, is_identity: bool) -> None:
        self._is_identity = is_identity
        self.rotary_calls: list[RotaryCall] = []
        self.keys: dict[int, Tensor] = {}

    def rotary_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call of a rotary module; returns what the model gets from it.

        `args` and `kwargs` are the module's own, which differ from model to model.
        """
        if not (isinstance(output, tuple) and len(output) == 2):
            raise UnsupportedModel("has a rotary module that does not return (cos, sin)")
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        call = RotaryCall(module, layer_type, output[0].float(), output[1].float())
        self.rotary_calls.append(call)
        return (call.scale.to(output[0].dtype), torch.zeros_like(output[1])) if self._is_identity else output

    def attention(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, mask: object) -> Tensor:
        """Note a layer's keys; returns what one token alone reads."""
        if not isinstance(mask, Mask):
            raise UnsupportedModel("makes its own attention mask")
        if not mask.is_sliding_window():
            raise UnsupportedModel(f"masks attention in layer {layer} by more than causality and a sliding window")
        self.keys[layer] = keys.float()
        return values.repeat_interleave(queries.shape[1] // values.shape[1], 1).transpose(1, 2)


class ProbeCache(DynamicCache):
    """Notes which layers pass keys of their own to the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.updated: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # The rest is options of the model's own, as any transformers cache must take.
        self.updated.add(layer_idx)
        return key_states, value_states


@torch.no_grad()
def run(probe: Probe, model: PreTrainedModel, decoder: nn.Module) -> Probe:
    """Feed one token, the same every time. The model must hand its rotation and attention to `probe`."""
    width = decoder.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]  # a transformers decoder
    embeds = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(0)).to(model.device, model.dtype)
    at = torch.full((1, 1), POSITION, device=model.device)
    cache = ProbeCache()
    with _eval_mode(model):
        decoder(inputs_embeds=embeds, position_ids=at, past_key_values=cache, use_cache=True)
    layers = set(range(model.config.get_text_config().num_hidden_layers))
    missing = sorted(layers - (cache.updated & set(probe.keys)))
    if missing:
        raise UnsupportedModel(f"has layers without attention keys and values of their own: {missing}")
    return probe


def rotaries_of(model: PreTrainedModel, rotated: Probe, plain: Probe) -> list[Rotary | None]:
    """How each layer rotates its keys, or None where it does not; layers that do it alike share one."""
    tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2
    found: dict[tuple[int, str | None, str], Rotary] = {}
    rotaries: list[Rotary | None] = []
    for layer in sorted(rotated.keys):
        plain_keys, rotated_keys = plain.keys[layer], rotated.keys[layer]
        rotary = _rotary_of(rotated.rotary_calls, plain_keys, rotated_keys, tolerance, found)
        if rotary is None and not _is_close(plain_keys, rotated_keys, tolerance):
            raise UnsupportedModel(
                f"does not rotate the keys of layer {layer} by RoPE in any layout that windlass knows"
            )
        rotaries.append(rotary)
    return rotaries


def _rotary_of(
    calls: list[RotaryCall],
    plain: Tensor,
    rotated: Tensor,
    tolerance: float,
    found: dict[tuple[int, str | None, str], Rotary],
) -> Rotary | None:
    """The module and layout that rotate `plain` into `rotated`, if any."""
    for call in calls:
        for layout in LAYOUTS:
            cos, sin = layout.columns(call.cos / call.scale), layout.columns(call.sin / call.scale)
            pairs = cos.shape[-1]
            if 2 * pairs <= plain.shape[-1] and _is_close(_rotated(plain, cos, sin, layout), rotated, tolerance):
                key = (id(call.module), call.layer_type, layout.name)
                return found.setdefault(key, Rotary(call.module, call.layer_type, layout, pairs))
    return None


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    pairs = cos.shape[-1]
    return layout.from_halves(rotate(layout.to_halves(keys, pairs), cos[:, None], sin[:, None]), pairs)


def _is_close(states: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((states - expected).norm() <= tolerance * expected.norm())


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
