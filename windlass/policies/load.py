"""A policy out of what a user typed: a name, a name with arguments, or a class in a file."""

import ast
import difflib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from windlass.errors import PolicyError
from windlass.policies import NAMES, Policy

Number = bool | int | float | None
FORMS = "use a name, Name(argument=number) or path/to/file.py:Class"


def load_policy(spec: str) -> Policy:
    """The policy that `spec` names: `"snapkv"`, `"SnapKV(pool=7)"` or `"path/to/file.py:Class"`.

    Names ignore case, `_` and `-`. Arguments are plain numbers. Code of a file is run, once, and
    what comes from outside (a file, or arguments) goes through `windlass.testing.check_policy`.

    Raises: PolicyError for what cannot be found, made, or breaks the contract.
    """
    path, call = _parts(spec)
    if path is None:
        make: Callable[..., Policy] = _named(call.name)
    else:
        make = _class_in(_module_of(Path(path).expanduser()), path, call.name)
    policy = _made(make, spec, call)
    if path is not None or call.has_arguments:
        # Imported here because `windlass.testing` imports the policies itself.
        from windlass.testing import check_policy

        check_policy(policy)
    return policy


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: list[Number]
    options: dict[str, Number]

    @property
    def has_arguments(self) -> bool:
        return bool(self.arguments or self.options)


def _parts(spec: str) -> tuple[str | None, _Call]:
    """The path, if any, and the class with its arguments."""
    match = re.fullmatch(r"(.*):\s*([^\W\d]\w*\s*(?:\(.*\))?)\s*", spec, re.DOTALL)
    if match is not None:
        return match[1], _call_of(spec, match[2])
    if spec.strip().endswith(".py"):
        raise PolicyError(f"policy {spec!r} is a file but names no class; use {spec.strip()}:Class")
    return None, _call_of(spec, spec.strip())


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
    options: dict[str, Number] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            raise wrong
        options[keyword.arg] = _number(spec, keyword.value)
    return _Call(tree.func.id, [_number(spec, node) for node in tree.args], options)


def _number(spec: str, node: ast.expr) -> Number:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        value = ast.unparse(node)
    if value is None or isinstance(value, bool | int | float):
        return value
    raise PolicyError(f"policy {spec!r}: {value!r} is not a plain number; a policy takes numbers, True, False or None")


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _named(name: str) -> type[Policy]:
    known = {_plain(each): each for each in NAMES}
    if _plain(name) in known:
        return NAMES[known[_plain(name)]]
    near = difflib.get_close_matches(_plain(name), list(known), n=1, cutoff=0.5)
    offer = f"did you mean {known[near[0]]}? " if near else ""
    raise PolicyError(f"policy {name!r} is unknown; {offer}the names are {', '.join(NAMES)}, or path/to/file.py:Class")


def _module_of(path: Path) -> ModuleType:
    """Runs the file; unlike `import` it leaves no byte code beside it."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"policy file {path} cannot be read: {error.strerror}") from None
    try:
        code = compile(source, str(path), "exec")
    except SyntaxError as error:
        raise PolicyError(f"policy file {path}, line {error.lineno or 1}: syntax error: {error.msg}") from None
    except ValueError as error:
        raise PolicyError(f"policy file {path} is not Python: {error}") from None
    module = ModuleType(f"windlass_policy_{path.stem}")
    module.__file__ = str(path)
    # `dataclass` looks its module up here to read annotations that are strings.
    sys.modules[module.__name__] = module
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)][-1:]
        at = f", line {line[0]}" if line else ""
        raise PolicyError(f"policy file {path}{at}: {type(error).__name__}: {error}") from error
    return module


def _class_in(module: ModuleType, path: str, name: str) -> type[Policy]:
    found = vars(module).get(name)
    if isinstance(found, type) and issubclass(found, Policy):
        return found
    own = [
        each.__name__
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Policy) and each.__module__ == module.__name__
    ]
    what = "has no class" if found is None else "has something else than a subclass of windlass.Policy named"
    raise PolicyError(f"policy file {path} {what} {name!r}; its policies: {', '.join(own) or 'none'}")


def _made(make: Callable[..., Policy], spec: str, call: _Call) -> Policy:
    try:
        return make(*call.arguments, **call.options)
    except PolicyError:
        raise
    except Exception as error:
        takes = f"{call.name}{inspect.signature(make)}".removesuffix(" -> None")
        raise PolicyError(f"policy {spec!r} cannot be made: {error}; it takes {takes}") from error
