"""Norms that a layer applies to queries and keys after RoPE: those whose outputs it hands on as they are."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from windlass.core.errors import UnsupportedModel
from windlass.positions.norm_weights import NormWeights, weight_of


class NormOutputs:
    """What norms gave in a pass, by the memory that it is in, which they keep so that nothing else takes it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[nn.Module, Tensor]] = {}

    @contextmanager
    def noted(self, modules: list[nn.Module]) -> Iterator[None]:
        """Note what those of `modules` give that have a vector of weights and nothing else."""
        with ExitStack() as stack:
            for module in modules:
                parameters = dict(module.named_parameters())
                if parameters.keys() == {"weight"} and parameters["weight"].ndim == 1:
                    stack.callback(module.register_forward_hook(self._note).remove)
            yield

    def _note(self, module: nn.Module, _args: object, output: Any) -> None:
        if isinstance(output, Tensor):
            self._found[output.untyped_storage().data_ptr()] = module, output

    def weights(self, queries: Tensor, keys: Tensor) -> NormWeights | None:
        """Of the norms that gave these, as they are or transposed; None where neither is from a norm of its width."""
        norms = [self._norm_of(states) for states in (queries, keys)]
        return None if norms == [None, None] else NormWeights(*norms)

    def _norm_of(self, states: Tensor) -> nn.Module | None:
        norm, output = self._found.get(states.untyped_storage().data_ptr(), (None, states))
        weight = weight_of(norm)
        is_its = weight is not None and output.numel() == states.numel() and len(weight) == states.shape[-1]
        return norm if is_its else None


def check_weights(layer: int, weights: NormWeights) -> None:
    """Return for weights that can be divided by. Raises: UnsupportedModel."""
    for norm in (weights.query_norm, weights.key_norm):
        weight = weight_of(norm)
        if weight is not None and not bool(weight.all()):
            raise UnsupportedModel(
                f"has a norm after RoPE in layer {layer} of which a weight is 0: the channel that it hides is lost, "
                "and can't be rotated again"
            )
