"""A cache in a file, so that a long text is read once.

The file is in safetensors format: the tokens that are held (packed, without free slots), their
positions and policy state, the ids of the text, and one JSON document with everything else. It is
bound to the model that made it. What was fed before the save can no longer be rolled back, once a
layer has evicted.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.across_ranks import check_across_ranks
from windlass.cache.compress import budgets_apart
from windlass.cache.leaves import Leaf, leaves_of
from windlass.cache.options import CacheOptions
from windlass.cache.picture_edits import has_places
from windlass.cache.policy_spec import policy_of
from windlass.cache.recall_memory import is_moved_later
from windlass.cache.recall_options import recall_folder_of
from windlass.cache.rows import RowTable
from windlass.core.check import check_kind
from windlass.core.errors import PromptCacheError, UsageError, WindlassError, WindlassWarning
from windlass.core.step import no_inference_mode
from windlass.hf import prompt_cache_file
from windlass.hf.adapters import inner_model
from windlass.hf.attach import attached
from windlass.hf.fingerprint import fingerprint, template_hash
from windlass.hf.forward import vocabulary_of
from windlass.hf.guards import check_model
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import layer_shapes
from windlass.hf.linear_layer import state_name
from windlass.hf.policy_note import AGAIN, note_of, noted_policy
from windlass.hf.prompt_cache_check import check_layer, check_rows, check_states
from windlass.hf.prompt_cache_document import Contents, LayerNote, parsed, to_document
from windlass.hf.prompt_cache_fields import InconsistentFile
from windlass.hf.prompt_cache_layout import COLUMNS, LayerPlan, Layout, layer_plans
from windlass.hf.prompt_cache_memory import check_memory
from windlass.hf.prompt_cache_ranks import any_evicted, check_statistics, cut, gathered, in_all, written_by_first
from windlass.policies import Policy
from windlass.policies.across_ranks import across_ranks
from windlass.positions.modes import MODES
from windlass.stores.low_bit import KEY_MEANS
from windlass.stores.plain import Plain
from windlass.stores.spec import STORES


def save(
    cache: KVCache, path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write `cache` to `path`; an older file there is replaced once the new one is whole, or not at all.

    The ids of the tokens are written where those of all rows are known. Of a model on several ranks all of them call
    this, and rank 0 writes one file with the heads of all of them. With a `tokenizer`
    the file notes the hash of its chat template.

    Raises: PromptCacheError when the file cannot be written; UsageError when `cache` belongs to
    another model, or reads at positions that have no name.
    """
    check_kind("cache", cache, KVCache, "a KVCache", "save(cache, path, model)")
    _check_path(path)
    check_model(model)
    if cache.config is not model.config.get_text_config():
        raise UsageError(
            f"this cache was made for another model than this {type(model).__name__}; give the one it uses"
        )
    if cache.is_rotated:
        raise UsageError("a cache of rotated keys can't be saved: files hold keys as they are before rotation")
    check_statistics(cache, note_of(cache.policy).name is not None)
    packed = {
        number: layer.table.packed().tensors() | layer.table.recalled_tensors()
        for number, layer in enumerate(cache.layers)
    }
    packed = gathered(cache, packed)
    tensors = {f"layers.{index}.{name}": tensor for index, held in packed.items() for name, tensor in held.items()}
    for row, ids in enumerate(cache.tokens or []):
        tensors[f"tokens.{row}"] = torch.tensor(ids, dtype=torch.int32)
    for state in cache.recurrent:
        tensors |= {state_name(state.index, name): tensor for name, tensor in state.tensors().items()}
    columns = [row.columns for row in cache.rows.rows]
    if len(set(columns)) > 1:
        tensors[COLUMNS] = torch.tensor(columns)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    document, version = to_document(_contents(cache, model, tokenizer))
    written_by_first(cache.heads, lambda: prompt_cache_file.write(Path(path), tensors, json.dumps(document), version))


