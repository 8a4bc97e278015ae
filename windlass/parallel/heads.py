"""Which heads of a model one rank has."""

from dataclasses import dataclass

from windlass.parallel.ranks import Ranks


@dataclass(frozen=True)
class RankHeads:
    """What this rank has of each attention layer: `kv_heads` of them, in the order of the cache's layers.

    `is_split`: the kv heads of all ranks together are those of a layer, rank 0 has the first; else each rank has all of
    them, with the same keys. `has_all_queries`: each rank has all query heads; else some, with or without split kv
    heads.
    """

    ranks: Ranks
    kv_heads: tuple[int, ...]
    is_split: bool
    has_all_queries: bool

    def heads(self, layer: int) -> tuple[int, ...] | None:
        """The numbers in the model of the kv heads that this rank has of a layer; None: all of them."""
        if not self.is_split:
            return None
        count = self.kv_heads[layer]
        return tuple(range(self.ranks.number * count, (self.ranks.number + 1) * count))

    def in_all(self, count: int) -> int:
        """How many heads a layer has of which this rank has `count`."""
        return count * self.ranks.size if self.is_split else count

    @property
    def label(self) -> str:
        """What `KVCache.describe` says of it."""
        own = f"rank {self.ranks.number} of {self.ranks.size}"
        if self.is_split:
            counts = sorted({*self.kv_heads})
            each = " or ".join(f"{count} of {self.in_all(count)}" for count in counts)
            return f"{own}, with {each} kv heads"
        return f"{own}, with all kv heads: this model's plan gives each rank the keys and values of all of them"
