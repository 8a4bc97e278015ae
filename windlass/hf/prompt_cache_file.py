"""The bytes of a prompt-cache file: a safetensors file with our metadata, read with care and written whole."""

import errno
import hashlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from windlass.core.errors import PromptCacheError
from windlass.core.files import replacing
from windlass.hf.fingerprint import raw_bytes
from windlass.hf.policy_note import AGAIN
from windlass.hf.prompt_cache_document import VERSION
from windlass.hf.prompt_cache_fields import InconsistentFile, shown
from windlass.hf.prompt_cache_layout import Layout

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


def read(path: Path, check: Callable[[str, int, Mapping[str, Layout]], Checked]) -> tuple[Checked, dict[str, Tensor]]:
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


def _layout(name: str, file: Any) -> Layout:
    """That of a tensor of an open safetensors file."""
    part = file.get_slice(name)
    if part.get_dtype() not in DTYPES:
        raise InconsistentFile(f"tensor {shown(name)} is of type {part.get_dtype()}, which no tensor has")
    return Layout(tuple(part.get_shape()), DTYPES[part.get_dtype()])
