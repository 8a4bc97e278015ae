"""Further kinds of rows of a server, as they are typed: `rows=2,budget=4096,policy=snapkv`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, get_type_hints

from windlass.cache.options import CacheOptions
from windlass.cli.cache_options import CacheArguments, sinks_of
from windlass.core.close_names import did_you_mean
from windlass.core.errors import UsageError, WindlassError
from windlass.core.limits import MAX_NUMBER
from windlass.core.spec import int_parser, parse_list

KIND: Final = "--kind"
MOST_ROWS: Final = 1024


def kinds_of(typed: Sequence[str], first: Mapping[str, Any]) -> tuple[tuple[int, CacheOptions], ...]:
    """How many rows of which options each of `typed` asks for; what one does not name is as in the `first` kind.

    Raises: UsageError for another name, one given twice, no number of rows, or options that cannot be honoured.
    """
    return tuple(_kind(each, first) for each in typed)


def _kind(typed: str, first: Mapping[str, Any]) -> tuple[int, CacheOptions]:
    given: dict[str, Any] = {}
    for part in parse_list(KIND, typed, str):
        name, sign, value = (each.strip() for each in part.partition("="))
        parsers = _parsers()
        make = parsers.get(name)
        if make is None or not sign or name in given:
            near = did_you_mean(name, parsers) if make is None else ""
            raise UsageError(
                f"{KIND} {typed!r}: {part!r} is not one of {', '.join(parsers)}, each once and with a value; {near}"
                "write rows=2,budget=4096,policy=snapkv"
            )
        given[name] = make(value)
    if "rows" not in given:
        raise UsageError(f"{KIND} {typed!r} says nothing of its rows; write rows=2,budget=4096,policy=snapkv")
    rows = given.pop("rows")
    try:
        return rows, CacheOptions(**{**first, **given})
    except WindlassError as error:
        raise UsageError(f"{KIND} {typed!r}: {error}") from error


def _parsers() -> dict[str, Callable[[str], Any]]:
    """How each value is read: the number of rows, and all that the command line asks of a cache."""
    found: dict[str, Callable[[str], Any]] = {"rows": int_parser(f"{KIND} rows", 1, MOST_ROWS)}
    for name, kind in get_type_hints(CacheArguments).items():
        if name == "sinks":
            found[name] = sinks_of
            continue
        found[name] = int_parser(f"{KIND} {name}", 0, MAX_NUMBER) if kind == int | None else str
    return found
