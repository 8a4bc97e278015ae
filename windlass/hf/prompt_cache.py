"""A cache in a file, so that a long text is read once.

The file is in safetensors format: the tokens that are held (packed, without free slots), their
positions and policy state, the ids of the text, and one JSON document with everything else. It is
bound to the model that made it. What was fed before the save can no longer be rolled back, once a
layer has evicted.
"""

import errno
import hashlib
import json
import os
import stat
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.cache import TextCache, check_across_ranks
from windlass.cache.compress import budgets_apart
from windlass.cache.edits import has_places
from windlass.cache.head_groups import Leaf, leaves_of
from windlass.cache.options import CacheOptions, policy_of, recall_folder_of
from windlass.cache.recall import RECALL, is_moved_later
from windlass.cache.rows import RowTable
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.errors import PromptCacheError, UsageError, WindlassError, WindlassWarning, check_kind
from windlass.core.files import replacing
from windlass.core.positions import EMPTY
from windlass.core.ranks import RankHeads
from windlass.core.step import HEADROOM, no_inference_mode
from windlass.hf.attach import attached
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache, LayerShape, layer_shapes
from windlass.hf.passes import check_model
from windlass.hf.prompt_cache_check import (
    COLUMNS,
    POSITIONS,
    LayerPlan,
    TensorSpec,
    check_layer,
    check_rows,
    check_states,
    layer_plans,
)
from windlass.hf.prompt_cache_format import (
    AGAIN,
    VERSION,
    Contents,
    InconsistentFile,
    LayerNote,
    next_places,
    note_of,
    noted_policy,
    parsed,
    shown,
    to_document,
)
from windlass.hf.recurrent import state_name
from windlass.hf.weights import fingerprint, inner_model, raw_bytes, template_hash
from windlass.policies import Policy
from windlass.policies.calls import across_ranks
from windlass.policies.expected_attention import COUNT
from windlass.positions.modes import MODES
from windlass.stores.formats import KEY_MEANS, STORES, Plain
from windlass.stores.full_precision import TOKEN_INDEX, WRITTEN

KIND: Final = "windlass prompt cache"
FIELDS: Final = {"kind", "version", "checksum", "contents"}  # of the metadata
MAX_HEADER_BYTES: Final = 16 * 2**20
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Checked = TypeVar("Checked")


def write(path: Path, tensors: dict[str, Tensor], contents: str, version: int) -> None:
    """Write beside the target, then take its place: at no moment is there half a file.

    Raises: PromptCacheError when it cannot be written.
    """
    metadata = {"kind": KIND, "version": str(version), "checksum": checksum(contents, tensors), "contents": contents}
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise PromptCacheError(f"{path} is not a regular file; give the name of a file to write")
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata)
    except (OSError, SafetensorError) as error:
        way = "free some space or save elsewhere" if _is_full(error) else "save elsewhere"
        left = "the older file there is unchanged" if target.exists() else "nothing was left there"
        why = error.strerror if isinstance(error, OSError) and error.strerror else error  # it names another file
        raise PromptCacheError(f"{path} cannot be written: {why}; {left}; {way}") from error


