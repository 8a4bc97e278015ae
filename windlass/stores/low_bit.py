"""Stores of small whole numbers, one scale per token and head, and all stores by name."""

import re
from typing import ClassVar, final

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.packed import Held
from windlass.core.shapes import KeyCentres, NewKeys, NewValues, SlotKeys, SlotValues
from windlass.core.spec import whole_numbers
from windlass.stores.base import Parts, Plain, Store
from windlass.stores.exact import Exact

CENTRES = "key_centres"


class LowBit(Store):
    """Keys and values as codes of 8 or 4 bits: 0.52 or 0.27 of what bfloat16 takes.

    A number is its code times the scale of its token and head. The channel of largest magnitude gets
    the lowest code, so that all codes are of use; where it is positive, the scale is negative. Keys
    are held before rotation, so their mean is one vector per head wherever they stand: codes count
    from there, and need to span a third, or less in a model whose keys have a bias.

    The first `sinks` tokens written to a row, and the `newest`, are held as the model made them too,
    and read so; see `Exact`. What `drop` frees was written all the same.

    Source: scales from the signed extreme, q4_0 of llama.cpp; keys coded before rotation, Hooper et
    al. 2024 (arXiv:2401.18079). Differs: a constant centre in place of a scale per channel.
    """

    part_names = ("key_codes", "key_scales", "value_codes", "value_scales")
    constant_names = (CENTRES,)
    needs_centres = True

    bits: ClassVar[int]

    def __init__(self, sinks: int = 0, newest: int = 0, centres: KeyCentres | None = None) -> None:
        super().__init__(Exact(sinks, newest))
        self._given = centres

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._numbers})"

    @property
    def name(self) -> str:
        return f"int{self.bits}" + (f"({self._numbers})" if self._numbers else "")

    @property
    def _numbers(self) -> str:
        numbers = {"sinks": self.exact.sinks, "newest": self.exact.newest}
        return ", ".join(f"{name}={number}" for name, number in numbers.items() if number)

    def fresh(self, centres: KeyCentres | None) -> "LowBit":
        return type(self)(self.exact.sinks, self.exact.newest, centres)

    def begin(self, keys: NewKeys) -> Parts:
        if self._given is None:
            return {CENTRES: keys.new_zeros(keys.shape[1], keys.shape[3])}
        return {CENTRES: self._given.to(keys)}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        for what, width in (("keys", keys.shape[3]), ("values", values.shape[3])):
            if width * self.bits % 8:
                raise UsageError(
                    f"store int4 packs two channels into a byte, but this model's {what} have {width}; use store int8"
                )
        key_codes, key_scales = kernels.encode(keys, self._constants[CENTRES], self.bits)
        value_codes, value_scales = kernels.encode(values, None, self.bits)
        return {
            "key_codes": key_codes,
            "key_scales": key_scales,
            "value_codes": value_codes,
            "value_scales": value_scales,
        }

    def decode_keys(self, parts: Parts) -> SlotKeys:
        held = Held(parts["key_codes"], self.bits, parts["key_scales"], self._centres())
        return held.floats().to(self._constants[CENTRES].dtype)

    def decode_values(self, parts: Parts) -> SlotValues:
        held = Held(parts["value_codes"], self.bits, parts["value_scales"])
        return held.floats().to(self._constants[CENTRES].dtype)

    def held_keys(self) -> Held:
        codes, scales, places = self._parts["key_codes"], self._parts["key_scales"], self.exact.places(self.slots)
        return Held(codes, self.bits, scales, self._centres(), self.exact.keys, places)

    def held_values(self) -> Held:
        codes, scales, places = self._parts["value_codes"], self._parts["value_scales"], self.exact.places(self.slots)
        return Held(codes, self.bits, scales, None, self.exact.values, places)

    def reads_like(self, other: Store) -> bool:
        return type(other) is type(self) and self._constants[CENTRES].equal(other._constants[CENTRES])

    def _centres(self) -> KeyCentres:
        return self._constants[CENTRES].float()


@final
class Int8(LowBit):
    """Codes of 8 bits: 0.52 of the bytes of bfloat16."""

    bits = 8


@final
class Int4(LowBit):
    """Codes of 4 bits: 0.27 of the bytes of bfloat16."""

    bits = 4


LOW_BIT: dict[str, type[LowBit]] = {"int8": Int8, "int4": Int4}
STORES: dict[str, type[Store]] = {"plain": Plain, **LOW_BIT}


def store_of(spec: str | Store) -> Store:
    """The store that `spec` names: `"plain"`, `"int8"`, `"int4(sinks=4, newest=32)"`; or a store itself.

    Raises: UsageError for an unknown name or wrong numbers.
    """
    if isinstance(spec, Store):
        return spec
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", spec)
    if match is None or match[1] not in STORES:
        forms = "int8 and int4 also as int4(sinks=4, newest=32)"
        raise UsageError(f"store={spec!r} is not a store; use one of: {', '.join(STORES)}; {forms}")
    names = ("sinks", "newest") if match[1] in LOW_BIT else ()
    numbers = whole_numbers(f"store={spec!r}", match[1], names, match[2] or "")
    if match[1] not in LOW_BIT:
        return Plain()
    return LOW_BIT[match[1]](numbers.get("sinks", 0), numbers.get("newest", 0))
