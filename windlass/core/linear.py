"""What a kernel is asked for by a linear layer."""

from dataclasses import dataclass

import torch

from windlass.core.shapes import Bias, CodeScales, GroupPairs, LinearInputs, LinearWeights, NibbleCodes

MIDDLE = 8  # the code of 4 bits that is worth its zero point


@dataclass(frozen=True)
class Nibbles:
    """Weights of 4 bits, as PyTorch packs them for a CPU: in blocks of so many outputs, a multiple of which there are.

    A block holds its inputs one after the other. Byte j of an input has the code of output j in its low nibble and
    that of output j + block / 2 in its high one. A code is worth (code - 8) * scale + zero point; `pairs` holds the two
    for each `group` of inputs.
    """

    codes: NibbleCodes
    pairs: GroupPairs
    group: int
    block: int

    @property
    def in_features(self) -> int:
        """Of the layer."""
        return 2 * self.codes.shape[1]

    def floats(self, dtype: torch.dtype) -> LinearWeights:
        """What the codes are worth."""
        outputs, width = self.codes.shape[0], self.in_features
        packed = self.codes.view(outputs // self.block, width, self.block // 2)
        codes = torch.cat([packed & 15, packed >> 4], -1).transpose(1, 2).reshape(outputs, width)
        scales, zeros = self.pairs.to(dtype).repeat_interleave(self.group, 0).unbind(-1)
        return (codes.to(dtype) - MIDDLE) * scales.T + zeros.T


@dataclass(frozen=True)
class LinearLayer:
    """Weights, and a bias (None: 0).

    `weights` are floats of the inputs' dtype; or int8 codes, of which each is worth itself times the scale of its
    output; or codes of 4 bits.
    """

    weights: LinearWeights | Nibbles
    bias: Bias | None = None
    scales: CodeScales | None = None  # of int8 codes

    @property
    def addresses(self) -> list[int]:
        """Of the memory that is read."""
        held = (self.weights.codes, self.weights.pairs) if isinstance(self.weights, Nibbles) else (self.weights,)
        return [each.data_ptr() for each in (*held, self.bias, self.scales) if each is not None]

    @property
    def in_features(self) -> int:
        """Of an input."""
        return self.weights.in_features if isinstance(self.weights, Nibbles) else self.weights.shape[1]

    @property
    def out_features(self) -> int:
        """Of an output."""
        return self.weights.codes.shape[0] if isinstance(self.weights, Nibbles) else self.weights.shape[0]


@dataclass(frozen=True)
class LinearInput:
    """Inputs times the transposed weights of a layer, plus its bias."""

    inputs: LinearInputs
    layer: LinearLayer

    @property
    def rows(self) -> int:
        """Of the inputs, all leading dimensions counted."""
        return self.inputs.numel() // self.inputs.shape[-1]
