"""A method of one module that stands in for its own until it is put back."""

from collections.abc import Callable
from typing import Any, final

from torch import nn


@final
class Replaced:
    """`module.name` is `replacement` from now on; `original` is what it was."""

    def __init__(self, module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
        self._module, self._name, self._own = module, name, vars(module).get(name)
        self.original: Callable[..., Any] = getattr(module, name)
        setattr(module, name, replacement)

    def put_back(self) -> None:
        """Leave the module as it was found."""
        delattr(self._module, self._name)
        if self._own is not None:
            setattr(self._module, self._name, self._own)
