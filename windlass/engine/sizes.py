"""How many bytes caches hold, without counting at each step: that takes as long as a step of a small model."""

from collections.abc import Sequence
from time import monotonic
from typing import Final

from windlass.hf.kv_cache import KVCache

SECONDS: Final = 0.1  # a count is good for


class Sizes:
    """The latest count of some caches. It is made anew where there are other caches or rows, or after `SECONDS`."""

    def __init__(self) -> None:
        self._caches: Sequence[tuple[KVCache, int]] = ()
        self._bytes: list[int] = []
        self._at = 0.0

    def of(self, caches: Sequence[KVCache], is_exact: bool) -> list[int]:
        """Bytes of each, of what it can recall as well; made anew where they are to be exact."""
        is_same = len(caches) == len(self._caches) and all(
            own is other and own.batch_size == rows for own, (other, rows) in zip(caches, self._caches, strict=True)
        )
        if is_exact or not is_same or monotonic() - self._at > SECONDS:
            self._caches, self._at = tuple((cache, cache.batch_size) for cache in caches), monotonic()
            self._bytes = [cache.bytes_held + cache.recall_bytes for cache in caches]
        return self._bytes
