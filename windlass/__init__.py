"""Windlass: a fixed-size KV cache for Hugging Face decoders.

Begin with `load` or `attach` for a model, `KVCache` for its memory and its files, and `stream` or `generate` for text.

Each public name is imported when it is first used: torch and transformers take seconds, and the command line's help
should not.
"""

import sys
from importlib import import_module

from windlass.core import __version__ as __version__
from windlass.core.torchao_later import TorchaoLater

# `__init__.pyi` has the same names, for type checkers.
_MODULES = {
    "chunks": "windlass.engine.chunks",
    "evals": "windlass.evals",
    "policies": "windlass.policies",
    "positions": "windlass.positions",
    "stores": "windlass.stores",
    "testing": "windlass.testing",
}
_HOMES = {
    "CacheOptions": "windlass.cache.options",
    "DraftModel": "windlass.engine.speculate",
    "KVCache": "windlass.hf.kv_cache",
    "PolicyError": "windlass.core.errors",
    "PromptCacheError": "windlass.core.errors",
    "Result": "windlass.engine.sampling",
    "Sampling": "windlass.engine.sampling",
    "Shares": "windlass.cache.shares",
    "Stream": "windlass.engine.generate",
    "UnsupportedModel": "windlass.core.errors",
    "UsageError": "windlass.core.errors",
    "WindlassError": "windlass.core.errors",
    "attach": "windlass.hf.attach",
    "detach": "windlass.hf.attach",
    "generate": "windlass.engine.generate",
    "load": "windlass.hf.load",
    "prefill": "windlass.engine.generate",
    "stream": "windlass.engine.generate",
    "system_tokens": "windlass.engine.templates",
}

__all__ = sorted({*_MODULES, *_HOMES})

sys.meta_path.insert(0, TorchaoLater())


def __dir__() -> list[str]:
    """The public names, with or without earlier imports."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """The public name, from the module that defines it. It is a plain attribute from then on.

    Raises: AttributeError for another name. Python adds the nearest public one to its traceback.
    """
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
