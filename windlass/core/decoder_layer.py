"""A decoder layer as a kernel takes it: what comes before attention, and what comes after it."""

from dataclasses import dataclass
from enum import IntEnum, unique

from windlass.core.linear import LinearLayer
from windlass.core.shapes import NormWeights


@unique
class Rounding(IntEnum):
    """How a norm of 16-bit numbers rounds; the numbers are those of `Norm::Kind` in `call.hpp`."""

    NARROW = 0  # numbers are rounded, then multiplied with the weights, and rounded
    ONE_MORE = 1  # they are multiplied with weights + 1, then rounded
    WIDE = 2  # they are multiplied with the weights, then rounded


@unique
class Activation(IntEnum):
    """Of the gate; the numbers are those of `DecoderLayer::Activation` in `call.hpp`."""

    SILU = 0
    GELU_TANH = 1


@dataclass(frozen=True, eq=False)
class Norm:
    """Numbers over the root of the mean of their squares plus `epsilon`, times weights."""

    weights: NormWeights
    epsilon: float
    rounding: Rounding


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Attention and gated feed-forward layers, each behind a norm and added to what came before.

    `query_norm` and `key_norm` are of the channels of a head; None for none.
    """

    first_norm: Norm
    query: LinearLayer
    key: LinearLayer
    value: LinearLayer
    query_norm: Norm | None
    key_norm: Norm | None
    output: LinearLayer
    second_norm: Norm
    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer
    activation: Activation
    head_dim: int  # channels of a head, the same of queries, keys and values

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        """In the order in which they are read."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """Of what goes into attention, and into the feed-forward layers; of queries and keys."""
        return self.first_norm, self.second_norm, self.query_norm, self.key_norm
