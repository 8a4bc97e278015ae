"""First tokens of each row that are never evicted, where the options leave their number to the text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from windlass.cache.leaves import leaves_of
from windlass.cache.options import CacheOptions
from windlass.cache.state import CacheState
from windlass.core.check import whole_number
from windlass.core.errors import UsageError
from windlass.core.limits import DEFAULT_SINKS, MAX_NUMBER, SYSTEM


def set_sinks(cache: CacheState, tokens: int, row: int = 0) -> None:
    """Never evict the first `tokens` of a row from now on; a cache with `sinks="system"` must be told before it reads.

    `windlass.system_tokens` counts those of a system text. Fewer than 4 count as 4, as by default.

    Raises: UsageError for a cache with another number of sinks, a row that is not there, or more than the budget holds.
    """
    if cache.options.sinks != SYSTEM:
        raise UsageError(
            f"set_sinks: this cache has sinks={cache.options.sinks}; make it with sinks={SYSTEM!r} to set them per row"
        )
    tokens = whole_number("sinks", tokens, 0, MAX_NUMBER)
    row = whole_number("row", row, 0, cache.batch_size - 1)
    budgets = [layer.budget for layer in cache.layers if not layer.rules.is_whole_window]
    check_sinks(tokens, cache.options, budgets)
    cache.text = replace(
        cache.text, rows=cache.rows.changed(lambda _, one: replace(one, sinks=max(tokens, DEFAULT_SINKS)), row)
    )


def check_fits(tokens: int, options: CacheOptions, layers: int) -> None:
    """Raises: UsageError where a row with these options, in a model of so many layers, has no room for the sinks."""
    if options.sinks == SYSTEM:
        check_sinks(tokens, options, [leaf.limits.budget for leaf in leaves_of(options, layers)])


def check_sinks(tokens: int, options: CacheOptions, budgets: Iterable[int | None]) -> None:
    """Raises: UsageError for more sinks than one of the budgets has room for, beside the window and one token."""
    window = options.limits.window
    least = min((budget for budget in budgets if budget is not None), default=None)
    if least is not None and max(tokens, DEFAULT_SINKS) + window + 1 > least:
        apart = "" if least == options.budget else f", of which a layer keeps {least},"
        raise UsageError(
            f"sinks: the system text has {tokens} tokens, and the budget of {options.budget} tokens{apart} has room "
            f"for {max(least - window - 1, 0)} beside the window of {window}; raise budget, shorten the system text, "
            "or set sinks to a number"
        )


def check_known(cache: CacheState, lengths: Iterable[int]) -> None:
    """Raises: UsageError where a row is to read tokens, and nobody has said how many of them are sinks."""
    if cache.options.sinks != SYSTEM:
        return
    for number, (row, tokens) in enumerate(zip(cache.rows.rows, lengths, strict=True)):
        if tokens and row.sinks is None:
            raise UsageError(
                f"sinks={SYSTEM!r} needs the number of tokens of the system text of row {number}; call "
                f"cache.set_sinks(windlass.system_tokens(tokenizer, messages), row={number}) before it reads, or give "
                "sinks a number"
            )
