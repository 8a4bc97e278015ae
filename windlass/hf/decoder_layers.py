"""Decoder layers of an attached model, for passes of few tokens: what is beside attention is two calls of a kernel.

In such a pass the weights come from memory, and push out of the CPU's caches whatever runs in between, so that each
small operation of PyTorch costs many times what it does alone.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from windlass import kernels
from windlass.core.decoder_layer import DecoderLayer, Norm
from windlass.core.linear import LinearLayer
from windlass.hf.axes import Turn, turn_of
from windlass.hf.cache_argument import NAMES, our_cache
from windlass.hf.known_code import (
    ATTENTION,
    LAYER,
    MLP,
    NORMED_ATTENTION,
    activation_of,
    epsilon_of,
    global_of,
    has_code_of,
    rounding_of,
)
from windlass.hf.layer_part import ROTATION, LayerPart, code_of
from windlass.hf.layer_proof import Proof
from windlass.hf.linears import FewRows, linears_of
from windlass.hf.model_cache import ModelCache
from windlass.hf.probe import eval_mode
from windlass.hf.replaced import Replaced
from windlass.hf.token_ids import ordinary_ids
from windlass.hf.whole_decoder import Attachment, KnownLayer, WholeDecoder
from windlass.hf.whole_pass import WholePass
from windlass.kernels.cpu import MAX_ROWS

if TYPE_CHECKING:
    from windlass.kernels.cpu.decoder_layer import FewTokens

MASK, TABLES = "attention_mask", "position_embeddings"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = ("gate_proj", "up_proj", "down_proj")
HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A kernel, and what it was prepared for: the addresses and number type of weights, and numbers of the modules."""

    kernel: "FewTokens | None"
    made_of: list[object]
    dtype: torch.dtype

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Nothing is prepared for a copied layer, whose weights are elsewhere."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing is prepared for a layer out of a file."""
        return type(None), ()


