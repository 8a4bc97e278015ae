"""`nbytes` and `describe` against the memory of a cache: its objects, walked, and the growth of a process."""

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import pytest
from torch import Tensor

from tests.helpers.models import Models, Text, read
from tests.helpers.policies import ALL_POLICIES
from windlass import KVCache
from windlass.policies import H2O, RKV, ExpectedAttention, KeyDiff, Policy, Recent, SnapKV

CASES: list[tuple[Policy, dict[str, Any]]] = [
    *((policy, {"budget": 20}) for policy in ALL_POLICIES),
    (H2O(), {}),
    (Recent(), {"rollback": 40, "budget": 20}),
    (KeyDiff(), {"store": "int8", "budget": 20, "rollback": 0}),
    (SnapKV(), {"store": "int4(sinks=2, newest=5)", "budget": 20}),
    (Recent(), {"store": "int8(newest=3)"}),
    (RKV(), {"merge": "mean_count", "budget": 20}),
    (ExpectedAttention(), {"merge": "pick", "store": "int4", "budget": 20}),
]


def walked(cache: KVCache) -> int:
    """Bytes of all storages reachable from the cache, except through the model or shared objects."""
    tables = [
        table for rotary in cache.rotaries if rotary is not None for pair in rotary.built.values() for table in pair
    ]
    shared = (cache.model_id, cache.config, cache.policy, *cache.rotaries, *tables)
    seen = {id(each) for each in shared}

    def tensors(thing: object) -> Iterator[Tensor]:
        left = [thing]
        while left:
            each = left.pop()
            if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, MethodType)):
                continue
            seen.add(id(each))
            if isinstance(each, Tensor):
                yield each
            else:
                left += gc.get_referents(each)

    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors(cache)}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize(("policy", "options"), CASES, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_bytes_are_those_of_all_that_is_kept_alive(
    attached_model: Models, text: Text, family: str, policy: Policy, options: dict[str, Any]
) -> None:
    model, ids = attached_model(family), text(70, rows=2)
    cache = KVCache(model, policy=policy, sinks=2, window=3, batch=2, **options)

    def check() -> None:
        assert cache.bytes_held == walked(cache)

    check()
    read(model, cache, ids[:, :30], 30)
    check()
    read(model, cache, ids[:, 30:39], 1)
    check()
    cache.rollback(1)
    check()
    read(model, cache, ids[:, 39:70], 31)
    cache.rollback([2, 15])
    check()
    read(model, cache, ids[:, 30:33], 3)
    cache.divide(0, 100, 2)
    check()
    read(model, cache, ids[:, 40:50], 10)
    cache.compress(12)
    check()
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: check())
    read(model, cache, ids[:, 50:53], 3)  # bytes for undoing an interrupted pass count while it runs
    handle.remove()
    cache.reset()
    check()


def test_a_description_names_the_parts_and_their_bytes(attached_model: Models, text: Text) -> None:
    """In a cache of a few slots, the records for rollback are a visible part."""
    model = attached_model("llama")
    cache = KVCache(model, 20, H2O(), sinks=2, window=3)
    read(model, cache, text(40), 40)
    line = cache.describe().splitlines()[-1]
    parts = dict(re.findall(r"(\S+) ([\d.]+) KiB", line.partition("(")[2]))
    assert list(parts) == ["keys", "values", "positions", "state.mass", "rollback"]
    total = sum(float(size) for size in parts.values())
    assert total == pytest.approx(cache.bytes_held / 1024, abs=0.05)
    held = sum(tensor.nbytes for layer in cache.layers for tensor in layer.tensors().values())
    assert float(parts["rollback"]) * 1024 == pytest.approx(cache.bytes_held - held, abs=10)
    cache.drop(39, 40)
    assert "rollback" not in cache.describe()
    assert cache.bytes_held == held


GROWTH = """
import gc, os, torch, windlass
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from windlass.cache.options import CacheOptions

def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

config = LlamaConfig(vocab_size=50, hidden_size=256, intermediate_size=64, num_hidden_layers=2, head_dim=128,
                     num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=20000)
model = windlass.attach(LlamaForCausalLM(config).eval())
sizes = {"keys and values": (4000, [1], CacheOptions(4000)),
         "codes": (6000, [3], CacheOptions(None, windlass.policies.H2O(), store="int8")),
         "much in records": (300, [1200], CacheOptions(300, windlass.policies.SnapKV(), chunk=1))}

def made(held, steps, options):
    theirs = DynamicCache(config=config)
    for layer in range(2):
        theirs.update(torch.randn(1, 8, held, 128), torch.randn(1, 8, held, 128), layer)
    cache = windlass.KVCache.from_rotated(model, theirs, options)
    del theirs
    with torch.no_grad():
        for tokens in steps:
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
    return cache

for name, size in sizes.items():
    made(*size)  # code, threads and rotary tables
    before = resident()
    cache = made(*size)
    print(name, cache.bytes_held, resident() - before, sep=",")
    del cache
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_grows_by_as_many_bytes() -> None:
    """Within 5 %: pages are whole, and an allocator keeps some freed memory."""
    memory = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, env=os.environ | memory
    )
    for line in done.stdout.splitlines():
        name, told, grown = line.split(",")
        assert int(told) > 10 * 2**20, name
        assert int(told) == pytest.approx(int(grown), rel=0.05), name
    assert done.stdout.count("\n") == 3
