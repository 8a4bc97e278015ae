"""A store of small whole numbers, one scale per token and head, and the stores by name."""

import torch
from torch import Tensor

from windlass.errors import UsageError
from windlass.held import Held
from windlass.shapes import KeyCentres, NewKeys, NewValues, SlotKeys, SlotValues
from windlass.store import Parts, Plain, Store

CENTRES = "key_centres"


class LowBit(Store):
    """Keys and values as codes of 8 or 4 bits: 0.52 or 0.27 of what bfloat16 takes.

    A number is its code times the scale of its token and head. The channel of largest magnitude gets
    the lowest code, so that all codes are of use; where it is positive, the scale is negative. Keys
    are held before rotation, so their mean is one vector per head wherever they stand: codes count
    from there, and need to span a third, or less in a model whose keys have a bias.

    With 4 bits, byte j holds channel j in its low half and channel j + width / 2 in its high half,
    each plus 8.

    Source: scales from the signed extreme, q4_0 of llama.cpp; keys coded before rotation, Hooper et
    al. 2024 (arXiv:2401.18079). Differs: a constant centre in place of a scale per channel.
    """

    part_names = ("key_codes", "key_scales", "value_codes", "value_scales")
    constant_names = (CENTRES,)
    needs_centres = True

    def __init__(self, bits: int, centres: KeyCentres | None = None) -> None:
        if bits not in (4, 8):
            raise UsageError(f"a store of {bits} bits is not there; use 8 or 4")
        super().__init__()
        self._bits = bits
        self._given = centres

    def __repr__(self) -> str:
        return f"LowBit({self._bits})"

    @property
    def name(self) -> str:
        return f"int{self._bits}"

    def fresh(self, centres: KeyCentres | None) -> "LowBit":
        return LowBit(self._bits, centres)

    def begin(self, keys: NewKeys) -> Parts:
        if self._given is None:
            return {CENTRES: keys.new_zeros(keys.shape[1], keys.shape[3])}
        return {CENTRES: self._given.to(keys)}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        key_codes, key_scales = self._coded(keys.float() - self._centres()[:, None], "keys")
        value_codes, value_scales = self._coded(values.float(), "values")
        return {
            "key_codes": key_codes,
            "key_scales": key_scales,
            "value_codes": value_codes,
            "value_scales": value_scales,
        }

    def decode_keys(self, parts: Parts) -> SlotKeys:
        held = Held(parts["key_codes"], self._bits, parts["key_scales"], self._centres())
        return held.floats().to(self._constants[CENTRES].dtype)

    def decode_values(self, parts: Parts) -> SlotValues:
        held = Held(parts["value_codes"], self._bits, parts["value_scales"])
        return held.floats().to(self._constants[CENTRES].dtype)

    def held_keys(self) -> Held:
        return Held(self._parts["key_codes"], self._bits, self._parts["key_scales"], self._centres())

    def held_values(self) -> Held:
        return Held(self._parts["value_codes"], self._bits, self._parts["value_scales"])

    def reads_like(self, other: Store) -> bool:
        if not isinstance(other, LowBit) or other._bits != self._bits:
            return False
        return self._constants[CENTRES].equal(other._constants[CENTRES])

    def _centres(self) -> KeyCentres:
        return self._constants[CENTRES].float()

    def _coded(self, numbers: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """Codes and float16 scales of float32 `numbers`."""
        width, lowest = numbers.shape[-1], -(2 ** (self._bits - 1))
        if self._bits == 4 and width % 2:
            raise UsageError(
                f"store int4 packs two channels into a byte, but this model's {what} have {width}; use store int8"
            )
        low, high = numbers.aminmax(dim=-1, keepdim=True)
        most = torch.finfo(torch.float16).max
        scales = (torch.where(-low > high, low, high) / lowest).clamp(-most, most).to(torch.float16)
        divisors = scales.float()
        codes = (numbers / divisors.where(divisors != 0, 1.0)).round().clamp(lowest, -lowest - 1)
        if self._bits == 8:
            return codes.to(torch.int8), scales
        first, second = (codes - lowest).to(torch.uint8).split(width // 2, -1)
        return first | second << 4, scales


STORES: dict[str, Store] = {store.name: store for store in (Plain(), LowBit(8), LowBit(4))}


def store_of(spec: str | Store) -> Store:
    """The store that `spec` names: `"plain"`, `"int8"` or `"int4"`; or a store itself.

    Raises: UsageError for an unknown name.
    """
    if isinstance(spec, Store):
        return spec
    if spec.strip() not in STORES:
        raise UsageError(f"store={spec!r} is not a store; use one of: {', '.join(STORES)}")
    return STORES[spec.strip()]
