"""Windlass: a fixed-size KV cache for any Hugging Face decoder.

Names are imported when they are first used: torch and transformers take seconds, and the command
line's help should not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass import policies as policies
    from windlass import testing as testing
    from windlass.core.errors import PolicyError as PolicyError
    from windlass.core.errors import PromptCacheError as PromptCacheError
    from windlass.core.errors import UnsupportedModel as UnsupportedModel
    from windlass.core.errors import UsageError as UsageError
    from windlass.core.errors import WindlassError as WindlassError
    from windlass.engine.generate import Stream as Stream
    from windlass.engine.generate import generate as generate
    from windlass.engine.generate import prefill as prefill
    from windlass.engine.generate import stream as stream
    from windlass.engine.result import Result as Result
    from windlass.engine.sampling import Sampling as Sampling
    from windlass.hf import prompt_cache as prompt_cache
    from windlass.hf.attach import attach as attach
    from windlass.hf.attach import detach as detach
    from windlass.hf.kv_cache import KVCache as KVCache
    from windlass.policies import DMC as DMC
    from windlass.policies import H2O as H2O
    from windlass.policies import RKV as RKV
    from windlass.policies import TOVA as TOVA
    from windlass.policies import ByValueNorm as ByValueNorm
    from windlass.policies import Compactor as Compactor
    from windlass.policies import Composite as Composite
    from windlass.policies import ExpectedAttention as ExpectedAttention
    from windlass.policies import InChunks as InChunks
    from windlass.policies import InGroups as InGroups
    from windlass.policies import KeyDiff as KeyDiff
    from windlass.policies import KeyNorm as KeyNorm
    from windlass.policies import KVzip as KVzip
    from windlass.policies import LagKV as LagKV
    from windlass.policies import Leverage as Leverage
    from windlass.policies import Pairs as Pairs
    from windlass.policies import Policy as Policy
    from windlass.policies import Pyramid as Pyramid
    from windlass.policies import Random as Random
    from windlass.policies import Recent as Recent
    from windlass.policies import Smoothed as Smoothed
    from windlass.policies import SnapKV as SnapKV
    from windlass.policies import TriAttention as TriAttention
    from windlass.positions.modes import Clamp as Clamp
    from windlass.positions.modes import Compact as Compact
    from windlass.positions.modes import Original as Original
    from windlass.positions.modes import SelfExtend as SelfExtend
    from windlass.stores.base import Plain as Plain
    from windlass.stores.low_bit import Int4 as Int4
    from windlass.stores.low_bit import Int8 as Int8

__version__ = "0.1.0"

_MODULES = {"policies": "policies", "prompt_cache": "hf.prompt_cache", "testing": "testing"}
_HOMES = {
    "hf.kv_cache": ("KVCache",),
    "engine.generate": ("Stream", "generate", "prefill", "stream"),
    "core.errors": ("PolicyError", "PromptCacheError", "UnsupportedModel", "UsageError", "WindlassError"),
    "hf.attach": ("attach", "detach"),
    "stores.low_bit": ("Int4", "Int8"),
    "policies": (
        *("ByValueNorm", "ExpectedAttention", "H2O", "InChunks", "InGroups", "KeyDiff", "KeyNorm", "LagKV", "Leverage"),
        *("Composite", "KVzip", "Pairs", "Policy", "Pyramid", "RKV", "Random", "Recent", "Smoothed", "SnapKV", "TOVA"),
        *("TriAttention", "Compactor", "DMC"),
    ),
    "positions.modes": ("Clamp", "Compact", "Original", "SelfExtend"),
    "engine.result": ("Result",),
    "engine.sampling": ("Sampling",),
    "stores.base": ("Plain",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME_OF, *_MODULES])


def __getattr__(name: str) -> object:
    """The public name, out of the module that defines it."""
    if name in _MODULES:
        return import_module(f"windlass.{_MODULES[name]}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}")
    value: object = getattr(import_module(f"windlass.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
