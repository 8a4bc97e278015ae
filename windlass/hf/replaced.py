"""A method of one module that stands in for its own until it is put back."""

from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import nn


@final
class Replaced:
    """`module.name` is `replacement` from now on."""

    def __init__(self, module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
        self._module, self._name, self._own = module, name, vars(module).get(name)
        self._replacement = replacement
        setattr(module, name, replacement)

    @property
    def original(self) -> Callable[..., Any]:
        """The method that the module had; where that is its class's, the one that the class has now."""
        own: Callable[..., Any] | None = self._own
        # Not `__get__` of it, which torch.compile takes for the attribute of the module: the replacement.
        return partial(getattr(type(self._module), self._name), self._module) if own is None else own

    def put_back(self) -> None:
        """Leave the module as it was found, but for what others have put there since."""
        if vars(self._module).get(self._name) is not self._replacement:
            return
        delattr(self._module, self._name)
        if self._own is not None:
            setattr(self._module, self._name, self._own)
