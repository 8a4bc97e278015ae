"""Low-bit stores: a cache of codes is, bit for bit, a plain cache of the numbers that the codes stand for."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.caches import POLICIES
from tests.helpers.models import Models, Text, read
from tests.helpers.stores import assert_equal
from windlass import KVCache, UsageError, kernels
from windlass.core.inputs import Format, PackedStates
from windlass.core.types import KeyMeans, NewKeys, NewValues
from windlass.policies import KeyDiff, Policy
from windlass.stores.base import Parts
from windlass.stores.formats import KEY_MEANS, Int4, Int8, LowBit, Plain, store_of

STORES = ("int8", "int4")
BITS = {8: Int8, 4: Int4}


class Rounded(Plain):
    """The oracle: floats, rounded at write as the codes of `like` round them."""

    needs_key_means = True

    def __init__(self, like: LowBit) -> None:
        super().__init__()
        self._like = like

    def fresh(self, key_means: KeyMeans | None) -> "Rounded":
        return Rounded(self._like.fresh(key_means))

    def make_constants(self, keys: NewKeys) -> Parts:
        self._like._constants = self._like.make_constants(keys)
        return {}

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        parts = self._like.encode(keys, values)
        return {"keys": self._like.decode_keys(parts), "values": self._like.decode_values(parts)}


def pair(model: PreTrainedModel, store: str, **options: object) -> tuple[KVCache, KVCache]:
    """A cache of codes and its oracle."""
    like = store_of(store)
    assert isinstance(like, LowBit)
    return KVCache(model, store=store, **options), KVCache(model, store=Rounded(like), **options)  # type: ignore[arg-type]


@pytest.fixture
def one_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes and floats are read by the same plain PyTorch, so that both give the same bits."""
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)


def packed_codes(store: LowBit, numbers: list[float]) -> tuple[Tensor, Tensor]:
    """Codes and scale of one key in a store without key means."""
    keys = torch.tensor(numbers)[None, None, None]
    store.allocate(keys, keys, 3)
    parts = store.encode(keys, keys)
    return parts["key_codes"].flatten(), parts["key_scales"].flatten()


def test_codes_worked_by_hand() -> None:
    codes, scale = packed_codes(Int4(), [6.5, -1.0, 0.5, 3.5] + [0.0] * 12 + [3.0, 3.0])
    # a step of 7.5 / 15 from -1 (code -8) to 6.5 (code 7), and a group of two, both 3
    assert scale.tolist() == [0.5, 3.0, 0.0, 3.0]
    # channels 0 to 3: codes 7, -8, -5, 1; zeros: -6; 9 channels on: 2 but for the last two, whose code is 0
    assert codes.tolist() == [
        15 | 2 << 4,
        0 | 2 << 4,
        3 | 2 << 4,
        9 | 2 << 4,
        *[2 | 2 << 4] * 3,
        2 | 8 << 4,
        2 | 8 << 4,
    ]
    codes, scale = packed_codes(Int8(), [-64.0, 63.9, 0.26, 1.0, 5.0])
    assert scale.tolist() == [0.5]
    assert codes.tolist() == [-128, 127, 1, 2, 10]


def test_a_fit_worked_by_hand() -> None:
    codes, pair = packed_codes(Int4(), [-4.0, 3.5] + [0.6] * 14)
    # The step of 0.5 from -4 to 3.5 gives codes -8, 7 and 14 times 1 (of 1.2), with an error of 14 * 0.1 ** 2.
    # 16 times the deviation of each from the mean 13 / 16: -141, 99 and 3. The least squares of numbers over codes:
    # (141 * 4 + 99 * 3.5 + 14 * 3 * 0.6) / (16 * 127 - 13 ** 2) = 0.50225, and (7.9 - 13 * 0.50244) / 16 = 0.08552.
    assert pair.tolist() == [1029 / 2**11, 1401 / 2**14]
    assert codes.tolist() == [0 | 9 << 4, 15 | 9 << 4, *[9 | 9 << 4] * 6]


