"""All stores, by name."""

from typing import Final

from windlass.core.check import check_kind
from windlass.core.close_names import use_one_of
from windlass.core.errors import UsageError
from windlass.core.spec import parse_ints, parse_spec
from windlass.stores.base import Store
from windlass.stores.low_bit import Int4, Int8
from windlass.stores.plain import Plain

STORES: Final[dict[str, type[Store]]] = {"plain": Plain, "int8": Int8, "int4": Int4}


def store_of(spec: str | Store) -> Store:
    """The store that `spec` names: `"plain"`, `"int8"`, `"int4(sinks=4, newest=32)"`; or a store itself.

    Raises: UsageError for an unknown name, wrong numbers, or what is neither a store nor a name.
    """
    if isinstance(spec, Store):
        return spec
    check_kind("store", spec, str, "a store or its name", 'write store="int8" or windlass.Int8()')
    typed = parse_spec(spec)
    if typed is None or typed.name not in STORES:
        hint = "numbers of a store stand in parentheses, as in int4(sinks=4, newest=32)"
        raise UsageError(f"store={spec!r} is not a store; {use_one_of(spec, STORES)}; {hint}")
    store = STORES[typed.name]
    numbers = parse_ints(f"store={spec!r}", typed, store.parameters)
    return store(**numbers)  # type: ignore[arg-type]  # `parameters` names the whole numbers it takes
