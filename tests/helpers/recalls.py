"""A cache that recalls all that it has evicted, beside a full one."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import read
from windlass import KVCache
from windlass.core.parse import PAGE

TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 0}


def recalling(model: PreTrainedModel, **options: Any) -> KVCache:
    """A cache of 11 slots that recalls up to 96 tokens."""
    usual: dict[str, Any] = {"budget": 11, "sinks": 2, "window": 3, "chunk": 13, "recall": 96}
    usual |= {"recall_store": "plain"} if options.get("recall", 96) else {}
    return KVCache(model, **usual | options)


def both(model: PreTrainedModel, **options: Any) -> tuple[KVCache, KVCache]:
    """A cache that recalls all, and a full one."""
    shared = {name: options[name] for name in ("batch", "positions", "store") if name in options}
    return recalling(model, **options), KVCache(model, **shared)


def read_both(model: PreTrainedModel, caches: tuple[KVCache, KVCache], ids: Tensor, chunk: int) -> None:
    """Read into both, and compare the results."""
    torch.testing.assert_close(*(read(model, cache, ids, chunk) for cache in caches), **TOLERANCE)


def digests_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the least number of each channel in each page of keys (batch, kv_heads, tokens, channels)."""
    pages = keys.split(PAGE, 2)
    return torch.stack([each.amax(2) for each in pages], 2), torch.stack([each.amin(2) for each in pages], 2)