def groups_of(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(len(kind))
    numbers = torch.randn(2, 3, 200, 40, generator=draw)
    if kind == "heavy tails":
        return numbers / torch.rand(numbers.shape, generator=draw)
    if kind == "constant":
        return torch.cat((numbers[..., :1].expand(-1, -1, -1, 20), numbers[..., :20].clamp(-0.1, 0.1)), -1)
    others = {"far from zero": numbers + 300, "tiny": numbers * 1e-7, "whole": (numbers * 3).round()}
    return others.get(kind, numbers)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "constant", "far from zero", "tiny", "whole"])
@pytest.mark.parametrize("group", [16, 32])
def test_no_group_has_a_larger_error_than_between_its_least_and_its_largest_number(kind: str, group: int) -> None:
    numbers, totals = groups_of(kind), [0.0, 0.0]
    codes, pairs = kernels.encode(numbers, None, group)
    ours = PackedStates(codes, Format.INT4, pairs, group=group).floats()
    for block, coded in zip(numbers.split(group, -1), ours.split(group, -1), strict=True):
        low, high = block.aminmax(dim=-1, keepdim=True)
        scale = ((high - low) / 15).half().float()
        offset = ((low + high) / 2 + scale / 2).half().float()
        levels = ((block - offset) / scale.where(scale != 0, 1.0)).round().clamp(-8, 7)
        found, widest = ((each - block).double().pow(2).sum(-1) for each in (coded, levels * scale + offset))
        assert (found <= widest * (1 + 1e-6)).all()
        totals = [totals[0] + float(found.sum()), totals[1] + float(widest.sum())]
    if kind in ("normal", "heavy tails"):
        assert totals[0] < 0.9 * totals[1]


@pytest.mark.parametrize("bits", [4, 8])
def test_no_number_is_off_by_more_than_half_a_step(bits: int) -> None:
    keys, values = torch.randn(2, 3, 7, 10) * 4, torch.randn(2, 3, 7, 6) / 50
    keys[0, 0, 0], values[1, 1, 3] = 0.0, 0.0
    store = BITS[bits](key_means=torch.randn(3, 10))
    store.allocate(keys, values, 9)
    store.write(torch.arange(7).expand(2, 1, 7), keys, values, torch.arange(7).expand(2, 1, 7))
    key_means = store.tensors()[KEY_MEANS][:, None]
    for ours, truth, scales in (
        (store.keys() - key_means, keys - key_means, store.tensors()["key_scales"]),
        (store.values(), values, store.tensors()["value_scales"]),
    ):
        step = scales[:, :, :7, :1].float()  # these are of one group, and have an offset beside it where they are int4
        wrong = (ours[:, :, :7] - truth).abs() / step.abs().clamp(min=1e-6)
        # There is one code less on the side opposite to the extreme.
        is_clamped = (truth / step.where(step != 0, 1.0) > 2 ** (bits - 1) - 0.5) | (bits == 4)
        assert (wrong <= torch.where(is_clamped, 1.05, 0.55)).all()
        assert ours.isfinite().all()


@pytest.mark.parametrize("store", ["plain", *STORES])
def test_a_slot_is_overwritten_without_touching_its_neighbours(store: str) -> None:
    keys, values = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 6)
    one = store_of(store).fresh(None)
    one.allocate(keys, values, 5)
    one.write(torch.arange(5).expand(2, 1, 5), keys, values, torch.arange(5).expand(2, 1, 5))
    before = {name: tensor.clone() for name, tensor in one.tensors().items() if name != KEY_MEANS}
    one.write(torch.tensor([[[3]], [[1]]]), keys[:, :, :1] + 9, values[:, :, :1] + 9, torch.tensor([[[3]], [[1]]]))
    for name, was in before.items():
        changed = (one.tensors()[name] != was).any(-1)
        expected = torch.zeros(2, 3, 5, dtype=torch.bool)
        expected[0, :, 3] = expected[1, :, 1] = True
        assert not (changed & ~expected).any()
        assert (changed == expected).any()


