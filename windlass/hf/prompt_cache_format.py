"""The header of a prompt-cache file: a model that `save` writes and nobody has to trust."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self, get_args, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationError,
    model_validator,
)

from windlass.cache.rows import RowState, RowTable, StateCheckpoint
from windlass.core.errors import PolicyError, PromptCacheError
from windlass.core.parse import MAX_NUMBER, SYSTEM
from windlass.core.positions import MAX_PLACE, Picture
from windlass.core.types import Tokens
from windlass.policies import NAMES, WRAPPERS, Policy

VERSION: Final = 13  # raised by every change that another version would misread. Older files are refused
AGAIN: Final = "Make it again (`windlass cache MODEL TEXT --prompt-cache FILE`, or cache.save)"
MAX_TEXT: Final = 4096  # characters of a name, a label or an option: labels hold names of files
MAX_POLICY_NUMBER: Final = 2**62
MAX_WRAPPED: Final = 16  # policies inside one another
KINDS: Final[dict[str, type[Policy]]] = {**NAMES, **WRAPPERS}
ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of a class that defines none: it differs in each run


class InconsistentFile(Exception):
    """Contents of a file that `save` would not have written. The message names them in one short line."""


def is_policy_number(value: object) -> bool:
    """Return True if a file may have `value` as a field of a policy."""
    return value is None or (type(value) in (bool, int, float) and abs(value) <= MAX_POLICY_NUMBER)  # type: ignore[arg-type]  # a number


def _policy_number(value: object) -> object:
    if not is_policy_number(value):
        raise ValueError("it is not a number, true, false or null")
    return value


def _line(text: str) -> str:
    # Text in an error must neither break its line nor steer a terminal.
    if len(text) > MAX_TEXT or not text.isprintable():
        raise ValueError(f"it is not a text of one line and at most {MAX_TEXT} characters")
    return text


def _kind_of_field(value: object) -> str:
    return "policy" if isinstance(value, dict | PolicyHeader) else "number"


Line = Annotated[str, AfterValidator(_line)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Size = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
PolicyNumber = Annotated[Any, AfterValidator(_policy_number)]


class _Model(BaseModel):
    """No field is missing, none is unknown, and each has its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PolicyHeader(_Model):
    """A policy by its name (None: the file cannot tell it) and its fields, among them the policy that it wraps."""

    name: Line | None
    fields: dict[
        str,
        Annotated[
            Annotated[PolicyHeader, Tag("policy")] | Annotated[PolicyNumber, Tag("number")],
            Discriminator(_kind_of_field),
        ],
    ]
    label: Line

    @property
    def wrapped(self) -> list[PolicyHeader]:
        """The policies that this one wraps."""
        return [each for each in self.fields.values() if isinstance(each, PolicyHeader)]

    @property
    def depth(self) -> int:
        """Number of policies inside one another, this one included."""
        return 1 + max((each.depth for each in self.wrapped), default=0)

    @classmethod
    def of(cls, policy: Policy) -> PolicyHeader:
        """Describe `policy`: by name and fields where these make it again, else by its label alone."""
        label = ADDRESS.sub("", repr(policy))
        if len(label) > MAX_TEXT or not label.isprintable():
            label = f"{type(policy).__name__} {hashlib.sha256(label.encode()).hexdigest()}"
        by_label = cls(name=None, fields={}, label=label)
        name = next((name for name, kind in KINDS.items() if type(policy) is kind), None)
        if name is None:
            return by_label
        held = {each.name: getattr(policy, each.name) for each in fields(policy)}  # type: ignore[arg-type]  # dataclasses
        found = {key: cls.of(each) if isinstance(each, Policy) else each for key, each in held.items()}
        if not all(
            each.name is not None if isinstance(each, PolicyHeader) else is_policy_number(each)
            for each in found.values()
        ):
            return by_label
        header = cls(name=name, fields=found, label=label)
        return header if header.depth <= MAX_WRAPPED else by_label

    def made(self, path: Path) -> Policy:
        """The policy again. Raises: PromptCacheError, naming the file at `path`."""
        if self.name is None:
            raise PromptCacheError(
                f"{path} was made with the policy {self.label}, and no prompt cache can make a policy of a file. "
                "Give it as it was given: --policy, or KVCache.load(path, model, policy=...)"
            )
        if self.name not in KINDS:
            raise PromptCacheError(
                f"{path} was made with the policy {self.name}, which this windlass lacks. Upgrade it"
            )
        kind = KINDS[self.name]
        hints = get_type_hints(kind)
        if {each.name for each in fields(kind)} != {*self.fields}:  # type: ignore[arg-type]  # our own are dataclasses
            now = repr(kind()) if self.name in NAMES else kind.__name__ + str(inspect.signature(kind))
            raise PromptCacheError(
                f"{path} was written by a windlass whose policy was {self.label}. This one has {now}: "
                "read the text again"
            )
        held = {
            name: value.made(path) if isinstance(value, PolicyHeader) else value for name, value in self.fields.items()
        }
        try:
            for name, value in held.items():
                if not _fits(value, hints[name]):
                    raise PolicyError(f"{name} of its policy is {value!r}")
            policy = kind(**held)
            if PolicyHeader.of(policy) != self:
                raise PolicyError(f"its policy is {policy!r}, and called {self.label}")
        except PolicyError as error:
            raise PromptCacheError(f"{path} is damaged: {error}. {AGAIN}") from None
        return policy


