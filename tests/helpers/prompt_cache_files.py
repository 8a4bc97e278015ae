"""Prompt-cache files as they lie on disk: honest ones of many kinds, taken apart and put together again."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models
from windlass import KVCache
from windlass.hf.prompt_cache import checksum
from windlass.policies import Composite, ExpectedAttention, KVzip, Policy, SnapKV
from windlass.testing import VOCABULARY

SIGNED = {"kind", "version", "checksum", "contents"}


@dataclass
class CacheFile:
    """The parts of a file. `contents` is JSON, as text, so that it may be none."""

    contents: str
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> "CacheFile":
        """Tensors and header of a file that safetensors can open. Raises: as safetensors does."""
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dict
        return cls(metadata.get("contents", ""), tensors, metadata)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document."""
        found: dict[str, Any] = json.loads(self.contents)
        return found

    def to_bytes(self, is_signed: bool = True) -> bytes:
        """The file, with the checksum of its present contents."""
        metadata = {**self.metadata, "contents": self.contents}
        if is_signed:
            metadata["checksum"] = checksum(self.contents, self.tensors)
        return save({name: tensor.clone().contiguous() for name, tensor in self.tensors.items()}, metadata)


class Honest(NamedTuple):
    """A file that `save` wrote, for this model. `policy` must be given to `load` unless it is None."""

    name: str
    model: PreTrainedModel
    policy: Policy | None
    file: CacheFile


def honest_files(models: Models, folder: Path) -> list[Honest]:
    """Small files of every store, of policies with state and statistics, merges, windows, ragged and edited rows."""
    files = []
    for name, (family, make) in KINDS.items():
        model = models(family)
        cache = make(model)
        path = folder / "honest"
        cache.save(path)
        given = cache.policy if isinstance(cache.policy, Composite) else None
        KVCache.load(path, model, policy=given)  # the file is honest
        files.append(Honest(name, model, given, CacheFile.read(path)))
    return files


def _read(model: PreTrainedModel, cache: KVCache, lengths: tuple[int, ...] = (33, 26), steps: int = 3) -> KVCache:
    """Prompts of `lengths` tokens, and some decode steps."""
    draw = torch.Generator().manual_seed(3)
    logits = windlass.prefill(model, cache, [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in lengths])
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
    return cache


def _small(model: PreTrainedModel, policy: Policy | None = None, **options: Any) -> KVCache:
    given = {"budget": 12, "sinks": 2, "window": 3, "chunk": 7, "positions": "compact", "batch": 2, **options}
    return _read(model, KVCache(model, policy=policy, **given))


def _edited(model: PreTrainedModel) -> KVCache:
    cache = _small(model, budget=None, positions="self_extend(3, 5)", rollback=4)
    cache.rollback([1, 2])  # so that the rows have columns of their own
    cache.drop(5, 9, row=0)
    cache.divide(4, cache.next_positions[1], 2, row=1)
    return _read(model, cache, (5, 3), 2)


@torch.no_grad()
def _without_ids(model: PreTrainedModel) -> KVCache:
    cache = KVCache(model)
    model(inputs_embeds=torch.randn(1, 5, model.config.hidden_size), past_key_values=cache)
    return cache


def _rolled_back(model: PreTrainedModel) -> KVCache:
    cache = _small(model, windlass.policies.KeyDiff(), store="int4(sinks=2, newest=5)")
    cache.rollback(2)
    return cache


def _sinks_of_rows(model: PreTrainedModel) -> KVCache:
    cache = KVCache(model, 12, sinks="system", window=3, chunk=7, positions="compact", batch=2)
    cache.set_sinks(5, row=0)
    cache.set_sinks(6, row=1)
    return _read(model, cache)


KINDS: dict[str, tuple[str, Callable[[PreTrainedModel], KVCache]]] = {
    "recent": ("llama", lambda model: _small(model)),
    "h2o": ("llama", lambda model: _small(model, windlass.policies.H2O())),
    "tova": ("llama", lambda model: _small(model, windlass.policies.TOVA())),
    "snapkv, int8": ("llama", lambda model: _small(model, SnapKV(observed_queries=4), store="int8")),
    "statistics": ("llama", lambda model: _small(model, ExpectedAttention(future=9, observed_queries=5))),
    "ring": ("llama", lambda model: _small(model, windlass.policies.KeyDiff(), store="int4(sinks=2, newest=5)")),
    "ring, rolled back": ("llama", _rolled_back),
    "merged": ("llama", lambda model: _small(model, windlass.policies.H2O(), merge="mean_count(next)")),
    "sinks of rows": ("llama", _sinks_of_rows),
    "recall": ("llama", lambda model: _small(model, recall=8, recall_store="int4")),
    "recall by head": ("llama", lambda model: _small(model, windlass.policies.TOVA(), recall=16, recall_store="plain")),
    "edited": ("llama", _edited),
    "without ids": ("llama", _without_ids),
    "empty": ("llama", lambda model: KVCache(model, batch=2, store="int8")),
    "windows": ("gemma2", lambda model: _small(model, windlass.policies.H2O(), positions="clamp(9)")),
    "layers apart": ("gemma2", lambda model: _small(model, Composite(KVzip(scoring_chunk=5)), budget=9)),
}
