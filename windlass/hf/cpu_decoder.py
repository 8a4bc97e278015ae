"""Decoder layers of an attached model for passes of few tokens, in compiled kernels where their code is known."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from windlass import kernels
from windlass.cache.cache import TextCache
from windlass.core.inputs import Activation, DecoderLayer, LinearLayer, Norm, Rounding
from windlass.core.ranks import RankHeads
from windlass.core.step import AttentionCall
from windlass.hf.deepseek import Indexer, Latent
from windlass.hf.model_cache import ModelCache
from windlass.hf.model_facts import Method, global_of, has_code_of, ordinary_ids
from windlass.hf.mrope import AxisRotation, turn_of
from windlass.hf.passes import CACHE_NAMES, AttributePatch, NotCopied, WholePass, not_compiled, our_cache
from windlass.hf.probe import QueryScale, eval_mode
from windlass.hf.recurrent import LayerKinds
from windlass.hf.self_check import LayerTrace
from windlass.hf.weights import CodedWeights, FewRows, linears_of, watch_weights
from windlass.kernels.cpu import MANY_ROWS
from windlass.positions.rotary import Rotary

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import FewTokens, Watch

LAYER: Final[Method] = ("llama", "LlamaDecoderLayer", "forward")
MLP: Final[Method] = ("llama", "LlamaMLP", "forward")
# Each passes a window to the attention function in its own way. Ours takes windows from the mask.
ATTENTION: Final[tuple[Method, ...]] = tuple(
    (family, f"{family.capitalize()}Attention", "forward") for family in ("llama", "qwen2", "mistral")
)
NORMED_ATTENTION: Final[Method] = ("qwen3", "Qwen3Attention", "forward")
# How norms round, and the name that they give to epsilon.
NORMS: Final[tuple[tuple[tuple[Method, ...], Rounding, str], ...]] = (
    ((("llama", "LlamaRMSNorm", "forward"),), Rounding.NARROW, "variance_epsilon"),
    ((("gemma", "GemmaRMSNorm", "forward"), ("gemma", "GemmaRMSNorm", "_norm")), Rounding.ONE_MORE, "eps"),
    ((("olmo2", "Olmo2RMSNorm", "forward"),), Rounding.WIDE, "variance_epsilon"),
)


def rounding_of(module: nn.Module) -> tuple[Rounding, float] | None:
    """How a norm rounds, and its epsilon, or None for an unknown norm."""
    for methods, rounding, epsilon in NORMS:
        if has_code_of(module, *methods):
            return rounding, float(getattr(module, epsilon))
    return None


def epsilon_of(module: nn.Module) -> str:
    """The name that a known norm gives to its epsilon."""
    return next(epsilon for methods, _, epsilon in NORMS if has_code_of(module, *methods))


def activation_of(module: nn.Module) -> Activation | None:
    """The activation of a module, or None for an unknown one."""
    kind = type(module)
    if kind is nn.SiLU or kind is type(ACT2FN["silu"]):
        return Activation.SILU
    is_tanh = kind is nn.GELU and getattr(module, "approximate", None) == "tanh"
    return Activation.GELU_TANH if is_tanh or kind is type(ACT2FN["gelu_pytorch_tanh"]) else None


FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
# In these decoders each layer takes the previous layer's output, and all layers of one type share a mask.
DECODERS: Final[tuple[Method, ...]] = tuple((each, f"{each.capitalize()}Model", "forward") for each in FAMILIES)
# These models hand the decoder's output to the head as it is.
HEADED: Final[tuple[Method, ...]] = tuple((each, f"{each.capitalize()}ForCausalLM", "forward") for each in FAMILIES)
GLOBAL_HOOKS: Final = ("_global_forward_hooks", "_global_forward_pre_hooks")  # of all modules


class Attachment(ABC):
    """The part of `AttachedModel` that the decoder uses."""

    attended: set[int]
    heads: RankHeads | None
    kinds: LayerKinds
    rotaries: list[Rotary | None]
    query_scales: dict[int, QueryScale]
    latents: dict[nn.Module, Latent]
    indexers: list[Indexer]

    @abstractmethod
    def text_call(self, layer: int, scale: float) -> AttentionCall:
        """The arguments of a layer's attention in a text, whose masks are causal."""


