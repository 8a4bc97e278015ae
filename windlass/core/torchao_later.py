"""torchao is imported when weights are made or loaded with it, not wherever it is installed.

transformers imports it beside all of its quantizers, for one function that only such weights need. That takes
seconds, and torchao logs which kernels of other machines it cannot load.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, Final

IMPORTER: Final = "transformers.quantizers.quantizer_torchao"
IMPORTED: Final = "torchao.prototype.safetensors.safetensors_support"
NOISY: Final = ("torchao", "torch.utils._pytree")


class TorchaoLater(MetaPathFinder):
    """Gives transformers' quantizer functions that import torchao when they are called."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != IMPORTER or "torchao" in sys.modules:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        stand_in: Any = ModuleType(IMPORTED)
        stand_in.__getattr__ = _later
        sys.modules[IMPORTED] = stand_in
        try:
            super().exec_module(module)
        finally:
            del sys.modules[IMPORTED]


def _later(name: str) -> Any:
    """The function of that name in torchao, which is imported by its first call."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *given: getattr(import_module(IMPORTED), name)(*given)


@contextmanager
def quiet_torchao() -> Iterator[None]:
    """A block in which torchao may be imported, and logs errors only."""
    levels = {name: logging.getLogger(name).level for name in NOISY}
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
