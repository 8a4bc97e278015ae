"""A file of shares, which `windlass calibrate --shares` writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Final

from windlass.cache.shares import Shares
from windlass.core.check import check_kind
from windlass.core.errors import UsageError
from windlass.core.files import read_bytes, replacing

KIND: Final = "windlass shares"
VERSION: Final = 1
AGAIN: Final = "make it with `windlass calibrate MODEL TEXT --shares -o FILE`"


def shares_of(spec: str | Path | Shares | None) -> Shares | None:
    """The shares of a file, named after it, or shares themselves; None stands for equal ones.

    Raises: UsageError for a file that cannot be read, or holds no shares.
    """
    check_kind("shares", spec, (str, Path, Shares, type(None)), "a file of `windlass calibrate --shares`, or Shares")
    return read(Path(spec)) if isinstance(spec, str | Path) else spec


def write(shares: Shares, path: Path) -> None:
    """Write the file, whole or not at all. Raises: UsageError when it cannot be written."""
    document = {"kind": KIND, "version": VERSION, **shares.document()}
    del document["name"]
    try:
        with replacing(path.expanduser()) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}; give another name") from None


def read(path: Path) -> Shares:
    """The shares of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        document = json.loads(read_bytes(path.expanduser(), f"shares {path}").decode("utf-8-sig"))
    except UsageError as error:
        raise UsageError(f"{error}; {AGAIN}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"shares {path}: this is no file of shares, or a damaged one; {AGAIN}") from None
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        raise UsageError(f"shares {path}: this is no file of shares; {AGAIN}")
    if (version := document.pop("version", None)) != VERSION:
        raise UsageError(f"shares {path} has format version {version}, this windlass reads {VERSION}; {AGAIN}")
    try:
        return replace(Shares.from_document({**document, "name": "shares"}), name=path.name)
    except UsageError as error:
        raise UsageError(f"shares {path} is damaged: {error}; {AGAIN}") from None
