"""The modules inside of a decoder layer, and the code of their classes, as they were when the model was attached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import nn

ROTATION: Final = "apply_rotary_pos_emb"  # of the module that defines a layer, by which its code rotates
METHODS: Final = ("forward", "_norm")  # those whose code a kernel stands in for, see `known_code`


@dataclass(frozen=True, eq=False)
class LayerPart:
    """A module inside of a layer, where it was found, its class, and what stood in for its `forward` then."""

    parent: nn.Module
    name: str
    module: nn.Module
    kind: type[nn.Module]
    forward: object

    @classmethod
    def of(cls, parent: nn.Module, name: str) -> LayerPart:
        module = parent.get_submodule(name)
        return cls(parent, name, module, type(module), vars(module).get("forward"))

    @property
    def is_as_found(self) -> bool:
        """Whether it is still there, and nothing else is called in its place, or beside it."""
        module = self.module
        is_same = self.parent._modules.get(self.name) is module and type(module) is self.kind
        is_same = is_same and vars(module).get("forward") is self.forward
        return is_same and not module._forward_hooks and not module._forward_pre_hooks


def code_of(classes: Sequence[type[nn.Module]]) -> list[object]:
    """The methods of classes as they are now, and the function by which the module of each rotates."""
    methods = [getattr(kind, name, None) for kind in classes for name in METHODS]
    rotations = [getattr(method, "__globals__", {}).get(ROTATION) for method in methods]
    return [*methods, *rotations]
