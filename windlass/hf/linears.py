"""Linear layers of an attached model, for passes of few tokens, in which reading the weights takes most of the time."""

from typing import Any, final

import torch
from torch import Tensor, nn

from windlass import kernels
from windlass.core.linear import LinearInput
from windlass.core.shapes import LinearInputs, LinearOutputs
from windlass.hf.replaced import Replaced
from windlass.hf.whole_pass import WholePass
from windlass.kernels.cpu import MAX_ROWS


@final
class FewRows:
    """The forward pass of one `nn.Linear`: our kernel's for few rows of a pass that is served, else its own.

    Its own, too, where gradients are wanted, and for weights or inputs that are no plain tensors, torchao's weights of
    8 bits aside.
    """

    def __init__(self, module: nn.Linear, whole: WholePass) -> None:
        self._module, self._whole = module, whole
        self._zero_points: Tensor | None = None
        self._are_zero = False
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
        if not self._whole.is_served or type(inputs) is not Tensor or torch.is_autocast_enabled("cpu"):
            return None
        weights: Any = self._module.weight  # a tensor, perhaps of a type of torchao's
        bias = self._module.bias
        if not inputs.shape[-1] or inputs.shape[-1] != weights.shape[1] or inputs.device != weights.device:
            return None
        if inputs.numel() > MAX_ROWS * inputs.shape[-1]:
            return None
        if torch.is_grad_enabled() and (inputs.requires_grad or weights.requires_grad):
            return None
        if type(weights) is nn.Parameter:
            return LinearInput(inputs, weights, bias)
        if is_int8(weights) and self._is_symmetric(weights.zero_point):
            return LinearInput(inputs, weights.qdata, bias, weights.scale[:, 0])
        return None

    def _is_symmetric(self, zero_points: Tensor) -> bool:
        """Whether they are all zero; looked at once."""
        if self._zero_points is not zero_points:
            self._zero_points, self._are_zero = zero_points, not zero_points.any()
        return self._are_zero


def is_int8(weights: Any) -> bool:
    """Whether these are weights of torchao in 8 bits, of one scale for each output, whose inputs stay floats.

    Known by name, so that torchao is not imported: `Int8WeightOnlyConfig` makes them.
    """
    kind = type(weights)
    if kind.__name__ != "Int8Tensor" or not kind.__module__.startswith("torchao."):
        return False
    has_float_inputs = weights.act_quant_kwargs is None and weights.act_pre_scale is None
    return has_float_inputs and list(weights.block_size) == [1, weights.shape[1]]


def is_plain(module: nn.Module) -> bool:
    """Whether a module is its weight and its bias and nothing else: not quantised, adapted, hooked, or offloaded."""
    forward = vars(module).get("forward")
    is_replaced = forward is not None and not isinstance(getattr(forward, "__self__", None), FewRows)
    is_hooked = module._forward_hooks or module._forward_pre_hooks or is_replaced
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked


def linears_of(model: nn.Module, whole: WholePass) -> list[Replaced]:
    """Those of the model that are plain linear layers on a device with a kernel for them, each now installed."""
    plain = (each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each))
    return [FewRows(each, whole).replaced for each in plain if kernels.has_linear(each.weight.device.type)]
