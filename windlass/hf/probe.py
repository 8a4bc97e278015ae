"""What a model hands to its rotary modules, its cache and its attention, found by running it with one token.

One token alone attends to itself, so its attention is its value, whatever its position, rotation and
mask. Two passes of one token therefore see the same hidden states in every layer, with and without
rotation, and their keys tell how each layer rotates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.hf.axes import axes_of
from windlass.hf.indexed_layers import SeenPicks
from windlass.hf.late_norms import NormOutputs
from windlass.hf.latent import Latent
from windlass.hf.linear_layer import LayerKinds
from windlass.hf.mask import Mask
from windlass.hf.placement import device_of_inputs
from windlass.hf.token_ids import ordinary_ids
from windlass.positions.norm_weights import NormWeights
from windlass.positions.tables import cos_sin, unturned

NEAR: Final = 7  # small enough for any trained length, large enough to tell two rotary bases apart
FAR: Final = 4095  # where the config does not tell the trained length
OWN_ATTENTION: Final = "does not let its attention function be chosen"
# Attention modules that repeat keys and values after the cache gave them back. Ours stores them repeated.
REPEATS: Final = frozenset({"JetMoeAttention"})


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module: the layer type that it was called for, and the cos and sin that it returned.

    `axes` is how many the positions had that it was given; 0 where one.
    """

    module: nn.Module
    layer_type: str | None
    cos: Tensor
    sin: Tensor
    axes: int = 0


