"""What a kernel is asked for by a linear layer."""

from dataclasses import dataclass

from windlass.core.shapes import Bias, CodeScales, LinearInputs, LinearWeights


@dataclass(frozen=True)
class LinearInput:
    """Inputs times the transposed weights, plus the bias (None: 0).

    `weights` are floats of the inputs' dtype; or int8 codes, of which each is worth itself times the scale of its
    output.
    """

    inputs: LinearInputs
    weights: LinearWeights
    bias: Bias | None = None
    scales: CodeScales | None = None  # float32; None: weights are floats

    @property
    def rows(self) -> int:
        """Of the inputs, all leading dimensions counted."""
        return self.inputs.numel() // self.inputs.shape[-1]
