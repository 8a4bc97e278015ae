"""Sin and cos tables out of a model's own rotary module.

The module is asked, never re-implemented, so every scaling scheme works: linear, dynamic NTK,
YaRN, llama3, longrope. `attention_scaling` is part of the table and so applied at read.
"""

import copy
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass import kernels
from windlass.core.errors import UnsupportedModel
from windlass.core.positions import rotate
from windlass.core.types import RotaryTable

Output = Tensor | tuple[Tensor, Tensor]


def cos_sin(output: object) -> tuple[Tensor, Tensor]:
    """Cos and sin from the output of a rotary module. Raises: UnsupportedModel for any other output."""
    match output:
        case Tensor() if output.is_complex():
            return output.real, output.imag
        case (Tensor() as cos, Tensor() as sin):
            return cos, sin
    raise UnsupportedModel("has a rotary module that returns neither (cos, sin) nor complex numbers")


def unturned(output: object) -> Output:
    """The same without any rotation, or scale."""
    cos, sin = cos_sin(output)
    ones = torch.ones_like(output if isinstance(output, Tensor) else cos)
    return ones if isinstance(output, Tensor) else (ones, torch.zeros_like(sin))


@dataclass(frozen=True)
class NormWeights:
    """The norms whose `weight`s (head_dim) multiply a layer's rotated queries and keys (None: no norm).

    Weights are read on each use, as a model may move, or be trained further.
    """

    query_norm: nn.Module | None
    key_norm: nn.Module | None

    def left_out(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of the norms, divided by their weights."""
        return _divided(queries, self.query_norm), _divided(keys, self.key_norm)

    def put_in(self, keys: Tensor) -> Tensor:
        """Rotated keys, in the model's layout, as its norm gives them, in float32."""
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


LENGTH_DEPENDENT = ("dynamic", "longrope")
MOST_ROUNDED, LEAST_ANGLE = 1e-2, 2e-7  # of an angle, when a model and its frequencies are cast to 16 bits


@dataclass(frozen=True)
class Layout:
    """How a model arranges the channels that RoPE rotates, two by two.

    `stop` (a share of the table's width) and `step` pick one column per channel pair out of the
    model's table. `is_interleaved`: a pair is two neighbours (2i, 2i + 1), else one of each half (i, i + n).
    `is_backward`: a pair is turned by the negative of the table's angle.
    """

    name: str
    stop: float
    step: int
    is_interleaved: bool
    is_backward: bool = False

    def columns(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin of the angle that each channel pair is turned by, out of the model's table."""
        cos, sin = (table[..., : int(table.shape[-1] * self.stop) : self.step] for table in (cos, sin))
        return cos, -sin if self.is_backward else sin

    def to_halves(self, states: Tensor, rotary_pairs: int) -> Tensor:
        """Channels reordered so that pair i is (i, i + rotary_pairs), copied only where they are interleaved."""
        if not self.is_interleaved:
            return states
        rotary, rest = states[..., : 2 * rotary_pairs], states[..., 2 * rotary_pairs :]
        return torch.cat((rotary[..., 0::2], rotary[..., 1::2], rest), -1)

    def from_halves(self, states: Tensor, rotary_pairs: int) -> Tensor:
        """The inverse of `to_halves`."""
        if not self.is_interleaved:
            return states
        first, second, rest = states.tensor_split((rotary_pairs, 2 * rotary_pairs), -1)
        return torch.cat((torch.stack((first, second), -1).flatten(-2), rest), -1)


LAYOUTS = (
    Layout("halves", 0.5, 1, False),  # Llama and most others
    Layout("halves, half table", 1.0, 1, False),  # gpt-oss
    Layout("interleaved", 0.5, 1, True),  # GLM
    Layout("interleaved, repeated table", 1.0, 2, True),  # Cohere
    Layout("interleaved, half table", 1.0, 1, True),  # Llama 4: complex numbers
    Layout("halves, backward", 0.5, 1, False, is_backward=True),  # nanochat
)


@dataclass
class _Tables:
    """The tables in use, how many rows they have, and the length of text that their frequencies are for."""

    tables: dict[torch.dtype, tuple[RotaryTable, RotaryTable]]
    rows: int = 0
    length: int = 0


class Rotary:
    """The rotary embedding of some layers of a model: tables on demand, and the channel layout.

    `rotary_pairs` is half of the field's `rotary_dim`: the other channels of a head pass unrotated. `trained_length` is
    the longest text that the model was trained on, extensions of its window included. Or None where it is unknown.
    `axes` is the number of axes of the positions that the module takes, or 0 for plain positions. `norm_weights` are
    those of one layer that applies norms to its rotated states, or None.
    """

    def __init__(
        self,
        module: nn.Module,
        layer_type: str | None,
        layout: Layout,
        rotary_pairs: int,
        trained_length: int | None = None,
        axes: int = 0,
    ) -> None:
        # A private copy: some schemes keep the length they last saw inside the module.
        self._source, self._module = module, _copied(module)
        self.layer_type = layer_type
        self._rope_type, self.constant_length = _scheme(module, layer_type)
        self._built = _Tables({})
        self._first_sin: Tensor | None = None  # of position 1, once it was asked for
        self.layout = layout
        self.rotary_pairs = rotary_pairs
        self.trained_length = trained_length
        self._axes = axes
        self.norm_weights: NormWeights | None = None

    def with_norm_weights(self, weights: NormWeights) -> "Rotary":
        """The same rotation and the same tables, for a layer whose norms after RoPE have these weights."""
        twin = copy.copy(self)
        twin.norm_weights = weights
        return twin

    def plain(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """A model's un-rotated queries and keys as a cache takes them.

        Channel pairs are halves, and the weights of norms after RoPE are left out.
        """
        if self.norm_weights is not None:
            queries, keys = self.norm_weights.left_out(queries, keys)
        return self.layout.to_halves(queries, self.rotary_pairs), self.layout.to_halves(keys, self.rotary_pairs)

    def query_gain(self) -> Tensor | None:
        """Factors (head_dim), in float32, of a rotated query before its products with keys.

        The weights of both norms after RoPE multiplied, or None without such norms.
        """
        if self.norm_weights is None:
            return None
        return self.layout.to_halves(self.norm_weights.product(), self.rotary_pairs)

    @property
    def is_length_dependent(self) -> bool:
        """Return True if the table changes with the length it must cover."""
        return any(name in self._rope_type for name in LENGTH_DEPENDENT)

    @property
    def built(self) -> dict[torch.dtype, tuple[RotaryTable, RotaryTable]]:
        """The latest tables, by dtype. Longer ones are new tensors. A CUDA graph must keep alive those it reads."""
        return self._built.tables

    def table_changes_at(self, length: int) -> bool:
        """Return True if a text of `length` tokens needs other tables than one within the trained length."""
        return self.is_length_dependent and length > self.constant_length

    def same_table(self, length: int, longer: int) -> bool:
        """Return True if the tables for a `longer` text begin with those for a text of `length` tokens."""
        if not self.table_changes_at(longer):
            return True
        return "longrope" in self._rope_type and self.table_changes_at(length)

    def asked(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The module's own float32 cos and sin for `positions` (batch, tokens), or (axes, batch, tokens)."""
        return self._asked_of(self._module.to(positions.device), positions)

    @torch.no_grad()
    def is_current(self) -> bool:
        """Return True if the model's module still rotates as it did when this was made, rounding aside."""
        device = next((buffer.device for buffer in self._source.buffers()), torch.device("cpu"))
        if device.type == "meta":
            return True
        first = torch.ones(1, 1, dtype=torch.long, device=device)
        if self._first_sin is None:
            self._first_sin = self.asked(first)[1]
        now, then = self._asked_of(self._source, first)[1], self._first_sin.to(device)
        return now.shape == then.shape and torch.allclose(
            now.float(), then.float(), rtol=MOST_ROUNDED, atol=LEAST_ANGLE
        )

    def _asked_of(self, module: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor]:
        if self._axes and positions.ndim == 2:
            positions = positions.expand(self._axes, *positions.shape)
        probe = torch.empty(1, device=positions.device, dtype=torch.float32)
        return cos_sin(module(probe, positions, *(() if self.layer_type is None else (self.layer_type,))))

    @torch.no_grad()
    def tables(
        self, rows: int, device: torch.device, dtype: torch.dtype = torch.float32, length: int | None = None
    ) -> tuple[RotaryTable, RotaryTable]:
        """Cos and sin for at least so many consecutive positions, in `dtype`, with one column per channel pair.

        A length-dependent scheme is asked for a text of exactly `length` tokens (None: of as many as there are rows)
        once that exceeds the trained length, and its table is built again whenever the length changes. The first row is
        that of position 0, but where there are more rows than that: then the last one is that of the last position, and
        only distances between rows mean anything.
        """
        if self.is_length_dependent:
            length = max(rows if length is None else length, self.constant_length)
            rows = max(rows, length)
            is_stale = (self._built.rows, self._built.length) != (rows, length)
        else:
            wanted = 256
            while wanted < rows:
                wanted *= 2
            rows = length = wanted
            is_stale = self._built.rows < rows
        built = self._built
        if not built.tables or is_stale or built.tables[torch.float32][0].device != device:
            built.tables = {torch.float32: self._build(rows, length, device)}
            built.rows, built.length = rows, length
        if dtype not in built.tables:
            cos, sin = built.tables[torch.float32]
            built.tables[dtype] = cos.to(dtype), sin.to(dtype)
        return built.tables[dtype]

    def cos_sin_at(self, distance: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cos and sin of each channel pair's angle at a distance, or where the table for a text of `length` ends."""
        cos, sin = self.tables(length, device)
        at = min(distance, cos.shape[0] - 1)
        return cos[at], sin[at]

    def _build(self, rows: int, length: int, device: torch.device) -> tuple[RotaryTable, RotaryTable]:
        positions = torch.arange(length - rows, length, device=device)[None]
        if self.is_length_dependent:
            # Some schemes never shrink from one length to the next. A single token resets them.
            self.asked(torch.zeros_like(positions[:, :1]))
        cos, sin = self.asked(positions)
        cos, sin = self.layout.columns(*(table.flatten(0, -3)[0] for table in (cos, sin)))  # alike on all axes, if any
        return cos.float().contiguous(), sin.float().contiguous()


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer in a text of `end` tokens. Where `rotary` is None, the layer does not rotate.

    States are (batch, heads, tokens, head_dim), positions (batch, 1 or heads, 1 or tokens), from 0 and below `end`.
    """

    rotary: Rotary | None
    end: int
    device: torch.device

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """`states` rotated to `positions`, in float32, or the same tensor where the layer does not rotate."""
        if self.rotary is None:
            return states
        cos, sin = tables = self.rotary.tables(self.end, self.device)
        if (rotated := kernels.rotated(states, positions, tables)) is not None:
            return rotated
        return rotate(states.float(), cos[positions], sin[positions])

    def query_gain(self) -> Tensor | None:
        """Factors (head_dim) of a rotated query before its products with rotated keys, or None for 1."""
        return None if self.rotary is None else self.rotary.query_gain()

    def step_angles(self) -> tuple[Tensor, Tensor] | None:
        """Cos and sin of each channel pair's angle from one position to the next, or None without rotation.

        They are scaled as the model scales its rotated states.
        """
        if self.rotary is None:
            return None
        cos, sin = self.rotary.tables(max(self.end, 2), self.device)
        return cos[1], sin[1]


def _copied(module: nn.Module) -> nn.Module:
    """A copy without hooks: those of an attached model know the model, which would be copied too."""
    hooks = (name for name in vars(module) if "_hooks" in name)
    return copy.deepcopy(module, {id(vars(module)[name]): OrderedDict() for name in hooks})


def _scheme(module: nn.Module, layer_type: str | None) -> tuple[str, int]:
    """The name of a module's scaling scheme and the length below which it is constant."""
    config = getattr(module, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type, parameters)
    longest = int(getattr(config, "max_position_embeddings", 0))
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type == "longrope":
        longest = int(parameters.get("original_max_position_embeddings", longest))
    return rope_type, longest
