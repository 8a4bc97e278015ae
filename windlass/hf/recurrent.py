"""Recurrent layers: which layers of a model keep a state, and that state in transformers' own classes."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from windlass.cache.cache import TextCache
from windlass.cache.recurrent import RecurrentLayer
from windlass.core.errors import UsageError
from windlass.hf.passes import CACHE_NAMES, AttributePatch
from windlass.policies import Policy
from windlass.policies.wrappers import changes_keys, scoring_chunk

# The types in a config's `layer_types` that keep a state, and the types that keep no memory.
RECURRENT: Final = frozenset({"conv", "linear_attention", "hybrid", "hybrid_sliding"})
WITHOUT_MEMORY: Final = frozenset({"moe", "mlp"})
STATE_PREFIX: Final = "states."  # prefix of the names of states in a file
CHECKPOINT_PREFIX: Final = "checkpoints."  # prefix of those in checkpoints
CONV: Final = "conv."  # prefix of the names of such tensors
STATE: Final = "state."


@dataclass(frozen=True)
class LayerKinds:
    """A model's layers with keys and values, by their numbers, and the number and kind of states of the others.

    `sources` has, for each layer that attends to keys and values of another layer, that layer's number. `latents` has
    the number of channels for each layer that attends over latents (MLA), and `indexed` the number of channels of the
    indexer's keys for each layer that reads an indexer's picks.
    """

    attention: tuple[int, ...]
    recurrent: tuple[tuple[int, int, str], ...] = ()  # number, states, kind
    latents: Mapping[int, int] = field(default_factory=dict)
    sources: Mapping[int, int] = field(default_factory=dict)
    indexed: Mapping[int, int] = field(default_factory=dict)

    @property
    def is_recurrent(self) -> bool:
        """Return True if any layer keeps a state."""
        return bool(self.recurrent)

    @property
    def shared(self) -> frozenset[int]:
        """Layers with keys and values that other layers share, counted among those with keys and values."""
        return frozenset(map(self.place, self.sources.values()))

    def place(self, layer: int) -> int:
        """Which of the layers with keys and values has those that `layer` attends to."""
        return self.attention.index(self.sources.get(layer, layer))

    def with_sources(self, sources: Mapping[int, int]) -> "LayerKinds":
        """Once it is known which layers have no keys and values of their own."""
        own = tuple(layer for layer in self.attention if layer not in sources)
        return replace(self, attention=own, sources=dict(sources))


def layer_kinds(model: PreTrainedModel) -> LayerKinds:
    """The kind of each layer of `model`, from its config. Layers attend where it names no kind."""
    config = model.config.get_text_config()
    types = _types(config)
    if not (RECURRENT | WITHOUT_MEMORY) & set(types):
        return LayerKinds(tuple(range(config.num_hidden_layers)))
    layers = DynamicCache(config=config).layers
    states = {
        number: layer
        for number, layer in enumerate(layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin) and types[number] not in WITHOUT_MEMORY
    }
    return LayerKinds(
        tuple(
            number
            for number, layer in enumerate(layers)
            if types[number] not in WITHOUT_MEMORY and (number not in states or types[number].startswith("hybrid"))
        ),
        tuple((number, layer.number_of_states, types[number]) for number, layer in states.items()),
    )


def keeps_states(config: PreTrainedConfig) -> bool:
    """Return True if a config's layer types tell which layers keep a state, so that a cache can be made for them."""
    return bool(RECURRENT & set(_types(config)))


def unknown_types(config: PreTrainedConfig) -> list[str]:
    """The layer types of a config with recurrent layers for which transformers has no cache."""
    known = WITHOUT_MEMORY | DYNAMIC_LAYER_TYPE_MAPPING.keys()
    return sorted({*_types(config)} - known) if keeps_states(config) else []


def _types(config: PreTrainedConfig) -> Sequence[str]:
    return getattr(config, "layer_types", None) or []


def check_policy(kinds: LayerKinds, policy: Policy) -> None:
    """Check that a policy fits these layers.

    Raises: UsageError for one that reads a text twice, where a state would have read it twice, too, and for one that
    was trained with the model, where layers share keys that it would change.
    """
    if kinds.sources and changes_keys(policy):
        layer, source = next(iter(kinds.sources.items()))
        raise UsageError(
            f"{policy!r} changes the keys and queries of every layer, and layer {layer} has no keys but those of layer "
            f"{source}. Take a policy that needs no training, such as key_diff"
        )
    if kinds.is_recurrent and scoring_chunk(policy):
        number, _, kind = kinds.recurrent[0]
        raise UsageError(
            f"{policy!r} reads a text twice, and layer {number} ({kind}) keeps a state that would read it twice, too. "
            "Take a policy that reads it once, such as key_diff"
        )


def state_name(layer: int, name: str) -> str:
    """The name in a file of a layer's state."""
    return f"{STATE_PREFIX}{layer}.{name}"


def checkpoint_name(row: int, tokens: int, state: str) -> str:
    """The name in a file of a state, of which `state` is the name, in a row's checkpoint at so many tokens."""
    return f"{CHECKPOINT_PREFIX}{row}.{tokens}.{state}"


