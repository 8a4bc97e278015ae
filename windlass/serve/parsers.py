"""Readers of a reply that comes in pieces: its thought, its text, and its calls of functions."""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, NamedTuple, final

from windlass.engine.templates import json_text
from windlass.engine.text import partial_mark
from windlass.serve.forms import (
    SPACE,
    THOUGHT_FORMS,
    CallForm,
    Functions,
    PairForm,
    ReplyForm,
    Schema,
    ThoughtForm,
    properties_of,
    typed,
)


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON. `id` is random, and clients name the call by it."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


class CallPart(NamedTuple):
    """A part of a call, which begins with its name. The arguments come in pieces. `id`: as in `Call`."""

    number: int
    name: str = ""
    arguments: str = ""
    id: str = ""


class TextPart(NamedTuple):
    """A part of a model's output: of its answer, of the thought before it, and of calls behind it."""

    text: str = ""
    thought: str = ""
    calls: tuple[CallPart, ...] = ()

    def then(self, after: "TextPart") -> "TextPart":
        """This part and the one that follows it."""
        return TextPart(self.text + after.text, self.thought + after.thought, self.calls + after.calls)


class ReplyReader(ABC):
    """Parts the text of a reply, which comes in pieces. The parts are the same however it is cut."""

    @property
    @abstractmethod
    def is_thinking(self) -> bool:
        """Return True until no thought follows: the next text is the answer, or the white space before it."""

    @property
    @abstractmethod
    def is_cut(self) -> bool:
        """Return True if the text ends within a call."""

    @abstractmethod
    def feed(self, piece: str) -> TextPart:
        """Return the text that is certain now that `piece` came. Text that may belong to a mark is held back."""

    @abstractmethod
    def end(self) -> TextPart:
        """Return the text that was held back."""


def first_of(marks: Sequence[str], text: str) -> tuple[int, str]:
    """Where the first of `marks` stands in `text`, and which one it is: the longer one of two. (-1, "") for none."""
    found = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    return (min(found)[0], min(found)[2]) if found else (-1, "")


def _may_be(text: str, mark: str) -> bool:
    """Return True if `text` begins with a mark, or is the beginning of it."""
    return text.startswith(mark) or mark.startswith(text)