@final
class KnownLayers:
    """All layers of a model that a kernel serves.

    They are looked at together, when the first of them is called in a pass: between two layers the CPU's caches lose
    what the look needs, and it takes several times as long.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.layers: list[FewTokensLayer] = []
        self.whole = WholeDecoder(decoder, self.layers)
        self._step: object = None  # of the pass for which they were prepared
        self._classes: list[type[nn.Module]] = []  # of all that they compute
        self._code: list[object] = []
        self.is_proving = False

    def note_code(self) -> None:
        """Note the code whose place kernels take: what others put in its place later is called instead."""
        modules = [self.whole.decoder, *(module for layer in self.layers for module in layer.modules)]
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

    def prepare(self, step: object, hidden: Tensor) -> None:
        """Prepare all layers for the pass that takes this step, once."""
        if self._step is step:
            return
        has_hooks = bool(torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks)
        has_hooks = has_hooks or code_of(self._classes) != self._code
        for layer in self.layers:
            layer.prepare(hidden, has_hooks)
        self._step = step


@final
class FewTokensLayer(KnownLayer):
    """The forward pass of one decoder layer: our kernel's for few tokens of a pass that is served, else its own.

    Its own, too, where gradients are wanted, or a module inside is hooked or replaced.
    """

    def __init__(self, module: nn.Module, whole: WholePass, attention_name: str, layers: "KnownLayers") -> None:
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
        self._is_proved = False  # whether the kernel was seen to give what the layer's own code gives
        self.replaced = Replaced(module, "forward", self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer returns; the arguments are its own."""
        kernel = None if torch.compiler.is_compiling() else self._kernel(args, kwargs)
        if kernel is None:
            return self.replaced.original(*args, **kwargs)
        hidden: Tensor = args[0]
        if self._all.is_proving:
            proof = Proof(self.module, self.replaced.original, kernel)
            out = proof.output(args, kwargs)
            self._is_proved = proof.is_near(hidden, out)
            return out
        if not self._is_proved:
            return self.replaced.original(*args, **kwargs)
        cache = our_cache(kwargs)
        assert cache is not None, "a kernel without a cache"
        if (out := self._all.whole.result(self, hidden, cache, kwargs.get(MASK))) is not None:
            return out
        attend = ALL_ATTENTION_FUNCTIONS[self._name]
        others = {name: value for name, value in kwargs.items() if name not in (MASK, TABLES, *NAMES)}
        queries, keys, values = kernel.before_attention(hidden)
        if turn_of(cache) is not Turn.NONE:
            queries, keys = self._rotate(queries, keys, *kwargs[TABLES])
        attended, _ = attend(
            self._attention, queries, keys, values, kwargs.get(MASK), scaling=self._attention.scaling, **others
        )
        return kernel.after_attention(hidden, attended)

    def _kernel(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "FewTokens | None":
        """The kernel of a pass with these arguments; None where it is none that it serves."""
        if not self._whole.is_served or len(args) != 1 or type(args[0]) is not Tensor:
            return None
        hidden, cache = args[0], our_cache(kwargs)
        if hidden.ndim != 3 or not 0 < hidden.shape[0] * hidden.shape[1] <= MAX_ROWS or not hidden.is_contiguous():
            return None
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden.device.type != "cpu":
            return None
        if cache is None or cache.text.pending is None or cache.text.pending.is_captured:
            return None
        if self._attention.config._attn_implementation != self._name:
            return None
        self._all.prepare(cache.text.pending, hidden)
        prepared = self._prepared
        return None if prepared is None or prepared.dtype is not hidden.dtype else prepared.kernel

    def kernel_of(self, hidden: Tensor) -> "FewTokens | None":
        """That which was prepared for the pass; None where there is none."""
        prepared = self._prepared if self._is_proved else None
        return None if prepared is None or prepared.dtype is not hidden.dtype else prepared.kernel

    @property
    def is_alone(self) -> bool:
        """Whether nothing is called beside the layer, or in its place."""
        module = self.module
        is_own = vars(module).get("forward") == self.forward
        return is_own and not module._forward_hooks and not module._forward_pre_hooks

    @property
    def attachment(self) -> Attachment:
        """What `attach` left on the model."""
        found: Attachment = getattr(self._attention, self._name)
        return found

    @property
    def modules(self) -> list[nn.Module]:
        """The layer, and all modules in it that a kernel computes."""
        return [self.module, *(part.module for part in (*self._own, *self._linears))]

    @property
    def scale(self) -> float:
        """Of its attention."""
        return float(self._attention.scaling)

    def prepare(self, hidden: Tensor, has_hooks: bool) -> None:
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
        if prepared is None or prepared.made_of != made_of or prepared.dtype is not hidden.dtype:
            layer = self._layer([layer for layer in layers if layer is not None])
            kernel = None if layer is None else kernels.decoder_layer_of(layer, hidden)
            self._prepared = _Prepared(kernel, made_of, hidden.dtype)

    def _layer(self, linears: list[LinearLayer]) -> DecoderLayer | None:
        """The layer as a kernel takes it; None where a part is not known any more."""
        activation, norms = activation_of(self._own[4].module), [_norm(each) for each in self._norms]
        first, second, *of_heads = norms
        if len(linears) < len(self._linears) or activation is None or first is None or second is None:
            return None
        query_norm, key_norm = of_heads or (None, None)
        if of_heads and (query_norm is None or key_norm is None):
            return None
        query, key, value, output, gate, up, down = linears
        before = first, query, key, value, query_norm, key_norm
        return DecoderLayer(*before, output, second, gate, up, down, activation, self._attention.head_dim)


def layer_of(part: LayerPart) -> LinearLayer | None:
    """The weights of a linear layer as our kernel takes them; None where they are not of a kind that it knows."""
    own = getattr(part.forward, "__self__", None)
    return own.layer() if isinstance(own, FewRows) else None


def _norm(module: nn.Module) -> Norm | None:
    found = rounding_of(module)
    return None if found is None else Norm(module.get_parameter("weight"), found[1], found[0])


def _is_known(module: nn.Module) -> bool:
    """Whether the kernel computes what a module does."""
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
) -> tuple[KnownLayers, list[Replaced]]:
    """Those of the model's linear layers, and of its decoder layers, that our kernels serve, each now installed."""
    linears = linears_of(model, whole) if is_wanted else []
    known = [each for each in model.modules() if linears and "forward" not in vars(each) and _is_known(each)]
    layers = KnownLayers(decoder)
    layers.layers += [FewTokensLayer(each, whole, attention_name, layers) for each in known]
    layers.note_code()
    return layers, [*(each.replaced for each in layers.layers), *linears]
