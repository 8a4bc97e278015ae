"""Windlass: a fixed-size KV cache for Hugging Face decoders.

Begin with `load` or `attach` for a model, `KVCache` for its memory and its files, and `stream` or `generate` for text.

The public names are those that `__init__.pyi` imports. Each is imported when it is first used: torch
and transformers take seconds, and the command line's help should not.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

from windlass.core.torchao_later import TorchaoLater

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi")
_IMPORTS = [node for node in ast.parse(_STUB.read_text()).body if isinstance(node, ast.ImportFrom)]
_HOMES = {alias.name: node.module or "" for node in _IMPORTS for alias in node.names}

__all__ = sorted(_HOMES)

sys.meta_path.insert(0, TorchaoLater())


def __dir__() -> list[str]:
    """The public names and nothing else, whatever has been imported so far."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """The public name, out of the module that defines it; it is a plain attribute from then on.

    Raises: AttributeError for another name; Python adds the nearest public one to its traceback.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    home = import_module(_HOMES[name])
    is_defined = name in vars(home)
    value: object = getattr(home, name) if is_defined else import_module(f"{home.__name__}.{name}")
    globals()[name] = value
    return value