ROTATION: Final = "apply_rotary_pos_emb"  # name of the rotation in the module that defines a layer
METHODS: Final = ("forward", "_norm")  # methods that a kernel replaces, see `known_code`


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A module inside of a layer: its place, its class, and the replacement of its `forward` at that time."""

    parent: nn.Module
    name: str
    module: nn.Module
    kind: type[nn.Module]
    forward: object

    @classmethod
    def of(cls, parent: nn.Module, name: str) -> LayerPart:
        module = parent.get_submodule(name)
        return cls(parent, name, module, type(module), vars(module).get("forward"))

    @property
    def is_as_found(self) -> bool:
        """Return True if it is still there, and nothing else is called in its place, or beside it."""
        module = self.module
        is_same = self.parent._modules.get(self.name) is module and type(module) is self.kind
        is_same = is_same and vars(module).get("forward") is self.forward
        return is_same and not module._forward_hooks and not module._forward_pre_hooks


def code_of(classes: Sequence[type[nn.Module]]) -> list[object]:
    """The methods of classes as they are now, and the function by which the module of each rotates."""
    methods = [getattr(kind, name, None) for kind in classes for name in METHODS]
    rotations = [getattr(method, "__globals__", {}).get(ROTATION) for method in methods]
    return [*methods, *rotations]


MASK, TABLES = "attention_mask", "position_embeddings"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")


@final
@dataclass(frozen=True, eq=False)
class _Prepared(NotCopied):
    """A kernel, and the weights that it was prepared for: their addresses, number types and modules' numbers."""

    kernel: FewTokens | None
    made_of: list[object]
    dtype: torch.dtype


