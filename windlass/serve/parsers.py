"""Readers of a model's text as it comes: thoughts and calls of functions."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from windlass.core.errors import shown
from windlass.serve.errors import BadField


def begun(text: str, mark: str) -> int:
    """The number of signs at the end of `text` that may become `mark`, which is not whole there."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


THOUGHT_OPEN: Final = "<think>"
THOUGHT_CLOSE: Final = "</think>"


class TextPart(NamedTuple):
    """A part of a model's output: of its answer, and of the thought before it."""

    text: str = ""
    thought: str = ""

    def then(self, after: "TextPart") -> "TextPart":
        """This part and the one that follows it."""
        return TextPart(self.text + after.text, self.thought + after.thought)


class _At(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()  # between a thought and the answer
    ANSWER = auto()


class ThoughtReader:
    """Parts a text that comes in pieces. White space around a thought belongs to neither of the two.

    Args:
        is_open: whether the prompt has begun a thought. Else the text begins one with `<think>`, or has none.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open, self._at = is_open, _At.START
        self._held, self._has_thought = "", False

    @property
    def is_over(self) -> bool:
        """Return True if no thought follows: the next text is the answer, or the white space before it."""
        return self._at in (_At.GAP, _At.ANSWER)

    def feed(self, piece: str) -> TextPart:
        """Return the text that is certain now that `piece` came. Text that may belong to a mark is held back."""
        self._held += piece
        thought = ""
        if self._at is _At.START:
            self._start()
        if self._at is _At.THOUGHT:
            thought = self._thought()
        if self._at is _At.GAP:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.GAP
        text = ""
        if self._at is _At.ANSWER:
            text, self._held = self._held, ""
        return TextPart(text, thought)

    def end(self) -> TextPart:
        """Return the text that was held back. A thought that was cut off is no answer."""
        held, self._held = self._held, ""
        is_thought = self._at is _At.THOUGHT or (self._at is _At.START and self._is_open)
        return TextPart(thought=held.rstrip()) if is_thought else TextPart(held)

    def _start(self) -> None:
        given = self._held.lstrip()
        if given.startswith(THOUGHT_OPEN):
            self._at, self._held = _At.THOUGHT, given[len(THOUGHT_OPEN) :]
        elif not THOUGHT_OPEN.startswith(given):
            self._at = _At.THOUGHT if self._is_open else _At.ANSWER

    def _thought(self) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip()
        stop = self._held.find(THOUGHT_CLOSE)
        if stop >= 0:
            given, self._held = self._held[:stop].rstrip(), self._held[stop + len(THOUGHT_CLOSE) :]
            self._at = _At.GAP
            return given
        given = self._held[: len(self._held) - begun(self._held, THOUGHT_CLOSE)].rstrip()
        self._held = self._held[len(given) :]
        self._has_thought = self._has_thought or bool(given)
        return given


CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL: Final = re.compile(rf"{CALL_OPEN}(.*?)(?:{CALL_CLOSE}|$)", re.DOTALL)
NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
ARGUMENTS: Final = ("arguments", "parameters")
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON. `id` is random, and clients name the call by it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


def schema_of(tools: Tools, choice: str) -> dict[str, Any]:
    """The JSON schema of a call of one of `tools`, or of the one that `choice` names as `=name`.

    Raises: BadField where that is none of them.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice != "required" and choice[1:] not in names:
        raise BadField("tool_choice", f"names {shown(choice[1:])}, which is not in tools")
    chosen = [tool["function"] for tool in tools if choice in ("required", f"={tool['function']['name']}")]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters", NO_ARGUMENTS),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in chosen
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


class CallReader:
    """Reads calls out of a text that comes in pieces. Text that may belong to a call is held back."""

    def __init__(self, names: Sequence[str], is_bound: bool) -> None:
        self._names, self._is_bound, self._held = names, is_bound, ""
        self._is_text = False

    def feed(self, piece: str) -> str:
        """The text that is certainly no call, now that `piece` came."""
        self._held += piece
        if self._is_bound:
            return ""
        start = self._held.find(CALL_OPEN)
        if start < 0:
            start = len(self._held) - begun(self._held, CALL_OPEN)
        if not self._is_text and self._held[:start].lstrip()[:1] in ("", "{"):
            return ""  # perhaps one call, and nothing else
        given, self._held = self._held[:start], self._held[start:]
        self._is_text = self._is_text or bool(given.strip())
        return given

    def end(self) -> tuple[str, list[Call]]:
        """Return the rest of the text, and the calls."""
        held, self._held = self._held, ""
        if not self._is_text and (call := self._call(held)) is not None:
            return "", [call]
        calls = [self._call(found) for found in CALL.findall(held)]
        if self._is_bound or not calls or None in calls:
            return held, []  # cut off, or not a valid call: the client gets the text as written
        return CALL.sub("", held).strip(), [call for call in calls if call is not None]

    def _call(self, text: str) -> Call | None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in self._names:
            return None
        arguments: Any = next((found[name] for name in ARGUMENTS if name in found), {})
        return Call(found["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None