class LimitsHeader(_Model):
    """The limits of `CacheOptions`, which knows their ranges."""

    budget: int | None
    sinks: int | Literal["system"]
    window: int | None
    chunk: int
    rollback: int


class OptionsHeader(_Model):
    """All of `CacheOptions.document`, without the policy, which has its own field."""

    batch: int
    positions: Line
    limits: LimitsHeader
    store: Line
    merge: Line | None
    recall: int
    recall_store: Line
    shares: dict[str, JsonValue] | None  # `Shares` checks it


class RowHeader(_Model):
    """Where the text of a row stands, see `RowState`. Of checkpoints it has the numbers of tokens."""

    tokens_seen: Count
    next_position: Count
    columns: Count
    since_edit: Count
    prompts: tuple[tuple[Count, Count], ...]
    pictures: tuple[tuple[int, int, int], ...]
    sinks: Count | None
    pins: tuple[tuple[Count, Count], ...] = ()
    checkpoints: tuple[Size, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        """The problem that `RowState` finds in its fields."""
        seen, end, since = self.tokens_seen, self.next_position, self.since_edit
        if seen > self.columns:
            raise ValueError(f"it has seen {seen} tokens in {self.columns} columns")
        if since > min(seen, end) or (since == seen and end != seen):
            raise ValueError(
                f"it has seen {seen} tokens, {since} of them since its last edit, and continues at position {end}"
            )
        last = -1
        for start, stop in self.prompts:
            if not last < start < stop <= end:
                raise ValueError(f"its prompts are not in order up to its end at {end}")
            last = stop
        last = 0
        for start, stop, offset in self.pictures:
            if not (last <= start <= stop <= end and 0 <= end + offset < MAX_PLACE):
                raise ValueError(f"its pictures are not in order up to its end at {end}")
            last = stop
        if list(self.checkpoints) != sorted({*self.checkpoints}) or max(self.checkpoints, default=0) > seen:
            raise ValueError(f"its checkpoints are not in order up to its {seen} tokens")
        return self

    @property
    def next_place(self) -> int:
        """Where the next token of text is read."""
        return self.next_position + (self.pictures[-1][2] if self.pictures else 0)

    @property
    def edited_end(self) -> int:
        """Where the last edit left the text: from here on every token has a position of its own."""
        return self.next_position - self.since_edit

    @classmethod
    def of(cls, row: RowState) -> RowHeader:
        """The header of `row`, without its ids."""
        ends = tuple(each.tokens for each in row.checkpoints)
        return cls.model_validate({name: getattr(row, name) for name in cls.model_fields} | {"checkpoints": ends})

    def row(self, ids: Tokens | None, checkpoints: tuple[StateCheckpoint, ...]) -> RowState:
        """The row again, without its padding, which is unknown."""
        told = dict(self) | {"pictures": tuple(Picture(*each) for each in self.pictures), "checkpoints": checkpoints}
        return RowState(**told, ids=ids, padding=None)


class LayerHeader(_Model):
    """Facts of a layer beside its tensors. `budget` is given only where it differs from the policy's first budget."""

    sliding_window: Size | None
    has_evicted: bool
    budget: Size | None


class Header(_Model):
    """Everything in a file but the tensors. A layer without tokens is None.

    `has_states`: whether there are states of recurrent layers. `has_places`: whether the text has pictures, so that the
    places of tokens are kept. `chat_template` is the hash of the tokenizer's template, or None.
    """

    model: Line
    dtype: Line
    fingerprint: Line
    chat_template: Line | None
    policy: PolicyHeader
    options: OptionsHeader
    rows: tuple[RowHeader, ...]
    layers: tuple[LayerHeader | None, ...]
    has_tokens: bool
    has_states: bool
    has_places: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        """The fields beside one another."""
        if self.policy.depth > MAX_WRAPPED:
            raise ValueError(f"its policy wraps more than {MAX_WRAPPED} others")
        if not 0 < len(self.rows) == self.options.batch:
            raise ValueError(f"it has {len(self.rows)} rows, and its options a batch of {shown(self.options.batch)}")
        if self.options.limits.sinks != SYSTEM and any(row.sinks is not None or row.pins for row in self.rows):
            raise ValueError(f"a row has sinks of its own, and its options do not say {SYSTEM!r}")
        if not self.has_states and any(row.checkpoints for row in self.rows):
            raise ValueError("a row has checkpoints of states, and the file has no states")
        return self

    @classmethod
    def parsed(cls, text: str) -> Header:
        """The header that `text` is the JSON of. Raises: InconsistentFile."""
        try:
            data = json.loads(text, object_pairs_hook=_object_of, parse_constant=_constant)
        except (ValueError, RecursionError) as error:
            raise InconsistentFile(f"its header is no JSON that can be read ({shown(str(error))})") from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InconsistentFile(_told(error, data)) from None

    @property
    def tokens_seen(self) -> list[int]:
        """Per row, the tokens it has read."""
        return [row.tokens_seen for row in self.rows]

    def table(self, ids: list[Tokens] | None, checkpoints: list[tuple[StateCheckpoint, ...]]) -> RowTable:
        """The rows again, with their `ids` and checkpoints."""
        known = [None] * len(self.rows) if ids is None else ids
        each = zip(self.rows, known, checkpoints, strict=True)
        return RowTable(tuple(row.row(own, kept) for row, own, kept in each))

    def policy_of(self, path: Path, given: Policy | None) -> Policy:
        """The policy of the file at `path`: made again of its header, or the one `given`, if it is the same.

        Raises: PromptCacheError, naming the file, for another policy than the file's, or one that must be given.
        """
        if given is None:
            return self.policy.made(path)
        if PolicyHeader.of(given) != self.policy:
            raise PromptCacheError(
                f"{path} was made with the policy {self.policy.label}, not with {given!r}. "
                "Give that one, or leave it out"
            )
        return given


def _fits(value: object, hint: Any) -> bool:
    """Return True if `value` is of a type that a field with this annotation takes. A whole number is a float, too."""
    if isinstance(value, Policy):
        return hint is Policy
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without it, of two fields of one name the first would be lost silently."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a field is there twice")
    return data


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _told(error: ValidationError, data: Any) -> str:
    """The first thing that is wrong with a header, in one line."""
    first = error.errors(include_url=False)[0]
    where: list[object] = []
    for at, part in enumerate(first["loc"]):  # it has names of our types, too
        is_inside = part in data if isinstance(data, dict) else isinstance(data, list) and part in range(len(data))
        if is_inside:
            data = data[part]
        if is_inside or at == len(first["loc"]) - 1:
            where.append(part)
    name = shown(".".join(map(str, where)))[1:-1] if where else ""
    if first["type"] == "missing":
        return f"its header has no field {name}"
    if first["type"] == "extra_forbidden":
        return f"its header has an unknown field {name}"
    place = f"{name} in its header" if name else "its header"
    if "error" in first.get("ctx", {}):  # one of the checks above
        return f"{place}: {first['ctx']['error']}"
    return f"{place} is {shown(first['input'])}: {first['msg'].lower()}"


def shown(value: object) -> str:
    """A short form of a value in a file, on one line and without terminal control characters."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    if isinstance(value, int | float) and not abs(value) <= MAX_POLICY_NUMBER:
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
