"""The JSON document of a prompt-cache file: what is written, and how it is read by someone who does not trust it."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn, get_args, get_type_hints

from windlass.cache.options import DEFAULT_RECALL_STORE
from windlass.core.errors import PolicyError, PromptCacheError
from windlass.core.parse import AUTO, MAX_NUMBER, SYSTEM
from windlass.core.positions import MAX_PLACE
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


class InconsistentFile(Exception):
    """Something in a file that `save` would not have written; the message says what, in one short line."""


class Fields:
    """The fields of a JSON object, each checked when it is taken. Errors name the field and the object, `where`."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise InconsistentFile(f"{where} is {shown(data)}, not an object")
        self._left, self._where = dict(data), where

    def end(self) -> None:
        """To be called when all fields are taken. Raises: InconsistentFile for one that is left."""
        for name in self._left:
            raise InconsistentFile(f"{self._where} has an unknown field {shown(name)}")

    def text(self, name: str) -> str:
        value = self._take(name)
        # What is shown in an error must neither break its line nor steer a terminal.
        if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
            return value
        return self._refuse(name, value, f"a text of one line and at most {MAX_TEXT} characters")

    def text_or_none(self, name: str) -> str | None:
        return self._take(name) if self._is_none(name) else self.text(name)

    def whole(self, name: str, least: int = 0) -> int:
        value = self._take(name)
        if is_whole(value, least):
            return int(value)
        return self._refuse(name, value, f"a whole number from {least} to {MAX_NUMBER}")

    def whole_or_none(self, name: str, least: int = 0) -> int | None:
        return self._take(name) if self._is_none(name) else self.whole(name, least)

    def wholes(self, name: str, count: int) -> list[int]:
        values = self.items(name)
        if len(values) == count and all(map(is_whole, values)):
            return values
        return self._refuse(name, values, f"{count} whole numbers from 0 to {MAX_NUMBER}, one per row")

    def lists(self, name: str, count: int) -> list[list[Any]]:
        values = self.items(name)
        if len(values) == count and all(isinstance(each, list) for each in values):
            return values
        return self._refuse(name, values, f"{count} lists, one per row")

    def numbers(self) -> dict[str, float | int | bool | None]:
        """All fields: finite numbers, true, false or null."""
        numbers, self._left = self._left, {}
        for name, value in numbers.items():
            if not is_policy_number(value):
                self._refuse(name, value, "a number")
        return numbers

    def objects(self) -> list[str]:
        """The names of the fields that are objects."""
        return [name for name, value in self._left.items() if isinstance(value, dict)]

    def flag(self, name: str) -> bool:
        value = self._take(name)
        return value if isinstance(value, bool) else self._refuse(name, value, "true or false")

    def items(self, name: str) -> list[Any]:
        value = self._take(name)
        return value if isinstance(value, list) else self._refuse(name, value, "a list")

    def inner(self, name: str) -> Fields:
        return Fields(self._take(name), f"{name} in {self._where}")

    def any(self, name: str) -> object:
        return self._take(name)

    def null(self, name: str) -> object:
        value = self._take(name)
        return value if value is None else self._refuse(name, value, "null")

    def _is_none(self, name: str) -> bool:
        return name in self._left and self._left[name] is None

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise InconsistentFile(f"{self._where} has no field {name!r}")
        return self._left.pop(name)

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        raise InconsistentFile(f"{name} in {self._where} is {shown(value)}, not {wanted}")


def is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MAX_NUMBER


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without it, of two fields of one name the first would be lost silently."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a field is there twice")
    return data


def constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def shown(value: object) -> str:
    """A short form of what a file holds, on one line and without signs that steer a terminal."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    if isinstance(value, int | float) and not abs(value) <= MAX_POLICY_NUMBER:
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# What an older windlass could not read raises the number; the first one reads files of plain stores.
PLAIN_VERSION, STORE_VERSION, MERGE_VERSION, BUDGETS_VERSION, AUTO_VERSION = 1, 2, 3, 4, 5
STATES_VERSION, PLACES_VERSION, RECALL_VERSION = 6, 7, 8  # the last has shares, too
WRAPPER_VERSION: Final = 9  # it has the hash of the chat template, too
SINKS_VERSION: Final = 10  # those of each row
VERSION: Final = SINKS_VERSION


@dataclass(frozen=True)
class LayerNote:
    """What a layer knows beside its tensors; `budget` only where it is not what the policy gives it at the start."""

    sliding_window: int | None
    has_evicted: bool
    budget: int | None = None


@dataclass(frozen=True)
class Contents:
    """The document, with the options beside the other fields. A layer without tokens has no note.

    `has_states`: whether there are states of recurrent layers. `has_places`: whether the text has pictures, so that it
    is kept where tokens are read. `chat_template` is the hash of the tokenizer's; None where nobody gave it.
    """

    model: str
    dtype: str
    fingerprint: str
    policy: PolicyNote
    standing: dict[str, Any]  # see `RowTable.to_json`; files have called it so since version 1
    has_tokens: bool
    layers: list[LayerNote | None]
    options: dict[str, Any]  # see `CacheOptions.document`
    has_states: bool = False
    has_places: bool = False
    chat_template: str | None = None


def next_places(contents: Contents) -> list[int]:
    """Per row, where the next token of text is read."""
    rows = zip(contents.standing["next_positions"], contents.standing["pictures"], strict=True)
    return [end + (pictures[-1][2] if pictures else 0) for end, pictures in rows]


def to_document(contents: Contents) -> tuple[dict[str, Any], int]:
    """What goes into the file, and the oldest format version that can say it."""
    document = asdict(contents)
    document |= document.pop("options")
    if document["limits"]["sinks"] == SYSTEM:
        return document, SINKS_VERSION
    del document["standing"]["sinks"]
    if contents.chat_template is not None or contents.policy.wrapped:
        return document, WRAPPER_VERSION
    del document["chat_template"]
    if document["recall"] or document["shares"] is not None:
        return document, RECALL_VERSION
    del document["recall"], document["recall_store"], document["shares"]
    if contents.has_places:
        return document, PLACES_VERSION
    del document["has_places"], document["standing"]["pictures"]
    if contents.has_states:
        return document, STATES_VERSION
    del document["has_states"]
    if document["positions"] == AUTO:
        return document, AUTO_VERSION
    if any(note is not None and note.budget is not None for note in contents.layers):
        return document, BUDGETS_VERSION
    for note in document["layers"]:
        if note is not None:
            del note["budget"]
    if document["merge"] is not None:
        return document, MERGE_VERSION
    del document["merge"]
    if document["store"] != "plain":
        return document, STORE_VERSION
    del document["store"]
    return document, PLAIN_VERSION


def parsed(text: str, version: int) -> Contents:
    """The document of a file of this version. Every field has its type and range; none is missing, none is unknown.

    Raises: InconsistentFile.
    """
    try:
        data = json.loads(text, object_pairs_hook=object_of, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InconsistentFile(f"its header is no JSON that can be read ({shown(str(error))})") from None
    given = Fields(data, "its header")
    policy = _policy(given.inner("policy"), MAX_WRAPPED if version >= WRAPPER_VERSION else 1)
    limits = given.inner("limits")
    batch = given.whole("batch", 1)
    options = {
        "batch": batch,
        "positions": given.text("positions"),
        "limits": {
            "budget": limits.whole_or_none("budget", 1),
            "sinks": limits.text("sinks") if version >= SINKS_VERSION else limits.whole("sinks"),
            "window": limits.whole_or_none("window", 1),
            "chunk": limits.whole("chunk", 1),
            "rollback": limits.whole("rollback"),
        },
        "store": given.text("store") if version >= STORE_VERSION else "plain",
        "merge": given.text_or_none("merge") if version >= MERGE_VERSION else None,
        "recall": given.whole("recall") if version >= RECALL_VERSION else 0,
        "recall_store": given.text("recall_store") if version >= RECALL_VERSION else DEFAULT_RECALL_STORE,
        "shares": given.any("shares") if version >= RECALL_VERSION else None,  # `Shares` checks it
    }
    limits.end()
    contents = Contents(
        model=given.text("model"),
        dtype=given.text("dtype"),
        fingerprint=given.text("fingerprint"),
        policy=policy,
        standing=_rows(given.inner("standing"), batch, version),
        has_tokens=given.flag("has_tokens"),
        layers=[_layer(each, index, version) for index, each in enumerate(given.items("layers"))],
        options=options,
        has_states=version >= STATES_VERSION and given.flag("has_states"),
        has_places=version >= PLACES_VERSION and given.flag("has_places"),
        chat_template=given.text_or_none("chat_template") if version >= WRAPPER_VERSION else None,
    )
    given.end()
    if version < AUTO_VERSION and options["positions"] == AUTO:
        raise InconsistentFile(f"positions in its header is {AUTO!r}, which version {version} does not know")
    return contents


def _policy(given: Fields, depth: int) -> PolicyNote:
    """A policy with at most `depth` policies inside one another, itself among them."""
    name, inner = given.text_or_none("name"), given.inner("fields")
    fields: dict[str, float | int | bool | PolicyNote | None] = {
        key: _policy(inner.inner(key), depth - 1) for key in inner.objects() if depth > 1
    }
    fields.update(inner.numbers())
    note = PolicyNote(name, fields, given.text("label"))
    given.end()
    return note


def _layer(data: object, index: int, version: int) -> LayerNote | None:
    if data is None:
        return None
    given = Fields(data, f"the note of layer {index}")
    budget = given.whole_or_none("budget", 1) if version >= BUDGETS_VERSION else None
    note = LayerNote(given.whole_or_none("sliding_window", 1), given.flag("has_evicted"), budget)
    given.end()
    return note


def _rows(given: Fields, batch: int, version: int) -> dict[str, Any]:
    """The standing of `batch` rows, each of which is as `Row` says that it may be."""
    rows: dict[str, Any] = {
        "tokens_seen": given.wholes("tokens_seen", batch),
        "next_positions": given.wholes("next_positions", batch),
        "prompts": [[_span(pair, row) for pair in spans] for row, spans in enumerate(given.lists("prompts", batch))],
        "columns_seen": given.whole("columns_seen"),
        "tokens": given.null("tokens"),
        "since_edit": given.wholes("since_edit", batch),
        "pictures": given.lists("pictures", batch) if version >= PLACES_VERSION else [[]] * batch,
        "sinks": given.wholes("sinks", batch) if version >= SINKS_VERSION else [0] * batch,
    }
    given.end()
    for row in range(batch):
        seen, end, since = (rows[name][row] for name in ("tokens_seen", "next_positions", "since_edit"))
        if since > min(seen, end) or (since == seen and end != seen):
            raise InconsistentFile(
                f"row {row} has seen {seen} tokens, {since} of them since its last edit, and goes on at position {end}"
            )
        last = -1
        for start, stop in rows["prompts"][row]:
            if not last < start < stop <= end:
                raise InconsistentFile(f"the prompts of row {row} are not in order up to its end at {end}")
            last = stop
        _check_pictures(rows["pictures"][row], row, end)
    return rows


def _check_pictures(pictures: list[Any], row: int, end: int) -> None:
    """Of `row`, which goes on at position `end`: each [start, stop, offset], see `Picture`."""
    last = 0
    for each in pictures:
        is_three = isinstance(each, list) and len(each) == 3 and all(type(number) is int for number in each)
        if not (is_three and last <= each[0] <= each[1] <= end and 0 <= end + each[2] < MAX_PLACE):
            raise InconsistentFile(f"a picture of row {row} is {shown(each)}, not in order up to its end at {end}")
        last = each[1]


def _span(pair: object, row: int) -> list[int]:
    if isinstance(pair, list) and len(pair) == 2 and all(is_whole(each) for each in pair):
        return pair
    raise InconsistentFile(f"a prompt of row {row} is {shown(pair)}, not [start, end]")
