"""What the modules of a model hold beside their weights, so that a refused `attach` leaves no trace."""

from typing import Final, final

from torch import nn

HOOKS: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@final
class ModuleState:
    """The attributes and hooks of all modules of a model, until `put_back`."""

    def __init__(self, model: nn.Module) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        hooks = [vars(module)[name] for module in model.modules() for name in HOOKS if name in vars(module)]
        self._hooks = [(held, dict(held)) for held in hooks]

    def put_back(self) -> None:
        """Leave the modules as they were."""
        for now, then in (*self._attributes, *self._hooks):
            now.clear()
            now.update(then)
