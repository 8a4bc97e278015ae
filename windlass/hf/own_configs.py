"""Which attention function the modules of one model call.

transformers looks its name up in a config, and several models may hold the same config object. So no config is ever
changed: while a pass runs, the modules of the model, and nobody else, hold copies that name our function.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import final

from torch import nn
from transformers import PreTrainedConfig


@final
class OwnConfigs:
    """The configs that some modules hold; copies that name another attention take their place."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [each for each in modules if isinstance(vars(each).get("config"), PreTrainedConfig)]
        self._held: list[PreTrainedConfig] | None = None

    def exchange(self, attention: str) -> None:
        """Put copies of the configs, as they are now, into the modules; they name `attention`."""
        held: list[PreTrainedConfig] = [vars(module)["config"] for module in self._modules]
        copies: dict[int, PreTrainedConfig] = {}
        ours = [_copied(config, attention, copies) for config in held]
        self._held = held
        self._put(ours)

    def give_back(self) -> None:
        """Put the configs of before `exchange` back; after an interrupt it may be called again."""
        if self._held is not None:
            self._put(self._held)
            self._held = None

    @contextmanager
    def exchanged(self, attention: str) -> Iterator[None]:
        """The modules with copies that name `attention`."""
        try:
            self.exchange(attention)
            yield
        finally:
            self.give_back()

    def _put(self, configs: list[PreTrainedConfig]) -> None:
        for module, config in zip(self._modules, configs, strict=True):
            vars(module)["config"] = config


def _copied(config: PreTrainedConfig, attention: str, copies: dict[int, PreTrainedConfig]) -> PreTrainedConfig:
    """A copy that names `attention`, the configs inside it too; modules that share a config share its copy."""
    if id(config) not in copies:
        ours = copies[id(config)] = copy.copy(config)
        inner = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
        vars(ours).update({name: _copied(part, attention, copies) for name, part in inner.items()})
        ours._attn_implementation_internal = attention
    return copies[id(config)]
