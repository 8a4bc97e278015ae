"""Windlass: a fixed-size KV cache for any Hugging Face decoder."""

from windlass import prompt_cache
from windlass.cache import KVCache
from windlass.engine import Stream, generate, prefill, stream
from windlass.errors import PolicyError, PromptCacheError, UnsupportedModel, UsageError, WindlassError
from windlass.hf import attach, detach
from windlass.policies import H2O, TOVA, KeyDiff, KeyNorm, Policy, Random, Recent, SnapKV
from windlass.positions import Clamp, Compact, Original, SelfExtend
from windlass.result import Result
from windlass.sampling import Sampling

__version__ = "0.1.0"

__all__ = [
    "Clamp",
    "Compact",
    "H2O",
    "KVCache",
    "KeyDiff",
    "KeyNorm",
    "Original",
    "Policy",
    "PolicyError",
    "PromptCacheError",
    "Random",
    "Recent",
    "Result",
    "Sampling",
    "SelfExtend",
    "SnapKV",
    "Stream",
    "TOVA",
    "UnsupportedModel",
    "UsageError",
    "WindlassError",
    "attach",
    "detach",
    "generate",
    "prefill",
    "prompt_cache",
    "stream",
]
