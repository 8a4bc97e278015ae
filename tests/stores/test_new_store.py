"""A store from outside: the demands of the contract, and all features that work with an unknown store."""

import pytest
import torch

from tests.helpers.models import Models, Text, read
from tests.helpers.stores import assert_equal
from windlass import KVCache, UsageError
from windlass.core.types import KeyMeans, NewKeys, NewValues, SlotKeys, SlotValues
from windlass.evals.speed.measure import bytes_held
from windlass.evals.speed.rows import rows_of
from windlass.evals.speed.workloads import BenchLists
from windlass.hf.forward import LayerShape
from windlass.policies import Recent
from windlass.stores import Int4, Int8, Plain
from windlass.stores.base import Parts, Store
from windlass.stores.formats import STORES, store_of


class Shifted(Store):
    """Keys and values as the model made them, plus `by`: kernels must read other numbers than those in memory."""

    part_names = ("key_and_value",)
    constant_names = ("by", "width")
    parameters = ("by",)

    def __init__(self, by: int = 1) -> None:
        super().__init__()
        self._by = by

    def __repr__(self) -> str:
        return f"Shifted({self._by})"

    @property
    def name(self) -> str:
        return f"shifted({self._by})"

    def fresh(self, key_means: KeyMeans | None) -> "Shifted":
        return Shifted(self._by)

    def make_constants(self, keys: NewKeys) -> Parts:
        return {"by": keys.new_full((), self._by), "width": torch.tensor(keys.shape[3])}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        return {"key_and_value": torch.cat((keys, values), -1) + self._constants["by"]}

    def decode_keys(self, parts: Parts) -> SlotKeys:
        return parts["key_and_value"][..., : int(self._constants["width"])] - self._constants["by"]

    def decode_values(self, parts: Parts) -> SlotValues:
        return parts["key_and_value"][..., int(self._constants["width"]) :] - self._constants["by"]


@pytest.mark.parametrize("budget", [None, 16])
def test_it_reads_as_a_plain_store(attached_model: Models, text: Text, budget: int | None) -> None:
    """Adding 0 and taking it away again changes no bit."""
    model, ids = attached_model("llama"), text(60)
    lives = []
    for store in (Shifted(0), Plain()):
        cache, other = (KVCache(model, budget, store=store, window=3, policy=Recent()) for _ in range(2))
        life = [read(model, cache, ids[:, :30], 7), read(model, other, ids[:, :12], 12)]
        cache.rollback(2)
        cache.splice(other)
        lives.append([*life, read(model, cache, ids[:, 30:], 1)])
    for ours, truth in zip(*lives, strict=True):
        assert_equal(ours, truth)


def test_it_is_compatible_with_its_like_only() -> None:
    stores = [Shifted(2), Shifted(2), Shifted(3), Plain()]
    for store in stores:
        store.allocate(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 6), 4)
    assert [stores[0].is_compatible(other) for other in stores] == [True, True, False, False]


def test_kernels_are_given_decoded_numbers() -> None:
    keys, values = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 6)
    store = Shifted(5)
    store.allocate(keys, values, 4)
    slots = torch.arange(4).expand(2, 1, 4)
    store.write(slots, keys, values, slots)
    for packed, truth in ((store.packed_keys(), keys), (store.packed_values(), values)):
        assert packed.bits == 32
        torch.testing.assert_close(packed.floats(), truth, atol=1e-6, rtol=0)


def test_one_line_makes_it_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES, "shifted", Shifted)
    for spec, name in (("shifted", "shifted(1)"), ("shifted(7)", "shifted(7)"), ("shifted(by=3)", "shifted(3)")):
        store = store_of(spec)
        assert isinstance(store, Shifted)
        assert store.name == name
    with pytest.raises(UsageError, match="shifted takes by, each once"):
        store_of("shifted(sinks=4)")
    with pytest.raises(UsageError, match="Use one of: plain, int8, int4, shifted "):
        store_of("shift")


@pytest.mark.parametrize(
    ("store", "dtype", "expected"),
    [
        (Plain(), torch.bfloat16, 2 * (10 + 6)),
        (Plain(), torch.float32, 4 * (10 + 6)),
        # a byte per number, and a scale of two bytes for keys and for values
        (Int8(), torch.bfloat16, 10 + 6 + 2 * 2),
        (Int8(sinks=4), torch.bfloat16, 10 + 6 + 2 * 2),
        # half a byte, and a scale and an offset for each group of 16 channels of a key and 32 of a value
        (Int4(), torch.bfloat16, 5 + 3 + 2 * 4),
        (Shifted(), torch.float16, 2 * (10 + 6)),
    ],
    ids=str,
)
def test_bytes_per_token(store: Store, dtype: torch.dtype, expected: int) -> None:
    assert store.bytes_per_token(10, 6, dtype) == expected
    # Only slots grow with the text: 30 more of them, in 2 rows and 3 heads, take so much more.
    sizes = []
    for slots in (20, 50):
        own = store.fresh(None)
        own.allocate(torch.randn(2, 3, 5, 10).to(dtype), torch.randn(2, 3, 5, 6).to(dtype), slots)
        sizes.append(sum(tensor.nbytes for tensor in own.tensors().values()))
    assert sizes[1] - sizes[0] == 30 * 2 * 3 * expected


def test_a_benchmark_asks_the_store_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two float32 rows of 3 heads, budget 40 and a chunk of 8."""
    monkeypatch.setitem(STORES, "shifted", Shifted)
    shape = LayerShape(3, 3, 10, 6, torch.float32, None)
    for store, per_token in (("plain", 64), ("int8", 16 + 2 * 2), ("shifted(2)", 64)):
        lists = BenchLists(prompt_tokens="0", options={"budget": "40", "store": store}, batch="2")
        (row,) = rows_of(lists, chunk=8)
        assert bytes_held(shape, row) == 2 * 3 * (40 + 8) * per_token


def test_a_store_that_cannot_hold_the_model_says_so() -> None:
    with pytest.raises(UsageError, match=r"two channels into a byte, but this model's values have 5. Use store int8"):
        Int4().bytes_per_token(8, 5, torch.bfloat16)
