"""Compile the Triton kernels for an H200: registers, spills and shared memory. Needs no GPU.

Compiles each kernel as `windlass.kernels` would launch it, for bfloat16 queries, and prints one JSON line each.
A kernel that takes more than the 227 KiB of shared memory there are, or reads a uniform register before one is set (a
fault of ptxas 12.8 that gave wrong products on an H200), is a fault. So is one that spills much.

    python -m gpu.code            # all variants, minutes
    python -m gpu.code "decode 128 plain original" "prefill 64 int8 original mass" evict
"""

import importlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from windlass.core.inputs import (
    TILE,
    AttentionInput,
    Digests,
    EvictionInput,
    Format,
    PackedStates,
    PageInput,
    ReadInput,
    TiledKeys,
    Visibility,
    WriteInput,
    words_of,
)
from windlass.core.parse import PAGE
from windlass.positions.modes import position_mode
from windlass.stores.formats import Int4

TARGET = GPUTarget("cuda", 90, 32)
SLOTS, KV_HEADS, GROUP = 4096, 8, 4
TOKENS = {"decode": 1, "prefill": 512}
STORES = {"plain": 16, "int8": 8, "int4": 4}

KERNELS = {
    "attend": ("attend_kernel", "join_kernel", "mass_kernel", "sums_kernel", "cosines_kernel"),
    "slots": ("_first_free", "_argsort_positions", "_evict", "_write", "_encode", "_encode_groups"),
    "recall": ("_read", "_write", "_allow"),
}
MODULES = {name: importlib.import_module(f"windlass.kernels.triton.{name}") for name in KERNELS}


class Device:
    """Stands in for the device that Triton would compile for."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Takes a kernel's place: compiles what would be launched, and keeps it."""

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.kernel = kernel
        self.made: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiled":
        return self

    def __call__(self, *args: object, **options: object) -> None:
        self.made.append(self.kernel.warmup(*args, grid=(1,), **options))