class _At(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()  # between a thought and the answer
    ANSWER = auto()


class ThoughtReader:
    """Parts a text that comes in pieces. White space around a thought belongs to neither of the two.

    `is_open`: the prompt has begun a thought. Otherwise the text begins one with its mark, or has none.
    """

    def __init__(self, is_open: bool, form: ThoughtForm = THOUGHT_FORMS[0]) -> None:
        self._is_open, self._form, self._at = is_open, form, _At.START
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
        given, opening = self._held.lstrip(), self._form.opening
        if given.startswith(opening):
            self._at, self._held = _At.THOUGHT, given[len(opening) :]
        elif not opening.startswith(given):
            self._at = _At.THOUGHT if self._is_open else _At.ANSWER

    def _thought(self) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip()
        closing = self._form.closing
        stop = self._held.find(closing)
        if stop >= 0:
            given, self._held = self._held[:stop].rstrip(), self._held[stop + len(closing) :]
            self._at = _At.GAP
            return given
        given = self._held[: len(self._held) - partial_mark(self._held, [closing])].rstrip()
        self._held = self._held[len(given) :]
        self._has_thought = self._has_thought or bool(given)
        return given


class JsonScan:
    """Finds the end of an object of JSON whose text comes in pieces. `depth`: of the braces before the first piece."""

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._is_escaped = depth, False, False

    def feed(self, text: str) -> int | None:
        """The number of characters of `text` up to the end of the object. None: it goes on."""
        for at, sign in enumerate(text, 1):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped, self._in_string = sign == "\\", sign != '"'
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at
        return None


class _In(Enum):
    TEXT = auto()
    CALL = auto()  # behind the mark of a call, before its arguments
    ARGUMENTS = auto()
    OUTER = auto()  # behind arguments in an object
    REST = auto()  # in the rest of that object
    CLOSING = auto()  # before the closing mark
    GAP = auto()  # behind a call


class CallReader:
    """Reads calls of `functions` out of a text that comes in pieces.

    A text that begins with a brace may be a call without marks. Marks that are special tokens are no text for the
    client: `hidden` has them. Anything that is no valid call is text, as it was written. Without functions, all is
    text.
    """

    def __init__(self, form: CallForm, functions: Functions, hidden: Sequence[str] = ()) -> None:
        self._form, self._functions, self._hidden = form, functions, tuple(hidden)
        self._openings = dict(form.marks) if functions else {}
        self._marks = [*self._openings, *(mark for mark in hidden if mark not in self._openings)]
        self._held, self._at, self._is_start, self._count = "", _In.TEXT, bool(functions), 0
        self._opening, self._lead = "", ""
        self._leads = [*self._marks, *(form.lead + mark for mark in self._openings)]
        self._scan, self._scanned, self._is_in_object = JsonScan(), 0, False
        self._text, self._parts = "", list[CallPart]()

    @property
    def is_cut(self) -> bool:
        """Return True if the text ends within a call."""
        return self._at is _In.ARGUMENTS

    def feed(self, piece: str) -> TextPart:
        """Return the text and the calls that are certain now that `piece` came."""
        self._held += piece
        while self._step():
            pass
        return self._taken()

    def end(self) -> TextPart:
        """Return the rest of the text, and of the calls."""
        while self._step() or self._give_up():
            pass
        if self._at is _In.TEXT:
            self._say(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> TextPart:
        found = TextPart(self._text, calls=tuple(self._parts))
        self._text, self._parts = "", []
        return found

    def _step(self) -> bool:
        """Read on. Returns False where more text is needed."""
        steps = {
            _In.TEXT: self._in_text,
            _In.CALL: self._in_call,
            _In.ARGUMENTS: self._in_arguments,
            _In.OUTER: self._in_outer,
            _In.REST: self._in_rest,
            _In.CLOSING: self._in_closing,
            _In.GAP: self._in_gap,
        }
        return bool(self._held) and steps[self._at]()

    def _in_text(self) -> bool:
        if self._is_start:
            first = self._held.lstrip()[:1]
            if first == "{":
                return self._open("", self._held)
            if not first:
                return False
        at, mark = first_of(self._marks, self._held)
        if at < 0:
            keep = len(self._held) - partial_mark(self._held, self._leads)
            self._say(self._held[:keep])
            self._held = self._held[keep:]
            return False
        text, lead = self._held[:at], self._form.lead
        if mark in self._openings:
            self._say(text.removesuffix(lead))
            return self._open(mark, self._held[at + len(mark) :], lead if text.endswith(lead) else "")
        self._say(text)
        self._held = self._held[at + len(mark) :]
        return True

    def _say(self, text: str) -> None:
        self._is_start = self._is_start and not text.strip()
        self._text += text

    def _open(self, mark: str, rest: str, lead: str = "") -> bool:
        self._at, self._opening, self._lead, self._held, self._is_start = _In.CALL, mark, lead, rest, False
        self._scan, self._scanned = JsonScan(), 0
        return True

    def _in_call(self) -> bool:
        head = next((found for each in self._form.heads if (found := each.match(self._held))), None)
        if head is not None:
            return self._begin(head) if head["name"] in self._functions else self._no_call()
        body = self._held.lstrip(f"{SPACE}[" if self._form.repeats else SPACE)
        if body[:1] == "{":
            return self._whole_object(len(self._held) - len(body))
        if self._form.pairs is not None and self._opening:
            return self._whole_pairs(self._openings[self._opening])
        is_named = any("outer" not in each.groupindex for each in self._form.heads)
        return self._no_call() if body and (not is_named or "{" in body) else False

    def _begin(self, head: re.Match[str]) -> bool:
        """Begin a call whose arguments come as JSON."""
        self._parts.append(CallPart(self._count, head["name"]))
        self._is_in_object = "outer" in head.re.groupindex
        self._held, self._scan, self._at = self._held[head.end() :], JsonScan(), _In.ARGUMENTS
        return True

    def _whole_object(self, start: int) -> bool:
        """Read an object whose name does not come first. It is a call once it is whole."""
        self._scanned = max(self._scanned, start)
        stop = self._scan.feed(self._held[self._scanned :])
        if stop is None:
            self._scanned = len(self._held)
            return False
        stop += self._scanned
        found = call_of(self._held[start:stop], self._functions)
        if found is None:
            return self._no_call()
        self._add(found)
        self._held, self._at = self._held[stop:], _In.CLOSING
        return True

    def _whole_pairs(self, closing: str) -> bool:
        stop = self._held.find(closing, self._scanned)
        if stop < 0:
            self._scanned = max(len(self._held) - len(closing), 0)
            return False
        found = self._with_pairs(self._held[: stop + len(closing)])
        if not found:
            return self._no_call()
        for each in found:
            self._add(each)
        self._held, self._at = self._held[stop + len(closing) :], _In.GAP
        return True

    def _with_pairs(self, body: str) -> list[Call]:
        """All calls between two marks. None of them where one is not valid."""
        assert self._form.pairs is not None
        form, text, found, at = self._form.pairs, self._opening + body, list[Call](), 0
        while (head := form.name.search(text, at)) is not None:
            at = text.find(form.end, head.end())
            if at < 0 or head["name"] not in self._functions:
                return []
            found.append(_paired(form, head["name"], text[head.end() : at], self._functions[head["name"]]))
        return found

    def _add(self, call: Call) -> None:
        self._parts += [CallPart(self._count, call.name), CallPart(self._count, "", call.arguments)]
        self._count += 1

    def _no_call(self) -> bool:
        """Go on behind the opening mark, which is text."""
        self._say(self._lead + ("" if self._opening in self._hidden else self._opening))
        self._at, self._is_start = _In.TEXT, False
        return True

    def _give_up(self) -> bool:
        """Read on where no more text comes."""
        if self._at is not _In.CALL:
            return False
        if self._form.pairs is not None and self._opening and (found := self._with_pairs(self._held)):
            for each in found:
                self._add(each)
            self._held, self._at = "", _In.GAP
            return False
        return self._no_call()

    def _in_arguments(self) -> bool:
        stop = self._scan.feed(self._held)
        given = self._held[:stop]
        self._parts.append(CallPart(self._count, "", given))
        self._held = self._held[len(given) :]
        if stop is None:
            return False
        self._count += 1
        self._at, self._scan = _In.OUTER if self._is_in_object else _In.CLOSING, JsonScan(depth=1)
        return True

    def _in_outer(self) -> bool:
        """Find the rest of the object around the arguments. A model may forget its brace."""
        self._held = self._held.lstrip(SPACE)
        if self._held:
            self._at = _In.REST if self._held[0] in "}," else _In.CLOSING
        return bool(self._held)

    def _in_rest(self) -> bool:
        stop = self._scan.feed(self._held)
        self._held = "" if stop is None else self._held[stop:]
        self._at = _In.REST if stop is None else _In.CLOSING
        return bool(self._held)

    def _in_closing(self) -> bool:
        closing = self._openings.get(self._opening, "")
        self._held = self._held.lstrip(self._form.filler if closing else SPACE)
        if len(self._held) < len(closing) and closing.startswith(self._held):
            return False
        self._held, self._at = self._held.removeprefix(closing), _In.GAP
        return True

    def _in_gap(self) -> bool:
        self._held = self._held.lstrip(self._form.gap)
        if self._form.repeats and self._held[:1] == "{":
            return self._open("", self._held)
        self._at = _In.TEXT if self._held else _In.GAP
        return bool(self._held)


def call_of(text: str, functions: Functions) -> Call | None:
    """Return the call that an object of JSON is, or None if it is no call of `functions`."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("name") not in functions:
            return None
        arguments: Any = next((found[name] for name in ("arguments", "parameters") if name in found), {})
        given = json.loads(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
    except (ValueError, RecursionError, TypeError):
        return None
    return Call(found["name"], json_text(given)) if isinstance(given, dict) else None


def _paired(form: PairForm, name: str, text: str, schema: Schema) -> Call:
    """A call whose arguments are pairs, each value of the type that the schema asks for."""
    properties = properties_of(schema)
    return Call(name, json_text({key: typed(value, properties.get(key, {})) for key, value in form.pairs(text)}))


@final
class MarkedReply(ReplyReader):
    """A reply whose thought and calls stand between marks. `thought` hides marks in a thought."""

    def __init__(self, thoughts: ThoughtReader | None, calls: CallReader, thought: CallReader) -> None:
        self._thoughts, self._calls, self._thought = thoughts, calls, thought

    @property
    def is_thinking(self) -> bool:
        return self._thoughts is not None and not self._thoughts.is_over

    @property
    def is_cut(self) -> bool:
        return self._calls.is_cut

    def feed(self, piece: str) -> TextPart:
        return self._read(TextPart(piece) if self._thoughts is None else self._thoughts.feed(piece))

    def end(self) -> TextPart:
        part = self._read(TextPart() if self._thoughts is None else self._thoughts.end())
        return part.then(TextPart(thought=self._thought.end().text)).then(self._calls.end())

    def _read(self, part: TextPart) -> TextPart:
        thought = self._thought.feed(part.thought).text
        if not self.is_thinking:
            thought += self._thought.end().text
        return TextPart(thought=thought).then(self._calls.feed(part.text))


class _Channel(Enum):
    START = auto()
    HEADER = auto()
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


@final
class HarmonyReply(ReplyReader):
    """A reply in channels: `analysis` is thought, `final` and `commentary` are text, unless a function is to get it.

    Each message is a header, a mark, and a body up to a mark.
    """

    MESSAGE: Final = "<|message|>"
    CLOSINGS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
    STARTS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, "assistant", "to=")
    RECIPIENT: Final = re.compile(r"to=functions\.([\w.-]+)")
    CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")

    def __init__(self, functions: Functions) -> None:
        self._functions, self._held, self._at, self._count = functions, "", _Channel.START, 0
        self._has_arguments, self._is_whole, self._scan = False, False, JsonScan()
        self._said = {_Channel.THOUGHT: False, _Channel.TEXT: False}

    @property
    def is_thinking(self) -> bool:
        return self._at in (_Channel.START, _Channel.THOUGHT)

    @property
    def is_cut(self) -> bool:
        return self._at is _Channel.CALL and not self._is_whole

    def feed(self, piece: str) -> TextPart:
        self._held += piece
        said = TextPart()
        while (part := self._step()) is not None:
            said = said.then(part)
        return said

    def end(self) -> TextPart:
        held, self._held = self._held, ""
        if self._at is _Channel.START:
            return TextPart() if any(mark in held for mark in self.STARTS) else TextPart(held)
        part = TextPart() if self._at is _Channel.HEADER else self._body(held)
        return part.then(self._closed())

    def _step(self) -> TextPart | None:
        if self._at in (_Channel.START, _Channel.HEADER):
            return self._header()
        at, mark = first_of(self.CLOSINGS, self._held)
        if at < 0:
            keep = len(self._held) - partial_mark(self._held, self.CLOSINGS)
            given, self._held = self._held[:keep], self._held[keep:]
            return self._body(given) if given else None
        part = self._body(self._held[:at])
        is_header = mark in ("<|start|>", "<|channel|>")
        self._held = self._held[at if is_header else at + len(mark) :]
        part = part.then(self._closed())
        self._at = _Channel.HEADER
        return part

    def _header(self) -> TextPart | None:
        given = self._held.lstrip()
        if self._at is _Channel.START and given and not any(_may_be(given, mark) for mark in self.STARTS):
            self._at = _Channel.TEXT  # a model that uses no channels
            return TextPart()
        stop = self._held.find(self.MESSAGE)
        if stop < 0:
            return None
        header, self._held = self._held[:stop], self._held[stop + len(self.MESSAGE) :]
        recipient, channel = self.RECIPIENT.search(header), self.CHANNEL.search(header)
        if recipient is not None and recipient[1] in self._functions:
            self._at, self._has_arguments, self._is_whole, self._scan = _Channel.CALL, False, False, JsonScan()
            return TextPart(calls=(CallPart(self._count, recipient[1]),))
        self._at = _Channel.THOUGHT if channel is not None and channel[1] == "analysis" else _Channel.TEXT
        return self._body("\n") if self._said[self._at] else TextPart()

    def _body(self, text: str) -> TextPart:
        if not text:
            return TextPart()
        if self._at is _Channel.CALL:
            self._has_arguments, self._is_whole = True, self._is_whole or self._scan.feed(text) is not None
            return TextPart(calls=(CallPart(self._count, "", text),))
        self._said[self._at] = True
        return TextPart(thought=text) if self._at is _Channel.THOUGHT else TextPart(text)

    def _closed(self) -> TextPart:
        """The end of a call, which has arguments where the model wrote none."""
        if self._at is not _Channel.CALL:
            return TextPart()
        part = TextPart() if self._has_arguments else TextPart(calls=(CallPart(self._count, "", "{}"),))
        self._count += 1
        return part


def reader_of(
    form: ReplyForm, functions: Functions, begun_thought: bool | None, hidden: Sequence[str] = ()
) -> ReplyReader | None:
    """Return a reader of a reply, or None where there is nothing to read out of it.

    `begun_thought`: whether the prompt has begun a thought. None: the reply has no thought. `hidden`: special tokens
    among the marks.
    """
    if form.has_channels:
        return HarmonyReply(functions)
    thoughts = None if form.thoughts is None or begun_thought is None else ThoughtReader(begun_thought, form.thoughts)
    if thoughts is None and not functions:
        return None
    return MarkedReply(thoughts, CallReader(form.calls, functions, hidden), CallReader(form.calls, {}, hidden))
