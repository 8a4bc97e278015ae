"""The shapes of the models that are measured, and where their files lie.

Standard library only: the workers of all environments read it.
"""

from dataclasses import dataclass, replace
from pathlib import Path

PEERS = Path(__file__).parents[2] / ".venv-peers"
ROPE_THETA = 10000.0
NORM_EPS = 1e-5
CONTEXT = 131072
# Per number, scales included: a scale of 2 bytes for a whole row, or a scale and a zero point for each group of 128.
WEIGHT_BYTES = {"auto": 2.0, "int8": 1.0, "int4": 0.5 + 4 / 128}


@dataclass(frozen=True)
class Shape:
    """A Llama with an untied head, with sizes as in its configuration."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int = 32000

    @property
    def folder(self) -> Path:
        """Where its weights are written."""
        return PEERS / "models" / f"{self.name}-{self.layers}"

    @property
    def params(self) -> int:
        """Parameters, norms included."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def matrices(self) -> int:
        """Numbers in the matrices that a token is multiplied with: all but the embedding and the norms."""
        return self.params - self.vocabulary * self.hidden - (2 * self.layers + 1) * self.hidden

    def token_bytes(self, depth: int, weights: str) -> float:
        """Bytes of matrices and of a bfloat16 cache that a step of decode at this depth reads."""
        held = 4 * self.layers * self.kv_heads * self.head_dim * depth
        return WEIGHT_BYTES[weights] * self.matrices + held

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in bfloat16."""
        return 2 * self.params


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", layers=3, hidden=256, heads=8, kv_heads=2, head_dim=32, mlp=704),
        Shape("1b", layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp=8192),
        Shape("8b", layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocabulary=128256),
        Shape("7b-mha", layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, mlp=11008),
    )
}


def shape_of(name: str, layers: int | None = None) -> Shape:
    """The shape of this name, with another number of layers if one is given.

    Raises: ValueError for a name that is not there.
    """
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is none of {', '.join(SHAPES)}")
    return SHAPES[name] if layers is None else replace(SHAPES[name], layers=layers)
