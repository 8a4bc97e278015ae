"""A policy out of what a user typed: a name, a name with arguments, or a class in a file."""

import ast
import inspect
import re
from dataclasses import dataclass

from windlass.core.errors import PolicyError
from windlass.core.plugin import Kind
from windlass.policies import NAMES, WRAPPERS, Pairs, Policy

Value = bool | int | float | Policy | None
KNOWN: dict[str, type[Policy]] = {**NAMES, **WRAPPERS}
FORMS = "use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"
POLICIES = Kind("policy", "policies", Policy, "windlass.Policy", PolicyError)

PAIRS = re.compile(r"\s*pairs\s*(\(\s*(table\s*=\s*)?(?P<mark>['\"]?)(?P<file>.*?)(?P=mark)\s*\))?\s*", re.I | re.S)


def load_policy(spec: str) -> Policy:
    """The policy that `spec` names: `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"Pairs(pairs.json)"`, `"file.py:Class"`.

    Names ignore case, `_` and `-`. Arguments are plain numbers, or one of our policies; `Pairs` takes a
    file. Code of a file is run, once, and what comes from outside (a file, or arguments) goes through
    `windlass.testing.check_policy`.

    Raises: PolicyError for what cannot be found, made, or breaks the contract.
    """
    with_file = PAIRS.fullmatch(spec)
    if with_file is not None and not with_file["file"]:
        raise PolicyError(f"policy {spec!r} needs a table: Pairs(FILE), with a file of `windlass calibrate`")
    if with_file is not None:
        return Pairs(with_file["file"])
    path, text = POLICIES.split(spec)
    call = _call_of(spec, text)
    policy = _named(spec, call) if path is None else _made(POLICIES.class_in(path, call.name), spec, call)
    if path is not None or call.has_arguments:
        # Imported here because `windlass.testing` imports the policies itself.
        from windlass.testing import check_policy

        check_policy(policy)
    return policy


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: list[Value]
    options: dict[str, Value]

    @property
    def has_arguments(self) -> bool:
        return bool(self.arguments or self.options)


def _call_of(spec: str, text: str) -> _Call:
    wrong = PolicyError(f"policy {spec!r} cannot be read; {FORMS}")
    if re.fullmatch(r"[\w-]+", text):
        return _Call(text, [], {})
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise wrong from None
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise wrong
    return _call_at(spec, tree.func.id, tree)


def _call_at(spec: str, name: str, tree: ast.Call) -> _Call:
    options: dict[str, Value] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise PolicyError(f"policy {spec!r} cannot be read; {FORMS}")
        options[keyword.arg] = _value(spec, keyword.value)
    return _Call(name, [_value(spec, node) for node in tree.args], options)


def _value(spec: str, node: ast.expr) -> Value:
    """A number, or a policy inside another one."""
    if isinstance(node, ast.Name):
        return _named(spec, _Call(node.id, [], {}))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _named(spec, _call_at(spec, node.func.id, node))
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        value = ast.unparse(node)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise PolicyError(f"policy {spec!r}: {value!r} is not a plain number; a policy takes numbers, True, False or None")


def _named(spec: str, call: _Call) -> Policy:
    return _made(KNOWN[POLICIES.name_of(call.name, KNOWN)], spec, call)


def _made(make: type[Policy], spec: str, call: _Call) -> Policy:
    try:
        return make(*call.arguments, **call.options)
    except PolicyError:
        raise
    except Exception as error:
        takes = f"{call.name}{inspect.signature(make)}".removesuffix(" -> None")
        raise PolicyError(f"policy {spec!r} cannot be made: {error}; it takes {takes}") from error
