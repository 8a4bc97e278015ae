"""Probe a model with one token: the inputs of its rotary modules, its cache and its attention.

One token alone attends to itself, so its attention is its value, whatever its position, rotation and mask. Two passes
of one token therefore see the same hidden states in every layer, with and without rotation, and their keys tell how
each layer rotates.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.hf.deepseek import IndexerObservation, Latent
from windlass.hf.mask import Mask
from windlass.hf.model_facts import device_of_inputs, ordinary_ids
from windlass.hf.mrope import axes_of
from windlass.hf.recurrent import LayerKinds, layer_kinds
from windlass.positions.rotary import NormWeights, cos_sin, unturned, weight_of


class NormOutputs:
    """Outputs of norms in a pass, by their memory, which they hold so that nothing else takes it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[nn.Module, Tensor]] = {}

    @contextmanager
    def noted(self, modules: list[nn.Module]) -> Iterator[None]:
        """Note the outputs of those `modules` whose only parameter is a vector of weights."""
        with ExitStack() as stack:
            for module in modules:
                parameters = dict(module.named_parameters())
                if parameters.keys() == {"weight"} and parameters["weight"].ndim == 1:
                    stack.callback(module.register_forward_hook(self._note).remove)
            yield

    def _note(self, module: nn.Module, _args: object, output: Any) -> None:
        if isinstance(output, Tensor):
            self._found[output.untyped_storage().data_ptr()] = module, output

    def weights(self, queries: Tensor, keys: Tensor) -> NormWeights | None:
        """Weights of the norms that gave these outputs, as they are or transposed.

        None where neither is from a norm of its width.
        """
        norms = [self._norm_of(states) for states in (queries, keys)]
        return None if norms == [None, None] else NormWeights(*norms)

    def _norm_of(self, states: Tensor) -> nn.Module | None:
        norm, output = self._found.get(states.untyped_storage().data_ptr(), (None, states))
        weight = weight_of(norm)
        is_its = weight is not None and output.numel() == states.numel() and len(weight) == states.shape[-1]
        return norm if is_its else None


def check_weights(layer: int, weights: NormWeights) -> None:
    """Return for weights that can be divided by. Raises: UnsupportedModel."""
    for norm in (weights.query_norm, weights.key_norm):
        weight = weight_of(norm)
        if weight is not None and not bool(weight.all()):
            raise UnsupportedModel(
                f"has a norm after RoPE in layer {layer} of which a weight is 0: the channel that it hides is lost, "
                "and can't be rotated again"
            )


NEAR: Final = 7  # small enough for any trained length, large enough to tell two rotary bases apart
FAR: Final = 4095  # if the config has no trained length
OWN_ATTENTION: Final = "does not let its attention function be chosen"
# Attention modules that repeat keys and values after the cache gave them back. Ours stores them repeated.
REPEATS: Final = frozenset({"JetMoeAttention"})