class Probe:
    """One pass of one token, and the queries, keys and rotary calls seen in it.

    `AttachedModel` calls it in place of rotation and attention, and `ProbeCache` in place of a cache.
    """

    def __init__(self, is_identity: bool, columns_seen: int = 0) -> None:
        self._is_identity, self._columns_seen = is_identity, columns_seen
        self.asked_lengths: set[int] = set()  # layers that asked the cache how many columns it has seen
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self.rotary_calls: list[RotaryCall] = []
        self.modules: dict[int, nn.Module] = {}
        self.numbers: dict[nn.Module, int] = {}  # layers of modules that are told theirs in a pass, and know none
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.norm_outputs = NormOutputs()
        self.norm_weights: dict[int, NormWeights | None] = {}  # of norms that gave the very queries and keys
        self.windows: dict[int, int | None] = {}
        self.latents: dict[int, int] = {}  # channels of each layer's latents, where it has them
        self.sources: dict[int, int] = {}  # of a layer that attends to the keys and values of another, that layer
        self.chunks: dict[int, int | None] = {}
        self.picks = SeenPicks()
        self.axes = 0  # of positions, where these have several

    def rotary_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call of a rotary module; returns what the model gets from it.

        `args` and `kwargs` are the module's own, which differ from model to model.
        """
        axes = axes_of(args, kwargs)
        self.axes = max(self.axes, axes)
        cos, sin = (table[0] if table.ndim == 4 else table for table in cos_sin(output))  # alike on all axes, if any
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        self.rotary_calls.append(RotaryCall(module, layer_type, cos.float().cpu(), sin.float().cpu(), axes))
        return unturned(output) if self._is_identity else output

    def columns_seen(self, layer: int) -> int:
        """What a layer is told of the columns that its cache has seen."""
        self.asked_lengths.add(layer)
        return self._columns_seen

    def update(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note what a layer wrote to the cache."""
        if layer in self._written:
            raise UnsupportedModel(f"writes keys and values of layer {layer} to the cache more than once in a pass")
        self._written[layer] = keys, values

    def attention(
        self,
        module: nn.Module,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: object,
        latent: Latent | None,
    ) -> Tensor:
        """Note a layer's queries and keys; returns what one token alone reads."""
        if not isinstance(mask, Mask):
            raise UnsupportedModel("makes its own attention mask")
        is_sliding = mask.is_sliding_window()
        is_chunked = not is_sliding and mask.is_chunked()
        if not is_sliding and not is_chunked:
            raise UnsupportedModel(
                f"masks attention in layer {layer} by more than causality and a sliding window or chunk"
            )
        written_as = next((number for number, (key, _) in self._written.items() if key is keys), layer)
        if layer < 0:
            layer = self.numbers.setdefault(module, written_as)
        if layer in self.modules:
            raise UnsupportedModel(f"calls attention more than once in layer {layer}: a cache writes at each call")
        self.windows[layer], self.chunks[layer] = (None, mask.window) if is_chunked else (mask.window, None)
        if written_as in self.keys and layer not in self._written:
            self._note_source(layer, written_as, values)
        elif written_as != layer:
            raise UnsupportedModel(f"writes the keys of layer {layer} to the cache as those of layer {written_as}")
        held = keys
        if latent is not None and layer in self._written:
            held = latent.check(*self._written[layer], keys, values)
            self.latents[layer] = latent.rank
        elif layer in self._written and type(module).__name__ not in REPEATS:
            written_keys, written_values = self._written[layer]
            if keys is not written_keys or values is not written_values:
                raise UnsupportedModel(f"changes keys or values in layer {layer} between the cache and attention")
        self.modules[layer] = module
        if layer not in self.sources:
            self.norm_weights[layer] = self.norm_outputs.weights(queries, keys)
            self.queries[layer], self.keys[layer] = queries.float().cpu(), held.float().cpu()
        return values.repeat_interleave(queries.shape[1] // values.shape[1], 1).transpose(1, 2)

    def _note_source(self, layer: int, source: int, values: Tensor) -> None:
        """Note a layer that attends to the keys which `source` wrote, and attended to before."""
        if values is not self._written[source][1]:
            raise UnsupportedModel(f"attends in layer {layer} to the keys of layer {source}, and to other values")
        if self.windows[layer] != self.windows[source]:
            raise UnsupportedModel(
                f"attends in layer {layer} to the keys and values of layer {source} through a sliding window of "
                f"{self.windows[layer]}, and layer {source} keeps them for one of {self.windows[source]}"
            )
        if self.chunks[layer] != self.chunks[source]:
            raise UnsupportedModel(f"attends in layer {layer} to keys of layer {source}, in other chunks of the text")
        self.sources[layer] = source

    @contextmanager
    def own_attention_is_named(self, model: PreTrainedModel) -> Iterator[None]:
        """Raises: UnsupportedModel, in place of the error of attention code that can make nothing of our mask."""
        try:
            yield
        except UnsupportedModel:
            raise
        except Exception as error:
            if self.keys or getattr(model, "_supports_attention_backend", False):
                raise
            raise UnsupportedModel(OWN_ATTENTION) from error

    def check_layers(self, kinds: LayerKinds) -> None:
        """Return if each layer that attends wrote to the cache. Raises: UnsupportedModel, naming the others."""
        if not self.keys:
            raise UnsupportedModel(OWN_ATTENTION)
        ours, expected = self._written.keys() & self.keys.keys(), set(kinds.attention) - self.sources.keys()
        if missing := sorted(expected - ours):
            raise UnsupportedModel(f"has layers without attention keys and values of their own: {missing}")
        if further := sorted((self._written.keys() | self.keys.keys()) - expected):
            raise UnsupportedModel(
                f"writes or attends in layers {further}, but its config has attention in {sorted(expected)}"
            )


class ProbeCache(DynamicCache):
    """Tells a probe what each layer passes to the cache."""

    def __init__(self, probe: Probe, config: PreTrainedConfig, kinds: LayerKinds) -> None:
        super().__init__(config=config if kinds.is_recurrent else None)
        self._probe = probe

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        # The rest is options of the model's own, as any transformers cache must take.
        self._probe.update(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return super().get_seq_length() if layer_idx is None else self._probe.columns_seen(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """What masks are made by, which is no layer's own question."""
        return super().get_seq_length()


@torch.no_grad()
def run(probe: Probe, model: PreTrainedModel, decoder: nn.Module, kinds: LayerKinds) -> Probe:
    """Feed one token near the start of a text and, as another row, at the end of the trained length.

    It is the same every time. The model must hand its rotation and attention to `probe`.
    """
    config = model.config.get_text_config()
    at = probed_positions(model)
    ids = ordinary_ids(model, 1).expand(2, 1)
    norms = probe.norm_outputs.noted(list(decoder.modules()))
    with eval_mode(model), probe.own_attention_is_named(model), norms:
        decoder(input_ids=ids, position_ids=at, past_key_values=ProbeCache(probe, config, kinds), use_cache=True)
    probe.check_layers(kinds)
    return probe


def probed_positions(model: PreTrainedModel) -> Tensor:
    """(rows, 1): where the tokens of a probe stand."""
    end = getattr(model.config.get_text_config(), "max_position_embeddings", None) or FAR + 1
    return torch.tensor([[NEAR], [max(end - 1, NEAR + 1)]], device=device_of_inputs(model))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; every module's own mode is put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
