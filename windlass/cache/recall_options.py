"""The options of a recall store, as users give them."""

import os
from pathlib import Path
from typing import Final

from windlass.core.check import check_kind
from windlass.core.errors import UsageError
from windlass.core.recall import PAGE
from windlass.stores.base import Store
from windlass.stores.spec import store_of

DEFAULT_RECALL_STORE: Final = "int8"


def recall_store_of(spec: str | Store) -> Store:
    """The store that `spec` names. Raises: UsageError, also for one that would hold some tokens in full precision."""
    store = store_of(spec)
    if store.full_precision.sinks or store.full_precision.newest:
        raise UsageError(
            f"recall_store={store.name!r} asks for tokens in full precision, which a recall store does not have; "
            f'use "plain", or leave the numbers out'
        )
    return store


def recall_folder_of(folder: object) -> Path | None:
    """The folder as a path. Raises: UsageError for what is no folder."""
    check_kind("recall_folder", folder, (str, os.PathLike, type(None)), "the name of a folder, or None")
    if folder is None:
        return None
    path = Path(os.fspath(folder))  # type: ignore[arg-type]  # checked above
    if not path.is_dir():
        raise UsageError(f"recall_folder {str(path)!r} is no folder; make it first, or leave it out")
    return path


def check_recall(recall: int, budget: int | None) -> None:
    """Raises: UsageError for a number of tokens that are no whole pages, or without a budget to evict by."""
    if recall % PAGE:
        raise UsageError(
            f"recall ({recall} tokens) must be a multiple of {PAGE}, the tokens of a page; "
            f"use {recall // PAGE * PAGE or PAGE} or {(recall // PAGE + 1) * PAGE}"
        )
    if recall and budget is None:
        raise UsageError(
            f"recall={recall} needs a budget: without one nothing is evicted that could be recalled; give budget as well"
        )