@final
@dataclass(frozen=True, eq=False)
class _Look(NotCopied):
    """A look at all layers before a pass with such hidden states, and the watch that sees what has changed since."""

    watch: Watch
    dtype: torch.dtype
    device: torch.device

    def holds(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Return True if the layers need no other look."""
        return self.dtype is dtype and self.device == device and self.watch.is_unchanged()


@final
class KnownLayers:
    """All layers of a model that a kernel serves.

    They are looked at together, when the first of them is called in a pass: between two layers the CPU's caches lose
    the data for the look, and it takes several times as long.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder
        self.layers: list[FewTokensLayer] = []
        self._step: object = None  # the pass for which they were prepared
        self._latest: _Look | None = None  # of those after which all layers have kernels
        self._classes: list[type[nn.Module]] = []  # of all modules that they compute
        self._code: list[object] = []
        self.is_proving = False

    def note_code(self) -> None:
        """Note the code that kernels replace: if others replace it later, theirs is called."""
        modules = [self.decoder, *(module for layer in self.layers for module in layer.modules)]
        self._classes = list(dict.fromkeys(map(type, modules)))
        self._code = code_of(self._classes)

    def prove(self, model: PreTrainedModel, cache: ModelCache) -> None:
        """Read a token with an empty cache, in which each layer compares its kernel with its own code.

        A layer in which they differ, as it may under another release of transformers, is left to its own code.
        """
        if not self.layers:
            return
        self.is_proving = True
        try:
            with torch.no_grad(), eval_mode(model):
                ids = ordinary_ids(model, 1)
                model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, past_key_values=cache)
        finally:
            self.is_proving = False

    def prepare(self, step: object, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare all layers for the pass that takes this step, once."""
        if self._step is step:
            return
        if self._latest is None or not self._latest.holds(dtype, device):
            self._latest = self._look(dtype, device)
        self._step = step

    def _look(self, dtype: torch.dtype, device: torch.device) -> _Look | None:
        has_hooks = bool(torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks)
        has_hooks = has_hooks or code_of(self._classes) != self._code
        for layer in self.layers:
            layer.prepare(dtype, device, has_hooks)
        if has_hooks or any(layer.kernel is None for layer in self.layers):
            return None
        watch = kernels.watch()
        self.watch(watch)
        return _Look(watch, dtype, device)

    def watch(self, watch: Watch) -> None:
        """Let `watch` look at all that the prepared kernels were made of."""
        for name in GLOBAL_HOOKS:
            watch.empty(vars(torch_modules), name)
        for kind in self._classes:
            for name in METHODS:
                if (method := getattr(kind, name, None)) is not None:
                    watch.attribute(kind, name, method)
                    if ROTATION in (outside := getattr(method, "__globals__", {})):
                        watch.item(outside, ROTATION, outside[ROTATION])
        for layer in self.layers:
            layer.watch(watch)


@final
class WholeDecoder:
    """A decoder whose layers a pass calls by their kernels, where their code is known: for one token per row in one
    call, for more one layer after the other."""

    def __init__(self, known: KnownLayers, whole: WholePass, attention_name: str) -> None:
        self._known, self._whole, self._name = known, whole, attention_name
        self.decoder: Any = known.decoder
        self._is_known = any(has_code_of(known.decoder, each) for each in DECODERS)
        self._watch: Watch | None = None
        self._kernels: list[FewTokens] | None = None  # of all layers, as long as the watch sees no change
        self._like: tuple[int, torch.dtype, torch.device]  # sizes and kind of hidden states, once there are kernels
        self._callers: Watch | None = None  # the model around the decoder, while it does nothing else

    def __deepcopy__(self, memo: dict[int, object]) -> WholeDecoder:
        """The decoder of the copied model, whose weights are elsewhere."""
        twin = WholeDecoder(copy.deepcopy(self._known, memo), copy.deepcopy(self._whole, memo), self._name)
        memo[id(self)] = twin
        return twin

    def __reduce__(self) -> tuple[type[WholeDecoder], tuple[KnownLayers, WholePass, str]]:
        """Nothing is prepared for a decoder out of a file."""
        return WholeDecoder, (self._known, self._whole, self._name)

    def is_all_of(self, model: nn.Module, replaced: AttributePatch) -> bool:
        """Return True if a model does nothing but call this decoder, and then its head, in a pass without a mask.

        `replaced`: the `forward` that `attach` gave the decoder.
        """
        if self._callers is None or not self._callers.is_unchanged():
            self._callers = self._watched_callers(model, replaced)
        return self._callers is not None

    def _watched_callers(self, model: nn.Module, replaced: AttributePatch) -> Watch | None:
        kind, decoder = type(model), self.decoder
        is_own = any(has_code_of(model, each) for each in HEADED) and kind.__call__ is nn.Module.__call__
        is_own = is_own and kernels.can_watch() and replaced.is_there and self._whole.replaced.is_there
        is_own = is_own and model._modules.get("model") is decoder
        is_own = is_own and not any(getattr(torch_modules, name) for name in GLOBAL_HOOKS)
        parts = model, decoder
        if not is_own or any(each._compiled_call_impl is not None or _has_hooks(each) for each in parts):
            return None
        watch = kernels.watch()
        for name in GLOBAL_HOOKS:
            watch.empty(vars(torch_modules), name)
        for name in ("forward", "__call__"):
            watch.attribute(kind, name, getattr(kind, name))
        watch.item(model._modules, "model", decoder)
        for each in parts:
            watch.type(each, type(each))
            _watch_forward(watch, each)
            watch.no_item(vars(each), "_compiled_call_impl")
        return watch

    @not_compiled
    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The last hidden states of the decoder. None, and no effect, where its own code is to be called."""
        cache = our_cache(kwargs)
        if not self._is_known or args or cache is None or not self._is_served(cache, kwargs):
            return None
        kernels_of_all = self._all_kernels(cache)
        if kernels_of_all is None:
            return None
        hidden = kwargs.get(EMBEDS)
        if hidden is None:
            weight = self.decoder.embed_tokens.weight
            is_coded = isinstance(weight, CodedWeights)
            hidden = weight.rows(kwargs[IDS]) if is_coded else self.decoder.embed_tokens(kwargs[IDS])
        if not self._reads(hidden, cache.batch_size):
            return None
        if (fused := cache.fused_decode(kernels_of_all, hidden, self._calls)) is not None:
            hidden = cache.decode(fused, hidden)
        else:
            for number, call in enumerate(self._calls()):
                layer, kernel = self._known.layers[number], kernels_of_all[number]
                attended = cache.attend(number, *layer.before(kernel, hidden), call)
                hidden = layer.after(kernel, hidden, attended.transpose(1, 2).contiguous())
        out: Tensor = self.decoder.norm(hidden)
        return out

    def _reads(self, hidden: Any, batch: int) -> bool:
        """Return True if the kernels read these hidden states, which are to be like the embedding's."""
        width, dtype, device = self._like
        is_like = type(hidden) is Tensor and hidden.ndim == 3 and hidden.shape[::2] == (batch, width)
        return is_like and hidden.is_contiguous() and hidden.dtype is dtype and hidden.device == device

    def as_output(self, hidden: Tensor, cache: TextCache) -> BaseModelOutputWithPast:
        """The output of the decoder with these hidden states."""
        given: dict[str, Any] = {"last_hidden_state": hidden, self._cache_name: cache}
        return BaseModelOutputWithPast(**given)

    def prove(self, model: PreTrainedModel, cache: ModelCache) -> None:
        """See `KnownLayers.prove`."""
        self._known.prove(model, cache)

    @cached_property
    def _cache_name(self) -> str:
        """The name that this release of transformers gives to the cache in an output."""
        return next(name for name in CACHE_NAMES if name in BaseModelOutputWithPast.__annotations__)

    def _is_served(self, cache: TextCache, kwargs: dict[str, Any]) -> bool:
        """True if the decoder returns hidden states in a pass, and nothing else."""
        step = cache.text.pending
        if step is None or step.is_captured or turn_of(cache) is not AxisRotation.NONE or self._known.is_proving:
            return False
        if not self._whole.is_served or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        if self.decoder.training or (kwargs.get(IDS) is None) is (kwargs.get(EMBEDS) is None):
            return False
        others = [(name, value) for name, value in kwargs.items() if name not in READ and value is not None]
        return all(name in PLAIN and value is PLAIN[name] for name, value in others)

    def _all_kernels(self, cache: TextCache) -> list[FewTokens] | None:
        """The kernels of all layers. None where a layer lacks one, or where hooks are called beside them."""
        if self._watch is not None and self._watch.is_unchanged():
            return self._kernels
        self._watch, self._kernels = None, None
        embedding = self.decoder.embed_tokens
        if not kernels.has_linear(embedding.weight.device.type):
            return None
        self._known.prepare(cache.text.pending, embedding.weight.dtype, embedding.weight.device)
        known = [kernel for layer in self._known.layers if (kernel := layer.kernel) is not None]
        if len(known) == len(self._known.layers) and self._calls_just_these():
            self._kernels = known
            self._like = embedding.embedding_dim, embedding.weight.dtype, embedding.weight.device
        self._watch = kernels.watch()
        self._known.watch(self._watch)
        self._watch_decoder(self._watch)
        return self._kernels

    def _calls_just_these(self) -> bool:
        """True if the decoder calls just these layers, one after the other, as attention of ours, by its own code."""
        decoder, layers = self.decoder, self._known.layers
        config = decoder.config
        if config.output_attentions or config.output_hidden_states or not config.return_dict:
            return False
        if config.num_hidden_layers != len(layers) or len(set(getattr(config, "layer_types", None) or [None])) > 1:
            return False
        if type(decoder.embed_tokens) is not nn.Embedding or not layers:
            return False
        pairs = list(zip(decoder.layers, layers, strict=False))
        is_alone = len(pairs) == len(layers) and all(layer.is_alone and layer.module is own for own, layer in pairs)
        return is_alone and _is_simple(layers[0].attachment) and not _is_hooked(decoder.embed_tokens)

    def _watch_decoder(self, watch: Watch) -> None:
        decoder = self.decoder
        for part in ("embed_tokens", "layers", "norm"):
            watch.item(decoder._modules, part, decoder._modules[part])
        for number, layer in decoder.layers._modules.items():
            watch.item(decoder.layers._modules, number, layer)
        _watch_forward(watch, decoder.embed_tokens)
        watch.type(decoder.embed_tokens, type(decoder.embed_tokens))
        config = decoder.config
        watch.item(vars(decoder), "config", config)
        for name in CONFIGURED & vars(config).keys():
            watch.item(vars(config), name, vars(config)[name])
        weights = decoder.embed_tokens._parameters
        watch.item(weights, "weight", weights["weight"])

    def _calls(self) -> list[AttentionCall]:
        """The arguments of the layers' attention: masks of single tokens are those of a text."""
        layers = self._known.layers
        return [layer.attachment.text_call(number, layer.scale) for number, layer in enumerate(layers)]


def _is_simple(attachment: Attachment) -> bool:
    """True if layers hand our attention nothing but queries, keys and values as a cache takes them, each its own."""
    rotaries = [rotary for rotary in attachment.rotaries if rotary is not None]
    is_plain = all(each.norm_weights is None and not each.layout.is_interleaved for each in rotaries)
    kinds = attachment.kinds
    has_more = kinds.sources or kinds.is_recurrent or attachment.latents or attachment.indexers
    return is_plain and not has_more and not attachment.query_scales


IDS, EMBEDS = "input_ids", "inputs_embeds"
# Arguments of a decoder that the cache has read, and arguments without effect.
READ: Final = frozenset({IDS, EMBEDS, "attention_mask", "position_ids", *CACHE_NAMES})
PLAIN: Final = {"use_cache": True, "return_dict": True, "output_attentions": False, "output_hidden_states": False}

# Names in a config of the numbers and flags that the kernels of all layers depend on.
CONFIGURED: Final = frozenset(
    {"num_hidden_layers", "sliding_window", "output_attentions", "_output_attentions"}
    | {"output_hidden_states", "return_dict"}
)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _is_hooked(module: nn.Module) -> bool:
    return _has_hooks(module) or "forward" in vars(module)


def _watch_forward(watch: Watch, module: nn.Module) -> None:
    """Watch that the module is called by its own code, and that no hooks are added beside it."""
    if "forward" in vars(module):
        watch.item(vars(module), "forward", vars(module)["forward"])
    else:
        watch.no_item(vars(module), "forward")
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        if getattr(module, name):
            watch.item(vars(module), name, None)  # it is hooked, and checked again in each pass
        else:
            watch.empty(vars(module), name)


@final
class FewTokensLayer:
    """The forward pass of one decoder layer, by kernels in a pass that is served, else its own.

    Few tokens go through one kernel, many through the linear modules and kernels between them. Its own code runs, too,
    where gradients are wanted, or a module inside is hooked or replaced.
    """

    def __init__(self, module: nn.Module, whole: WholePass, attention_name: str, layers: KnownLayers) -> None:
        self.module, self._whole, self._name, self._all = module, whole, attention_name, layers
        mlp = module.get_submodule("mlp")
        self._attention: Any = module.get_submodule("self_attn")
        names = "input_layernorm", "post_attention_layernorm", "self_attn", "mlp"
        norms = [LayerPart.of(self._attention, name) for name in HEAD_NORMS if name in self._attention._modules]
        self._own, self._linears = (
            [*(LayerPart.of(module, name) for name in names), LayerPart.of(mlp, "act_fn"), *norms],
            [
                *(LayerPart.of(self._attention, name) for name in PROJECTIONS),
                *(LayerPart.of(mlp, name) for name in GATED),
            ],
        )
        self._norms = [*(part.module for part in self._own[:2]), *(part.module for part in norms)]
        self._rotate = global_of(self._attention, ROTATION)
        self._numbers = [(norm, epsilon_of(norm)) for norm in self._norms]
        self._prepared: _Prepared | None = None
        self._is_proved = False  # true once the kernel's output matched that of the layer's own code
        self.replaced = AttributePatch(module, "forward", self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the layer. The arguments are its own."""
        kernel = None if torch.compiler.is_compiling() else self._kernel(args, kwargs)
        if kernel is None:
            return self.replaced.original(*args, **kwargs)
        hidden: Tensor = args[0]
        if self._all.is_proving:
            proof = LayerTrace(self.module, self.replaced.original, kernel)
            out = proof.output(args, kwargs)
            self._is_proved = proof.is_near(hidden, out)
            return out
        if not self._is_proved:
            return self.replaced.original(*args, **kwargs)
        cache = our_cache(kwargs)
        assert cache is not None, "a kernel without a cache"
        attend = ALL_ATTENTION_FUNCTIONS[self._name]
        others = {name: value for name, value in kwargs.items() if name not in (MASK, TABLES, *CACHE_NAMES)}
        queries, keys, values = self.before(kernel, hidden)
        if turn_of(cache) is not AxisRotation.NONE:
            queries, keys = self._rotate(queries, keys, *kwargs[TABLES])
        attended, _ = attend(
            self._attention, queries, keys, values, kwargs.get(MASK), scaling=self._attention.scaling, **others
        )
        return self.after(kernel, hidden, attended)

    def before(self, kernel: FewTokens, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values. With many tokens the products are those of the modules."""
        if kernel.takes(hidden):
            return kernel.before_attention(hidden)
        normed, heads = kernel.norm(0, hidden), (*hidden.shape[:2], -1, kernel.head_dim)
        queries, keys, values = (part.module(normed).view(heads) for part in self._linears[:3])
        if len(self._norms) > 2:
            queries, keys = kernel.norm(2, queries), kernel.norm(3, keys)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def after(self, kernel: FewTokens, hidden: Tensor, attended: Tensor) -> Tensor:
        """The output of the layer."""
        if kernel.takes(hidden):
            return kernel.after_attention(hidden, attended)
        output, gate, up, down = (part.module for part in self._linears[3:])
        middle: Tensor = output(attended.flatten(2)).add_(hidden)
        normed = kernel.norm(1, middle)
        out: Tensor = down(kernel.gate(gate(normed), up(normed))).add_(middle)
        return out

    def _kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FewTokens | None:
        """The kernel of a pass with these arguments, or None where it serves no such pass."""
        if not self._whole.is_served or len(args) != 1 or type(args[0]) is not Tensor:
            return None
        hidden, cache = args[0], our_cache(kwargs)
        if hidden.ndim != 3 or not hidden.numel() or not hidden.is_contiguous():
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden.device.type != "cpu":
            return None
        pending = None if cache is None else cache.text.pending
        if pending is None or pending.is_captured or self._attention.config._attn_implementation != self._name:
            return None
        self._all.prepare(pending, hidden.dtype, hidden.device)
        prepared = self._prepared
        return prepared.kernel if prepared is not None and prepared.dtype is hidden.dtype else None

    @property
    def kernel(self) -> FewTokens | None:
        """The kernel that was prepared for the pass, or None where there is none."""
        return self._prepared.kernel if self._is_proved and self._prepared is not None else None

    @property
    def is_alone(self) -> bool:
        """Return True if nothing is called beside the layer, or in its place."""
        module = self.module
        is_own = vars(module).get("forward") == self.forward
        return is_own and not module._forward_hooks and not module._forward_pre_hooks

    @property
    def attachment(self) -> Attachment:
        """The attachment that `attach` left on the model."""
        found: Attachment = getattr(self._attention, self._name)
        return found

    @property
    def modules(self) -> list[nn.Module]:
        """The layer, and all modules in it that a kernel computes."""
        return [self.module, *(part.module for part in (*self._own, *self._linears))]

    @property
    def scale(self) -> float:
        """Scale of the attention's logits."""
        return float(self._attention.scaling)

    def watch(self, watch: Watch) -> None:
        """Let `watch` look at all that the kernel was made of."""
        _watch_forward(watch, self.module)
        for part in (*self._own, *self._linears):
            watch.item(part.parent._modules, part.name, part.module)
            watch.type(part.module, part.kind)
            _watch_forward(watch, part.module)
        for part in self._linears:
            watch_weights(watch, part.module)
        for norm, name in self._numbers:
            watch.item(norm._parameters, "weight", norm._parameters["weight"])
            watch.address(norm.get_parameter("weight"))
            watch.item(vars(norm), name, vars(norm)[name])
        activation = vars(self._own[4].module)
        if "approximate" in activation:
            watch.item(activation, "approximate", activation["approximate"])
        for name in ("scaling", "head_dim"):
            watch.item(vars(self._attention), name, vars(self._attention)[name])

    def prepare(self, dtype: torch.dtype, device: torch.device, has_hooks: bool) -> None:
        """Look up the weights, and prepare a kernel where they are elsewhere than before.

        `has_hooks`: all modules have, or classes have other code, so that each of them is to be called.
        """
        if has_hooks or not all(part.is_as_found for part in (*self._own, *self._linears)):
            self._prepared = None
            return
        layers = [layer_of(part) for part in self._linears]
        made_of: list[object] = [address for layer in layers if layer is not None for address in layer.addresses]
        made_of += [norm.get_parameter("weight").data_ptr() for norm in self._norms]
        made_of += [getattr(norm, name) for norm, name in self._numbers]
        made_of.append(getattr(self._own[4].module, "approximate", None))
        prepared = self._prepared
        if prepared is None or prepared.made_of != made_of or prepared.dtype is not dtype:
            layer = self._layer([layer for layer in layers if layer is not None])
            kernel = None if layer is None else kernels.decoder_layer_of(layer, dtype, device)
            self._prepared = _Prepared(kernel, made_of, dtype)

    def _layer(self, linears: list[LinearLayer]) -> DecoderLayer | None:
        """The layer as a kernel takes it, or None where a part has changed."""
        activation, norms = activation_of(self._own[4].module), [_norm(each) for each in self._norms]
        first, second, *of_heads = norms
        if len(linears) < len(self._linears) or activation is None or first is None or second is None:
            return None
        query_norm, key_norm = of_heads or (None, None)
        if of_heads and (query_norm is None or key_norm is None):
            return None
        query, key, value, output, gate, up, down = linears
        return DecoderLayer(
            first_norm=first,
            query=query,
            key=key,
            value=value,
            query_norm=query_norm,
            key_norm=key_norm,
            output=output,
            second_norm=second,
            gate=gate,
            up=up,
            down=down,
            activation=activation,
            head_dim=self._attention.head_dim,
        )


@final
class FewRowsNorm:
    """The forward pass of a decoder's last norm: our kernel's for few tokens of a pass that is served, else its own."""

    def __init__(self, module: nn.Module, whole: WholePass) -> None:
        self._module, self._whole = module, whole
        self._code = [getattr(type(module), name, None) for name in METHODS]
        self._epsilon = epsilon_of(module)
        self._rounding = next(rounding for methods, rounding, _ in NORMS if has_code_of(module, *methods))
        self.replaced = AttributePatch(module, "forward", self.forward)

    def forward(self, states: Tensor) -> Tensor:
        """The normed states."""
        if torch.compiler.is_compiling() or not self._is_served(states):
            own: Tensor = self.replaced.original(states)
            return own
        weights: Any = self._module._parameters["weight"]
        return kernels.norm(states, Norm(weights, getattr(self._module, self._epsilon), self._rounding))

    def _is_served(self, states: Tensor) -> bool:
        is_own = self._code == [getattr(type(self._module), name, None) for name in METHODS]
        if not is_own or not self._whole.is_served or type(states) is not Tensor:
            return False
        is_cpu = states.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        return is_cpu and not torch.is_grad_enabled() and 0 < states.shape[:-1].numel() <= MANY_ROWS


def layer_of(part: LayerPart) -> LinearLayer | None:
    """The weights of a linear layer as our kernel takes them, or None where they are of an unknown kind."""
    own = getattr(part.forward, "__self__", None)
    return own.layer() if isinstance(own, FewRows) else None


def _norm(module: nn.Module) -> Norm | None:
    found = rounding_of(module)
    return None if found is None else Norm(module.get_parameter("weight"), found[1], found[0])


def _is_known(module: nn.Module) -> bool:
    """Return True if the kernel has the arithmetic of a module."""
    if not has_code_of(module, LAYER):
        return False
    parts = module._modules
    attention, mlp = parts.get("self_attn"), parts.get("mlp")
    if attention is None or mlp is None or not has_code_of(mlp, MLP):
        return False
    norms = [parts.get("input_layernorm"), parts.get("post_attention_layernorm")]
    if has_code_of(attention, NORMED_ATTENTION):
        norms += [attention._modules.get(name) for name in HEAD_NORMS]
    elif not any(has_code_of(attention, each) for each in ATTENTION):
        return False
    if any(norm is None or rounding_of(norm) is None for norm in norms):
        return False
    linears = [*(attention._modules.get(name) for name in PROJECTIONS), *(mlp._modules.get(name) for name in GATED)]
    return all(each is not None and isinstance(_own(each), FewRows) for each in linears)


def _own(module: nn.Module) -> object:
    return getattr(vars(module).get("forward"), "__self__", None)


def few_rows_of(
    model: nn.Module, decoder: nn.Module, whole: WholePass, attention_name: str, is_wanted: bool
) -> tuple[WholeDecoder, list[AttributePatch]]:
    """The decoder, and its linear and decoder layers that our kernels serve, each now installed."""
    linears = linears_of(model, whole) if is_wanted else []
    known = [each for each in model.modules() if linears and "forward" not in vars(each) and _is_known(each)]
    layers = KnownLayers(decoder)
    layers.layers += [FewTokensLayer(each, whole, attention_name, layers) for each in known]
    layers.note_code()
    patches = [each.replaced for each in layers.layers]
    last = decoder._modules.get("norm")
    if known and last is not None and "forward" not in vars(last) and rounding_of(last) is not None:
        patches.append(FewRowsNorm(last, whole).replaced)
    return WholeDecoder(layers, whole, attention_name), [*patches, *linears]