@no_inference_mode
def load(
    path: str | Path,
    model: PreTrainedModel,
    policy: str | Policy | None = None,
    recall_folder: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> KVCache:
    """The cache that `save` wrote: going on with it is as if the text had never been interrupted.

    `policy`, as a policy or its name, is needed only where the file's is not one of windlass' own. A file need not
    come from a friend: all of it is checked before anything of it is used, and it changes nothing but the cache that
    is returned. `recall_folder` is that of `KVCache`: what the file has of evicted tokens goes there. The model runs
    for one token, so that shapes are compared with its own. With a `tokenizer`, a warning tells where the file was made
    with another chat template: the text in the cache stays as it was written.

    Raises: PromptCacheError, naming the file, when it is missing, damaged, of a newer format, made by
    another model, or made with another policy; UsageError when the model is not attached.
    """
    heads = attached(model).heads
    _check_path(path)
    path, given = Path(path), None if policy is None else policy_of(policy)
    folder = recall_folder_of(recall_folder)

    def check(text: str, version: int, found: Mapping[str, Layout]) -> tuple[Contents, CacheOptions, list[LayerPlan]]:
        contents = parsed(text, version)
        shapes = layer_shapes(model)
        _check_model(path, contents, model, len(shapes))
        options = replace(_options(path, contents, given), recall_folder=folder)
        check_across_ranks(options, heads)
        plans = layer_plans(model, in_all(heads, shapes), contents, options, found)
        check_memory(contents, options, shapes, model)
        return contents, options, plans

    try:
        (contents, options, plans), tensors = prompt_cache_file.read(path, check)
        check_rows(contents, tensors, vocabulary_of(model))
        check_states(tensors)
        for plan in plans:
            check_layer(plan, contents, options, tensors)
    except InconsistentFile as error:
        raise PromptCacheError(f"{path} is damaged: {error}; {AGAIN}") from None
    tensors = cut(heads, tensors)
    cache = _empty_cache(model, options, tensors)
    for plan in plans:
        held = {name: tensors[plan.prefix + name] for name in plan.layouts}
        held = {name: part if is_moved_later(name) else part.to(cache.device) for name, part in held.items()}
        rules = replace(plan.rules, policy=across_ranks(plan.rules.policy, heads))
        cache.layers[plan.index].load(held, rules, plan.note.has_evicted, contents.standing["tokens_seen"])
    if contents.has_states:
        for state in cache.recurrent:
            prefix = state_name(state.index, "")
            own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
            state.load({name: each.to(cache.device) for name, each in own.items()})
    tokens = [tensors[f"tokens.{row}"].tolist() for row in range(cache.batch_size)] if contents.has_tokens else None
    columns = tensors[COLUMNS].tolist() if COLUMNS in tensors else None
    cache.rows = RowTable.from_json(contents.standing, tokens, columns)
    if tokenizer is not None and contents.chat_template not in (None, template_hash(tokenizer)):
        said = "was written with another chat template than the tokenizer has now; its text stays as it is"
        warnings.warn(f"{path} {said}", WindlassWarning, stacklevel=3)
    return cache


def _check_path(path: object) -> None:
    check_kind("path", path, (str, os.PathLike), "the name of a file")


def _options(path: Path, contents: Contents, policy: Policy | None) -> CacheOptions:
    try:
        return CacheOptions.from_document(contents.options, noted_policy(path, contents.policy, policy))
    except PromptCacheError:
        raise
    except WindlassError as error:
        raise InconsistentFile(str(error)) from None


def _empty_cache(model: PreTrainedModel, options: CacheOptions, tensors: Mapping[str, Tensor]) -> KVCache:
    """With the file's own mean keys, of which the model learns nothing; without any they are measured."""
    means = _key_means(leaves_of(options, len(attached(model).rotaries)), tensors)
    if not means:
        return KVCache.from_options(model, options)
    cache = KVCache.from_options(model, replace(options, store=Plain()))
    cache.options, cache.key_means = options, means
    cache.reset()
    return cache


def _key_means(leaves: Sequence[Leaf], tensors: Mapping[str, Tensor]) -> list[Tensor | None]:
    """The mean keys of each layer of the model, whose heads may lie in several of the cache's layers."""
    found: list[Tensor | None] = []
    for _, its in groupby(enumerate(leaves), lambda pair: pair[1].layer):
        held = [
            (leaf.heads, mean)
            for index, leaf in its
            if (mean := tensors.get(f"layers.{index}.{KEY_MEANS}")) is not None
        ]
        if not held:
            return []
        heads = [head for own, _ in held for head in own or ()]
        joined = torch.cat([mean for _, mean in held])
        found.append(joined[torch.tensor(heads).argsort()] if heads else joined)
    return found


def _contents(cache: KVCache, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Contents:
    if type(cache.positions) not in MODES.values():
        raise UsageError(f"positions {cache.positions!r} cannot be saved; set cache.positions to one of {list(MODES)}")
    if type(cache.store) not in STORES.values():
        raise UsageError(f"store {cache.store!r} cannot be saved; use a KVCache with one of: {', '.join(STORES)}")
    return Contents(
        model=type(inner_model(model)).__name__,
        dtype=_dtype(model),
        fingerprint=fingerprint(model),
        policy=note_of(cache.policy),
        standing=cache.rows.to_json(),
        has_tokens=cache.tokens is not None,
        layers=[
            None if layer.is_empty else LayerNote(layer.sliding_window, has_evicted, budget)
            for layer, has_evicted, budget in zip(cache.layers, any_evicted(cache), budgets_apart(cache), strict=True)
        ],
        options=cache.options.document(),
        has_states=any(not state.is_empty for state in cache.recurrent),
        has_places=has_places(cache),
        chat_template=None if tokenizer is None else template_hash(tokenizer),
    )


def _check_model(path: Path, contents: Contents, model: PreTrainedModel, layers: int) -> None:
    hint = "load it with that model, or make it again with this one"
    ours = type(inner_model(model)).__name__
    if contents.model != ours:
        raise PromptCacheError(f"{path} was made by a {contents.model}, this model is a {ours}; {hint}")
    has_shares = contents.options["shares"] is not None  # then there are notes on groups of heads
    if len(contents.layers) != layers and not has_shares:
        made = f"it has {len(contents.layers)} layers, this model has {layers}"
        raise PromptCacheError(f"{path} was made by another {ours}: {made}; {hint}")
    if contents.dtype != _dtype(model):
        # A fingerprint is one of weights in their dtype, so it cannot tell whether this is the same model.
        hint = f"load the model that made it, with dtype {contents.dtype}"
        raise PromptCacheError(f"{path} was made in {contents.dtype}, this model is in {_dtype(model)}; {hint}")
    if contents.fingerprint != fingerprint(model):
        raise PromptCacheError(f"{path} was made by another {ours}: config or weights differ; {hint}")


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
