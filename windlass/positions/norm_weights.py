"""Weights of norms that a layer applies to queries and keys after RoPE: they do not commute with it.

A norm's division does: a rotated vector is as long as before. So keys are stored divided and un-rotated, without the
weight `w_k`, and of the product sum(w_q[i] q[i] * w_k[i] k[i]) of a rotated query and key, `w_q * w_k` is left to the
query, which is multiplied by it once it is rotated.
"""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class NormWeights:
    """The norms whose `weight`s (head_dim) multiply a layer's rotated queries and keys; None: no norm does.

    Weights are read when they are asked for: a model may move, or be trained further.
    """

    query_norm: nn.Module | None
    key_norm: nn.Module | None

    def left_out(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """What the norms gave, divided by their weights."""
        return _divided(queries, self.query_norm), _divided(keys, self.key_norm)

    def put_in(self, keys: Tensor) -> Tensor:
        """Rotated keys, in the model's layout, as its norm gives them; in float32."""
        weight = weight_of(self.key_norm)
        return keys if weight is None else keys.float() * weight

    def product(self) -> Tensor:
        """(head_dim) in float32: of both weights, in the model's layout of channels."""
        weights = [weight for norm in (self.query_norm, self.key_norm) if (weight := weight_of(norm)) is not None]
        assert weights, "no norm has weights"
        return weights[0] if len(weights) == 1 else weights[0] * weights[1]


def weight_of(norm: nn.Module | None) -> Tensor | None:
    """A norm's weight in float32."""
    if norm is None:
        return None
    weight = norm.weight
    assert isinstance(weight, Tensor), "a norm without a weight"
    return weight.detach().float()


def _divided(states: Tensor, norm: nn.Module | None) -> Tensor:
    weight = weight_of(norm)
    return states if weight is None else (states.float() / weight.to(states.device)).to(states.dtype)
