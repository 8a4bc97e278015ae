"""The stores by name: plain tensors, codes of 8 bits and of 4 bits."""

from collections.abc import Sequence
from typing import ClassVar, Final, final

import torch

from windlass import kernels
from windlass.core.errors import UsageError, check_kind
from windlass.core.inputs import Format, PackedStates
from windlass.core.parse import parse_ints, parse_spec, use_one_of
from windlass.core.types import KeyMeans, NewKeys, NewValues, SlotKeys, SlotValues
from windlass.stores.base import Parts, Store
from windlass.stores.full_precision import FullPrecisionRing

KEY_MEANS: Final = "key_centres"  # as prompt-cache files call it, which must stay readable


class LowBit(Store):
    """Keys and values as codes of 8 or 4 bits, and scales of these. `Int8` and `Int4` say how many.

    Keys are coded as their difference from the mean key of the layer and head. They are held before RoPE, so that mean
    is one vector, wherever a key stands in the text. The range of the difference is a third of the keys' range, or less
    in a model whose keys have a bias.

    The first `sinks` tokens written to a row, and its `newest` ones, are kept in full precision as well and read from
    there, see `FullPrecisionRing`. A token counts as written even if `drop` frees it later.

    Source: keys quantised before RoPE, Hooper et al. 2024 (arXiv:2401.18079). Differs: a constant mean is subtracted,
    in place of a scale per channel.
    """

    part_names = ("key_codes", "key_scales", "value_codes", "value_scales")
    constant_names = (KEY_MEANS,)
    parameters = ("sinks", "newest")
    needs_key_means = True

    bits: ClassVar[int]
    format: ClassVar[Format]
    key_group: ClassVar[int] = 0
    """Channels of a key that share a scale and an offset. 0: a key has one scale."""
    value_group: ClassVar[int] = 0

    def __init__(self, sinks: int = 0, newest: int = 0, key_means: KeyMeans | None = None) -> None:
        super().__init__(FullPrecisionRing(sinks, newest))
        self._key_means = key_means

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._numbers})"

    @property
    def name(self) -> str:
        return f"int{self.bits}" + (f"({self._numbers})" if self._numbers else "")

    @property
    def _numbers(self) -> str:
        numbers = {"sinks": self.full_precision.sinks, "newest": self.full_precision.newest}
        return ", ".join(f"{name}={number}" for name, number in numbers.items() if number)

    def fresh(self, key_means: KeyMeans | None) -> "LowBit":
        return type(self)(self.full_precision.sinks, self.full_precision.newest, key_means)

    def make_constants(self, keys: NewKeys) -> Parts:
        if self._key_means is None:
            return {KEY_MEANS: keys.new_zeros(keys.shape[1], keys.shape[3])}
        return {KEY_MEANS: self._key_means.to(keys)}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        for what, width in (("keys", keys.shape[3]), ("values", values.shape[3])):
            if width * self.bits % 8:
                raise UsageError(
                    f"store int4 packs two channels into a byte, but this model's {what} have {width}. Use store int8"
                )
        key_codes, key_scales = kernels.encode(keys, self._constants[KEY_MEANS], self.key_group)
        value_codes = value_scales = values.new_zeros(values.shape, dtype=torch.uint8)  # of no channels
        if values.shape[3]:
            value_codes, value_scales = kernels.encode(values, None, self.value_group)
        return {
            "key_codes": key_codes,
            "key_scales": key_scales,
            "value_codes": value_codes,
            "value_scales": value_scales,
        }

    def decode_keys(self, parts: Parts) -> SlotKeys:
        held = PackedStates(parts["key_codes"], self.format, parts["key_scales"], self._means(), group=self.key_group)
        return kernels.decode(held, self._constants[KEY_MEANS].dtype)

    def decode_values(self, parts: Parts) -> SlotValues:
        held = PackedStates(parts["value_codes"], self.format, parts["value_scales"], group=self.value_group)
        return kernels.decode(held, self._constants[KEY_MEANS].dtype)

    def packed_keys(self) -> PackedStates:
        codes, scales, ring = self._parts["key_codes"], self._parts["key_scales"], self.full_precision
        in_ring = ring.ring_index(self.slots)
        return PackedStates(codes, self.format, scales, self._means(), ring.keys, in_ring, group=self.key_group)

    def packed_values(self) -> PackedStates:
        codes, scales, ring = self._parts["value_codes"], self._parts["value_scales"], self.full_precision
        in_ring = ring.ring_index(self.slots)
        return PackedStates(codes, self.format, scales, None, ring.values, in_ring, group=self.value_group)

    def in_place(self) -> tuple[PackedStates, PackedStates] | None:
        return None if self.latent or self.index or self.full_precision.tensors else self.packed()

    def in_place_beside_sinks(self) -> tuple[PackedStates, PackedStates] | None:
        is_plain = not (self.latent or self.index)
        return self.packed() if is_plain and self.full_precision.newest == 0 else None

    def _means(self) -> KeyMeans:
        return self._constants[KEY_MEANS].float()


