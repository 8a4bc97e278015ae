"""A policy out of what a user typed: a name, a name with arguments, or a class in a file."""

import ast
import inspect
import re

from windlass.core.errors import PolicyError
from windlass.core.plugin import PluginKind
from windlass.core.spec import Spec, parse_spec
from windlass.policies import NAMES, WRAPPERS, Pairs, Policy
from windlass.policies.auto import auto, is_auto

Value = bool | int | float | Policy | None
KNOWN: dict[str, type[Policy]] = {**NAMES, **WRAPPERS}
FORMS = "use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"
POLICIES = PluginKind("policy", "policies", Policy, "windlass.Policy", PolicyError)
TABLE = re.compile(r"\s*(?:table\s*=\s*)?(?P<mark>['\"]?)(?P<file>.*?)(?P=mark)\s*", re.DOTALL)  # in Pairs(...)


def parse_policy(spec: str) -> tuple[Policy, bool]:
    """The policy that `spec` names, and whether it comes from outside: out of a file, or with arguments.

    It is typed as `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"Pairs(pairs.json)"` or `"file.py:Class"`. Names ignore
    case, `_` and `-`. Arguments are plain numbers, or one of our policies; `Pairs` takes a file. Code of a file is
    run, once.

    Raises: PolicyError for what cannot be found or made.
    """
    if is_auto(spec):
        return auto(), False
    typed = parse_spec(spec)
    if typed is not None and typed.name.lower() == "pairs":
        return _pairs(spec, typed), False
    path, text = POLICIES.split(spec)
    typed = _parsed(spec, text)
    make = _known(typed.name) if path is None else POLICIES.class_in(path, typed.name)
    return _made(make, spec, typed), path is not None or bool(typed.positional or typed.named)


def _pairs(spec: str, typed: Spec) -> Policy:
    table = TABLE.fullmatch(typed.inside or "")
    if table is None or not table["file"]:
        raise PolicyError(f"policy {spec!r} needs a table: Pairs(FILE), with a file of `windlass calibrate`")
    return Pairs(table["file"])


def _parsed(spec: str, text: str) -> Spec:
    typed = parse_spec(text)
    if typed is None or len(dict(typed.named)) < len(typed.named):
        raise _unreadable(spec)
    return typed


def _unreadable(spec: str) -> PolicyError:
    return PolicyError(f"policy {spec!r} cannot be read; {FORMS}")


def _known(name: str) -> type[Policy]:
    return KNOWN[POLICIES.name_of(name, KNOWN)]


def _value(spec: str, text: str) -> Value:
    """A number, or a policy inside another one."""
    try:
        value = ast.literal_eval(text)
    except SyntaxError:
        raise _unreadable(spec) from None
    except (ValueError, TypeError, MemoryError, RecursionError):
        inner = parse_spec(text)
        if inner is not None:
            return _made(_known(inner.name), spec, _parsed(spec, text))
        value = text
    if value is None or isinstance(value, bool | int | float):
        return value
    raise PolicyError(f"policy {spec!r}: {value!r} is not a plain number; a policy takes numbers, True, False or None")


def _made(make: type[Policy], spec: str, typed: Spec) -> Policy:
    try:
        arguments = [_value(spec, text) for text in typed.positional]
        return make(*arguments, **{name: _value(spec, text) for name, text in typed.named})
    except PolicyError:
        raise
    except Exception as error:
        takes = f"{typed.name}{inspect.signature(make)}".removesuffix(" -> None")
        raise PolicyError(f"policy {spec!r} cannot be made: {error}; it takes {takes}") from error
