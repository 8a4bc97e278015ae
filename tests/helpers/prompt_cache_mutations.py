"""Ways to spoil a prompt-cache file whose checksum is right."""

import json
import random
import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers.prompt_cache_files import CacheFile, Honest
from windlass.hf.prompt_cache import checksum

DEEP, LONG = "@deep@", "@long@"  # stand for texts of JSON that Python cannot write
NUMBERS = (0, 1, -1, -2, -7, 2**30, 2**31, 2**53, 10**18, 10**30, 0.5, 1e300, float("nan"), float("inf"))
TEXTS = ("", "x", "1", "\n", "\x1b[2J", "é" * 9000, DEEP, LONG)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"a": 1}, *TEXTS)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
ALL_DTYPES = (*DTYPES, torch.int8, torch.uint8, torch.bool)
ENTRIES = (0, 1, -1, -2, -7, 2**30, 2**31 - 1, -(2**31), float("nan"), float("inf"), -float("inf"), 1e30)
NAMES = ("x", "", "layers.0", "layers.0.x", "layers.99.keys", "layers.0.state.x", "layers.0.statistics.mean")
NAMES_OF_OTHERS = (
    "columns",
    "tokens.0",
    "tokens.7",
    "layers.1.positions",
    "layers.0.state.merged",
    "layers.0.exact_serials",
)


def mutated(honest: Honest, draw: random.Random) -> tuple[str, bytes]:
    """A spoiled copy of a file, with a description. The same `draw` gives the same file."""
    file = honest.file
    file = CacheFile(file.contents, {name: tensor.clone() for name, tensor in file.tensors.items()}, file.metadata)
    kinds: list[Callable[[CacheFile, random.Random], str]] = [_field, _entry]
    weights = [6, 4]
    if file.tensors:
        kinds += [_values, _bits, _shape, _dtype, _order, _names]
        weights += [6, 2, 3, 2, 2, 2]
    what = draw.choices([*kinds, None], [*weights, 6])[0]
    if what is None:
        return _raw(file, draw)
    return what(file, draw), file.to_bytes()


def _field(file: CacheFile, draw: random.Random) -> str:
    """A field of the document gets another value, goes, comes, or changes its place."""
    document = file.document
    holder, key = draw.choice(list(_places(document)))
    was = holder[key]
    how = draw.randrange(8)
    if how == 0:
        del holder[key]
        did = "removed"
    elif how == 1 and isinstance(holder, list):
        holder.insert(draw.randrange(len(holder) + 1), was)
        did = "doubled"
    elif how == 2 and isinstance(was, dict):
        was[draw.choice(("x", "batch", "tokens", ""))] = draw.choice((None, 0, "x"))
        did = "gained a field"
    elif how == 3 and isinstance(was, list):
        draw.shuffle(was)
        did = "shuffled"
    elif how == 4 and isinstance(was, int | float):
        holder[key] = was + draw.choice((-1, 1, 2, -2, 0.0, 0.5, 1000, 2**31))
        did = f"{was} to {holder[key]!r}"
    elif how == 5 and isinstance(was, str):
        holder[key] = _retyped(was, draw)
        did = f"to {holder[key][:80]!r}"
    else:
        holder[key] = draw.choice((*NUMBERS, *OTHERS))
        did = f"to {holder[key]!r}"[:80]
    text = json.dumps(document)
    text = text.replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000).replace(f'"{LONG}"', "1" + "0" * 5000)
    file.contents = text
    return f"field {key!r} {did}"


