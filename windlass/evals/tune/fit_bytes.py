"""From bytes to tokens: the largest budget whose cache holds no more than was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.step import HEADROOM
from windlass.core.units import in_units
from windlass.engine import generate as engine
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import LayerShape

NUMBER_BYTES = 4  # of a position, and of a number that a policy or a rule of merging keeps, per slot
PROBES = (48, 80)  # budgets, too small to take time
ASKED = 8  # tokens of a question after it
STEPS = HEADROOM + 8  # of decode in a probe: more than records are kept of


@dataclass(frozen=True)
class LayerBytes:
    """What the slots of a layer take: `fixed` bytes, and `per_slot` for each; at most `most_tokens` are held."""

    fixed: int
    per_slot: int
    most_tokens: int | None

    def of(self, budget: int, rollback: int) -> int:
        """Bytes with this budget: room for the next tokens and for those that may come back included."""
        tokens = budget if self.most_tokens is None else min(budget, self.most_tokens)
        return self.fixed + self.per_slot * (tokens + HEADROOM + rollback)


@dataclass(frozen=True)
class Records:
    """Bytes of what a cache keeps beside its slots: statistics of layers, and records of the latest steps."""

    fixed: float = 0.0
    per_token: float = 0.0

    def of(self, budget: int) -> float:
        """With this budget."""
        return self.fixed + self.per_token * budget


def layer_bytes(shape: LayerShape, options: CacheOptions) -> LayerBytes:
    """What one layer of one text takes, by store, policy and merge rule.

    Raises: UsageError where the store cannot hold such keys or values.
    """
    _, keys, values = shape.states(torch.device("cpu"))
    sizes = []
    for slots in (1, 2):
        store = shape.empty_store(options.store)
        store.allocate(keys, values, slots, options.rollback)
        sizes.append(sum(tensor.nbytes for tensor in store.tensors().values()))
    needs = options.policy.needs
    numbers = 1 + len({*needs.state, *(options.merge.state if options.merge is not None else ())})
    heads = shape.kv_heads if needs.per_head else 1
    one, two = sizes
    return LayerBytes(2 * one - two, two - one + NUMBER_BYTES * heads * numbers, shape.most_visible)


def bytes_of(layers: Sequence[LayerBytes], options: CacheOptions, budget: int, records: Records = Records()) -> float:
    """What a cache of one text takes at rest, once it holds `budget` tokens a layer."""
    return sum(layer.of(budget, options.rollback) for layer in layers) + records.of(budget)


def records_of(
    model: PreTrainedModel, ids: Sequence[int], options: CacheOptions, layers: Sequence[LayerBytes]
) -> Records:
    """Measured on two small caches that read `ids` over and over: what it takes grows with the budget, if at all."""
    low, high = ((budget, _most_held(model, ids, replace(options, budget=budget))) for budget in PROBES)
    beside = [max(0.0, held - bytes_of(layers, options, budget)) for budget, held in (low, high)]
    per_token = max(0.0, (beside[1] - beside[0]) / (PROBES[1] - PROBES[0]))
    return Records(max(0.0, beside[1] - per_token * PROBES[1]), per_token)


@torch.no_grad()
def _most_held(model: PreTrainedModel, ids: Sequence[int], options: CacheOptions) -> int:
    """The most bytes that a cache held after any step of decode."""
    assert options.budget is not None, "a probe without budget"
    cache = KVCache.from_options(model, options)
    tokens = options.budget + options.chunk
    engine.prefill(model, cache, [(list(ids) * (1 + tokens // len(ids)))[:tokens]])
    engine.prefill(model, cache, [list(ids[:ASKED])])
    most = cache.bytes_held
    for token in (list(ids) * STEPS)[:STEPS]:
        forward(model, torch.tensor([[token]], device=model.device), None, cache, [0])
        most = max(most, cache.bytes_held)
    return most


def budget_within(layers: Sequence[LayerBytes], options: CacheOptions, size: int, records: Records = Records()) -> int:
    """The largest budget with which `bytes_of` is at most `size`.

    Raises: UsageError where even the smallest cache is larger.
    """
    least = options.limits.sinks + (options.window or 1) + 1
    smallest = bytes_of(layers, options, least, records)
    if smallest > size:
        raise UsageError(
            f"--bytes {in_units(size)} are too few for policy {options.policy!r} in store {options.store.name}: "
            f"{least} tokens a layer, the fewest, take {in_units(round(smallest))}; raise --bytes"
        )
    low, high = least, MAX_NUMBER
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(layers, options, middle, records) <= size else (low, middle - 1)
    return low
