"""Whether a kernel gives what the code of a decoder layer gives, on one pass of the model."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from torch import Tensor, nn

from windlass.hf.self_check import ROUNDING

if TYPE_CHECKING:
    from windlass.kernels.cpu.decoder_layer import FewTokens

ROUNDINGS: Final = 32  # between a layer's inputs and its outputs, at most


@final
class Proof:
    """A layer's own code, run while what it hands to attention, and what it gets from there, is noted."""

    def __init__(self, module: nn.Module, own: Callable[..., Any], kernel: "FewTokens") -> None:
        self._own, self._kernel = own, kernel
        self._attention = module.get_submodule("self_attn")
        self._states: dict[str, Tensor] = {}
        self._attended: Tensor | None = None

    def output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the layer's own code returns."""
        inside = self._attention._modules
        with ExitStack() as stack:
            for name in "qkv":
                module = inside.get(f"{name}_norm") or inside[f"{name}_proj"]
                assert module is not None
                stack.callback(module.register_forward_hook(partial(self._note_states, name)).remove)
            last = self._attention.get_submodule("o_proj")
            stack.callback(last.register_forward_pre_hook(self._note_attended).remove)
            return self._own(*args, **kwargs)

    def is_near(self, hidden: Tensor, output: Tensor) -> bool:
        """Whether the kernel, given the same, gives the same but for rounding."""
        states = [states.transpose(1, 2) for states in self._kernel.before_attention(hidden)]
        pairs = [(ours, self._states[name].view(ours.shape)) for ours, name in zip(states, "qkv", strict=True)]
        if self._attended is None:
            return False
        attended = self._attended.reshape(states[0].shape)
        pairs.append((self._kernel.after_attention(hidden, attended.contiguous()), output))
        return all(_is_near(ours, own) for ours, own in pairs)

    def _note_states(self, name: str, module: nn.Module, args: object, output: Tensor) -> None:
        self._states[name] = output

    def _note_attended(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._attended = args[0]


def _is_near(ours: Tensor, own: Tensor) -> bool:
    """Number by number. Nothing is near what is no number."""
    step = ROUNDINGS * ROUNDING[own.dtype]
    ours, own = ours.float(), own.float()
    return bool(((ours - own).abs() <= step * (own.abs() + own.abs().median())).all())
