"""Linear layers of an attached model, for few tokens: they read weights as fast as memory gives them."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from windlass import kernels
from windlass.cache.cache import TextCache
from windlass.core.linear import LinearInput
from windlass.core.shapes import LinearInputs, LinearOutputs
from windlass.hf.replaced import Replaced
from windlass.hf.running_pass import not_compiled
from windlass.kernels.cpu import MAX_ROWS

CACHE: Final = "past_key_values"


@final
class ServedThreads:
    """The threads in which a pass with a cache of ours runs, from the model's first module to its last."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    @property
    def is_served(self) -> bool:
        """Whether such a pass runs in this thread."""
        return get_ident() in self.threads

    @not_compiled
    def leave(self) -> None:
        """No such pass runs in this thread."""
        self.threads.discard(get_ident())

    @not_compiled
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a model, whose head stands outside of its decoder."""
        self.leave()  # one that was interrupted
        if isinstance(kwargs.get(CACHE), TextCache):
            self.threads.add(get_ident())

    @not_compiled
    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of a model, called when a pass fails, too."""
        self.leave()

    @contextmanager
    def within(self) -> Iterator[None]:
        """A pass of the decoder with a cache of ours."""
        is_outermost = not self.is_served
        self.threads.add(get_ident())
        try:
            yield
        finally:
            if is_outermost:
                self.leave()


@final
class FewRows:
    """The forward pass of one `nn.Linear`: our kernel's for few rows of a pass that is served, else its own.

    Its own, too, where gradients are wanted, and for weights or inputs that are no plain tensors.
    """

    def __init__(self, module: nn.Linear, threads: ServedThreads) -> None:
        self._module, self._threads = module, threads
        self.replaced = Replaced(module, "forward", self.forward)

    def forward(self, inputs: LinearInputs) -> LinearOutputs:
        """What the module returns."""
        call = None if torch.compiler.is_compiling() else self._call(inputs)
        if call is None:
            own: Tensor = self.replaced.original(inputs)
            return own
        return kernels.linear(call)

    def _call(self, inputs: Tensor) -> LinearInput | None:
        """What our kernel is asked for; None where it is not."""
        if not self._threads.is_served or type(inputs) is not Tensor or torch.is_autocast_enabled("cpu"):
            return None
        weights, bias = self._module.weight, self._module.bias
        if type(weights) is not nn.Parameter or not inputs.shape[-1] or inputs.shape[-1] != weights.shape[1]:
            return None
        if inputs.numel() > MAX_ROWS * inputs.shape[-1] or inputs.device != weights.device:
            return None
        if torch.is_grad_enabled() and (inputs.requires_grad or weights.requires_grad):
            return None
        return LinearInput(inputs, weights, bias)


def linears_of(model: nn.Module, threads: ServedThreads) -> list[FewRows]:
    """Those of the model that are plain linear layers on a device with a kernel for them, each now installed."""
    plain = (each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each))
    return [FewRows(each, threads) for each in plain if kernels.has_linear(each.weight.device.type)]
