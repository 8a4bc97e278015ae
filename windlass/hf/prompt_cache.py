"""A cache in a file, so that a long text is read once.

The file is in safetensors format: the tokens that are held (packed, without free slots), their positions and policy
state, the ids of the text, and one JSON document with everything else. It is bound to the model that made it. Tokens
fed before the save can no longer be rolled back, once a layer has evicted.
"""

import errno
import hashlib
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.cache import check_across_ranks
from windlass.cache.compress import budgets_apart
from windlass.cache.edits import has_places
from windlass.cache.head_groups import Leaf, leaves_of
from windlass.cache.options import CacheOptions, policy_of, recall_folder_of
from windlass.cache.recall import POSITIONS, RECALL, is_moved_later
from windlass.cache.recurrent import RecurrentLayer
from windlass.cache.rows import StateCheckpoint
from windlass.core.errors import PromptCacheError, UsageError, WindlassError, WindlassWarning, check_kind
from windlass.core.files import replacing
from windlass.core.step import HEADROOM, no_inference_mode
from windlass.core.types import Tokens
from windlass.hf.attach import attached
from windlass.hf.forward import LayerShape, layer_shapes, vocabulary_of
from windlass.hf.model_cache import ModelCache
from windlass.hf.prompt_cache_check import (
    LayerPlan,
    TensorSpec,
    check_layer,
    check_rows,
    layer_plans,
)
from windlass.hf.prompt_cache_format import (
    AGAIN,
    VERSION,
    Header,
    InconsistentFile,
    LayerHeader,
    OptionsHeader,
    PolicyHeader,
    RowHeader,
    shown,
)
from windlass.hf.recurrent import checkpoint_name, state_name
from windlass.hf.tensor_parallel import any_evicted, check_statistics, gather_heads, own_heads, written_by_first
from windlass.hf.weights import fingerprint, inner_model, raw_bytes, template_hash
from windlass.policies import Policy
from windlass.policies.calls import across_ranks
from windlass.positions.modes import MODES
from windlass.stores.formats import KEY_MEANS, STORES, Plain

KIND: Final = "windlass prompt cache"
SEGMENT: Final = "tokens that can be recalled"  # contents of a file of one segment
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
Made = TypeVar("Made", bound=ModelCache)


def write(path: Path, tensors: dict[str, Tensor], contents: str) -> None:
    """Write beside the target, then take its place: at no moment is there half a file.

    Raises: PromptCacheError when it cannot be written.
    """
    metadata = {"kind": KIND, "version": str(VERSION), "checksum": checksum(contents, tensors), "contents": contents}
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise PromptCacheError(f"{path} is not a regular file. Give the name of a file to write")
    try:
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata)
    except (OSError, SafetensorError) as error:
        way = "Free some space or save elsewhere" if _is_full(error) else "Save elsewhere"
        left = "The older file is unchanged" if target.exists() else "No file was left there"
        why = error.strerror if isinstance(error, OSError) and error.strerror else error  # it names another file
        raise PromptCacheError(f"{path} cannot be written: {why}. {left}. {way}") from error


