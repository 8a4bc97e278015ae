"""A random step over budget, and a layer merged by a rule."""

import torch
from torch import Tensor

from windlass.cache.merging import LayerView, Merge, MergePlan, plan_merge
from windlass.stores.formats import Plain

HEADS, SLOTS, KEY_DIM, VALUE_DIM, SINKS, WINDOW, ENDS = 3, 17, 10, 4, 2, 3, (20, 24)


def random_step(ranked: int, seed: int) -> dict[str, Tensor]:
    """Two rows over budget, with some slots free, some evicted ones too, and some slots with merged tokens already."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(ENDS[i // ranked], generator=g)[:SLOTS] for i in range(2 * ranked)])
    positions = positions.reshape(2, ranked, SLOTS).int()
    positions[..., 11] = -1
    weights = torch.rand(2, ranked, SLOTS, generator=torch.Generator().manual_seed(seed + 9)).add(0.1)
    weights[..., 11] = 0
    evicted = torch.stack([torch.randperm(SLOTS, generator=g)[:6] for _ in range(2 * ranked)]).reshape(2, ranked, 6)
    before = positions.gather(-1, evicted)
    return {
        "keys": torch.randn(2, HEADS, SLOTS, KEY_DIM, generator=g),
        "values": torch.randn(2, HEADS, SLOTS, VALUE_DIM, generator=g),
        "merged": torch.randint(0, 3, (2, ranked, SLOTS), generator=g).float(),
        "positions": positions.scatter(-1, evicted, before.where(before < 0, -2)),
        "evicted": evicted,
        "before": before,
        "weights": weights,
    }


def view_of(
    step: dict[str, Tensor], sliding_window: int | None = None, attention_chunk: int | None = None
) -> LayerView:
    """A layer of its own that holds the step's tensors."""
    store = Plain()
    store.allocate(step["keys"], step["values"], SLOTS)
    store.put(torch.arange(SLOTS).expand(2, 1, -1), {"keys": step["keys"], "values": step["values"]})
    state = {"merged": step["merged"].clone(), "token_weight": step["weights"].clone()}
    return LayerView(
        store, step["positions"], state, torch.tensor(ENDS), SINKS, WINDOW, sliding_window, attention_chunk
    )


def merged_by(
    rule: Merge, step: dict[str, Tensor], sliding_window: int | None = None, attention_chunk: int | None = None
) -> tuple[LayerView, MergePlan]:
    """The layer after the merge, and the plan of it."""
    layer = view_of(step, sliding_window, attention_chunk)
    plan = plan_merge(rule, layer, step["evicted"], step["before"])
    plan.apply(layer.store, layer.state)
    return layer, plan