@pytest.mark.parametrize("store", ["plain", *STORES])
def test_rows_and_slots_are_moved_whole(store: str) -> None:
    keys, values = torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, 6)
    one = store_of(store).fresh(torch.randn(2, 8))
    one.allocate(keys, values, 5)
    one.write(torch.arange(5).expand(3, 1, 5), keys, values, torch.arange(5).expand(3, 1, 5))
    rows, order = torch.tensor([2, 0, 2, 1]), torch.tensor([4, 1, 3]).expand(4, 1, 3)
    before = one.keys(), one.values()
    one.select_rows(rows)
    one.rearrange(order, 7)
    assert one.slots == 7
    one.copy_row(1, 3)
    for now, was in zip((one.keys(), one.values()), before, strict=True):
        expected = was[rows][:, :, [4, 1, 3]]
        expected[3] = expected[1]
        assert_equal(now[:, :, :3], expected)


def test_odd_widths() -> None:
    keys, values = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 5)
    with pytest.raises(UsageError, match=r"two channels into a byte, but this model's values have 5. Use store int8"):
        Int4().allocate(keys, values, 3)
    store = Int8()
    store.allocate(keys, values, 3)
    store.write(torch.arange(3)[None, None], keys, values, torch.arange(3)[None, None])
    torch.testing.assert_close(store.values(), values, atol=0.02, rtol=0)


@pytest.mark.parametrize("spec", ["int2", "int4(sinks=4", "", "INT8"])
def test_a_store_that_is_not_there(attached_model: Models, spec: str) -> None:
    with pytest.raises(UsageError, match=r"is not a store\. Use one of: plain, int8, int4"):
        KVCache(attached_model("llama"), store=spec)


@pytest.mark.usefixtures("one_arithmetic")
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("positions", ["original", "compact"])
def test_a_life_of_evictions_edits_and_rollbacks(
    attached_model: Models, text: Text, store: str, policy: Policy, positions: str
) -> None:
    model, ids = attached_model("llama"), text(90, rows=2)
    prompts = [ids[0, :40].tolist(), ids[1, :23].tolist()]
    lives = []
    for cache in pair(model, store, budget=16, policy=policy, window=3, chunk=9, positions=positions, batch=2):
        logits = [windlass.prefill(model, cache, prompts)]
        logits.append(read(model, cache, ids[:, 40:46], 1))
        logits.append(read(model, cache, ids[:, 46:53], 7))
        cache.rollback(4)
        logits.append(read(model, cache, ids[:, 53:57], 2))
        cache.drop(5, 12)
        cache.shift(20, 60, 3, row=0)
        logits.append(read(model, cache, ids[:, 57:60], 3))
        cache.copy(0, 1)
        cache.divide(0, 9, 2, row=1)
        cache.select_rows(torch.tensor([1, 0, 1]))
        logits.append(read(model, cache, torch.cat((ids, ids[:1]))[:, 60:70], 4))
        lives.append(logits)
    for ours, theirs in zip(*lives, strict=True):
        assert_equal(ours, theirs)


@pytest.mark.usefixtures("one_arithmetic")
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt_oss", "glm4"])
@pytest.mark.parametrize("store", STORES)
def test_families(attached_model: Models, text: Text, family: str, store: str) -> None:
    model, ids = attached_model(family), text(60)
    ours, theirs = (read(model, cache, ids, 11) for cache in pair(model, store, budget=24))
    assert_equal(ours, theirs)


