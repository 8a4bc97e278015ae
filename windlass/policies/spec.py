"""A policy out of what a user typed: a name, a name with arguments, or a class in a file."""

import ast
import inspect
import re
from dataclasses import fields
from typing import Any

from windlass.core.errors import PolicyError
from windlass.core.plugin import PluginKind
from windlass.core.spec import Spec, parse_spec
from windlass.policies import FROM_FILES, NAMES, WRAPPERS, Policy
from windlass.policies.auto import auto, is_auto
from windlass.policies.wrapper import find

Value = bool | int | float | Policy | None
KNOWN: dict[str, type[Policy]] = {**NAMES, **WRAPPERS, **FROM_FILES}
FORMS = "use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"
POLICIES = PluginKind("policy", "policies", Policy, "windlass.Policy", PolicyError)
FILE = re.compile(r"(?P<mark>['\"]?)(?P<file>.*?)(?P=mark)\s*", re.DOTALL)  # in Pairs(...)


def parse_policy(spec: str) -> tuple[Policy, bool]:
    """The policy that `spec` names, and whether it is to be checked: it comes out of a file, or has arguments.

    It is typed as `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"Pairs(pairs.json)"` or `"file.py:Class"`. Names ignore
    case, `_` and `-`. Arguments are plain numbers, or one of our policies; `Pairs` and `LinearScorer` take a file. Code
    of a file is run, once.

    Raises: PolicyError for what cannot be found or made.
    """
    if is_auto(spec):
        return auto(), False
    typed = parse_spec(spec)
    if typed is not None and (kind := _kind_from_file(typed)) is not None:
        return _of_file(kind, spec, typed), False
    path, text = POLICIES.split(spec)
    typed = _parsed(spec, text)
    make = _known(typed.name) if path is None else POLICIES.class_in(path, typed.name)
    policy = _made(make, spec, typed)
    is_of_file = any(find(policy, kind) is not None for kind in FROM_FILES.values())  # it may serve one model alone
    return policy, not is_of_file and (path is not None or bool(typed.positional or typed.named))


def _kind_from_file(typed: Spec) -> type[Policy] | None:
    """The policy that is made of a file and has this name, if there is one."""
    return FROM_FILES.get(POLICIES.name_in(typed.name, FROM_FILES) or "")


def _of_file(kind: type[Any], spec: str, typed: Spec) -> Policy:
    (field,) = fields(kind)
    given = FILE.fullmatch(re.sub(rf"^\s*({field.name}\s*=\s*)?", "", typed.inside or ""))
    if given is None or not given["file"]:
        raise PolicyError(
            f"policy {spec!r} needs a {field.name}: {kind.__name__}(FILE), with a file of `windlass calibrate`"
        )
    made: Policy = kind(given["file"])
    return made


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
    typed = parse_spec(text)
    if typed is not None and (kind := _kind_from_file(typed)) is not None:
        return _of_file(kind, spec, typed)
    try:
        value = ast.literal_eval(text)
    except SyntaxError:
        raise _unreadable(spec) from None
    except (ValueError, TypeError, MemoryError, RecursionError):
        if typed is not None:
            return _made(_known(typed.name), spec, _parsed(spec, text))
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
