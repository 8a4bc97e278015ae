"""A store of codes beside its oracle in floats, and whether they read alike."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass import KVCache, kernels
from windlass.core.inputs import Format, PackedStates, Writes
from windlass.core.types import KeyMeans, NewKeys, NewValues, SlotIndex, SlotKeys, SlotValues
from windlass.kernels import reference
from windlass.stores import Plain
from windlass.stores.base import Parts
from windlass.stores.formats import LowBit, store_of

SPECS = ("int4(sinks=3, newest=5)", "int8(newest=4)", "int4(sinks=2)")


def packed_as(store: str, states: Tensor, means: Tensor | None = None, group: int = 16) -> PackedStates:
    """States (batch, kv_heads, slots, width) as a store of this name holds them: int4 in groups of so many channels."""
    if store == "plain":
        return PackedStates(states)
    group = group if store == "int4" else 0
    codes, scales = reference.encode(states, means, group)
    return PackedStates(codes, Format(store), scales, means, group=group)


class Told(Plain):
    """The oracle: floats, and each token's number. Exact tokens are given anew at each reading.

    It keeps everything and has no ring. `roll_back` reports rolled back tokens to it.
    """

    part_names = ("keys", "values", "coded_keys", "coded_values", "numbers")  # type: ignore[assignment]  # more than Plain has
    needs_key_means = True

    def __init__(self, like: LowBit) -> None:
        super().__init__()
        self._like = like
        self.sinks, self.newest = like.full_precision.sinks, like.full_precision.newest
        self.written: list[int] = []

    def fresh(self, key_means: KeyMeans | None) -> "Told":
        return Told(self._like.fresh(key_means))

    def make_constants(self, keys: NewKeys) -> Parts:
        self._like._constants = self._like.make_constants(keys)
        self.written = [0] * len(keys)
        return {}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        codes = self._like.encode(keys, values)
        decoded = self._like.decode_values(codes) if values.shape[3] else values  # values may be a part of the keys
        coded = {"coded_keys": self._like.decode_keys(codes), "coded_values": decoded}
        return {"keys": keys, "values": values, **coded, "numbers": torch.zeros(*keys.shape[:3], 1, dtype=torch.long)}

    def write(
        self, index: SlotIndex, keys: NewKeys, values: NewValues, positions: SlotIndex, beside: Writes = ()
    ) -> None:
        parts = self.parts_of(keys, values)
        for row, columns in enumerate((positions >= 0).any(1).tolist()):
            for column, is_token in enumerate(columns):
                if is_token:
                    parts["numbers"][row, :, column] = self.written[row]
                    self.written[row] += 1
        kernels.write_all(index, [*((held, parts[name]) for name, held in self._allocated().items()), *beside])

    def put(self, index: SlotIndex, parts: Parts, beside: Writes = ()) -> None:
        kernels.write_all(index, [(self._allocated()[name], part) for name, part in parts.items() if "coded" in name])

    def roll_back(self, counts: list[int]) -> None:
        self.written = [number - count for number, count in zip(self.written, counts, strict=True)]

    def decode_keys(self, parts: Parts) -> SlotKeys:
        return self._told(parts, "keys")

    def decode_values(self, parts: Parts) -> SlotValues:
        return self._told(parts, "values")

    def _told(self, parts: Parts, name: str) -> Tensor:
        written = torch.tensor(self.written[: len(parts[name])])[:, None, None, None]
        is_exact = (parts["numbers"] < self.sinks) | (parts["numbers"] >= written - self.newest)
        return torch.where(is_exact, parts[name], parts[f"coded_{name}"])

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.written = [self.written[row] for row in rows.tolist()]

    def copy_row(self, source: int, target: int) -> None:
        super().copy_row(source, target)
        self.written[target] = self.written[source]


@pytest.fixture(autouse=True)
def one_arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and floats are read by the same plain PyTorch, so that both give the same bits."""
    if "compiled" not in request.node.name:
        monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)


def pair(model: PreTrainedModel, spec: str, **options: object) -> Iterator[KVCache]:
    """A cache of codes, then its oracle."""
    yield KVCache(model, store=spec, **options)  # type: ignore[arg-type]
    like = store_of(spec)
    assert isinstance(like, LowBit)
    yield KVCache(model, store=Told(like), **options)  # type: ignore[arg-type]


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(mine, other)


def in_text_order(cache: KVCache) -> list[Tensor]:
    """Positions, keys and values as they are read, of all layers."""
    found = []
    for layer in cache.layers:
        order = layer.positions.where(layer.positions >= 0, 2**30).argsort(dim=-1, stable=True)
        order = order[..., : int((layer.positions >= 0).sum(-1).min())]
        for row in range(cache.batch_size):
            own = order[row : row + 1]
            found += [layer.positions[row : row + 1].gather(-1, own), *layer.store.read(row, own)]
    return found


def exact_positions(cache: KVCache, row: int = 0) -> list[int]:
    """Positions whose tokens are read exactly, in layer 0 and head 0."""
    layer = cache.layers[0]
    places = layer.store.full_precision.ring_index(layer.store.slots)
    assert places is not None
    positions = layer.positions[row, 0]
    return sorted(positions[(places[row, 0] >= 0) & (positions >= 0)].tolist())