def _is_full(error: BaseException) -> bool:
    """Return True if a disk has no more room, as safetensors reports in words only."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)


def read(
    path: Path,
    check: Callable[[Header, Mapping[str, TensorSpec]], Checked],
    before: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Checked, dict[str, Tensor]]:
    """Read a file: the result of `check` for its header and the layouts of all tensors, then copies of the tensors.

    Tokens of `before` stand before those of the tensor with their name.

    No tensor is read before `check` has passed, nor more of the rest than `MAX_HEADER_BYTES`.

    Raises: PromptCacheError for a file that is missing, no regular one, damaged or of another format, and any error of
    `check`.
    """
    with _opened(path) as (metadata, file):
        names = file.keys()
        header, layouts = Header.parsed(metadata["contents"]), {name: _layout(name, file) for name in names}
        before = _without_own(before, layouts)
        checked = check(header, {name: _behind(each, before.get(name)) for name, each in layouts.items()})
        # Copies: the file is mapped into memory, and may change or vanish later.
        tensors = {name: file.get_tensor(name).clone() for name in names}
    if checksum(metadata["contents"], tensors) != metadata["checksum"]:
        raise InconsistentFile("its contents do not fit its checksum")
    return checked, tensors | {name: torch.cat([part, tensors[name]], _axis(part)) for name, part in before.items()}


def _axis(part: Tensor) -> int:
    """The dimension of the tokens: positions have no heads and no width."""
    return 2 if part.dim() == 4 else 1


def _without_own(before: Mapping[str, Tensor], layouts: Mapping[str, TensorSpec]) -> Mapping[str, Tensor]:
    """Leave tokens `before` out that a file has itself: all positions of a text that was edited."""
    sizes = {layouts[name].shape[2:3] for name, part in before.items() if part.dim() == 4 and name in layouts}
    return {
        name: part
        for name, part in before.items()
        if part.dim() == 4 or (name in layouts and layouts[name].shape[1:2] in sizes)
    }


def _behind(own: TensorSpec, before: Tensor | None) -> TensorSpec:
    """The layout of a tensor behind the tokens `before` it."""
    if before is None:
        return own
    axis = _axis(before)
    rest, its = (shape[:axis] + shape[axis + 1 :] for shape in (own.shape, tuple(before.shape)))
    if len(own.shape) != before.dim() or own.dtype != before.dtype or rest != its:
        raise InconsistentFile("its recalled tokens have another layout than those of the file before it")
    return TensorSpec((*own.shape[:axis], before.shape[axis] + own.shape[axis], *own.shape[axis + 1 :]), own.dtype)


Segments = Sequence[tuple[int, str]]  # ends and numbers of parts of the tokens that can be recalled


@dataclass(frozen=True)
class RecalledBefore:
    """First tokens that can be recalled, which are not in their cache's file, by the names that they have there."""

    segments: Segments
    tensors: Mapping[str, Tensor]


def settled(cache: ModelCache) -> Segments:
    """The first tokens that a cache of one row can recall, in segments that do not change any more, if all layers have
    them alike."""
    stores = [layer.table.recall for layer in cache.layers if layer.table.recall is not None]
    if cache.heads is not None or not stores or any(each.is_empty for each in stores):
        return ()
    first, *others = (each.settled() for each in stores)
    ends = [end for end, _ in first]
    return first if all([end for end, _ in each] == ends for each in others) else ()


def save_segment(cache: ModelCache, path: Path, start: int, stop: int) -> None:
    """Write the tokens of one segment. Raises: PromptCacheError when it cannot be written."""
    tensors = {
        f"layers.{index}.{name}": part.cpu().contiguous()
        for index, layer in enumerate(cache.layers)
        if layer.table.recall is not None
        for name, part in layer.table.recall.settled_tensors(start, stop).items()
    }
    write(path, tensors, SEGMENT)


def read_segments(segments: Segments, paths: Sequence[Path]) -> RecalledBefore:
    """The tokens of segments in these files. Raises: PromptCacheError for a file that is missing or damaged."""
    parts: dict[str, list[Tensor]] = {}
    for path in paths:
        with _opened(path) as (metadata, file):
            names = file.keys()
            tensors = {name: file.get_tensor(name).clone() for name in names}
        is_sound = metadata["contents"] == SEGMENT and checksum(SEGMENT, tensors) == metadata["checksum"]
        if not is_sound or any(part.dim() != 4 for part in tensors.values()):
            raise PromptCacheError(f"{path} is damaged: its contents do not fit its checksum. {AGAIN}")
        for name, part in tensors.items():
            parts.setdefault(name, []).append(part)
    plain = torch.arange(segments[-1][0] if segments else 0, dtype=torch.int32)[None]
    positions = {f"{name.partition(RECALL)[0]}{RECALL}{POSITIONS}": plain for name in parts}
    return RecalledBefore(segments, {name: torch.cat(each, 2) for name, each in parts.items()} | positions)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[dict[str, str], Any]]:
    """The metadata of a file, and the file. Raises: PromptCacheError, also where reading fails within the block."""
    try:
        _check_header_size(path)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != KIND:
                raise PromptCacheError(f"{path} is not a prompt cache of windlass. {AGAIN}")
            _check_version(path, metadata.get("version", ""))
            if set(metadata) != FIELDS:
                raise InconsistentFile(f"its metadata has other fields than {', '.join(sorted(FIELDS))}")
            yield metadata, file
    except FileNotFoundError:
        raise PromptCacheError(f"{path} does not exist. {AGAIN}") from None
    except OSError as error:
        raise PromptCacheError(f"{path} cannot be read: {error}. Give the name of a prompt-cache file") from error
    except SafetensorError as error:
        raise PromptCacheError(
            f"{path} is damaged, cut short or not a safetensors file: {shown(str(error))}. {AGAIN}"
        ) from error


