"""Self-check: a short text, read with a cache and without, to find errors that a probe of one token misses.

Each attention module is given, with the cache, the very inputs that it had in the model's own pass. Its outputs are
replaced by those of that pass after they were compared. So an error belongs to one layer, and rounding does not grow
from layer to layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UnsupportedModel
from windlass.core.step import AttentionCall
from windlass.core.types import Attended, NewKeys, NewValues, Queries
from windlass.hf.model_cache import ModelCache
from windlass.hf.model_facts import ordinary_ids
from windlass.hf.probe import check_finite, eval_mode
from windlass.policies import Recent
from windlass.positions.rotary import Rotation

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import FewTokens

PASSES: Final = (5, 3)  # tokens of each pass with the cache. The model's own pass reads all of them at once
RECURRENT_PASSES: Final = (4, 3, 1)  # where layers keep a state, code of its own takes single tokens
OPTIONS: Final = CacheOptions(policy=Recent(), chunk=max(PASSES), positions="original")
HIDDEN: Final = "hidden_states"

# Relative error of one rounding. In float32 it includes sums of thousands of products in another order. Products of
# bfloat16 and float16 are summed in float32.
ROUNDING: Final[Mapping[torch.dtype, float]] = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-18}
# Of a float32 model whose products a GPU may round to TF32, or to bfloat16.
FAST_ROUNDING: Final[Mapping[str, float]] = {"high": 2**-10, "medium": 2**-8}
# Roundings in one attention module, without its scores: rotation, probabilities, values, projection.
OF_ATTENTION: Final = 4
# Linear layers with quantised weights may round activations, too: by a step of 8-bit codes.
OF_CODES: Final = 2**-6
# The decoder's last output has passed feed-forwards in every layer, where a rounding may choose another expert.
OF_STREAM: Final = 32


class CheckCache(ModelCache):
    """Notes how large attention scores are: rounding them moves probabilities by as much."""

    def reset(self) -> None:
        super().reset()
        self.largest_scores: dict[int, float] = {}  # by layer, over all layers that share it
        self._rotated: dict[int, Tensor] = {}  # keys of the pass

    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        self._rotated[layer] = self._turned(layer, keys)
        self._note(layer, queries, call)
        return super().attend(layer, queries, keys, values, call)

    def attend_shared(self, layer: int, queries: Queries, call: AttentionCall) -> Attended:
        self._note(layer, queries, call)
        return super().attend_shared(layer, queries, call)

    def _note(self, layer: int, queries: Queries, call: AttentionCall) -> None:
        keys = self._rotated[layer].repeat_interleave(queries.shape[1] // self._rotated[layer].shape[1], 1)
        turned, rotary = self._turned(layer, queries), self.rotaries[layer]
        gain = None if rotary is None else rotary.query_gain()
        largest = call.scale * float(((turned if gain is None else turned * gain) @ keys.mT).abs().max())
        largest = largest if call.softcap is None else min(largest, call.softcap)
        self.largest_scores[layer] = max(largest, self.largest_scores.get(layer, 0.0))

    def _turned(self, layer: int, states: Tensor) -> Tensor:
        """Queries or keys of the pass, rotated."""
        step = self.text.pending
        assert step is not None, "attention outside of a pass"
        rotation = Rotation(self.rotaries[layer], step.end, states.device)
        return rotation.rotate(states.float(), step.positions[:, None])


class SelfCheck:
    """Attention outputs of the model's own pass, and the errors of the passes with a cache.

    `modules` are those that call attention, by layer.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, modules: Mapping[int, nn.Module]) -> None:
        self._model, self._decoder, self._modules = model, decoder, modules
        self._ids = ordinary_ids(model, sum(PASSES))
        self._wanted = 1  # logits
        self._columns: slice | None = None  # of the pass with a cache that is running
        self._cache: CheckCache | None = None
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._stream: Tensor | None = None

    @torch.no_grad()
    def run(self, cache: CheckCache, own_attention: AbstractContextManager[None]) -> None:
        """Read a short text without a cache, under `own_attention`, then with it.

        Raises: UnsupportedModel for a model with other outputs, and UsageError for one that makes a pass that no cache
        can take.
        """
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self._model))
            for layer, module in self._modules.items():
                before = module.register_forward_pre_hook(partial(self._before, layer), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(partial(self._after, layer)).remove)
            stack.callback(self._decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True).remove)
            stack.callback(self._decoder.register_forward_hook(self._after_decoder).remove)
            # Layers that share keys may leave out queries of which nobody wants logits.
            self._wanted, start = 0 if cache.shared else 1, 0
            self._read_alone(own_attention)
            self._cache = cache
            for tokens in RECURRENT_PASSES if cache.recurrent else PASSES:
                self._columns = slice(start, start + tokens)
                self._call(self._columns, use_cache=True, past_key_values=cache)
                start += tokens

    def _read_alone(self, own_attention: AbstractContextManager[None]) -> None:
        """The model's own pass."""
        try:
            with own_attention:
                self._call(slice(0, sum(PASSES)), use_cache=False)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(
                f"can't read a text even without a cache: {type(error).__name__}: {error}"
            ) from error
        if self._stream is None:
            raise UnsupportedModel("does not call its decoder")

    def _call(self, columns: slice, **options: object) -> None:
        """The model as `generate` calls it."""
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            options["logits_to_keep"] = self._wanted
        ids = self._ids[:, columns]
        if columns.start == 0:  # later some wrappers would count positions by the mask, and not by the ids
            options["attention_mask"] = torch.ones_like(ids)
        self._model(input_ids=ids, **options)

    def _before_decoder(self, _module: nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if self._columns is not None and not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)):
            raise UnsupportedModel(
                "makes the attention masks outside of its decoder, where a KVCache can't make its own"
            )

    def _after_decoder(self, _module: nn.Module, _args: object, output: Any) -> None:
        if self._columns is None:
            self._stream = output[0].clone()
            return
        assert self._stream is not None, "a pass with the cache before the model's own"
        error = _error(output[0], self._stream[:, self._columns])
        allowed = max(OF_STREAM * _rounding(output[0]), OF_ATTENTION * _of_codes(self._decoder))
        if not error <= allowed:
            raise UnsupportedModel(
                f"gives other hidden states with a cache than without: {error:.1%} off, where rounding explains "
                f"{allowed:.1%}"
            )

    def _before(self, layer: int, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Note a layer's own input, or let it have that again."""
        given = kwargs.get(HIDDEN, args[0] if args else None)
        if not isinstance(given, Tensor) or given.ndim < 3:
            return None
        if self._columns is None:
            self._inputs[layer] = given.clone()
            return None
        if layer not in self._inputs:
            return None
        own = self._inputs[layer][:, self._columns].clone()
        return (args, {**kwargs, HIDDEN: own}) if HIDDEN in kwargs else ((own, *args[1:]), kwargs)

    def _after(self, layer: int, module: nn.Module, _args: object, output: Any) -> Any:
        """Note a layer's own output, or compare with it and let the model go on with that."""
        given = output[0] if isinstance(output, tuple) else output
        if self._columns is None:
            check_finite(given, layer)
            self._outputs[layer] = given.clone()
            return None
        assert self._cache is not None, "a pass with a cache, but which?"
        own = self._outputs[layer][:, self._columns].clone()
        roundings = OF_ATTENTION + self._cache.largest_scores[self._cache.kinds.place(layer)]
        error, allowed = _error(given, own), max(roundings * _rounding(given), _of_codes(module))
        if not error <= allowed:
            raise UnsupportedModel(
                f"attends otherwise in layer {layer} than a cache does: its output is {error:.1%} off, where rounding "
                f"explains {allowed:.1%}"
            )
        return (own, *output[1:]) if isinstance(output, tuple) else own


def _error(states: Tensor, own: Tensor) -> float:
    return float((states.float() - own.float()).norm() / own.float().norm())


def _of_codes(module: nn.Module) -> float:
    """Error that the codes of quantised weights may cause: 0 without integer or custom parameters."""
    weights = (parameter.data for parameter in module.parameters())
    is_quantised = any(type(weight) is not Tensor or not weight.is_floating_point() for weight in weights)
    return OF_CODES if is_quantised else 0.0


def _rounding(states: Tensor) -> float:
    if states.dtype == torch.float32:
        return FAST_ROUNDING.get(torch.get_float32_matmul_precision(), ROUNDING[torch.float32])
    return ROUNDING.get(states.dtype, ROUNDING[torch.bfloat16])


ROUNDINGS: Final = 32  # between a layer's inputs and its outputs, at most


@final
class LayerTrace:
    """A run of a layer's own code that notes the inputs and outputs of its attention."""

    def __init__(self, module: nn.Module, own: Callable[..., Any], kernel: FewTokens) -> None:
        self._own, self._kernel = own, kernel
        self._attention = module.get_submodule("self_attn")
        self._states: dict[str, Tensor] = {}
        self._attended: Tensor | None = None

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of the layer's own code."""
        inside = self._attention._modules
        with ExitStack() as stack:
            for name in "qkv":
                module = inside.get(f"{name}_norm") or inside[f"{name}_proj"]
                assert module is not None
                stack.callback(module.register_forward_hook(partial(self._note_states, name)).remove)
            last = self._attention.get_submodule("o_proj")
            stack.callback(last.register_forward_pre_hook(self._note_attended).remove)
            return self._own(*args, **kwargs)

    def is_near(self, hidden: Tensor, output: Tensor) -> bool:
        """Return True if the kernel, given the same, gives the same but for rounding."""
        states = [states.transpose(1, 2) for states in self._kernel.before_attention(hidden)]
        pairs = [(ours, self._states[name].view(ours.shape)) for ours, name in zip(states, "qkv", strict=True)]
        if self._attended is None:
            return False
        attended = self._attended.reshape(states[0].shape)
        pairs.append((self._kernel.after_attention(hidden, attended.contiguous()), output))
        return all(_is_near(ours, own) for ours, own in pairs)

    def _note_states(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        self._states[name] = output

    def _note_attended(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._attended = args[0]


def _is_near(ours: Tensor, own: Tensor) -> bool:
    """Compare number by number. NaN is near nothing."""
    step = ROUNDINGS * ROUNDING[own.dtype]
    ours, own = ours.float(), own.float()
    return bool(((ours - own).abs() <= step * (own.abs() + own.abs().median())).all())
