"""The keys or the values of a layer as they lie in memory."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.shapes import KeyCentres, Scales


@dataclass(frozen=True)
class Held:
    """The keys or the values of a layer as they lie in memory, for kernels that read them in place.

    `bits` is the width of a number: that of the floats themselves, or 8 or 4 for codes. Codes stand
    for code * scale, plus the centre of their channel where there is one.
    """

    codes: Tensor
    bits: int
    scales: Scales | None = None
    centres: KeyCentres | None = None
    exact: Tensor | None = None  # (batch, kv_heads, places, channels), of slots that are held exactly, too
    places: Tensor | None = None  # (batch, kv_heads, slots) int32: where a slot stands in `exact`, -1 for nowhere

    @property
    def channels(self) -> int:
        """Numbers per slot and head."""
        return self.codes.shape[-1] * (2 if self.bits == 4 else 1)

    def floats(self) -> Tensor:
        """The numbers that the codes stand for, float32; what is held as floats comes as it is."""
        if self.scales is None:
            return self.codes
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), -1).to(torch.int8) - 8
        floats = codes.float() * self.scales.float()
        if self.centres is not None:
            floats = floats + self.centres[:, None]
        if self.exact is None or self.places is None:
            return floats
        places = self.places.long().clamp(min=0)[..., None].expand_as(floats)
        return torch.where(self.places[..., None] >= 0, self.exact.float().gather(2, places), floats)
