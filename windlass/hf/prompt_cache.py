"""A cache in a file, so that a long text is read once.

The file is in safetensors format: the tokens that are held (packed, without free slots), their
positions and policy state, the ids of the text, and one JSON document with everything else. It is
bound to the model that made it. What was fed before the save can no longer be rolled back, once a
layer has evicted.
"""

import copy
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.compress import budgets_apart
from windlass.cache.layer import LayerCache
from windlass.cache.rows import Standing
from windlass.core.errors import PromptCacheError, UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.step import Limits, outlasting
from windlass.hf.attach import seam_of
from windlass.hf.fingerprint import fingerprint, raw_bytes
from windlass.hf.kv_cache import KVCache
from windlass.hf.policy_note import PolicyNote, note_of, policy_of
from windlass.policies import Policy
from windlass.positions.modes import MODES
from windlass.stores.low_bit import CENTRES, STORES

KIND = "windlass prompt cache"
# What an older windlass could not read raises the number; the first one reads files of plain stores.
PLAIN_VERSION, STORE_VERSION, MERGE_VERSION, VERSION = 1, 2, 3, 4


def save(cache: KVCache, path: str | Path, model: PreTrainedModel) -> None:
    """Write `cache` to `path`; an older file there is replaced once the new one is whole, or not at all.

    Raises: PromptCacheError when the file cannot be written; UsageError when `cache` belongs to
    another model, or reads at positions that have no name.
    """
    if cache.config is not model.config.get_text_config():
        raise UsageError(
            f"this cache was made for another model than this {type(model).__name__}; give the one it uses"
        )
    if cache.is_rotated:
        raise UsageError("a cache of rotated keys can't be saved: files hold keys as they are before rotation")
    tensors = {f"layers.{layer.index}.{name}": t for layer in cache.layers for name, t in _packed(layer).items()}
    for row, ids in enumerate(cache.tokens or []):
        tensors[f"tokens.{row}"] = torch.tensor(ids, dtype=torch.int32)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    document, version = _document(_contents(cache, model))
    contents = json.dumps(document)
    checksum = _checksum(contents, tensors)
    _write(Path(path), tensors, {"kind": KIND, "version": str(version), "checksum": checksum, "contents": contents})


@outlasting
def load(path: str | Path, model: PreTrainedModel, policy: Policy | None = None) -> KVCache:
    """The cache that `save` wrote: going on with it is as if the text had never been interrupted.

    `policy` is needed only where the file's policy is not one of windlass' own.

    Raises: PromptCacheError, naming the file, when it is missing, damaged, of a newer format, made by
    another model, or made with another policy; UsageError when the model is not attached.
    """
    path = Path(path)
    contents, tensors = _read(path)
    _check_model(path, contents, model)
    limits = contents.limits
    seam = seam_of(model)
    centres = [tensors.get(f"layers.{layer}.{CENTRES}") for layer in range(len(contents.layers))]
    if seam.centres is None and any(centre is not None for centre in centres):
        # The same model measured them: no need to do it again, and caches that share them move codes.
        seam.centres = centres
    cache = KVCache(
        model,
        budget=limits.budget,
        policy=policy_of(path, contents.policy, policy),
        sinks=limits.sinks,
        window=limits.window,
        chunk=limits.chunk,
        positions=contents.positions,
        batch=contents.batch,
        rollback=limits.rollback,
        store=contents.store,
        merge=contents.merge,
    )
    for layer, note in zip(cache.layers, contents.layers, strict=True):
        if note is not None:
            start = f"layers.{layer.index}."
            held = {
                name.removeprefix(start): tensor.to(model.device)
                for name, tensor in tensors.items()
                if name.startswith(start)
            }
            if note.budget is not None:
                layer.limit_to(note.budget)
            layer.restore(held, note.sliding_window, note.has_evicted)
    tokens = [tensors[f"tokens.{row}"].tolist() for row in range(contents.batch)] if contents.has_tokens else None
    cache.standing = replace(contents.standing, tokens=tokens)
    return cache


@dataclass(frozen=True)
class _LayerNote:
    """What a layer knows beside its tensors; `budget` only where it is not what the policy gives it at the start."""

    sliding_window: int | None
    has_evicted: bool
    budget: int | None = None


@dataclass(frozen=True)
class _Contents:
    """The JSON document of a file. A layer that never held a token has no note."""

    model: str
    dtype: str
    fingerprint: str
    batch: int
    positions: str
    limits: Limits
    policy: PolicyNote
    standing: Standing
    has_tokens: bool
    layers: list[_LayerNote | None]
    store: str = "plain"
    merge: str | None = None


