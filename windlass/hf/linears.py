"""Linear layers of an attached model, for passes of few tokens, in which reading the weights takes most of the time."""

from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from windlass import kernels
from windlass.core.linear import LinearInput, LinearLayer, Nibbles
from windlass.core.shapes import LinearInputs, LinearOutputs
from windlass.hf.replaced import Replaced
from windlass.hf.weights import kind_of
from windlass.hf.whole_pass import WholePass
from windlass.kernels.cpu import MAX_ROWS, can_read_nibbles

# Outputs that lie side by side in codes of 4 bits, by the instructions for which PyTorch packs them here.
PACKED_BLOCKS: Final = {"AVX512": 64, "AVX2": 32}


@final
@dataclass(frozen=True)
class Codes:
    """Weights of torchao as our kernel takes them, and the tensors of which they were made.

    `weights` is None for those that torchao itself has to multiply.
    """

    made_of: tuple[Tensor, Tensor]
    weights: Tensor | Nibbles | None = None
    scales: Tensor | None = None

    @classmethod
    def of(cls, weights: Any, kind: str) -> "Codes":
        """Of a tensor of torchao's that is of this kind."""
        made_of = tensors_of(weights, kind)
        if weights.act_pre_scale is not None:
            return cls(made_of)
        if kind == "int8":
            is_symmetric = weights.zero_point is None or not weights.zero_point.any()
            is_known = is_symmetric and list(weights.block_size) == [1, weights.shape[1]]
            return cls(made_of, weights.qdata, weights.scale[:, 0]) if is_known else cls(made_of)
        block = PACKED_BLOCKS.get(torch.backends.cpu.get_cpu_capability(), 0)
        nibbles = Nibbles(*made_of, weights.block_size[1], block)
        return cls(made_of, nibbles if can_read_nibbles(nibbles) else None)

    def layer(self, bias: Tensor | None) -> LinearLayer | None:
        """With these weights; None where they are not our kernel's."""
        return None if self.weights is None else LinearLayer(self.weights, bias, self.scales)


def tensors_of(weights: Any, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor of torchao's."""
    return weights.qdata, weights.scale if kind == "int8" else weights.scale_and_zero


@final
class FewRows:
    """The forward pass of one `nn.Linear`: our kernel's for few rows of a pass that is served, else its own.

    Its own, too, where gradients are wanted, and for weights or inputs that are no plain tensors, torchao's weights of
    8 and 4 bits aside.
    """

    def __init__(self, module: nn.Linear, whole: WholePass) -> None:
        self._module, self._whole = module, whole
        self._codes: Codes | None = None
        self._code = type(module).forward  # whose place the kernel takes
        self.replaced = Replaced(module, "forward", self.forward)

    def forward(self, inputs: LinearInputs) -> LinearOutputs:
        """What the module returns."""
        call = None if torch.compiler.is_compiling() else self._call(inputs)
        if call is None:
            own: Tensor = self.replaced.original(inputs)
            return own
        return kernels.linear(call)

    def layer(self) -> LinearLayer | None:
        """The module's weights as our kernel takes them; None where they are not of a kind that it knows."""
        weights: Any = self._module.weight  # a tensor, perhaps of a type of torchao's
        if type(weights) is nn.Parameter:
            return LinearLayer(weights, self._module.bias)
        kind = kind_of(weights)
        if kind is None:
            return None
        codes, scales = tensors_of(weights, kind)
        known = self._codes
        if known is None or known.made_of[0] is not codes or known.made_of[1] is not scales:
            known = self._codes = Codes.of(weights, kind)
        return known.layer(self._module.bias)

    def _call(self, inputs: Tensor) -> LinearInput | None:
        """What our kernel is asked for; None where it is not."""
        if type(self._module).forward is not self._code:
            return None
        if not self._whole.is_served or type(inputs) is not Tensor or torch.is_autocast_enabled("cpu"):
            return None
        width = inputs.shape[-1]
        if not width or inputs.numel() > MAX_ROWS * width:
            return None
        layer = self.layer()
        if layer is None or width != layer.in_features:
            return None
        weights, wants_gradients = layer.weights, torch.is_grad_enabled()
        if wants_gradients and inputs.requires_grad:
            return None
        if isinstance(weights, Nibbles):
            is_like = inputs.dtype == weights.pairs.dtype and inputs.device == weights.codes.device
        else:
            is_like = inputs.device == weights.device and not (wants_gradients and weights.requires_grad)
        return LinearInput(inputs, layer) if is_like else None


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