@pytest.mark.parametrize("store", STORES)
def test_rows_of_a_batch_are_read_as_alone(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("llama"), text(30, rows=2)
    prompts = [ids[0].tolist(), ids[1, :17].tolist()]
    together = KVCache(model, batch=2, store=store)
    windlass.prefill(model, together, prompts)
    for row, prompt in enumerate(prompts):
        alone = KVCache(model, store=store)
        windlass.prefill(model, alone, [prompt])
        assert (
            alone.layers[0]
            .store.keys()[0, :, : len(prompt)]
            .equal(together.layers[0].store.keys()[row, :, : len(prompt)])
        )


@pytest.fixture(scope="module")
def coarse(plain_model: Models) -> PreTrainedModel:
    """A model in bfloat16, too coarse for codes to come out the same when they are made anew."""
    return windlass.attach(copy.deepcopy(plain_model("llama")).bfloat16())


@pytest.mark.parametrize("policy", [None, KeyDiff()], ids=repr)
@pytest.mark.parametrize("store", STORES)
def test_splice_moves_codes(coarse: PreTrainedModel, text: Text, store: str, policy: Policy | None) -> None:
    model, ids = coarse, text(40)
    first, second = (KVCache(model, policy=policy, store=store) for _ in range(2))
    read(model, first, ids[:, :15], 15)
    read(model, second, ids[:, 15:], 25)
    before = [{name: t.clone() for name, t in layer.tensors().items()} for layer in second.layers]
    first.splice(second)
    for layer, source, was in zip(first.layers, second.layers, before, strict=True):
        assert [int(p) for p in layer.positions[0, 0, :40]] == list(range(40))
        for name in layer.store.part_names:
            assert layer.tensors()[name][:, :, 15:40].equal(was[name][:, :, :25]), name
            assert source.tensors()[name].equal(was[name])


@pytest.mark.parametrize(("source", "target"), [("plain", "int4"), ("int4", "int8"), ("int8", "plain")])
def test_splice_into_another_store_converts_once(attached_model: Models, text: Text, source: str, target: str) -> None:
    model, ids = attached_model("llama"), text(40, rows=2)
    ours, theirs = KVCache(model, batch=2, store=target), KVCache(model, store=source)
    read(model, ours, ids[:, :10], 10)
    read(model, theirs, ids[:1, 10:], 30)
    ours.splice(theirs, row=1)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        keys, values = other.store.keys()[:, :, :30], other.store.values()[:, :, :30]
        parts = mine.store.encode(keys, values)
        at = mine.positions[1, 0].argsort(stable=True)[-30:]
        assert mine.store.keys()[1:, :, at].equal(mine.store.decode_keys(parts))
        assert mine.store.values()[1:, :, at].equal(mine.store.decode_values(parts))


def test_splice_of_codes_around_other_key_means_converts(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(30)
    ours, theirs = (KVCache(model, store="int8") for _ in range(2))
    for layer in theirs.layers:
        layer.table.store = layer.store.fresh(None)
    read(model, ours, ids[:, :10], 10)
    read(model, theirs, ids[:, 10:], 20)
    assert not ours.layers[0].store.is_compatible(theirs.layers[0].store)
    ours.splice(theirs)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        parts = mine.store.encode(other.store.keys()[:, :, :20], other.store.values()[:, :, :20])
        assert mine.store.keys()[:, :, 10:30].equal(mine.store.decode_keys(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bytes_and_dtypes(dtype: torch.dtype) -> None:
    keys, values = torch.randn(1, 2, 50, 64).to(dtype), torch.randn(1, 2, 50, 64).to(dtype)
    for bits, share in ((8, 66 / 128), (4, (34 + 10) / 128)):
        store = BITS[bits](key_means=torch.randn(2, 64))
        store.allocate(keys, values, 50)
        store.write(torch.arange(50)[None, None], keys, values, torch.arange(50)[None, None])
        sizes = {name: tensor.nbytes for name, tensor in store.tensors().items() if name != KEY_MEANS}
        assert sum(sizes.values()) == share * 2 * 2 * 50 * 64 * 2
        assert store.keys().dtype == store.values().dtype == dtype
        held_keys, held_values = store.packed_keys(), store.packed_values()
        assert held_keys.bits == held_values.bits == bits
        assert held_keys.floats().to(dtype).equal(store.keys())
        assert held_values.floats().to(dtype).equal(store.values())
        assert held_keys.means is not None
        assert held_keys.means.dtype == torch.float32
        assert held_values.means is None
