"""A part of `python -m gpu`: the attention kernel alone, over keys and values of several layers.

One query per row reads every slot. Each kind is recorded as a CUDA graph over all layers, so that the
time is the device's and not the host's. PyTorch's attention gets keys that were rotated beforehand, and is
recorded in the same way.
"""

import functools

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu.part import Part, Work
from windlass import kernels
from windlass.core.inputs import AttentionInput, PackedStates, Visibility
from windlass.core.parse import in_units
from windlass.evals.speed.measure import free_bytes
from windlass.evals.speed.rows import SHAPES
from windlass.hf.forward import LayerShape
from windlass.positions.modes import Original
from windlass.stores.formats import store_of

MOST_LAYERS = 128
STORES = ("plain", "int8", "int4")
TEMPORARIES = 16  # bytes that making a store takes for each byte of a layer's keys


def measure(part: Part) -> None:
    """Every shape, batch and number of slots."""
    for name in part.sizes.shapes:
        for batch in part.sizes.batches:
            for slots in part.sizes.slots:
                what = f"{name} b{batch} {slots} slots"
                part.attempt(what, functools.partial(_measure, part, what, name, batch, slots))


def _measure(part: Part, what: str, name: str, batch: int, slots: int) -> None:
    (shape, *_) = SHAPES[name].cached_layers(torch.bfloat16)
    layer_bytes = 4 * batch * shape.kv_heads * slots * shape.head_dim
    count = min(MOST_LAYERS, max(2, part.sizes.layer_bytes // layer_bytes))
    needed, free = (2 * count + TEMPORARIES) * layer_bytes, free_bytes(part.device)
    if free is not None and needed > free:
        part.skip(what, f"needs about {in_units(needed)}, {in_units(free)} are free")
        return
    layers = Layers(shape, batch, slots, count, part.device)
    works: dict[str, Work] = {
        "unrotated": functools.partial(layers.ours, "plain"),
        "rotated": functools.partial(layers.ours, "plain", is_rotated=True),
        "unrotated, mass": functools.partial(layers.ours, "plain", is_observed=True),
        "int8": functools.partial(layers.ours, "int8"),
        "int4": functools.partial(layers.ours, "int4"),
        "pytorch": layers.pytorch,
    }
    recorded = {kind: part.recorded(work) for kind, work in works.items()}
    timed = part.alternate({kind: work for kind, (work, _) in recorded.items()}, share=0.1)
    for kind, line in timed.items():
        store = kind if kind in STORES else "plain"
        size, why = layers.nbytes(store), recorded[kind][1]
        about = {"shape": name, "batch": batch, "slots": slots, "layers": count, "what": kind}
        part.write("attention", **about, bytes=size, gb_per_s=size / line["median_s"] / 1e9, not_recorded=why, **line)


class Layers:
    """The contents of `count` layers in every store, and one query per row."""

    def __init__(self, shape: LayerShape, batch: int, slots: int, count: int, device: torch.device) -> None:
        size = batch, shape.kv_heads, slots, shape.head_dim
        self._scale, self._is_grouped = shape.head_dim**-0.5, shape.heads > shape.kv_heads
        self._queries = torch.randn(batch, shape.heads, 1, shape.head_dim, device=device, dtype=torch.bfloat16)
        self._positions = torch.arange(slots, dtype=torch.int32, device=device).expand(batch, 1, -1).contiguous()
        self._at = torch.full((batch, 1), slots - 1, device=device)
        self._observed = torch.zeros_like(self._at)
        self._rotary_index = Original().rotary_index(self._positions, self._at)
        pairs = shape.head_dim // 2
        angles = torch.arange(slots, device=device)[:, None] / 10000 ** (torch.arange(pairs, device=device) / pairs)
        dtype = kernels.table_dtype(self._queries)
        self._tables = angles.cos().to(dtype), angles.sin().to(dtype)
        self._held: dict[str, list[tuple[PackedStates, PackedStates]]] = {name: [] for name in STORES}
        index = self._positions.long()
        for _ in range(count):
            keys, values = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
            for name in STORES:
                store = store_of(name).fresh(None)
                store.allocate(keys, values, slots)
                store.write(index, keys, values, index)
                self._held[name].append((store.packed_keys(), store.packed_values()))

    def nbytes(self, store: str) -> int:
        """The bytes of the keys, values and scales of all layers."""
        tensors: list[Tensor | None] = [t for pair in self._held[store] for h in pair for t in (h.data, h.scales)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def ours(self, store: str, is_rotated: bool = False, is_observed: bool = False) -> None:
        """Our kernel over all layers, keys rotated when they are read, or taken as they are."""
        for keys, values in self._held[store]:
            kernels.attend(
                AttentionInput(
                    self._queries,
                    keys,
                    values,
                    self._positions,
                    self._at,
                    rotary_index=None if is_rotated else self._rotary_index,
                    tables=None if is_rotated else self._tables,
                    scale=self._scale,
                    visibility=Visibility(),
                    observed=self._observed if is_observed else None,
                )
            )

    def pytorch(self) -> None:
        """PyTorch's attention over all layers."""
        for keys, values in self._held["plain"]:
            scaled_dot_product_attention(self._queries, keys.data, values.data, enable_gqa=self._is_grouped)
