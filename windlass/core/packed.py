"""The keys or the values of a layer as they lie in memory, for kernels that read them in place."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from windlass.core.shapes import KeyMeans, Scales


class Format(Enum):
    """How a number is stored. Kernels decode the formats named here and no others.

    A store with a format of its own hands over decoded floats: slower to read, and correct.
    """

    FLOAT = "float"  # the tensor's own dtype
    INT8 = "int8"  # one signed byte for each channel
    INT4 = "int4"  # channel j, plus 8, in the low half of byte j, channel j + channels / 2 in its high half


@dataclass(frozen=True)
class PackedStates:
    """Keys or values of all slots: `data` (batch, kv_heads, slots, width) in a `format`.

    A number of INT8 or INT4 is code * scale + mean: one scale for each slot and head, one mean for each
    channel (None: 0). Some slots are also held at full precision and are read from there: slot s at entry
    `ring_index[s]` of `full_precision`, -1 for none.

    `last`: only the last so many channels are meant, as in values that are a part of their keys; None: all of them.
    """

    data: Tensor
    format: Format = Format.FLOAT
    scales: Scales | None = None
    means: KeyMeans | None = None
    full_precision: Tensor | None = None  # (batch, kv_heads, entries, channels)
    ring_index: Tensor | None = None  # (batch, kv_heads, slots) int32
    last: int | None = None

    @property
    def held_channels(self) -> int:
        """Numbers per slot and head that lie in memory."""
        return self.data.shape[-1] * (2 if self.format is Format.INT4 else 1)

    @property
    def channels(self) -> int:
        """Numbers per slot and head."""
        return self.held_channels if self.last is None else self.last

    @property
    def first(self) -> int:
        """The first of the channels that are meant."""
        return self.held_channels - self.channels

    @property
    def bits(self) -> int:
        """Bits per number."""
        return 4 if self.format is Format.INT4 else 8 * self.data.itemsize

    def floats(self) -> Tensor:
        """The decoded numbers, float32; floats come as they are."""
        return self._held()[..., self.first :]

    def _held(self) -> Tensor:
        if self.scales is None:
            return self.data
        codes = self.data
        if self.format is Format.INT4:
            codes = torch.cat((codes & 15, codes >> 4), -1).to(torch.int8) - 8
        floats = codes.float() * self.scales.float()
        if self.means is not None:
            floats = floats + self.means[:, None]
        if self.full_precision is None or self.ring_index is None:
            return floats
        entries = self.ring_index.long().clamp(min=0)[..., None].expand_as(floats)
        return torch.where(self.ring_index[..., None] >= 0, self.full_precision.float().gather(2, entries), floats)