def _places(holder: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) of a document."""
    pairs = list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder))
    inner = [place for _, value in pairs if isinstance(value, dict | list) for place in _places(value)]
    return [(holder, key) for key, _ in pairs] + inner


def _retyped(text: str, draw: random.Random) -> str:
    """`text` with one sign another, gone, or more."""
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(("", *string.printable)) + text[at + draw.randrange(2) :]


def _entry(file: CacheFile, draw: random.Random) -> str:
    """A byte of the document, or an entry of the metadata."""
    how = draw.randrange(4)
    if how:
        at = draw.randrange(len(file.contents))
        before, sign = file.contents[at], draw.choice(string.printable)
        file.contents = file.contents[:at] + sign + file.contents[at + 1 :]
        return f"document, sign {at}, {before!r} to {sign!r}"
    name = draw.choice(("kind", "version", "format", "x"))
    value = draw.choice(("", "0", "1", "2", "3", "4", "5", "-1", "01", "9" * 5000, "x", "٣", None))
    file.metadata = {**file.metadata}
    if value is None:
        file.metadata.pop(name, None)
    else:
        file.metadata[name] = value
    return f"metadata {name!r} to {value!r}"[:80]


def _picked(file: CacheFile, draw: random.Random) -> str:
    """A tensor. Tensors without states come as often as those with states."""
    small = [name for name, tensor in file.tensors.items() if not tensor.is_floating_point() or tensor.ndim < 4]
    return draw.choice(draw.choice((small or list(file.tensors), list(file.tensors))))


def _values(file: CacheFile, draw: random.Random) -> str:
    """One number of a tensor, or all of them, are others."""
    name = _picked(file, draw)
    tensor = file.tensors[name]
    if not tensor.numel():
        return f"{name} is empty"
    flat, at = tensor.flatten(), draw.randrange(tensor.numel())
    choices = [value for value in ENTRIES if tensor.is_floating_point() or (value == value and abs(value) < 2**31)]
    value = draw.choice((*choices, flat[draw.randrange(len(flat))].item(), flat[at].item() + draw.choice((1, -1))))
    # As in memory: numbers that do not fit wrap around.
    new = torch.tensor(value).to(tensor.dtype)
    is_all = draw.randrange(6) == 0
    flat[slice(None) if is_all else at] = new
    file.tensors[name] = flat.view(tensor.shape)
    return f"{name}, {'all' if is_all else at} to {value}"


def _bits(file: CacheFile, draw: random.Random) -> str:
    name = _picked(file, draw)
    raw = file.tensors[name].contiguous().flatten().view(torch.uint8)
    if not raw.numel():
        return f"{name} is empty"
    at, bit = draw.randrange(raw.numel()), draw.randrange(8)
    raw[at] ^= 1 << bit
    return f"{name}, byte {at}, bit {bit}"


def _shape(file: CacheFile, draw: random.Random) -> str:
    name = _picked(file, draw)
    tensor = file.tensors[name]
    dim = draw.randrange(tensor.ndim) if tensor.ndim else 0
    changes: list[Callable[[], Tensor]] = [
        lambda: tensor.narrow(dim, 0, tensor.shape[dim] - 1),
        lambda: tensor.narrow(dim, 0, 0),
        lambda: torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim),
        lambda: tensor.unsqueeze(dim),
        lambda: tensor.flatten(),
        lambda: tensor.transpose(dim, (dim + 1) % tensor.ndim),
        lambda: tensor.sum(),
        lambda: torch.empty(*tensor.shape[:dim], 0, 2**40).to(tensor.dtype),
    ]
    change = draw.randrange(len(changes))
    try:
        file.tensors[name] = changes[change]()
    except (RuntimeError, IndexError):
        file.tensors[name] = tensor[None]
    return f"{name} of shape {tuple(tensor.shape)} to {tuple(file.tensors[name].shape)}"


def _dtype(file: CacheFile, draw: random.Random) -> str:
    name = _picked(file, draw)
    dtype = draw.choice(ALL_DTYPES)
    file.tensors[name] = file.tensors[name].to(dtype)
    return f"{name} to {dtype}"


def _order(file: CacheFile, draw: random.Random) -> str:
    """Numbers of a tensor in another order, or those of another tensor."""
    name = _picked(file, draw)
    tensor = file.tensors[name]
    twins = [other for other, each in file.tensors.items() if each.shape == tensor.shape and each.dtype == tensor.dtype]
    other = draw.choice(twins)
    if other != name:
        file.tensors[name], file.tensors[other] = file.tensors[other], tensor
        return f"{name} and {other} exchanged"
    dim = draw.randrange(tensor.ndim) if tensor.ndim else 0
    if draw.randrange(2) or not tensor.ndim:
        file.tensors[name] = tensor.flip(dim) if tensor.ndim else tensor
        return f"{name} reversed along {dim}"
    index = list(range(tensor.shape[dim]))
    draw.shuffle(index)
    file.tensors[name] = tensor.index_select(dim, torch.tensor(index, dtype=torch.long))
    return f"{name} permuted along {dim}"


def _names(file: CacheFile, draw: random.Random) -> str:
    name = _picked(file, draw)
    new = draw.choice((*NAMES, *NAMES_OF_OTHERS, name + "x", name[:-1], name.replace("0", "1", 1)))
    tensor = file.tensors[name]
    how = draw.randrange(3)
    if how != 0:
        file.tensors[new] = tensor
    if how != 1 and new != name:
        del file.tensors[name]
    return f"{name} {('removed', 'copied to', 'renamed to')[how]} {new if how else ''}"


def _raw(file: CacheFile, draw: random.Random) -> tuple[str, bytes]:
    """The bytes of the file: cut, longer, or changed in the header of safetensors."""
    data = bytearray(file.to_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    how = draw.randrange(6)
    if how == 0:
        at = draw.choice((draw.randrange(len(data)), draw.randrange(end), 0, 4, 8))
        return f"cut at {at}", bytes(data[:at])
    if how == 1:
        return "longer", bytes(data) + draw.randbytes(draw.randrange(1, 99))
    if how == 2:
        length = draw.choice((0, 1, end, len(data), 2**24, 2**31, 2**63, 2**64 - 1, draw.randrange(len(data))))
        return f"header of {length} bytes", length.to_bytes(8, "little") + bytes(data[8:])
    if how == 3:
        head = draw.choice((b"[" * 100_000, b"{}", b'{"a":' * 50_000, b"\xff" * 64, b" " * 20_000_000))
        return f"header {head[:8]!r}", len(head).to_bytes(8, "little") + head + bytes(data[end:])
    at = draw.randrange(8, end)
    data[at] = draw.randrange(256) if how == 4 else ord(draw.choice(string.printable))
    return f"header, byte {at}", _signed_again(bytes(data), end)


def _signed_again(data: bytes, end: int) -> bytes:
    """The spoiled header with its own checksum, if it can still be read."""
    from safetensors.torch import load

    try:
        metadata = json.loads(data[8:end])["__metadata__"]
        new = checksum(metadata["contents"], load(data))
        return data[:8] + data[8:end].replace(metadata["checksum"].encode(), new.encode()) + data[end:]
    except Exception:  # of any kind: the file stays unsigned
        return data
