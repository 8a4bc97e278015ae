"""The policy of a cache as a prompt-cache file names it."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

from windlass.core.errors import PromptCacheError
from windlass.policies import NAMES, Policy

AGAIN: Final = "make it again (`windlass cache`, or prompt_cache.save)"


@dataclass(frozen=True)
class PolicyNote:
    """A policy by its name in `NAMES` (None: it came from elsewhere) and its fields."""

    name: str | None
    fields: dict[str, float | int | bool | None]
    label: str


def note_of(policy: Policy) -> PolicyNote:
    """What a file says about `policy`."""
    name = next((name for name, kind in NAMES.items() if type(policy) is kind), None)
    numbers = {} if name is None else {field.name: getattr(policy, field.name) for field in fields(policy)}  # type: ignore[arg-type]  # our own policies are dataclasses
    return PolicyNote(name, numbers, repr(policy))


def noted_policy(path: Path, note: PolicyNote, given: Policy | None) -> Policy:
    """The policy of a file: rebuilt from its name and fields, or the one `given`, if it is the same.

    Raises: PromptCacheError, naming the file, for another policy than the file's, or one that must be given.
    """
    if given is not None:
        if note_of(given) != note:
            raise PromptCacheError(
                f"{path} was made with the policy {note.label}, not with {given!r}; give that one, or leave it out"
            )
        return given
    if note.name is None:
        raise PromptCacheError(
            f"{path} was made with the policy {note.label}, which is not one of windlass' own; "
            "give it: --policy file.py:Class, or load(path, model, policy=...)"
        )
    if note.name not in NAMES:
        raise PromptCacheError(f"{path} was made with the policy {note.name}, which this windlass lacks; upgrade it")
    kind = NAMES[note.name]
    if {field.name for field in fields(kind)} != {*note.fields}:  # type: ignore[arg-type]  # our own are dataclasses
        raise PromptCacheError(
            f"{path} was written by a windlass whose policy was {note.label}; this one has {kind()!r}: "
            "read the text again"
        )
    hints = get_type_hints(kind)
    wrong = [name for name, value in note.fields.items() if not _fits(value, hints[name])]
    if wrong:
        raise PromptCacheError(f"{path} is damaged: {wrong[0]} of its policy is {note.fields[wrong[0]]!r}; {AGAIN}")
    policy = kind(**note.fields)
    if repr(policy) != note.label:
        raise PromptCacheError(f"{path} is damaged: its policy is {policy!r}, and called {note.label}; {AGAIN}")
    return policy


def _fits(value: float | int | bool | None, hint: Any) -> bool:
    """Whether `value` is of a type that a field with this annotation takes; a whole number is a float, too."""
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)