def _contents(cache: KVCache, model: PreTrainedModel) -> _Contents:
    if type(cache.positions) not in MODES.values():
        raise UsageError(f"positions {cache.positions!r} cannot be saved; set cache.positions to one of {list(MODES)}")
    if type(cache.store) not in STORES.values():
        raise UsageError(f"store {cache.store!r} cannot be saved; use a KVCache with one of: {', '.join(STORES)}")
    # The tokens travel as tensors.
    standing = replace(cache.standing, tokens=None)
    return _Contents(
        model=type(model).__name__,
        dtype=_dtype(model),
        fingerprint=fingerprint(model),
        batch=cache.batch_size,
        positions=str(cache.positions),
        limits=cache.limits,
        policy=note_of(cache.policy),
        standing=standing,
        has_tokens=cache.tokens is not None,
        layers=[
            None if layer.is_empty else _LayerNote(layer.sliding_window, layer.has_evicted, budget)
            for layer, budget in zip(cache.layers, budgets_apart(cache), strict=True)
        ],
        store=cache.store.name,
        merge=None if cache.merge is None else str(cache.merge),
    )


def _document(contents: _Contents) -> tuple[dict[str, Any], int]:
    """What goes into the file, and the oldest format version that can say it."""
    document = asdict(contents)
    if any(note is not None and note.budget is not None for note in contents.layers):
        return document, VERSION
    for note in document["layers"]:
        if note is not None:
            del note["budget"]
    if contents.merge is not None:
        return document, MERGE_VERSION
    del document["merge"]
    if contents.store != "plain":
        return document, STORE_VERSION
    del document["store"]
    return document, PLAIN_VERSION


def _parsed(text: str) -> _Contents:
    document: dict[str, Any] = json.loads(text)
    document["limits"] = Limits(**document["limits"])
    document["policy"] = PolicyNote(**document["policy"])
    document["standing"] = Standing(**document["standing"])
    document["layers"] = [None if note is None else _LayerNote(**note) for note in document["layers"]]
    return _Contents(**document)


def _packed(layer: LayerCache) -> dict[str, Tensor]:
    """A layer's tensors with its tokens in the first slots and no more slots than tokens."""
    if layer.is_empty:
        return {}
    is_held = layer.positions >= 0
    slots = max(1, int(is_held.sum(-1).max()))
    # The order in which `LayerCache.resize` packs, so that later ties between scores fall the same way.
    order = is_held.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :slots]
    store = copy.deepcopy(layer.store)
    store.rearrange(order, slots)
    state = {f"state.{name}": tensor.gather(-1, order) for name, tensor in layer.state.items()}
    statistics = {f"statistics.{name}": tensor for name, tensor in layer.statistics.items()}
    return {**store.tensors(), "positions": layer.positions.gather(-1, order).clamp(min=EMPTY), **state, **statistics}


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside the target, then take its place: at no moment is there half a file."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise PromptCacheError(f"{path} is not a regular file; give the name of a file to write")
    temporary = target.with_name(f".windlass-{uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = (target if target.exists() else temporary).stat().st_mode
        save_file(tensors, temporary, metadata)
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        left = "the older file there is unchanged" if target.exists() else "nothing was left there"
        raise PromptCacheError(
            f"{path} cannot be written: {error}; {left}; free some space or save elsewhere"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[_Contents, dict[str, Tensor]]:
    """What a file holds, after every check that needs no model."""
    again = "make it again with windlass.prompt_cache.save"
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise PromptCacheError(f"{path} is not a prompt cache of windlass; {again}")
            _check_version(path, metadata.get("version", ""), again)
            # Copies: the file is mapped into memory, and may change or vanish later.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        raise PromptCacheError(f"{path} does not exist; {again}") from None
    except OSError as error:
        raise PromptCacheError(f"{path} cannot be read: {error}; give the name of a prompt-cache file") from error
    except SafetensorError as error:
        raise PromptCacheError(f"{path} is damaged, cut short or not a safetensors file: {error}; {again}") from error
    contents = metadata.get("contents", "")
    if _checksum(contents, tensors) != metadata.get("checksum"):
        raise PromptCacheError(f"{path} is damaged: its contents do not fit its checksum; {again}")
    return _parsed(contents), tensors


def _check_version(path: Path, version: str, again: str) -> None:
    if not (version.isascii() and version.isdigit() and int(version) > 0):
        raise PromptCacheError(f"{path} is damaged: its format version is {version!r}; {again}")
    if int(version) > VERSION:
        raise PromptCacheError(
            f"{path} has format version {version}, this windlass reads up to {VERSION}; upgrade windlass or {again}"
        )


def _check_model(path: Path, contents: _Contents, model: PreTrainedModel) -> None:
    way_out = "load it with that model, or make it again with this one"
    ours = type(model).__name__
    if contents.model != ours:
        raise PromptCacheError(f"{path} was made by a {contents.model}, this model is a {ours}; {way_out}")
    if contents.dtype != _dtype(model):
        raise PromptCacheError(f"{path} was made in {contents.dtype}, this model is in {_dtype(model)}; {way_out}")
    if contents.fingerprint != fingerprint(model):
        raise PromptCacheError(f"{path} was made by another {ours}: config or weights differ; {way_out}")


def _checksum(contents: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(contents.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
