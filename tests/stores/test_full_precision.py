"""Exact sinks and newest tokens: which token is read as codes, and which as the model made it."""

from dataclasses import replace

import pytest
import torch

import windlass
from tests.helpers import attention_cases as suite
from tests.helpers import stores
from tests.helpers.models import Models, Text, read
from tests.helpers.stores import SPECS, Told, assert_alike, in_text_order, pair
from windlass import KVCache, UsageError, kernels
from windlass.policies import H2O, KeyDiff, Policy, Recent, SnapKV
from windlass.stores import Int4, Int8
from windlass.stores.base import Store
from windlass.stores.formats import store_of

one_arithmetic = stores.one_arithmetic  # fixture


def rollback(cache: KVCache, counts: list[int]) -> None:
    for layer in cache.layers:
        if isinstance(layer.store, Told):  # before a policy looks at the keys
            layer.store.roll_back(counts)
    cache.rollback(counts)


@pytest.mark.parametrize("policy", [Recent(), H2O(), SnapKV(), KeyDiff()], ids=repr)
@pytest.mark.parametrize(("spec", "positions"), [*zip(SPECS, ("original", "compact", "original"), strict=True)])
def test_a_life_of_evictions_edits_and_rollbacks(
    attached_model: Models, text: Text, spec: str, policy: Policy, positions: str
) -> None:
    model, ids = attached_model("llama"), text(120, rows=2)
    prompts = [ids[0, :40].tolist(), ids[1, :23].tolist()]  # ragged: padded in the middle of the chunks
    lives = []
    for cache in pair(model, spec, budget=16, policy=policy, window=3, chunk=9, positions=positions, batch=2):
        life = [windlass.prefill(model, cache, prompts)]
        life.append(read(model, cache, ids[:, 40:46], 1))
        rollback(cache, [1, 1])
        life.append(read(model, cache, ids[:, 46:53], 7))
        rollback(cache, [2, 5])
        life.append(read(model, cache, ids[:, 53:57], 2))
        cache.select_rows(torch.tensor([1, 0]))
        cache.drop(5, 12)
        cache.shift(20, 60, 3, row=0)
        life.append(read(model, cache, ids[:, 57:60], 3))
        cache.copy(0, 1)
        cache.divide(0, 9, 2, row=1)
        cache.select_rows(torch.tensor([1, 0, 1]))
        life.append(read(model, cache, torch.cat((ids, ids[:1]))[:, 60:110], 4))
        rollback(cache, [0, 2, 1])
        life += [read(model, cache, torch.cat((ids, ids[:1]))[:, 110:], 1), *in_text_order(cache)]
        lives.append(life)
    assert_alike(*lives)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "deepseek_v3", "gpt_oss"])
def test_families(attached_model: Models, text: Text, family: str, spec: str) -> None:
    model, ids = attached_model(family), text(70)
    assert_alike(*([read(model, cache, ids, 23)] for cache in pair(model, spec, budget=24)))


def test_worked_by_hand() -> None:
    """Two rows, of which one has padding before its tokens. One first token and the two newest are exact."""
    keys, values = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 4)
    store = Int4(1, 2)
    store.allocate(keys, values, 9)
    where = torch.tensor([[[8, 1, 5]], [[0, 1, 2]]])
    store.write(where, keys[:, :, :3], values[:, :, :3], torch.tensor([[[0, 1, 2]], [[-1, -1, 0]]]))
    assert exact_slots(store, keys.shape[0]) == [[1, 5, 8], [2]]
    before = store.full_precision.ring_index(9)
    where = torch.tensor([[[0, 2, 3]], [[3, 0, 1]]])
    store.write(where, keys[:, :, 3:], values[:, :, 3:], torch.tensor([[[3, -1, 4]], [[1, 2, 3]]]))
    assert exact_slots(store, keys.shape[0]) == [[0, 3, 8], [0, 1, 2]]
    assert before is not None  # entries in use stay unchanged, and are not given again
    assert (before[0, 0] >= 0).nonzero()[:, 0].tolist() == [1, 5, 8]
    for ours, truth in ((store.keys(), keys), (store.values(), values)):
        assert ours[0, :, 8].equal(truth[0, :, 0])
        assert ours[0, :, [0, 3]].equal(truth[0, :, [3, 5]])
        assert ours[1, :, [2, 0, 1]].equal(truth[1, :, [2, 4, 5]])
        assert not ours[0, :, 5].equal(truth[0, :, 2])
    store.rearrange(torch.tensor([3, 8, 1]).expand(2, 1, 3), 4)
    assert exact_slots(store, keys.shape[0]) == [[0, 1], [2]]


