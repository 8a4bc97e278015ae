"""A token through all decoder layers in one call of a kernel, where a decoder is nothing but known layers in a row.

What is done for each layer in Python is then done for all of them before the call and after it, while the CPU's caches
hold it, and not between two layers, whose weights push it out.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn

from windlass import kernels
from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError
from windlass.core.step import AttentionCall
from windlass.hf.axes import Turn, turn_of
from windlass.hf.indexer import Indexer
from windlass.hf.known_code import Method, has_code_of
from windlass.hf.latent import Latent
from windlass.hf.linear_layer import LayerKinds
from windlass.hf.mask import Mask
from windlass.hf.query_scale import QueryScale
from windlass.parallel.heads import RankHeads
from windlass.positions.rotary import Rotary

if TYPE_CHECKING:
    from windlass.kernels.cpu.decoder_layer import FewTokens

# Whose layers are given what the layer before returned, and all the same mask where they are of one type.
DECODERS: Final[tuple[Method, ...]] = tuple(
    (family, f"{family.capitalize()}Model", "forward") for family in ("llama", "mistral", "qwen2", "qwen3")
)


class Attachment(ABC):
    """What is asked of the `AttachedModel`."""

    attended: set[int]
    heads: RankHeads | None
    kinds: LayerKinds
    rotaries: list[Rotary | None]
    query_scales: dict[int, QueryScale]
    latents: dict[nn.Module, Latent]
    indexers: list[Indexer]

    @abstractmethod
    def call(self, layer: int, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None) -> AttentionCall:
        """What a layer is asked for under this mask."""


class KnownLayer(ABC):
    """A decoder layer whose code is known: `module`, with an attention module that scales its scores by `scale`."""

    module: nn.Module

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether nothing is called beside the layer, or in its place."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """Of its attention."""

    @property
    @abstractmethod
    def attachment(self) -> Attachment:
        """What `attach` left on the model."""

    @abstractmethod
    def kernel_of(self, hidden: Tensor) -> "FewTokens | None":
        """That which was prepared for the pass; None where there is none."""


@final
class WholeDecoder:
    """All layers of a decoder, when the first one is called in a pass of one token per row.

    The others then return what they are given, which is what the last one would.
    """

    def __init__(self, decoder: nn.Module, layers: Sequence[KnownLayer]) -> None:
        self.decoder, self._layers = decoder, layers
        self._is_known = any(has_code_of(decoder, each) for each in DECODERS)
        self._done: tuple[object, Tensor, object] | None = None  # a pass's step, what the layers gave, their mask

    def result(self, layer: KnownLayer, hidden: Tensor, cache: TextCache, mask: object) -> Tensor | None:
        """What a layer returns in this way; None where it is to be called by itself.

        Raises: UsageError where the layers turn out to be called in another order than the decoder's code says.
        """
        step = cache.text.pending
        if self._done is not None and self._done[0] is step:
            if layer is self._layers[0] or hidden is not self._done[1] or mask is not self._done[2]:
                raise UsageError(
                    "decoder layers were called in another order, or with other masks, than their model's code says"
                )
            return hidden
        self._done = None
        if layer is not self._layers[0] or step is None or not step.is_token or turn_of(cache) is not Turn.NONE:
            return None
        if not self._can_be_whole():
            return None
        out = self._decoded(hidden, cache, mask)
        self._done = None if out is None else (step, out, mask)
        return out

    def _can_be_whole(self) -> bool:
        """Whether the decoder calls just these layers, one after the other, and nothing else is called beside them."""
        decoder: Any = self.decoder
        count = decoder.config.num_hidden_layers if self._is_known else 0
        if count != len(self._layers) or len(set(getattr(decoder.config, "layer_types", None) or [None])) > 1:
            return False
        each = zip(decoder.layers[:count], self._layers, strict=True)
        return all(layer.is_alone and layer.module is module for module, layer in each)

    def _decoded(self, hidden: Tensor, cache: TextCache, mask: object) -> Tensor | None:
        """What the last layer returns; None, and nothing has happened, where a layer takes more than a kernel."""
        attachment = self._layers[0].attachment
        if not isinstance(mask, Mask) or not _is_simple(attachment):
            return None
        plans, layers = [], []
        for number, layer in enumerate(self._layers):
            kernel = layer.kernel_of(hidden)
            if kernel is None:
                return None
            states = kernel.states(hidden)
            plan = cache.planned(number, *states, attachment.call(number, mask, layer.scale, None, None))
            if plan is None:
                return None
            plans.append(plan)
            layers.append(kernel.planned(states, plan.prepared.kernel, plan.planned, torch.empty_like(hidden)))
        attachment.attended.update(range(len(plans)))
        kernels.decode_layers(layers, hidden)
        for number, plan in enumerate(plans):
            cache.keep_decoded(number, plan)
        return layers[-1].result


def _is_simple(attachment: Attachment) -> bool:
    """Whether layers hand our attention nothing but queries, keys and values as a cache takes them, each its own."""
    rotaries = [rotary for rotary in attachment.rotaries if rotary is not None]
    is_plain = all(each.norm_weights is None and not each.layout.is_interleaved for each in rotaries)
    kinds = attachment.kinds
    has_more = kinds.sources or kinds.is_recurrent or attachment.latents or attachment.indexers
    return is_plain and not has_more and not attachment.query_scales