def _is_full(error: BaseException) -> bool:
    """Whether a disk has no more room; safetensors tells that in words only."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def read(
    path: Path, check: Callable[[str, int, Mapping[str, TensorSpec]], Checked]
) -> tuple[Checked, dict[str, Tensor]]:
    """What `check` makes of the document, its version and the layouts of all tensors; then the tensors, copied.

    Nothing of the tensors is read before `check` has passed, nor more of the rest than `MAX_HEADER_BYTES`.

    Raises: PromptCacheError for a file that is missing, no regular one, damaged or of a newer format; and what
    `check` raises.
    """
    try:
        _check_header_size(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise PromptCacheError(f"{path} is not a prompt cache of windlass; {AGAIN}")
            version = _version(path, metadata.get("version", ""))
            if set(metadata) != FIELDS:
                raise InconsistentFile(f"its metadata has other fields than {', '.join(sorted(FIELDS))}")
            names = file.keys()
            checked = check(metadata["contents"], version, {name: _layout(name, file) for name in names})
            # Copies: the file is mapped into memory, and may change or vanish later.
            tensors = {name: file.get_tensor(name).clone() for name in names}
    except FileNotFoundError:
        raise PromptCacheError(f"{path} does not exist; {AGAIN}") from None
    except OSError as error:
        raise PromptCacheError(f"{path} cannot be read: {error}; give the name of a prompt-cache file") from error
    except SafetensorError as error:
        raise PromptCacheError(
            f"{path} is damaged, cut short or not a safetensors file: {shown(str(error))}; {AGAIN}"
        ) from error
    if checksum(metadata["contents"], tensors) != metadata["checksum"]:
        raise InconsistentFile("its contents do not fit its checksum")
    return checked, tensors


def checksum(contents: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of the document and of all tensors: it finds damage, not malice."""
    digest = hashlib.sha256(contents.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _check_header_size(path: Path) -> None:
    """A pipe or a device has no end, and a folder no bytes; the header's length comes first in the file."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise PromptCacheError(f"{path} is not a regular file; give the name of a prompt-cache file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise PromptCacheError(
            f"{path} is not a safetensors file, or damaged: its header would have {length:,} bytes, "
            f"and may have {MAX_HEADER_BYTES:,}; {AGAIN}"
        )


def _version(path: Path, version: str) -> int:
    if not (version.isascii() and version.isdigit() and len(version) < 10 and version[0] != "0"):
        raise InconsistentFile(f"its format version is {shown(version)}")
    if int(version) > VERSION:
        raise PromptCacheError(
            f"{path} has format version {version}, this windlass reads up to {VERSION}; upgrade windlass or {AGAIN}"
        )
    return int(version)


def _layout(name: str, file: Any) -> TensorSpec:
    """That of a tensor of an open safetensors file."""
    part = file.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise InconsistentFile(f"tensor {shown(name)} is of type {part.get_dtype()}, which no tensor has")
    return TensorSpec(tuple(part.get_shape()), DTYPES[part.get_dtype()])


def check_memory(
    contents: Contents, options: CacheOptions, shapes: Sequence[LayerShape], model: PreTrainedModel
) -> None:
    """Raises: InconsistentFile where the first step after a load would allocate more than the device has.

    A cache with a budget allocates all of it, and the room for a chunk; every cache has a rotary table.
    """
    device, rotaries = model.device, attached(model).rotaries
    total = memory_of(device)
    if total is None:
        return
    ring = options.store.full_precision
    slots = 0 if options.budget is None else options.budget + max(options.chunk, HEADROOM)
    exact = ring.sinks + (ring.newest + HEADROOM + options.rollback if ring.newest else 0)
    needed = 0
    for shape in shapes:
        per_slot = shape.bytes_per_token(options.store)
        needed += (
            options.batch
            * shape.kv_heads
            * (slots * per_slot + exact * (shape.channels - shape.index) * shape.dtype.itemsize)
        )
    end = max(map(max, next_places(contents), contents.standing["next_positions"])) + 1
    # A state, and the copy that is made before a pass.
    needed += 2 * options.batch * sum(state.nbytes for state in attached(model).states.values())
    tables = {
        rotary.rotary_pairs
        * options.positions.within(rotary.trained_length, options.budget is not None).bound(end, slots or end, 1)
        for rotary in rotaries
        if rotary is not None
    }
    needed += 8 * max(tables, default=0)
    if needed > total:
        raise InconsistentFile(
            f"its cache takes {needed / 2**30:,.1f} GiB (a budget of {options.budget} tokens, {options.batch} rows, "
            f"a text up to position {end - 1}), and {device} has {total / 2**30:,.1f} GiB"
        )


def memory_of(device: torch.device, /) -> int | None:
    """Bytes of memory, in use or not; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


SLOTS_AXIS = 2  # of tensors with a head axis before it; ranks may hold different numbers of slots


def in_all(heads: RankHeads | None, shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes of layers with the heads of all ranks, of those that this rank has."""
    if heads is None:
        return list(shapes)
    return [shape.of_heads(heads.in_all(shape.kv_heads)) for shape in shapes]


def gathered(cache: TextCache, layers: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """The tensors of each layer, by their names, with the heads of all ranks; on other ranks than 0 anything.

    A collective call; no more than one tensor of a layer travels at once.

    Raises: UsageError for statistics of a policy from elsewhere, of which nobody knows which numbers are of which head.
    """
    heads = cache.heads
    if heads is None or not heads.is_split:
        return {index: dict(own) for index, own in layers.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for index, own in sorted(layers.items()):
        is_alike = POSITIONS in own and _is_alike(own[POSITIONS], cache.layers[index].policy)
        found[index] = {}
        for name, tensor in sorted(own.items()):
            axis = _head_axis(name, is_alike)
            pieces = [tensor] if axis is None else heads.ranks.gathered_by_first(tensor.cpu().contiguous())
            found[index][name] = _joined(pieces, axis, EMPTY if name == POSITIONS else 0) if pieces else tensor
    return found


def any_evicted(cache: TextCache) -> list[bool]:
    """Per layer, whether any rank has evicted in it. A collective call where there are several."""
    own = [layer.history.has_evicted for layer in cache.layers]
    if cache.heads is None:
        return own
    return [any(each) for each in zip(*cache.heads.ranks.gathered(own), strict=True)]


def check_statistics(cache: TextCache, is_ours: bool) -> None:
    """Raises: UsageError where a policy that `is_ours` or not keeps numbers that nobody can tell apart by heads."""
    if cache.heads is not None and cache.heads.is_split and cache.policy.needs.statistics and not is_ours:
        raise UsageError(
            f"{cache.policy!r} keeps statistics, and only it knows which of them are of which head, so that the caches "
            f"of {cache.heads.ranks.size} ranks cannot become one file; save it from a single process"
        )


def cut(heads: RankHeads | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file with the heads of this rank alone, by the same names."""
    if heads is None or not heads.is_split:
        return dict(tensors)
    found = dict(tensors)
    for name, tensor in tensors.items():
        room, index, inner = [*name.split(".", 2), "", ""][:3]
        if room != "layers":
            continue
        positions = tensors.get(f"layers.{index}.{POSITIONS}")
        axis = _head_axis(inner, positions is not None and positions.shape[1] == 1)
        if axis is not None:
            count = tensor.shape[axis] // heads.ranks.size
            found[name] = tensor.narrow(axis, heads.ranks.number * count, count).contiguous()
    return found


def written_by_first(heads: RankHeads | None, write: Callable[[], None]) -> None:
    """Let rank 0 write; all ranks return once it has. Raises: on all of them what it raised, as PromptCacheError."""
    if heads is None:
        write()
        return
    said = ""
    if heads.ranks.is_first:
        try:
            write()
        except PromptCacheError as error:
            said = str(error)
    if said := heads.ranks.told_by_first(said):
        raise PromptCacheError(said)


def _is_alike(positions: Tensor, policy: Policy) -> bool:
    """Whether all heads of a layer hold the same tokens, with one row of positions for all of them."""
    return positions.shape[1] == 1 and not policy.needs.per_head


def _head_axis(name: str, is_alike: bool) -> int | None:
    """Which axis of a layer's tensor counts heads; None where the tensor is the same on all ranks.

    `is_alike`: whether its heads share positions, and so what is kept of each slot.
    """
    if name.endswith(KEY_MEANS):
        return 0
    if name in (TOKEN_INDEX, WRITTEN, RECALL + POSITIONS, STATISTICS + COUNT):
        return None
    if is_alike and (name == POSITIONS or name.startswith(STATE)):
        return None
    return 1


def _joined(pieces: Sequence[Tensor], axis: int | None, free: int) -> Tensor:
    """The pieces of all ranks as one tensor; where one has fewer slots, the missing ones are `free`."""
    if axis is None:
        return pieces[0]
    if axis != 0 and pieces[0].ndim > SLOTS_AXIS:
        most = max(piece.shape[SLOTS_AXIS] for piece in pieces)
        behind = [0, 0] * (pieces[0].ndim - SLOTS_AXIS - 1)
        pieces = [pad(piece, (*behind, 0, most - piece.shape[SLOTS_AXIS]), value=free) for piece in pieces]
    return torch.cat(list(pieces), axis)


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
    written_by_first(cache.heads, lambda: write(Path(path), tensors, json.dumps(document), version))


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

    def check(
        text: str, version: int, found: Mapping[str, TensorSpec]
    ) -> tuple[Contents, CacheOptions, list[LayerPlan]]:
        contents = parsed(text, version)
        shapes = layer_shapes(model)
        _check_model(path, contents, model, len(shapes))
        options = replace(_options(path, contents, given), recall_folder=folder)
        check_across_ranks(options, heads)
        plans = layer_plans(model, in_all(heads, shapes), contents, options, found)
        check_memory(contents, options, shapes, model)
        return contents, options, plans

    try:
        (contents, options, plans), tensors = read(path, check)
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
