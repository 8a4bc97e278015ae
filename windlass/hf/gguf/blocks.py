"""GGUF files: the header, checked before anything is believed, and blocks of weights, laid out anew without loss."""

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.errors import UsageError
from windlass.core.inputs import GroupCodes
from windlass.hf.weights import raw_bytes

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
# Limits of a header, far above any model's, because the reader after us trusts it.
MOST_ITEMS, MOST_TEXT, MOST_DIMENSIONS = 2**22, 2**24, 4
ALIGNMENT: Final = 32
# struct's letters of the numbers that metadata have.
NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file: its name there, the type of its blocks, its shape as PyTorch has it, and where it lies."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """All dimensions but the last one counted."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's blocks."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Header:
    """Metadata and tensors of a file, in the file's order."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        """The model's architecture, by the name it has in llama.cpp."""
        found: str = self.metadata["general.architecture"]
        return found


def read_header(path: Path) -> Header:
    """The header of a file. Raises: UsageError for one that is damaged, cut, or of another format."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(f"model {path} is no GGUF file: it does not begin with {MAGIC.decode()}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data, size).header()
    except OSError as error:
        raise UsageError(f"model {path} cannot be read: {error.strerror}") from None


class _Cursor:
    """A place in a file that moves on with all that is read."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size = path, data, size
        self._at, self._items = len(MAGIC), 0

    def header(self) -> Header:
        (version,) = self._numbers("I")
        if version not in VERSIONS:
            raise UsageError(
                f"model {self._path} is of version {version} of GGUF, or of a machine of another byte order. "
                f"Versions {VERSIONS[0]} and {VERSIONS[1]} are read"
            )
        tensors, fields = self._numbers("QQ")
        self._check_count(tensors)
        self._check_count(fields)
        metadata: dict[str, Any] = {}
        for _ in range(fields):
            name = self._text()
            if name in metadata:
                raise self._damaged(f"{name!r} occurs twice")
            metadata[name] = self._value(self._numbers("I")[0])
        if not isinstance(metadata.get("general.architecture"), str):
            raise self._damaged("it does not name its architecture")
        entries = [self._entry() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return Header(self._path, metadata, self._placed(entries, start))

    def _placed(self, entries: list[tuple[str, int, tuple[int, ...], int]], start: int) -> dict[str, StoredTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kinds = {
            int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES
        }
        found: dict[str, StoredTensor] = {}
        end = start
        for name, number, shape, offset in sorted(entries, key=lambda entry: entry[3]):
            if number not in kinds:
                raise UsageError(
                    f"model {self._path}: {name!r} is of type {number}, which this gguf does not know. Upgrade it: "
                    "pip install --upgrade gguf"
                )
            kind, inputs, size = kinds[number]
            if name in found or not shape or not all(shape) or shape[-1] % inputs:
                raise self._damaged(f"tensor {name!r} of type {kind} has shape {shape}, or occurs twice")
            tensor = StoredTensor(name, kind, shape, start + offset, shape[-1] // inputs * size)
            if tensor.start < end:
                raise self._damaged(f"tensor {name!r} lies on another one")
            end = tensor.start + tensor.nbytes
            if end > self._size:
                raise UsageError(
                    f"model {self._path} is cut: it has {self._size:,} bytes, and {name!r} ends at {end:,}. "
                    "Copy it again"
                )
            found[name] = tensor
        return found

    def _entry(self) -> tuple[str, int, tuple[int, ...], int]:
        name, (dimensions,) = self._text(), self._numbers("I")
        if dimensions > MOST_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {dimensions} dimensions")
        shape = self._numbers(f"{dimensions}Q")
        kind, offset = self._numbers("IQ")
        return name, kind, shape[::-1], offset

    def _value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self._numbers(NUMBERS[kind])[0]
        if kind == TEXT:
            return self._text()
        if kind != ARRAY:
            raise self._damaged(f"it has a value of type {kind}")
        inner, count = self._numbers("IQ")
        self._check_count(count)
        if inner == TEXT:
            return [self._text() for _ in range(count)]
        if inner not in NUMBERS:
            raise self._damaged(f"it has an array of type {inner}")
        return list(self._numbers(f"{count}{NUMBERS[inner]}"))

    def _check_count(self, count: int) -> None:
        self._items += count
        if self._items > MOST_ITEMS or count > self._size:
            raise self._damaged(f"it counts {count:,} items")

    def _numbers(self, letters: str) -> tuple[Any, ...]:
        try:
            found = struct.unpack_from(f"<{letters}", self._data, self._at)
        except struct.error:
            raise self._damaged("it ends in its header") from None
        self._at += struct.calcsize(f"<{letters}")
        return found

    def _text(self) -> str:
        (length,) = self._numbers("Q")
        if length > MOST_TEXT or length > self._size - self._at:
            raise self._damaged(f"it has a text of {length:,} bytes")
        self._at += length
        try:
            return self._data[self._at - length : self._at].decode()
        except UnicodeDecodeError:
            raise self._damaged("a text in it is not UTF-8") from None

    def _damaged(self, problem: str) -> UsageError:
        return UsageError(f"model {self._path} is damaged: {problem}. Copy it again")


@dataclass(frozen=True)
class Rows:
    """Some outputs of a matrix: codes (outputs, inputs), pairs and super-scales (outputs, groups, columns)."""

    codes: Tensor
    pairs: Tensor
    supers: Tensor | None = None


def _halves(blocks: Tensor, *places: int) -> Tensor:
    """Numbers of float16 at these places of each block, side by side."""
    return torch.cat([blocks[..., at : at + 2].contiguous().view(torch.float16) for at in places], -1)


def _nibbles(blocks: Tensor, width: int) -> Tensor:
    """The low nibbles of each `width` bytes, then the high ones."""
    parts = blocks.unflatten(-1, (-1, 1, width))
    return torch.cat([parts & 15, parts >> 4], -2).flatten(-3)


def _bits(blocks: Tensor, count: int, shifts: int) -> Tensor:
    """Unpack `shifts` fields of `count` bits from each byte, lowest bits first: one row of all bytes for each field."""
    return torch.cat([(blocks >> (count * shift)) & (2**count - 1) for shift in range(shifts)], -1)


def _fifth(blocks: Tensor) -> Tensor:
    """The fifth bits of 32 codes, of which a byte holds those of 8 that follow each other."""
    return torch.stack([(blocks >> shift) & 1 for shift in range(8)], -1).flatten(-2) << 4


def _q4_0(blocks: Tensor) -> Rows:
    return Rows(_nibbles(blocks[..., 2:], 16), _halves(blocks, 0)[..., None])


def _q4_1(blocks: Tensor) -> Rows:
    return Rows(_nibbles(blocks[..., 4:], 16), _halves(blocks, 0, 2)[..., None, :])


def _q5_0(blocks: Tensor) -> Rows:
    codes = _nibbles(blocks[..., 6:], 16) | _fifth(blocks[..., 2:6])
    return Rows(codes.view(torch.int8) - 16, _halves(blocks, 0)[..., None])


def _q5_1(blocks: Tensor) -> Rows:
    codes = _nibbles(blocks[..., 8:], 16) | _fifth(blocks[..., 4:8])
    return Rows(codes.view(torch.int8), _halves(blocks, 0, 2)[..., None, :])


def _q8_0(blocks: Tensor) -> Rows:
    return Rows(blocks[..., 2:].view(torch.int8), _halves(blocks, 0)[..., None])


def _scales(packed: Tensor) -> Tensor:
    """Eight scales and minima of 6 bits, side by side."""
    first, second, third = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return torch.stack([scales, minima], -1).view(torch.int8)


def _supers(blocks: Tensor) -> Tensor:
    """The scale of scales, and that of minima, which are subtracted."""
    return _halves(blocks, 0, 2)[..., None, :] * torch.tensor([1, -1], dtype=torch.float16)


def _q4_k(blocks: Tensor) -> Rows:
    return Rows(_nibbles(blocks[..., 16:], 32), _scales(blocks[..., 4:16]), _supers(blocks))


def _q5_k(blocks: Tensor) -> Rows:
    codes = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 1, 8) << 4
    return Rows(codes.view(torch.int8), _scales(blocks[..., 4:16]), _supers(blocks))


def _q6_k(blocks: Tensor) -> Rows:
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2, 4).flatten(-2)
    codes = (_nibbles(blocks[..., :128], 64) | high << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return Rows(codes, scales[..., None], _halves(blocks, 208)[..., None])


@dataclass(frozen=True)
class Layout:
    """How blocks of a type become codes: bytes of a block, bits and `middle` of a code, and inputs of a group."""

    size: int
    bits: int
    group: int
    read: Callable[[Tensor], Rows]
    middle: int = 0


LAYOUTS: Final = {
    "Q4_0": Layout(18, 4, 32, _q4_0, middle=8),
    "Q4_1": Layout(20, 4, 32, _q4_1),
    "Q5_0": Layout(22, 8, 32, _q5_0),
    "Q5_1": Layout(24, 8, 32, _q5_1),
    "Q8_0": Layout(34, 8, 32, _q8_0),
    "Q4_K": Layout(144, 4, 32, _q4_k),
    "Q5_K": Layout(176, 8, 32, _q5_k),
    "Q6_K": Layout(210, 8, 16, _q6_k),
}
BLOCK: Final = 64  # outputs that lie side by side, which all kernels read
PIECE: Final = 2**21  # numbers that are laid out at once


def raw_rows(path: Path, tensor: StoredTensor, first: int, last: int) -> Tensor:
    """Some rows as they lie in the file, (rows, bytes). Read, not mapped: a file that is cut meanwhile is no crash."""
    found = torch.empty(last - first, tensor.row_bytes, dtype=torch.uint8)
    with path.open("rb") as file:
        file.seek(tensor.start + first * tensor.row_bytes)
        if file.readinto(raw_bytes(found)) != found.nbytes:
            raise UsageError(f"model {path} was cut while it was read. Copy it again")
    return found


def pieces(tensor: StoredTensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are read one after the other, in whole blocks of outputs."""
    step = max(BLOCK, PIECE // tensor.shape[-1] // BLOCK * BLOCK)
    for first in range(0, tensor.rows, step):
        yield first, min(tensor.rows, first + step)


def codes_of(path: Path, tensor: StoredTensor, order: Tensor | None = None) -> GroupCodes:
    """Read a matrix in one of the LAYOUTS. With an `order`, row i is row `order[i]` of the file."""
    if order is None:
        raws = (raw_rows(path, tensor, first, last) for first, last in pieces(tensor))
    else:
        whole = raw_rows(path, tensor, 0, tensor.rows)
        raws = (whole[order[first:last]] for first, last in pieces(tensor))
    return _codes(LAYOUTS[tensor.kind], raws, tensor.rows, tensor.shape[-1])


def codes_of_experts(path: Path, parts: Sequence[StoredTensor]) -> GroupCodes:
    """Read the matrices of all experts. The outputs of each are those of its `parts`, one after the other.

    The parts are of one type. Codes, pairs and supers have one more dimension, the experts.
    """
    layout, (experts, _, inputs) = LAYOUTS[parts[0].kind], parts[0].shape
    outputs = [part.shape[1] for part in parts]
    whole: GroupCodes | None = None
    for expert in range(experts):
        raws = [
            raw_rows(path, part, expert * rows, (expert + 1) * rows) for part, rows in zip(parts, outputs, strict=True)
        ]
        own = _codes(layout, iter([torch.cat(raws)]), sum(outputs), inputs)
        if whole is None:
            codes, pairs, *supers = [each.new_empty(experts, *each.shape) for each in own.parts]
            whole = replace(own, codes=codes, pairs=pairs, supers=supers[0] if supers else None)
        for held, part in zip(whole.parts, own.parts, strict=True):
            held[expert] = part
    assert whole is not None, "no experts"
    return whole


def _codes(layout: Layout, raws: Iterator[Tensor], outputs: int, inputs: int) -> GroupCodes:
    """Lay out the rows of a matrix, which come in pieces of whole blocks of outputs."""
    rows, first = -(-outputs // BLOCK) * BLOCK, 0
    is_narrow = layout.bits == 4
    codes = torch.zeros(rows // BLOCK, inputs, BLOCK * layout.bits // 8, dtype=torch.uint8 if is_narrow else torch.int8)
    pairs = supers = None
    for raw in raws:
        found, last = layout.read(raw.unflatten(-1, (-1, layout.size))), first + len(raw)
        filled = (0, 0, 0, -len(raw) % BLOCK)
        # Of each row, then of each block of outputs.
        own = pad(found.codes.flatten(1), filled).unflatten(0, (-1, BLOCK))
        if is_narrow:
            own = own[:, : BLOCK // 2] | own[:, BLOCK // 2 :] << 4
        codes[first // BLOCK : -(-last // BLOCK)] = own.transpose(1, 2)
        pairs = _placed(pairs, found.pairs, rows, first)
        supers = None if found.supers is None else _placed(supers, found.supers, rows, first)
        first = last
    assert pairs is not None, "a matrix without rows"
    packed = codes.view(rows, -1)
    return GroupCodes(packed, pairs, layout.group, BLOCK, outputs, layout.bits, layout.middle, supers)


def _placed(whole: Tensor | None, part: Tensor, rows: int, first: int) -> Tensor:
    """The scales of all outputs, block by block, with those of some in their place."""
    part = pad(part.flatten(1, 2), (0, 0, 0, 0, 0, -len(part) % BLOCK)).unflatten(0, (-1, BLOCK)).permute(0, 2, 3, 1)
    if whole is None:
        whole = part.new_empty(rows // BLOCK, *part.shape[1:])
    whole[first // BLOCK : first // BLOCK + len(part)] = part
    return whole


def decoded_of(path: Path, tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a tensor of any type, each rounded to this dtype."""
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType[tensor.kind]
    found = torch.empty(tensor.rows, tensor.shape[-1], dtype=dtype)
    for first, last in pieces(tensor):
        raw = raw_rows(path, tensor, first, last)
        if tensor.kind in FLOATS:
            found[first:last] = raw.view(FLOATS[tensor.kind])
        else:
            try:
                found[first:last] = torch.from_numpy(dequantize(raw.numpy(), kind))
            except NotImplementedError:
                raise UsageError(
                    f"model {path}: {tensor.name!r} is of type {tensor.kind}, which gguf cannot decode. Use a file of "
                    f"one of: {', '.join(LAYOUTS)}"
                ) from None
    return found.view(tensor.shape)
