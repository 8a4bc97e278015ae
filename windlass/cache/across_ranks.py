"""Options of a cache on a rank that has some heads of a model: those that would need the others' heads are refused."""

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.parallel.heads import RankHeads
from windlass.policies.across_ranks import across_ranks


def check_across_ranks(options: CacheOptions, heads: RankHeads | None) -> None:
    """Raises: PolicyError, UsageError for what cannot be the same here as in a single process, naming it."""
    across_ranks(options.policy, heads)
    if heads is None:
        return
    if not heads.has_all_queries and not heads.is_split and options.recall:
        raise UsageError(
            f"recall={options.recall} picks tokens by queries, and here each rank has some of the query heads that "
            "read the same keys; leave recall out"
        )
    if not heads.is_split:
        return
    if options.shares is not None:
        raise UsageError(
            f"shares {options.shares} give heads of a layer other budgets, and each of {heads.ranks.size} ranks has "
            "only some of them; leave shares out"
        )
    merge = options.merge
    if merge is not None and not options.policy.needs.per_head and (merge.target != "next" or merge.threshold > -1):
        raise UsageError(
            f"merge {merge} looks for one slot for all heads, as {options.policy!r} ranks them alike, and each of "
            f"{heads.ranks.size} ranks has only some of them; take {type(merge).name}(next), or a policy that ranks "
            "each head by itself"
        )


def check_fit(heads: RankHeads | None) -> None:
    """Raises: UsageError where new values for the tokens kept would be fitted to the queries of this rank alone."""
    if heads is not None and not heads.is_split and not heads.has_all_queries:
        raise UsageError(
            "compress(fit=True) fits values to queries, and here each rank has some of the query heads that read the "
            "same keys; leave fit out"
        )
