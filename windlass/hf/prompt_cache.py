"""A cache in a file, so that a long text is read once.

The file is in safetensors format: the tokens that are held (packed, without free slots), their
positions and policy state, the ids of the text, and one JSON document with everything else. It is
bound to the model that made it. What was fed before the save can no longer be rolled back, once a
layer has evicted.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.compress import budgets_apart
from windlass.cache.options import CacheOptions
from windlass.cache.rows import RowTable
from windlass.core.errors import PromptCacheError, UsageError
from windlass.core.files import replacing
from windlass.core.step import no_inference_mode
from windlass.hf.attach import attached
from windlass.hf.fingerprint import fingerprint, raw_bytes
from windlass.hf.kv_cache import KVCache
from windlass.hf.policy_note import PolicyNote, note_of, policy_of
from windlass.policies import Policy
from windlass.positions.modes import MODES
from windlass.stores.low_bit import KEY_MEANS
from windlass.stores.spec import STORES

KIND = "windlass prompt cache"
# What an older windlass could not read raises the number; the first one reads files of plain stores.
PLAIN_VERSION, STORE_VERSION, MERGE_VERSION, VERSION = 1, 2, 3, 4
COLUMNS = "columns"  # a tensor: how many each row was fed, where rows were rolled back by different numbers


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
    packed = {layer.index: layer.table.packed().tensors() for layer in cache.layers}
    tensors = {f"layers.{index}.{name}": tensor for index, held in packed.items() for name, tensor in held.items()}
    for row, ids in enumerate(cache.tokens or []):
        tensors[f"tokens.{row}"] = torch.tensor(ids, dtype=torch.int32)
    columns = [row.columns for row in cache.rows.rows]
    if len(set(columns)) > 1:
        tensors[COLUMNS] = torch.tensor(columns)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    document, version = _document(_contents(cache, model))
    contents = json.dumps(document)
    checksum = _checksum(contents, tensors)
    _write(Path(path), tensors, {"kind": KIND, "version": str(version), "checksum": checksum, "contents": contents})


@no_inference_mode
def load(path: str | Path, model: PreTrainedModel, policy: Policy | None = None) -> KVCache:
    """The cache that `save` wrote: going on with it is as if the text had never been interrupted.

    `policy` is needed only where the file's policy is not one of windlass' own.

    Raises: PromptCacheError, naming the file, when it is missing, damaged, of a newer format, made by
    another model, or made with another policy; UsageError when the model is not attached.
    """
    path = Path(path)
    contents, tensors = _read(path)
    _check_model(path, contents, model)
    attachment = attached(model)
    means = [tensors.get(f"layers.{layer}.{KEY_MEANS}") for layer in range(len(contents.layers))]
    if attachment.key_means is None and any(mean is not None for mean in means):
        # The same model measured them: no need to do it again, and caches that share them move codes.
        attachment.key_means = means
    options = CacheOptions.from_document(contents.options, policy_of(path, contents.policy, policy))
    cache = KVCache.from_options(model, options)
    for layer, note in zip(cache.layers, contents.layers, strict=True):
        if note is not None:
            start = f"layers.{layer.index}."
            held = {
                name.removeprefix(start): tensor.to(model.device)
                for name, tensor in tensors.items()
                if name.startswith(start)
            }
            if note.budget is not None:
                layer.rules = layer.rules.with_budget(note.budget)
            layer.load(held, note.sliding_window, note.has_evicted)
    tokens = [tensors[f"tokens.{row}"].tolist() for row in range(cache.batch_size)] if contents.has_tokens else None
    columns = tensors[COLUMNS].tolist() if COLUMNS in tensors else None
    cache.rows = RowTable.from_json(contents.standing, tokens, columns)
    return cache


@dataclass(frozen=True)
class _LayerNote:
    """What a layer knows beside its tensors; `budget` only where it is not what the policy gives it at the start."""

    sliding_window: int | None
    has_evicted: bool
    budget: int | None = None


@dataclass(frozen=True)
class _Contents:
    """The JSON document of a file, with the options beside the other fields. A layer without tokens has no note."""

    model: str
    dtype: str
    fingerprint: str
    policy: PolicyNote
    standing: dict[str, Any]  # see `RowTable.to_json`; files have called it so since version 1
    has_tokens: bool
    layers: list[_LayerNote | None]
    options: dict[str, Any]  # see `CacheOptions.document`


_NOTES = {each.name for each in fields(_Contents)}


def _contents(cache: KVCache, model: PreTrainedModel) -> _Contents:
    if type(cache.positions) not in MODES.values():
        raise UsageError(f"positions {cache.positions!r} cannot be saved; set cache.positions to one of {list(MODES)}")
    if type(cache.store) not in STORES.values():
        raise UsageError(f"store {cache.store!r} cannot be saved; use a KVCache with one of: {', '.join(STORES)}")
    return _Contents(
        model=type(model).__name__,
        dtype=_dtype(model),
        fingerprint=fingerprint(model),
        policy=note_of(cache.policy),
        standing=cache.rows.to_json(),
        has_tokens=cache.tokens is not None,
        layers=[
            None if layer.is_empty else _LayerNote(layer.sliding_window, layer.history.has_evicted, budget)
            for layer, budget in zip(cache.layers, budgets_apart(cache), strict=True)
        ],
        options=cache.options.document(),
    )


def _document(contents: _Contents) -> tuple[dict[str, Any], int]:
    """What goes into the file, and the oldest format version that can say it."""
    document = asdict(contents)
    document |= document.pop("options")
    if any(note is not None and note.budget is not None for note in contents.layers):
        return document, VERSION
    for note in document["layers"]:
        if note is not None:
            del note["budget"]
    if document["merge"] is not None:
        return document, MERGE_VERSION
    del document["merge"]
    if document["store"] != "plain":
        return document, STORE_VERSION
    del document["store"]
    return document, PLAIN_VERSION


def _parsed(text: str) -> _Contents:
    document: dict[str, Any] = json.loads(text)
    document["policy"] = PolicyNote(**document["policy"])
    document["layers"] = [None if note is None else _LayerNote(**note) for note in document["layers"]]
    options = {name: document.pop(name) for name in list(document) if name not in _NOTES}
    return _Contents(**document, options=options)


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside the target, then take its place: at no moment is there half a file."""
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise PromptCacheError(f"{path} is not a regular file; give the name of a file to write")
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata)
    except (OSError, SafetensorError) as error:
        left = "the older file there is unchanged" if target.exists() else "nothing was left there"
        raise PromptCacheError(
            f"{path} cannot be written: {error}; {left}; free some space or save elsewhere"
        ) from error


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
    hint = "load it with that model, or make it again with this one"
    ours = type(model).__name__
    if contents.model != ours:
        raise PromptCacheError(f"{path} was made by a {contents.model}, this model is a {ours}; {hint}")
    if contents.dtype != _dtype(model):
        raise PromptCacheError(f"{path} was made in {contents.dtype}, this model is in {_dtype(model)}; {hint}")
    if contents.fingerprint != fingerprint(model):
        raise PromptCacheError(f"{path} was made by another {ours}: config or weights differ; {hint}")


def _checksum(contents: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(contents.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