def main() -> None:
    triton.runtime.driver.set_active(Device())
    kernels = []
    for module, name in ((MODULES[home], name) for home, names in KERNELS.items() for name in names):
        kernels.append(Compiled(getattr(module, name)))
        setattr(module, name, kernels[-1])
    for name, call in itertools.chain(attended(), of_slots(), recalled()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        for each in kernels:
            each.made.clear()
        call()
        for each in kernels:
            for made in each.made:
                row = {"variant": name, "kernel": each.kernel.__name__, **resources(made)}
                print(json.dumps(row), flush=True)


def attended() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of `attend`, each with its name."""
    for step, head_dim, store, mode, mass in itertools.product(
        TOKENS, (64, 128), STORES, ("original", "self_extend(8, 512)"), ("", "mass")
    ):
        tokens, bits = TOKENS[step], STORES[store]
        if tokens == 1 and mode != "original":
            continue  # one branch serves a single token
        where = torch.arange(SLOTS - tokens, SLOTS, dtype=torch.int32)[None]
        call = AttentionInput(
            queries=torch.zeros(1, tokens, KV_HEADS * GROUP, head_dim, dtype=torch.bfloat16).transpose(1, 2),
            keys=held(head_dim, bits, torch.zeros(KV_HEADS, head_dim)),
            values=held(head_dim, bits, None, Int4.value_group),
            slot_positions=positions(),
            query_positions=where,
            rotary_index=position_mode(mode).rotary_index(positions(), where),
            tables=(torch.zeros(SLOTS, head_dim // 2, dtype=torch.float16),) * 2,
            scale=head_dim**-0.5,
            visibility=Visibility(),
            observed=torch.arange(min(tokens, 32))[None] if mass else None,
            is_rest_wanted=bool(mass) and tokens > 1,
        )
        yield " ".join((step, str(head_dim), store, mode, mass)).strip(), partial(MODULES["attend"].attend, call)
        if step == "prefill" and store == "plain" and mode == "original":
            narrow = replace(call, rotary_index=None, tables=None, values=held(32, bits, None))
            yield f"{step} {head_dim} narrow {mass}".strip(), partial(MODULES["attend"].attend, narrow)


def of_slots() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of what else a step asks, each with its name."""
    slots = MODULES["slots"]
    for head_dim, (store, bits) in itertools.product((64, 128), STORES.items()):
        keys = held(head_dim, bits, torch.zeros(KV_HEADS, head_dim))
        call = partial(MODULES["attend"].mean_key_cosine, keys, positions())
        yield f"mean_key_cosine {head_dim} {store}", call
        new = torch.zeros(1, KV_HEADS, 1, head_dim, dtype=torch.bfloat16)
        if bits < 16:
            yield f"encode {head_dim} {store}", partial(slots.encode, new, keys.means, keys.group)
            continue
        index, at = torch.zeros(1, KV_HEADS, 1, dtype=torch.int64), torch.zeros(1, KV_HEADS, 1, dtype=torch.int32)
        writes = [(keys.data, new), (keys.data, new), (positions(), at), (positions().float(), 0.0)]
        yield f"write {head_dim}", partial(slots.write_all, index, writes)
    yield "first_free", partial(slots.first_free, positions(), 1)
    yield "argsort_positions", partial(slots.argsort_positions, positions())
    ends = torch.full((1,), SLOTS)
    for name, window in (("evict", None), ("evict sliding", 1024)):
        eviction = EvictionInput(positions().float(), positions(), ends, 4, 64, window, 32)
        yield name, partial(slots.evict, eviction)


def recalled() -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls of what ranks, reads and writes evicted tokens, each with its name."""
    recall, segments = MODULES["recall"], (2048, 1024, 1536)
    total = sum(segments)
    for head_dim, (store, bits), queries in itertools.product((64, 128), STORES.items(), (1, 16)):
        means = torch.zeros(KV_HEADS, head_dim) if bits < 16 else None
        pieces = tuple(tiled(head_dim, bits, means, size) for size in segments)
        digests = tuple(Digests(*(tiled(head_dim, bits, means, size // PAGE) for _ in range(2))) for size in segments)
        asked = torch.zeros(1, KV_HEADS * GROUP, queries, head_dim)
        text = torch.zeros(1, total, dtype=torch.int32), torch.zeros(1, KV_HEADS, SLOTS), 16
        call = PageInput(asked, torch.ones(1, queries, dtype=torch.bool), pieces, *text, digests, 256)
        yield f"best_pages {head_dim} {store} {queries}", partial(recall.best_pages, call)
        if queries == 1:
            tiles, index = tuple(piece.tiles for piece in pieces), torch.zeros(1, KV_HEADS, 128, dtype=torch.int64)
            yield f"read {head_dim} {store}", partial(recall.read_tokens, ReadInput(tiles, index, is_tiled=True))
            rows = torch.zeros(1, KV_HEADS, 1, tiles[0].shape[3], dtype=torch.int32)
            new = WriteInput(tiles, index[:, 0, :1], rows, is_tiled=True)
            yield f"remember {head_dim} {store}", partial(recall.write_tokens, new)


def tiled(width: int, bits: int, means: Tensor | None, tokens: int) -> TiledKeys:
    states = held(width, bits, means)
    words = words_of(states.data[:, :, :1]).shape[3]
    scales = None if states.scales is None else states.scales[:, :, :tokens].contiguous()
    tiles = torch.zeros(1, KV_HEADS, tokens // TILE, words, TILE, dtype=torch.int32)
    return TiledKeys(tiles, replace(states, data=states.data[:, :, :0], scales=scales))


def positions() -> Tensor:
    return torch.arange(SLOTS, dtype=torch.int32).repeat(1, KV_HEADS, 1)


def held(width: int, bits: int, means: Tensor | None, group: int = Int4.key_group) -> PackedStates:
    if bits == 16:
        return PackedStates(torch.zeros(1, KV_HEADS, SLOTS, width, dtype=torch.bfloat16))
    kind, dtype, group = (Format.INT8, torch.int8, 0) if bits == 8 else (Format.INT4, torch.uint8, group)
    data = torch.zeros(1, KV_HEADS, SLOTS, width * bits // 8, dtype=dtype)
    scales = torch.zeros(1, KV_HEADS, SLOTS, 2 * -(-width // group) if group else 1, dtype=torch.float16)
    return PackedStates(data, kind, scales, means, group=group)


def unset_registers(assembly: str) -> int:
    """The number of uniform registers that are read before an instruction above has set them. Loops only come back."""
    unset, was_set = set[int](), set[int]()
    for line in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?) ;", assembly):
        name, _, operands = re.sub(r"^@\S+\s+", "", line).partition(" ")
        first, _, rest = operands.partition(",")
        sets = re.fullmatch(r"\s*UR(\d+)", first) if name.startswith(("U", "R2UR", "S2UR", "CS2UR")) else None
        read = {int(number) for number in re.findall(r"\bUR(\d+)", rest if sets else operands)}
        if "HGMMA" not in name:  # names the first of several
            unset |= read - was_set
        if sets:
            wide = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
            was_set |= set(range(int(sets[1]), int(sets[1]) + wide))
    return len(unset)


def resources(made: Any) -> dict[str, int]:
    """The resources of a compiled kernel, per thread and per program."""
    with tempfile.TemporaryDirectory() as folder:
        source, made_of_it = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(made.asm["ptx"])
        compiling = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(made_of_it)]
        told = subprocess.run(compiling, capture_output=True, text=True, check=True).stderr
        reading = [triton.knobs.nvidia.nvdisasm.path, "-c", str(made_of_it)]
        assembly = subprocess.run(reading, capture_output=True, text=True, check=True).stdout
    numbers = {"registers": r"Used (\d+) registers", "spill_bytes": r"(\d+) bytes spill stores"}
    found = {name: int(re.findall(pattern, told)[0]) for name, pattern in numbers.items()}
    fetched = len(re.findall(r"cp\.async\.c[ag]", made.asm["ptx"]))
    found |= {"unset_registers": unset_registers(assembly)}
    return {**found, "shared_bytes": made.metadata.shared, "async_copies": fetched, "warps": made.metadata.num_warps}


if __name__ == "__main__":
    main()
