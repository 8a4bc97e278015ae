"""What a cache holds, in two lines and as a table of a notebook."""

from collections.abc import Sequence
from html import escape
from typing import Final

from windlass.cache.describe import bytes_by_part
from windlass.cache.state import CacheState
from windlass.core.units import in_units

MAX_ROWS: Final = 6  # of a batch, that are told one by one


def facts(cache: CacheState) -> dict[str, str]:
    """What the cache was asked for, and what it holds now, by name. Counts slots, and copies none of them."""
    options = cache.options.labels()
    told = {"model": cache.model_name} if cache.model_name else {}
    told["budget"] = "none" if cache.limits.budget is None else f"{cache.limits.budget:,}"
    told |= {name: str(options[name]) for name in ("policy", "positions", "store")}
    if cache.merge is not None:
        told["merge"] = str(cache.merge)
    if cache.options.shares is not None:
        told["shares"] = str(cache.options.shares)
    if cache.options.recall:
        told["recall"] = cache.options.recalled
    if cache.batch_size > 1:
        told["rows"] = f"{cache.batch_size:,}"
    told["tokens seen"] = _numbers(cache.rows.tokens_seen)
    told["tokens kept"] = _kept(cache)
    told["bytes held"] = in_units(sum(bytes_by_part(cache).values()))
    return told


def as_text(cache: CacheState) -> str:
    """Two lines: what was asked for, and what is held."""
    told = facts(cache)
    name = f"KVCache of {told.pop('model')}" if "model" in told else "KVCache"
    seen, kept, held = (told.pop(each) for each in ("tokens seen", "tokens kept", "bytes held"))
    asked = ", ".join([name, *(f"{each} {value}" for each, value in told.items())])
    return f"{asked}\n  {seen} tokens seen, {kept} kept, {held} held"


def as_html(cache: CacheState) -> str:
    """A table of two columns."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(cache).items())
    return f"<table><caption>KVCache</caption>{''.join(lines)}</table>"


def _kept(cache: CacheState) -> str:
    """Tokens that each row keeps, or the least and the most where layers differ, or heads after an edit."""
    counts = [(layer.positions >= 0).sum(-1).T.tolist() for layer in cache.layers if not layer.is_empty]
    heads = [rows for layer in counts for rows in layer]
    if not heads:
        return "0"
    if all(rows == heads[0] for rows in heads):
        return _numbers(heads[0])
    every = [number for rows in heads for number in rows]
    return f"{min(every):,} to {max(every):,} a layer"


def _numbers(rows: Sequence[int]) -> str:
    """One number where all rows have it, each row's where they are few, else the least and the most."""
    if len(set(rows)) == 1:
        return f"{rows[0]:,}"
    return ", ".join(f"{each:,}" for each in rows) if len(rows) <= MAX_ROWS else f"{min(rows):,} to {max(rows):,}"