def options_of(path: Path, policy: Policy | None) -> CacheOptions:
    """The options of the cache in a file, of which the tensors are not read. `policy` is that of `load`.

    Raises: PromptCacheError as `load` does.
    """
    try:
        with _opened(path) as (metadata, _):
            header = Header.parsed(metadata["contents"])
            return _options(header, header.policy_of(path, policy))
    except InconsistentFile as error:
        raise PromptCacheError(f"{path} is damaged: {error}. {AGAIN}") from None


def checksum(contents: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of the document and of all tensors: it finds damage, not malice."""
    digest = hashlib.sha256(contents.encode("utf-8", "surrogatepass"))
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(raw_bytes(tensor))
    return digest.hexdigest()


def _check_header_size(path: Path) -> None:
    """Check the length of the header, which comes first. A pipe or a device has no end, and a folder no bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise PromptCacheError(f"{path} is not a regular file. Give the name of a prompt-cache file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise PromptCacheError(
            f"{path} is not a safetensors file, or damaged: its header would have {length:,} bytes, "
            f"and may have {MAX_HEADER_BYTES:,}. {AGAIN}"
        )


def _check_version(path: Path, version: str) -> None:
    if version == str(VERSION):
        return
    if not (version.isascii() and version.isdigit() and len(version) < 10 and version[0] != "0"):
        raise InconsistentFile(f"its format version is {shown(version)}")
    way_out = AGAIN if int(version) < VERSION else f"Upgrade windlass. Otherwise: {AGAIN}"
    raise PromptCacheError(f"{path} has format version {version}, and this windlass reads {VERSION} alone. {way_out}")


def _layout(name: str, file: Any) -> TensorSpec:
    """Layout of a tensor of an open safetensors file."""
    part = file.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise InconsistentFile(f"tensor {shown(name)} is of type {part.get_dtype()}, which no tensor has")
    return TensorSpec(tuple(part.get_shape()), DTYPES[part.get_dtype()])


def check_memory(header: Header, options: CacheOptions, shapes: Sequence[LayerShape], model: PreTrainedModel) -> None:
    """Check the size of a cache.

    Raises: InconsistentFile where the first step after a load exceeds the device's memory. A cache with a budget
    allocates all of it, and the room for a chunk. Every cache has a rotary table.
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
    end = max(max(row.next_place, row.next_position) for row in header.rows) + 1
    # A state, the copy that is made before a pass, and checkpoints.
    copies = 2 * options.batch + sum(len(row.checkpoints) for row in header.rows)
    needed += copies * sum(state.nbytes for state in attached(model).states.values())
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
    """Bytes of memory, in use or not, or None where the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def save(
    cache: ModelCache,
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    segments: Segments = (),
) -> None:
    """Write `cache`, made for `model`. See `KVCache.save`. `segments`: parts that are in files of their own."""
    _check_path(path)
    if cache.is_rotated:
        raise UsageError("a cache of rotated keys can't be saved: files hold keys as they are before rotation")
    check_statistics(cache, PolicyHeader.of(cache.policy).name is not None)
    packed = {
        number: layer.table.packed().tensors() | layer.table.recalled_tensors(segments[-1][0] if segments else 0)
        for number, layer in enumerate(cache.layers)
    }
    packed = gather_heads(cache, packed)
    tensors = {f"layers.{index}.{name}": tensor for index, held in packed.items() for name, tensor in held.items()}
    for row, ids in enumerate(cache.rows.ids or []):
        tensors[f"tokens.{row}"] = torch.from_numpy(np.frombuffer(bytearray(bytes(ids)), np.int32))
    for state in cache.recurrent:
        tensors |= {state_name(state.index, name): tensor for name, tensor in state.tensors().items()}
    tensors |= _of_checkpoints(cache)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    contents = _header(cache, model, tokenizer).model_dump_json()
    written_by_first(cache.heads, lambda: write(Path(path), tensors, contents))


@no_inference_mode
def load(
    path: str | Path,
    model: PreTrainedModel,
    make: Callable[[PreTrainedModel, CacheOptions], Made],
    policy: str | Policy | None,
    recall_folder: str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    before: RecalledBefore | None = None,
) -> Made:
    """The cache that `save` wrote, in an empty one of `make`. See `KVCache.load`."""
    heads = attached(model).heads
    _check_path(path)
    path, given = Path(path), None if policy is None else policy_of(policy)
    folder = recall_folder_of(recall_folder)

    def check(header: Header, found: Mapping[str, TensorSpec]) -> tuple[Header, CacheOptions, list[LayerPlan]]:
        shapes = layer_shapes(model)
        _check_model(path, header, model, len(shapes))
        options = replace(_options(header, header.policy_of(path, given)), recall_folder=folder)
        check_across_ranks(options, heads)
        of_file = [each if heads is None else each.of_heads(heads.in_all(each.kv_heads)) for each in shapes]
        plans = layer_plans(model, of_file, header, options, found, make)
        check_memory(header, options, shapes, model)
        return header, options, plans

    try:
        (header, options, plans), tensors = read(path, check, {} if before is None else before.tensors)
        check_rows(header, tensors, vocabulary_of(model))
        for plan in plans:
            check_layer(plan, header, options, tensors)
    except InconsistentFile as error:
        raise PromptCacheError(f"{path} is damaged: {error}. {AGAIN}") from None
    tensors = own_heads(heads, tensors)
    cache = _empty_cache(model, options, tensors, make)
    for layer in cache.layers:
        if layer.table.recall is not None:
            layer.table.recall.memory.planned = [] if before is None else [*before.segments]
    for plan in plans:
        held = {name: tensors[plan.prefix + name] for name in plan.layouts}
        held = {name: part if is_moved_later(name) else part.to(cache.device) for name, part in held.items()}
        rules = replace(plan.rules, policy=across_ranks(plan.rules.policy, heads))
        cache.layers[plan.index].load(held, rules, plan.note.has_evicted, header.tokens_seen)
    for state in cache.recurrent if header.has_states else ():
        prefix = state_name(state.index, "")
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        state.load({name: each.to(cache.device) for name, each in own.items()})
    packed = (tensors[f"tokens.{row}"].numpy().tobytes() for row in range(cache.batch_size))
    tokens = [*map(Tokens.of_bytes, packed)] if header.has_tokens else None
    cache.rows = header.table(tokens, _checkpoints(cache, header, tensors))
    if tokenizer is not None and header.chat_template not in (None, template_hash(tokenizer)):
        said = "was written with another chat template than the tokenizer has now. Its text stays as it is"
        warnings.warn(f"{path} {said}", WindlassWarning, stacklevel=4)
    return cache


def _of_checkpoints(cache: ModelCache) -> dict[str, Tensor]:
    """Copies of the states in a cache's checkpoints, which rows may share, by their names in a file."""
    return {
        checkpoint_name(at, kept.tokens, state_name(layer.index, name)): state.clone()
        for at, row in enumerate(cache.rows.rows)
        for kept in row.checkpoints
        for layer, states in zip(cache.recurrent, kept.states, strict=True)
        for name, state in states.items()
    }


def _checkpoints(cache: ModelCache, header: Header, tensors: Mapping[str, Tensor]) -> list[tuple[StateCheckpoint, ...]]:
    """The checkpoints of each row of a file, whose recurrent layers `cache` has."""

    def states(at: int, end: int, layer: RecurrentLayer) -> dict[str, Tensor]:
        names = {name: checkpoint_name(at, end, state_name(layer.index, name)) for name in layer.tensors()}
        return {name: tensors[full].to(cache.device) for name, full in names.items()}

    return [
        tuple(StateCheckpoint(end, tuple(states(at, end, each) for each in cache.recurrent)) for end in row.checkpoints)
        for at, row in enumerate(header.rows)
    ]


def _check_path(path: object) -> None:
    check_kind("path", path, (str, os.PathLike), "the name of a file")


def _options(header: Header, policy: Policy) -> CacheOptions:
    try:
        return CacheOptions.from_document(header.options.model_dump(), policy)
    except WindlassError as error:
        raise InconsistentFile(str(error)) from None


def _empty_cache(
    model: PreTrainedModel,
    options: CacheOptions,
    tensors: Mapping[str, Tensor],
    make: Callable[[PreTrainedModel, CacheOptions], Made],
) -> Made:
    """Make an empty cache with the file's own mean keys, or with measured ones where it has none."""
    means = _key_means(leaves_of(options, len(attached(model).rotaries)), tensors)
    if not means:
        return make(model, options)
    cache = make(model, replace(options, store=Plain()))
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


def _header(cache: ModelCache, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Header:
    if type(cache.positions) not in MODES.values():
        raise UsageError(f"positions {cache.positions!r} cannot be saved. Set cache.positions to one of {list(MODES)}")
    if type(cache.store) not in STORES.values():
        raise UsageError(f"store {cache.store!r} cannot be saved. Use a KVCache with one of: {', '.join(STORES)}")
    notes = zip(cache.layers, any_evicted(cache), budgets_apart(cache), strict=True)
    return Header(
        model=type(inner_model(model)).__name__,
        dtype=_dtype(model),
        fingerprint=fingerprint(model),
        chat_template=None if tokenizer is None else template_hash(tokenizer),
        policy=PolicyHeader.of(cache.policy),
        options=OptionsHeader.model_validate(cache.options.document()),
        rows=tuple(map(RowHeader.of, cache.rows.rows)),
        layers=tuple(
            None
            if layer.is_empty
            else LayerHeader(sliding_window=layer.sliding_window, has_evicted=has_evicted, budget=budget)
            for layer, has_evicted, budget in notes
        ),
        has_tokens=cache.rows.ids is not None,
        has_states=any(not state.is_empty for state in cache.recurrent),
        has_places=has_places(cache),
    )


def _check_model(path: Path, header: Header, model: PreTrainedModel, layers: int) -> None:
    hint = "Load it with that model, or make it again with this one"
    ours = type(inner_model(model)).__name__
    if header.model != ours:
        raise PromptCacheError(f"{path} was made by a {header.model}, this model is a {ours}. {hint}")
    has_shares = header.options.shares is not None  # then notes are on groups of heads
    if len(header.layers) != layers and not has_shares:
        made = f"it has {len(header.layers)} layers, this model has {layers}"
        raise PromptCacheError(f"{path} was made by another {ours}: {made}. {hint}")
    if header.dtype != _dtype(model):
        # A fingerprint is one of weights in their dtype, so it cannot tell whether this is the same model.
        hint = f"Load the model that made it, with dtype {header.dtype}"
        raise PromptCacheError(f"{path} was made in {header.dtype}, this model is in {_dtype(model)}. {hint}")
    if header.fingerprint != fingerprint(model):
        raise PromptCacheError(f"{path} was made by another {ours}: config or weights differ. {hint}")


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
