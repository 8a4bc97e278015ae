"""Modules of transformers whose code is known: which families share it, their class names do not tell.

Many families have a copy of the same `forward`. A module counts as known where the code of its class is that of a
class of Llama, Gemma, OLMo 2, Mistral, Qwen2 or Qwen3 in the installed transformers, instruction by instruction.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from types import CodeType
from typing import Any, Final

from torch import nn
from transformers.activations import ACT2FN

from windlass.core.decoder_layer import Activation, Rounding

Method = tuple[str, str, str]  # a family of transformers, a class of it, a method

LAYER: Final[Method] = ("llama", "LlamaDecoderLayer", "forward")
MLP: Final[Method] = ("llama", "LlamaMLP", "forward")
# They differ in what they tell the attention function about windows, which ours takes from the mask.
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


def has_code_of(module: nn.Module, *methods: Method) -> bool:
    """Whether each of these methods is, in the module's class, the same code."""
    return all(_is_same(getattr(type(module), name, None), _known(family, of, name)) for family, of, name in methods)


def rounding_of(module: nn.Module) -> tuple[Rounding, float] | None:
    """How a norm rounds, and its epsilon; None for a module that is no known norm."""
    for methods, rounding, epsilon in NORMS:
        if has_code_of(module, *methods):
            return rounding, float(getattr(module, epsilon))
    return None


def epsilon_of(module: nn.Module) -> str:
    """The name that a known norm gives to its epsilon."""
    return next(epsilon for methods, _, epsilon in NORMS if has_code_of(module, *methods))


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module is; None for others."""
    kind = type(module)
    if kind is nn.SiLU or kind is type(ACT2FN["silu"]):
        return Activation.SILU
    is_tanh = kind is nn.GELU and getattr(module, "approximate", None) == "tanh"
    return Activation.GELU_TANH if is_tanh or kind is type(ACT2FN["gelu_pytorch_tanh"]) else None


def global_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """What a name outside of it means in the `forward` of a module's class."""
    found: Callable[..., Any] = inspect.unwrap(type(module).forward).__globals__[name]
    return found


def _known(family: str, of: str, name: str) -> Any:
    return getattr(getattr(import_module(f"transformers.models.{family}.modeling_{family}"), of, None), name, None)


def _is_same(ours: Callable[..., Any] | None, known: Callable[..., Any] | None) -> bool:
    if ours is None or known is None:
        return False
    one, other = _code(ours), _code(known)
    return one is not None and other is not None and _facts(one) == _facts(other)


def _code(function: Callable[..., Any]) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _facts(code: CodeType) -> tuple[object, ...]:
    """What a function does: its instructions, and what they name."""
    return code.co_code, code.co_names, code.co_varnames, code.co_consts, code.co_freevars, code.co_flags
