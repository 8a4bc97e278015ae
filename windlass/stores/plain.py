"""Keys and values as the model made them."""

from windlass.core.shapes import KeyMeans, NewKeys, NewValues, SlotKeys, SlotValues
from windlass.stores.base import Parts, Store


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

    def in_place(self) -> tuple[SlotKeys, SlotValues] | None:
        return None if self.latent or self.index else (self._parts["keys"], self._parts["values"])
