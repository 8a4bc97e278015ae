"""Policies by name, by arguments or from a file, and their spelling on the command line."""

import ast
import inspect
import re
from dataclasses import fields
from typing import Any

from windlass.core.errors import PolicyError
from windlass.core.parse import AUTO, PluginKind, Spec, parse_spec
from windlass.policies import FROM_FILES, NAMES, WRAPPERS
from windlass.policies.base import Policy
from windlass.policies.key_diff import KeyDiff
from windlass.policies.recent import Recent
from windlass.policies.wrappers import find

KNOWN: dict[str, type[Policy]] = {**NAMES, **WRAPPERS, **FROM_FILES}
_BY_CLASS: dict[str, tuple[str, type[Any]]] = {kind.__name__: (name, kind) for name, kind in KNOWN.items()}


def spelled(made: str) -> str:
    """The text that a user types for the policy whose `repr` is `made`: `"snapkv(pool=7)"` for `"SnapKV(pool=7)"`.

    Arguments that have their default value are left out. A class of the user's own keeps its name.
    """
    typed = parse_spec(made)
    if typed is None or typed.name not in _BY_CLASS:
        return made.removesuffix("()")
    name, kind = _BY_CLASS[typed.name]
    arguments = _arguments(typed, kind)
    return f"{name}({', '.join(arguments)})" if arguments else name


def _arguments(typed: Spec, kind: type[Any]) -> list[str]:
    """Arguments of `typed` that differ from the defaults of `kind`. A wrapped policy or a file needs no name."""
    usual = {each.name: repr(each.default) for each in fields(kind)}
    given = [(key, value) for key, value in typed.named if usual.get(key) != value]
    named = [spelled(value) if key in ("policy", "table", "file") else f"{key}={value}" for key, value in given]
    return [*map(spelled, typed.positional), *named]


def is_auto(policy: object) -> bool:
    """Return True if nobody chose a policy: None, or the word "auto" in any case."""
    return policy is None or (isinstance(policy, str) and policy.strip().lower() == AUTO)


def auto(has_budget: bool = True) -> Policy:
    """The policy of `policy="auto"`: the best that reads a text once, see docs/results/findings.md.

    A cache without a budget evicts nothing and gets `Recent`, which ranks heads alike, so that they share positions.
    """
    return KeyDiff() if has_budget else Recent()


Value = bool | int | float | Policy | None
FORMS = "Use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"
POLICIES = PluginKind("policy", "policies", Policy, "windlass.policies.Policy", PolicyError)
FILE = re.compile(r"(?P<mark>['\"]?)(?P<file>.*?)(?P=mark)\s*", re.DOTALL)  # in Pairs(...)


def parse_policy(spec: str) -> tuple[Policy, bool]:
    """The policy that `spec` names, and True if it is to be checked: it is from a file, or has arguments.

    A spec is `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"Pairs(pairs.json)"` or `"file.py:Class"`. Names ignore case,
    `_` and `-`. Arguments are plain numbers, or a built-in policy. `Pairs` and `LinearScorer` take a file. Code of a
    file is run, once.

    Raises: PolicyError for a policy that cannot be found or made.
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
    return PolicyError(f"policy {spec!r} cannot be read. {FORMS}")


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
    raise PolicyError(f"policy {spec!r}: {value!r} is not a plain number. A policy takes numbers, True, False or None")


def _made(make: type[Policy], spec: str, typed: Spec) -> Policy:
    try:
        arguments = [_value(spec, text) for text in typed.positional]
        return make(*arguments, **{name: _value(spec, text) for name, text in typed.named})
    except PolicyError:
        raise
    except Exception as error:
        takes = f"{typed.name}{inspect.signature(make)}".removesuffix(" -> None")
        problem = str(error).partition(". Did you mean")[0]  # Python 3.13 guesses a name. All of them follow
        raise PolicyError(f"policy {spec!r} cannot be made: {problem}. It takes {takes}") from error


def catalogue() -> list[dict[str, str]]:
    """Each policy's `name`, how it is `made` by default, a line on the tokens that it `keeps`, and its `source`."""
    made = {name: repr(kind()) for name, kind in NAMES.items()}
    made |= {name: repr(kind(KeyDiff())) for name, kind in WRAPPERS.items()}
    made |= {name: f"{kind.__name__}(FILE)" for name, kind in FROM_FILES.items()}
    entries = []
    for name, label in made.items():
        paragraphs = (KNOWN[name].__doc__ or "").split("\n\n")
        keeps, notes = " ".join(paragraphs[0].split()), " ".join(paragraphs[-1].split())
        source = notes.partition("Source: ")[2].partition(" Differs:")[0]
        entries.append({"name": name, "made": label, "keeps": keeps, "source": source})
    return entries