def exact_slots(store: Store, rows: int) -> list[list[int]]:
    places = store.full_precision.ring_index(store.slots)
    assert places is not None
    assert places.dtype == torch.int32
    assert places.is_contiguous()
    return [(places[row, 0] >= 0).nonzero()[:, 0].tolist() for row in range(rows)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 3, 50, 8, dtype=dtype), torch.randn(2, 3, 50, 6, dtype=dtype)
    for store, places in ((Int4(), 0), (Int4(sinks=4), 5), (Int8(newest=7), 7 + 20 + 1), (Int8(4, 7), 4 + 7 + 20 + 1)):
        store.allocate(keys, values, 50, 20)
        plain = type(store)()
        plain.allocate(keys, values, 50, 20)
        more = sum(t.nbytes for t in store.tensors().values()) - sum(t.nbytes for t in plain.tensors().values())
        # per place the numbers and 4 bytes for the slot, per row and place a serial, per row a count
        assert more == (2 * 3 * places * (14 * dtype.itemsize + 4) + 2 * places * 8 + 2 * 8 if places else 0)


def test_names() -> None:
    for spec, name, shown in (
        ("int8", "int8", "Int8()"),
        (" int4 ( 4 ,newest= 32)", "int4(sinks=4, newest=32)", "Int4(sinks=4, newest=32)"),
        ("int8(newest=2, sinks=0)", "int8(newest=2)", "Int8(newest=2)"),
        ("int4()", "int4", "Int4()"),
        ("plain", "plain", "Plain()"),
    ):
        store = store_of(spec)
        assert (store.name, repr(store)) == (name, shown)
        assert store_of(store.name).name == name
        assert store.fresh(None).name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int4(window=3)", r"store='int4\(window=3\)': int4 takes sinks and newest, each once"),
        ("int4(1, 2, 3)", "int4 takes sinks and newest, each once"),
        ("int8(newest=1, newest=2)", "int8 takes sinks and newest, each once"),
        ("int8(newest=many)", "newest must be a whole number, got 'many'"),
        ("int8(sinks=1.5)", "sinks must be a whole number, got '1.5'"),
        ("int8(sinks=-1)", "sinks of a store must be from 0 to 1073741824, got -1"),
        ("plain(newest=3)", r"plain takes no numbers"),
        (
            "int2(newest=3)",
            r"is not a store. Use one of: plain, int8, int4 \(Did you mean int8\?\)\. .* int4\(sinks=4, newest=32\)",
        ),
    ],
)
def test_what_is_no_store(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        store_of(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.skipif(not kernels.cpu.instruction_sets(), reason="windlass was installed without its compiled kernels")
def test_compiled_kernels_read_exact_places(dtype: torch.dtype, bits: int, tokens: int) -> None:
    case = suite.Case((3, 5, 40, 48, 10), dtype, bits, slots=300, tokens=tokens)
    call = suite.step(case)
    places = torch.full((suite.BATCH, 3, 300), -1, dtype=torch.int32)
    for head in places.flatten(0, 1):
        head[torch.randperm(300)[:70]] = torch.randperm(90)[:70].int()
    for name, width in (("keys", 40), ("values", 48)):
        exact = 3 * torch.randn(suite.BATCH, 3, 90, width).to(dtype)  # unlike the codes
        states = replace(getattr(call, name), full_precision=exact, ring_index=places)
        call = replace(call, **{name: states})
    truth, expected = suite.exactly(call)
    for kernel in (
        (kernels.cpu.attend, kernels.sdpa.attend) if tokens > kernels.cpu.FEW_TOKENS else (kernels.cpu.attend,)
    ):
        ours, mass = kernel(call)
        suite.compare(ours, truth, suite.TOLERANCE[dtype])
        suite.compare(mass.rows, expected.rows, suite.TOLERANCE[dtype])
    floats = call.keys.floats()
    assert kernels.cpu.rotated(call.keys, None, None, 300, torch.float32).allclose(floats, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS)
def test_compiled_kernels_read_a_whole_cache(attached_model: Models, text: Text, spec: str) -> None:
    model, ids = attached_model("llama"), text(80)
    ours, theirs = (read(model, cache, ids, 20) for cache in pair(model, spec))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
