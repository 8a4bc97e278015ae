"""Rules as a user types them, and which caches they go with."""

import re
from dataclasses import fields

from windlass.core.errors import UsageError
from windlass.merge.base import FRAMES, Merge
from windlass.merge.readout import READS
from windlass.merge.rules import MERGES
from windlass.merge.targets import TARGETS
from windlass.policies.base import Policy
from windlass.positions.modes import Clamp, Compact, Original, PositionMode, SelfExtend, position_mode
from windlass.stores.base import Plain, Store

FORM = "mean_count(next, rotated, rare=0.1)"


def merge_of(spec: str | Merge | None) -> Merge | None:
    """The rule that `spec` names: `"mean_count"`, `"mean_count(next, rotated, rare=0.1)"`; a rule itself, or None
    for none. Settings come in any order: words are a target, a frame or a read, numbers have a name.

    Raises: UsageError for an unknown name or setting, one given twice, or settings that do not go together.
    """
    if spec is None or isinstance(spec, Merge):
        return spec
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", spec)
    if match is None or match[1] not in MERGES:
        raise UsageError(f"merge={spec!r} is not a rule; use one of: {', '.join(MERGES)}, or with settings: {FORM}")
    words: dict[str, str] = {}
    numbers: dict[str, float] = {}
    for word in (part.strip() for part in (match[2] or "").split(",") if part.strip()):
        name, is_number, value = (part.strip() for part in word.rpartition("="))
        if is_number:
            numbers[_new(spec, name, numbers)] = _number(spec, name, value)
        else:
            words[_new(spec, _kind(spec, word), words)] = word
    return MERGES[match[1]](**words, **numbers)  # type: ignore[arg-type]  # their names are the settings'


def _kind(spec: str, word: str) -> str:
    """Of which setting `word` is a value."""
    for name, known in (("target", tuple(TARGETS)), ("frame", FRAMES), ("read", READS)):
        if word in known:
            return name
    every = ", ".join((*TARGETS, *FRAMES, *READS))
    raise UsageError(f"merge={spec!r}: {word!r} is not a setting; use some of: {every}, as in {FORM}")


def _new(spec: str, name: str, given: dict[str, str] | dict[str, float]) -> str:
    if name in given:
        raise UsageError(f"merge={spec!r}: {name} is given twice; leave one out")
    return name


def _number(spec: str, name: str, value: str) -> float:
    known = [each.name for each in fields(Merge) if each.type is float]
    if name not in known:
        raise UsageError(f"merge={spec!r}: {name!r} is not a setting; the numbers are: {', '.join(known)}")
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", value):
        raise UsageError(f"merge={spec!r}: {name} must be a number, got {value!r}")
    return float(value)


def checked_merge(spec: str | Merge | None, budget: int | None, store: Store, policy: Policy) -> Merge | None:
    """As `merge_of`. Raises: UsageError also where a cache of this budget, store and policy cannot merge."""
    merge = merge_of(spec)
    if merge is not None and budget is None:
        raise UsageError(f"merge={merge} needs a budget: a cache without one evicts nothing that could be merged")
    if merge is not None and merge.weighs_by is not None and merge.weighs_by not in policy.state:
        raise UsageError(
            f"merge={merge} takes weights from the policy, and {policy!r} gives none; use policy dmc, or mean_count"
        )
    if merge is not None and store.exact.sinks + store.exact.newest:
        raise UsageError(f"merge={merge} does not go with store {store.name}: a copy held exactly takes nothing in")
    if merge is not None and merge.read == "damped" and not isinstance(store, Plain):
        raise UsageError(
            f"merge={merge} does not go with store {store.name}: codes lose channels that are damped, which could not "
            'be undone; use store="plain"'
        )
    return merge


def readable(merge: Merge | None, spec: str | PositionMode) -> PositionMode:
    """The position mode that `spec` names. Raises: UsageError where it is none, or cells cannot be read by it."""
    mode = position_mode(spec)
    read = "plain" if merge is None else merge.read
    if read == "damped" and not isinstance(mode, Original):
        raise UsageError(
            f'merge={merge}: damped cells are held for distances of the text, so positions must be "original", not '
            f'"{mode}"; leave out damped'
        )
    if read == "anchors" and not isinstance(mode, Original | SelfExtend | Clamp):
        why = "ranks count slots, not anchors" if isinstance(mode, Compact) else "a mode must place each by itself"
        raise UsageError(f'merge={merge} does not go with positions "{mode}": {why}; use "original", or no anchors')
    return mode