def meta_states(layers: Sequence[RecurrentLayer]) -> dict[str, Tensor]:
    """Their states by the names that a file has for them, without numbers."""
    named = [(layer, *each) for layer in layers for each in layer.tensors().items()]
    return {state_name(layer.index, name): state.to("meta") for layer, name, state in named}


@final
class LinearAttentionCache(RecurrentLayer):
    """A recurrent layer of a model, in transformers' own `LinearAttentionLayer`, which the model's code writes into."""

    def __init__(self, index: int, states: int, kind: str) -> None:
        super().__init__(index)
        self.kind, self._count = kind, states
        self.own = LinearAttentionLayer(number_of_states=states)

    def tensors(self) -> dict[str, Tensor]:
        held = [(CONV, self.own.conv_states), (STATE, self.own.recurrent_states)]
        return {
            f"{name}{number}": state
            for name, states in held
            for number, state in states.items()
            if state is not None and self.own.has_previous_state[number]
        }

    def load(self, states: dict[str, Tensor]) -> None:
        own = LinearAttentionLayer(number_of_states=self._count)
        for name, state in states.items():
            part, _, number = name.partition(".")
            at = int(number)
            own.has_previous_state[at] = True
            own.dtype, own.device = state.dtype, state.device  # type: ignore[assignment]  # None until now
            if part + "." == CONV:
                own.conv_states[at], own.is_conv_states_initialized[at] = state, True
                own.conv_kernel_size[at] = state.shape[-1]
            else:
                own.recurrent_states[at], own.is_recurrent_states_initialized[at] = state, True
        self.own = own


STATES: Final = "hidden_states"
MASK: Final = "attention_mask"
CACHES: Final = frozenset({*CACHE_NAMES, "cache_params"})  # names of a layer's argument for the cache


@final
class Columns:
    """Calls the module of a recurrent layer for some tokens of a pass one after the other: drafts, of which each may be
    the last to stay, and all tokens where the layer `forgets` a state that it has in a pass of several.

    Padding leaves the states of its row as they are.
    """

    def __init__(self, module: nn.Module, cache: Callable[[], TextCache | None], forgets: bool) -> None:
        self._module, self._cache, self._forgets = module, cache, forgets
        self._signature = inspect.signature(module.forward)
        self.replaced = AttributePatch(module, "forward", self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's output for each token, side by side. The arguments are its own."""
        given = dict(self._signature.bind(*args, **kwargs).arguments)
        given |= given.pop("kwargs", {})
        columns, cache = given[STATES].shape[1], self._cache()
        step = None if cache is None else cache.text.pending
        layer = None if cache is None else next(e for e in cache.recurrent if e.index == self._module.layer_idx)
        widths = [] if layer is None or step is None else self._widths(columns, layer.is_empty, step.drafts)
        if layer is None or len(widths) == 1 or not widths:
            whole: Tensor = self.replaced.original(*args, **kwargs)
            return whole
        mask, outs, left = given.get(MASK), list[Tensor](), columns
        for width in widths:
            part = given | {STATES: given[STATES][:, columns - left : columns - left + width]}
            part[MASK] = None if mask is None else mask[:, -left:][:, :width]
            outs.append(self._part(part, layer))
            left -= width
            if step is not None and 0 < left <= step.drafts:
                layer.note_draft(left)
        return torch.cat(outs, 1)

    def _widths(self, columns: int, is_empty: bool, drafts: int) -> list[int]:
        """The number of tokens of each call."""
        first = columns - drafts
        return [*([1] * first if self._forgets and not is_empty else [first]), *[1] * drafts]

    def _part(self, given: dict[str, Any], layer: RecurrentLayer) -> Tensor:
        """The output for some tokens. One of padding changes no state."""
        mask, before = given[MASK], layer.tensors()
        if given[STATES].shape[1] > 1 or mask is None:
            out: Tensor = self.replaced.original(**given)
            return out
        before = {name: state.clone() for name, state in before.items()}
        out = self.replaced.original(**given | {MASK: None})
        for name, state in layer.tensors().items():
            if name in before:
                is_read = mask[:, -1].bool().view(-1, *[1] * (state.ndim - 1))
                state.copy_(state.where(is_read, before[name]))
        return out


def columns_of(
    modules: Iterable[nn.Module], layers: Iterable[int], cache: Callable[[], TextCache | None], forgets: bool
) -> list[Columns]:
    """Columns of the modules that hold the states of these layers, each now installed.

    Raises: UsageError for drafts in a layer of which not one module is seen to hold the states.
    """
    found: dict[object, list[nn.Module]] = {number: [] for number in layers}
    for module in modules:
        taken = inspect.signature(module.forward).parameters.keys()
        if module.layer_idx in found and STATES in taken and MASK in taken and taken & CACHES:
            found[module.layer_idx].append(module)
    for number, own in found.items():
        own[:] = [each for each in own if not any(other in own for other in [*each.modules()][1:])]  # the innermost
        if len(own) != 1 and not forgets:
            names = ", ".join(type(each).__name__ for each in own) or "none"
            raise UsageError(f"drafts: layer {number} keeps a state, and one module should hold it. Found: {names}")
    return [Columns(module, cache, forgets) for own in found.values() for module in own]