@final
class Int8(LowBit):
    """Codes of 8 bits: 0.52 of the bytes of bfloat16.

    A token and head has one scale. The channel of largest magnitude gets the lowest code, so that all codes are in use.
    Where that channel is positive, the scale is negative.

    Source: scales from the signed extreme, q4_0 of llama.cpp.
    """

    bits = 8
    format = Format.INT8


@final
class Int4(LowBit):
    """Codes of 4 bits: 0.34 of the bytes of bfloat16.

    Each 16 channels of a key and 32 of a value have a scale and an offset of their own. These and the codes are fitted
    to each other in turn, to the least squared error, from the range of the group on.

    Source: groups with a scale and a minimum, q4_1 of llama.cpp and Sheng et al. 2023 (arXiv:2303.06865). Levels and
    codes fitted in turn, Lloyd 1982 (doi:10.1109/TIT.1982.1056489). Differs: levels stay at equal distances, the offset
    is the middle of the group, of which float16 loses less, and keys are centred first.
    """

    bits = 4
    format = Format.INT4
    key_group = 16
    value_group = 32


class Plain(Store):
    """Keys and values as the model made them."""

    part_names = ("keys", "values")

    def __repr__(self) -> str:
        return "Plain()"

    @property
    def name(self) -> str:
        return "plain"

    def fresh(self, key_means: KeyMeans | None) -> "Plain":
        return Plain()

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        return {"keys": keys, "values": values}

    def decode_keys(self, parts: Parts) -> SlotKeys:
        return parts["keys"]

    def decode_values(self, parts: Parts) -> SlotValues:
        return parts["values"]

    def in_place(self) -> tuple[PackedStates, PackedStates] | None:
        if self.latent or self.index:
            return None
        return PackedStates(self._parts["keys"]), PackedStates(self._parts["values"])


@final
class PlainRows(Plain):
    """The plain stores of several layers, as rows of one batch, for policies that read keys and values.

    It holds no memory of its own: each call copies.
    """

    def __init__(self, layers: Sequence[Store]) -> None:
        super().__init__()
        self._layers = layers

    @property
    def slots(self) -> int:
        return self._layers[0].slots

    def keys(self) -> SlotKeys:
        return torch.cat([each.keys() for each in self._layers])

    def values(self) -> SlotValues:
        return torch.cat([each.values() for each in self._layers])


STORES: Final[dict[str, type[Store]]] = {"plain": Plain, "int8": Int8, "int4": Int4}


def store_of(spec: str | Store) -> Store:
    """The store that `spec` names: `"plain"`, `"int8"`, `"int4(sinks=4, newest=32)"`, or a store itself.

    Raises: UsageError for an unknown name, wrong numbers, or a value that is neither a store nor a name.
    """
    if isinstance(spec, Store):
        return spec
    check_kind("store", spec, str, "a store or its name", 'Write store="int8" or windlass.stores.Int8()')
    typed = parse_spec(spec)
    if typed is None or typed.name not in STORES:
        hint = "Numbers of a store stand in parentheses, as in int4(sinks=4, newest=32)"
        raise UsageError(f"store={spec!r} is not a store. {use_one_of(spec, STORES)}. {hint}")
    store = STORES[typed.name]
    numbers = parse_ints(f"store={spec!r}", typed, store.parameters)
    return store(**numbers)  # type: ignore[arg-type]  # `parameters` names the whole numbers it takes