@dataclass(frozen=True)
class RotaryCall:
    """One call of a rotary module: the layer type that it was called for, and the cos and sin that it returned.

    `axes` is the number of axes of its positions, or 0 for plain ones.
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
        self.asked_lengths: set[int] = set()  # layers that asked the cache for the number of columns seen
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self.rotary_calls: list[RotaryCall] = []
        self.modules: dict[int, nn.Module] = {}
        self.numbers: dict[nn.Module, int] = {}  # layers of modules that learn their number in a pass
        self.queries: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.norm_outputs = NormOutputs()
        self.norm_weights: dict[int, NormWeights | None] = {}  # of norms whose outputs were the queries and keys
        self.windows: dict[int, int | None] = {}
        self.latents: dict[int, int] = {}  # channels of each layer's latents, where it has them
        self.sources: dict[int, int] = {}  # of a layer that attends to the keys and values of another, that layer
        self.chunks: dict[int, int | None] = {}
        self.picks = IndexerObservation()
        self.axes = 0  # number of axes of positions

    def rotary_output(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Note a call of a rotary module. Returns the output for the model.

        `args` and `kwargs` are the module's own, which differ from model to model.
        """
        axes = axes_of(args, kwargs)
        self.axes = max(self.axes, axes)
        cos, sin = (table[0] if table.ndim == 4 else table for table in cos_sin(output))  # alike on all axes, if any
        layer_type = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        self.rotary_calls.append(RotaryCall(module, layer_type, cos.float().cpu(), sin.float().cpu(), axes))
        return unturned(output) if self._is_identity else output

    def columns_seen(self, layer: int) -> int:
        """Number of columns seen, as the cache reports it to a layer."""
        self.asked_lengths.add(layer)
        return self._columns_seen

    def update(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note a layer's writes to the cache."""
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
        """Note a layer's queries and keys. Returns the attention of one token alone."""
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
            raise UnsupportedModel(f"writes the keys of layer {layer} to the cache as keys of layer {written_as}")
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
        """Replace errors of attention code that cannot read our mask. Raises: UnsupportedModel in their place."""
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
    """Passes each layer's cache inputs to a probe."""

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
        """Offset of masks, which is not a question of a layer."""
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
    """Disable dropout in a block. Every module's own mode is restored after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training


@final
class OwnConfigs:
    """The configs of some modules, replaced by copies that name another attention."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [each for each in modules if isinstance(vars(each).get("config"), PreTrainedConfig)]
        self._held: list[PreTrainedConfig] | None = None

    def exchange(self, attention: str) -> None:
        """Put copies of the present configs into the modules. They name `attention`."""
        held: list[PreTrainedConfig] = [vars(module)["config"] for module in self._modules]
        copies: dict[int, PreTrainedConfig] = {}
        ours = [_copied(config, attention, copies) for config in held]
        self._held = held
        self._put(ours)

    def give_back(self) -> None:
        """Restore the configs of before `exchange`. It may be called again after an interrupt."""
        if self._held is not None:
            self._put(self._held)
            self._held = None

    @contextmanager
    def exchanged(self, attention: str) -> Iterator[None]:
        """The modules with copies that name `attention`."""
        try:
            self.exchange(attention)
            yield
        finally:
            self.give_back()

    def _put(self, configs: list[PreTrainedConfig]) -> None:
        for module, config in zip(self._modules, configs, strict=True):
            vars(module)["config"] = config


def _copied(config: PreTrainedConfig, attention: str, copies: dict[int, PreTrainedConfig]) -> PreTrainedConfig:
    """A copy that names `attention`, the configs inside it too. Modules that share a config share its copy."""
    if id(config) not in copies:
        ours = copies[id(config)] = copy.copy(config)
        inner = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
        vars(ours).update({name: _copied(part, attention, copies) for name, part in inner.items()})
        ours._attn_implementation_internal = attention
    return copies[id(config)]


ROTARY: Final = "RotaryEmbedding"  # how the names of rotary modules end


def check_finite(states: Tensor, layer: int) -> None:
    """Raises: UnsupportedModel for infinities and NaN, which nothing can be compared with."""
    if not bool(states.isfinite().all()):
        raise UnsupportedModel(
            f"gives infinite numbers or NaN in layer {layer} by itself. Load it in bfloat16 or float32, which hold more"
        )


@dataclass(frozen=True)
class DecoderModules:
    """`inner` rotates and attends. A pass with a cache is one of `outer`.

    They are the same module, or `outer` calls `inner` with the masks that it made. `first_position` is its number for a
    text's first token.
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
        """Modules of `inner`, and those around it up to `outer`, without towers for pictures or sound."""
        path = next(name for name, module in self.outer.named_modules() if module is self.inner).split(".")
        around = [self.outer.get_submodule(".".join(path[:end])) for end in range(len(path))]
        return [*dict.fromkeys((*around, *self.inner.modules()))]


def decoder_of(model: PreTrainedModel) -> DecoderModules:
    """The decoder of a model, and the base model around it where that makes the decoder's masks.

    Raises: UnsupportedModel for one that has no positions of its own, in rotation or in recurrent layers.
    """
    inner = _without_head(model.get_decoder()) if model.can_generate() else model
    if not DecoderModules(inner, inner).rotary_modules and not layer_kinds(model).is_recurrent:
        raise UnsupportedModel("has no rotary module: its positions are not RoPE, or built in")
    base = model.base_model
    if base is inner or all(module is not inner for module in base.modules()):
        return DecoderModules(inner, inner)
    given = _given_to(inner, model)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return DecoderModules(inner, inner)
    return DecoderModules(
        inner, base, int(positions[0, 0]) if isinstance(positions, Tensor) and positions.ndim == 2 else 0
    )


def _without_head(decoder: PreTrainedModel) -> PreTrainedModel:
    """The model inside of a decoder with logits that returns hidden states."""
    inner = [each for each in decoder.children() if isinstance(each, PreTrainedModel)]
    return inner[0] if len(inner) == 1 and decoder.get_output_embeddings() is not None else decoder


class _DecoderCalled(Exception):  # no error: it ends a pass early
    """The decoder was called."""


@torch.no_grad()
def _given_to(decoder: nn.Module, model: PreTrainedModel) -> dict[str, Any]:
    """Named arguments that `model` passes to its decoder when it reads one token.

    Empty where the model fails: the next run of the model gives the error.
    """
    given: dict[str, Any] = {}

    def note(_module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        given.update(kwargs)
        raise _DecoderCalled

    ids, configs = ordinary_ids(model, 1), OwnConfigs(model.modules())
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        stack.callback(decoder.register_forward_pre_hook(note, with_kwargs=True).remove)
        stack.callback(configs.give_back)
        configs.exchange("eager")  # eager attention always asks for a matrix
        with suppress(Exception):
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return given


MANY: Final = 2**20 - 1  # columns: more than any step of a scale is long


@dataclass(frozen=True)
class QueryScale:
    """A factor that grows with the logarithm of the position, in steps of `floor_scale` tokens, as Llama 4 has it."""

    floor_scale: float
    attn_scale: float

    def at(self, positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1) / self.floor_scale)) * self.attn_scale + 1

    def moved(self, queries: Tensor, columns_seen: int, positions: Tensor) -> Tensor:
        """Queries that were scaled by columns, after so many others, as they are at (batch, tokens) `positions`."""
        columns = torch.arange(queries.shape[2], device=queries.device) + columns_seen
        factor = self.at(positions.clamp(min=0)) / self.at(columns)  # 1, to the bit, where they are the same
        return (queries.float() * factor[:, None, :, None]).to(queries.dtype)


def query_scales(probe: Probe, after: Callable[[int], Probe], tolerance: float) -> dict[int, QueryScale]:
    """How layers scale queries by the length that their cache tells, found by `after` many columns.

    Raises: UnsupportedModel for a layer in which more depends on that length than a scale that is known.
    """
    asking = sorted(probe.asked_lengths & probe.queries.keys())
    if not asking:
        return {}
    later = after(MANY)
    scales = {layer: _scale_of(probe.modules[layer]) for layer in asking}
    for layer, scale in scales.items():
        factor = 1.0 if scale is None else float(scale.at(torch.tensor(MANY)) / scale.at(torch.tensor(0)))
        expected = probe.queries[layer] * factor, probe.keys[layer]
        if not all(map(_alike, (later.queries[layer], later.keys[layer]), expected, (tolerance, tolerance))):
            raise UnsupportedModel(
                f"asks in layer {layer} how many columns its cache has seen, and makes of it more than a known scale"
            )
    return {layer: scale for layer, scale in scales.items() if scale is not None}


def _scale_of(module: nn.Module) -> QueryScale | None:
    """The scale of an attention module that has the numbers of one, and uses it."""
    floor_scale, attn_scale = (getattr(module, name, None) for name in ("floor_scale", "attn_scale"))
    is_used = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False)
    if not is_used or not isinstance(floor_scale, (int, float)) or not isinstance(attn_scale, (int, float)):
        return None
    return QueryScale(float(floor_scale), float(attn_scale))


def _alike(states: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((states - expected).norm() <= tolerance * expected.norm())
