"""The part of a model that a cache belongs to: the decoder, and the module that makes its attention masks."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.hf.linear_layer import layer_kinds
from windlass.hf.own_configs import OwnConfigs
from windlass.hf.probe import eval_mode
from windlass.hf.token_ids import ordinary_ids

ROTARY: Final = "RotaryEmbedding"  # how the names of rotary modules end


@dataclass(frozen=True)
class Decoder:
    """`inner` rotates and attends. A pass with a cache is one of `outer`.

    They are the same module, or `outer` calls `inner` with the masks that it made. `first_position` is what it calls
    the position of a text's first token.
    """

    inner: nn.Module
    outer: nn.Module
    first_position: int = 0

    @property
    def rotary_modules(self) -> list[nn.Module]:
        return [module for module in self.inner.modules() if type(module).__name__.endswith(ROTARY)]

    @property
    def attention_modules(self) -> list[nn.Module]:
        return [module for module in self.inner.modules() if isinstance(getattr(module, "layer_idx", None), int)]

    @property
    def modules(self) -> list[nn.Module]:
        """Those of `inner`, and those around it up to `outer`. Towers for pictures or sound are not among them."""
        path = next(name for name, module in self.outer.named_modules() if module is self.inner).split(".")
        around = [self.outer.get_submodule(".".join(path[:end])) for end in range(len(path))]
        return [*dict.fromkeys((*around, *self.inner.modules()))]


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The decoder of a model; with the base model around it, where that makes the decoder's masks.

    Raises: UnsupportedModel for one that has no positions of its own, in rotation or in recurrent layers.
    """
    inner = _without_head(model.get_decoder()) if model.can_generate() else model
    if not Decoder(inner, inner).rotary_modules and not layer_kinds(model).is_recurrent:
        raise UnsupportedModel("has no rotary module: its positions are not RoPE, or built in")
    base = model.base_model
    if base is inner or all(module is not inner for module in base.modules()):
        return Decoder(inner, inner)
    given = _given_to(inner, model)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return Decoder(inner, inner)
    return Decoder(inner, base, int(positions[0, 0]) if isinstance(positions, Tensor) and positions.ndim == 2 else 0)


def _without_head(decoder: PreTrainedModel) -> PreTrainedModel:
    """Of a decoder that gives logits, the one model inside, which gives hidden states."""
    inner = [each for each in decoder.children() if isinstance(each, PreTrainedModel)]
    return inner[0] if len(inner) == 1 and decoder.get_output_embeddings() is not None else decoder


class _Reached(Exception):  # no error: it ends a pass of which nothing more is wanted
    """The decoder was called."""


@torch.no_grad()
def _given_to(decoder: nn.Module, model: PreTrainedModel) -> dict[str, Any]:
    """What `model`, reading one token, hands its decoder by name.

    Nothing where it fails: what runs the model next will tell.
    """
    given: dict[str, Any] = {}

    def note(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        given.update(kwargs)
        raise _Reached

    ids, configs = ordinary_ids(model, 1), OwnConfigs(model.modules())
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.callback(decoder.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(configs.give_back)
        configs.exchange("eager")  # which asks for a matrix in any case
        with suppress(Exception):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return given
