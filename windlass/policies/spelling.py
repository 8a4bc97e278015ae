"""A policy as the command line spells it."""

from dataclasses import fields
from typing import Any

from windlass.core.spec import Spec, parse_spec
from windlass.policies import FROM_FILES, NAMES, WRAPPERS, Policy

_KINDS: dict[str, type[Policy]] = {**NAMES, **WRAPPERS, **FROM_FILES}
_BY_CLASS: dict[str, tuple[str, type[Any]]] = {kind.__name__: (name, kind) for name, kind in _KINDS.items()}


def spelled(made: str) -> str:
    """What a user types for the policy whose `repr` is `made`: `"SnapKV(pool=7)"` is `"snapkv(pool=7)"`.

    Arguments that have their default value are left out. A class of the user's own keeps its name.
    """
    typed = parse_spec(made)
    if typed is None or typed.name not in _BY_CLASS:
        return made.removesuffix("()")
    name, kind = _BY_CLASS[typed.name]
    arguments = _arguments(typed, kind)
    return f"{name}({', '.join(arguments)})" if arguments else name


def _arguments(typed: Spec, kind: type[Any]) -> list[str]:
    """Those of `typed` that are not as `kind` has them by default; a wrapped policy or a file needs no name."""
    usual = {each.name: repr(each.default) for each in fields(kind)}
    given = [(key, value) for key, value in typed.named if usual.get(key) != value]
    named = [spelled(value) if key in ("policy", "table", "file") else f"{key}={value}" for key, value in given]
    return [*map(spelled, typed.positional), *named]
