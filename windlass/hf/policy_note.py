"""The policy of a cache as a prompt-cache file names it."""

from __future__ import annotations

import hashlib
import inspect
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from windlass.core.errors import PolicyError, PromptCacheError
from windlass.policies import NAMES, WRAPPERS, Policy

AGAIN: Final = "make it again (`windlass cache`, or prompt_cache.save)"
MAX_TEXT: Final = 4096  # characters of a name, a label or an option; labels hold names of files
MAX_POLICY_NUMBER: Final = 2**62
MAX_WRAPPED: Final = 16  # policies inside one another
KINDS: Final[dict[str, type[Policy]]] = {**NAMES, **WRAPPERS}
ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of a class that defines none: it differs in each run


@dataclass(frozen=True)
class PolicyNote:
    """A policy by its name (None: the file cannot tell it) and its fields, among them the policy that it wraps."""

    name: str | None
    fields: dict[str, float | int | bool | PolicyNote | None]
    label: str

    @property
    def wrapped(self) -> list[PolicyNote]:
        """The notes of the policies that this one wraps."""
        return [each for each in self.fields.values() if isinstance(each, PolicyNote)]

    @property
    def depth(self) -> int:
        """How many policies stand inside one another."""
        return 1 + max((each.depth for each in self.wrapped), default=0)


def note_of(policy: Policy) -> PolicyNote:
    """Describe `policy`: by name and fields where these make it again, else by its label alone."""
    label = ADDRESS.sub("", repr(policy))
    if len(label) > MAX_TEXT or not label.isprintable():
        label = f"{type(policy).__name__} {hashlib.sha256(label.encode()).hexdigest()}"
    by_label = PolicyNote(None, {}, label)
    name = next((name for name, kind in KINDS.items() if type(policy) is kind), None)
    if name is None:
        return by_label
    held = {each.name: getattr(policy, each.name) for each in fields(policy)}  # type: ignore[arg-type]  # dataclasses
    note = PolicyNote(
        name, {key: note_of(each) if isinstance(each, Policy) else each for key, each in held.items()}, label
    )
    is_whole = all(each.name is not None for each in note.wrapped) and note.depth <= MAX_WRAPPED
    is_plain = all(isinstance(each, PolicyNote) or is_policy_number(each) for each in note.fields.values())
    return note if is_whole and is_plain else by_label


def is_policy_number(value: object) -> bool:
    """Whether a file may have `value` as a field of a policy."""
    return value is None or (type(value) in (bool, int, float) and abs(value) <= MAX_POLICY_NUMBER)  # type: ignore[arg-type]  # a number


def noted_policy(path: Path, note: PolicyNote, given: Policy | None) -> Policy:
    """The policy of a file: rebuilt from its name and fields, or the one `given`, if it is the same.

    Raises: PromptCacheError, naming the file, for another policy than the file's, or one that must be given.
    """
    if given is not None:
        ours = note_of(given)
        # Versions before 9 note a wrapper by its label alone.
        if ours != note and (note.name is not None or ours.label != note.label):
            raise PromptCacheError(
                f"{path} was made with the policy {note.label}, not with {given!r}; give that one, or leave it out"
            )
        return given
    if note.name is None:
        raise PromptCacheError(
            f"{path} was made with the policy {note.label}, which is not one of windlass' own; "
            "give it: --policy file.py:Class, or load(path, model, policy=...)"
        )
    if note.name not in KINDS:
        raise PromptCacheError(f"{path} was made with the policy {note.name}, which this windlass lacks; upgrade it")
    kind = KINDS[note.name]
    if {field.name for field in fields(kind)} != {*note.fields}:  # type: ignore[arg-type]  # our own are dataclasses
        now = repr(kind()) if note.name in NAMES else kind.__name__ + str(inspect.signature(kind))
        raise PromptCacheError(
            f"{path} was written by a windlass whose policy was {note.label}; this one has {now}: read the text again"
        )
    held = {
        name: noted_policy(path, value, None) if isinstance(value, PolicyNote) else value
        for name, value in note.fields.items()
    }
    hints = get_type_hints(kind)
    wrong = [name for name, value in held.items() if not _fits(value, hints[name])]
    if wrong:
        raise PromptCacheError(f"{path} is damaged: {wrong[0]} of its policy is {held[wrong[0]]!r}; {AGAIN}")
    try:
        policy = kind(**held)
    except PolicyError as error:
        raise PromptCacheError(f"{path} is damaged: {error}; {AGAIN}") from None
    if note_of(policy) != note:
        raise PromptCacheError(f"{path} is damaged: its policy is {policy!r}, and called {note.label}; {AGAIN}")
    return policy


def _fits(value: object, hint: Any) -> bool:
    """Whether `value` is of a type that a field with this annotation takes; a whole number is a float, too."""
    if isinstance(value, Policy):
        return hint is Policy
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)
