"""The options of a recall store, as users give them."""

import os
from pathlib import Path
from typing import Final

from windlass.core.check import check_kind
from windlass.core.errors import UsageError
from windlass.core.files import check_folder
from windlass.stores.base import Store
from windlass.stores.spec import STORES, store_of

DEFAULT_RECALL_STORE: Final = "int4"


def recall_store_of(spec: str | Store) -> Store:
    """The store that `spec` names.

    Raises: UsageError for an unknown one, one of another's making, whose bytes no scan knows, and one that would hold
    some tokens in full precision.
    """
    store = store_of(spec)
    if type(store) not in STORES.values():
        raise UsageError(f"recall_store={store!r} is none that can be scanned; use one of: {', '.join(STORES)}")
    if store.full_precision.sinks or store.full_precision.newest:
        raise UsageError(
            f"recall_store={store.name!r} asks for tokens in full precision, which a recall store does not have; "
            f'use "plain", or leave the numbers out'
        )
    return store


def recall_folder_of(folder: str | Path | None) -> Path | None:
    """The folder as a path. Raises: UsageError for what is no folder."""
    check_kind("recall_folder", folder, (str, os.PathLike, type(None)), "the name of a folder, or None")
    return None if folder is None else check_folder(Path(os.fspath(folder)), "recall_folder")
