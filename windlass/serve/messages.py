"""The messages of a chat, from what a client sends to what a template takes."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from windlass.core.check import shown
from windlass.serve.assistant import assistant_message
from windlass.serve.errors import BadField
from windlass.serve.fields import Check, listed, mapping, one_of, record, text
from windlass.serve.settings import RequestLimits

CHUNK: Final = "chunk"
TEXTS: Final = ("text", CHUNK)  # types of a part of a message
ROLES: Final = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
INERT: Final = ("annotations", "cache_control", "id", "index", "logprobs")  # of a message and a part, dropped
OF_RESULTS: Final = ("name", "tool_call_id")  # of a message of a tool; all others are dropped


Messages = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """A part of a message that is read once, wherever it stands."""

    text: str


def written(messages: Messages, chunk: Callable[[Chunk], str]) -> list[dict[str, Any]]:
    """The messages as templates take them, with all text in strings: that of a chunk is what `chunk` says."""

    def joined(content: tuple[str | Chunk, ...]) -> str:
        return "".join(chunk(each) if isinstance(each, Chunk) else each for each in content)

    return [{**each, "content": joined(each["content"])} for each in messages]


def chunks_of(messages: Messages) -> list[Chunk]:
    """All chunks, in the order of the text."""
    return [part for each in messages for part in each["content"] if isinstance(part, Chunk)]


def messages(limits: RequestLimits) -> Check:
    """A check for a list of messages. The content of each becomes a tuple of texts and chunks; see `written`.

    A message of the system or the user has the fields that are known, or is refused. One of the assistant or a tool
    has been sent back, and what is not known of it is dropped.
    """
    string = text(limits.characters)
    asked = record({"content": lambda name, value: _content(name, value, string), "name": text(256)}, ("content",))

    def check(name: str, value: Any) -> dict[str, Any]:
        given = mapping(name, value)
        if given.get("role") is None:
            raise BadField(f"{name}.role", "is missing", "missing_required_parameter")
        role = ROLES[one_of(tuple(ROLES))(f"{name}.role", given["role"])]
        if role == "assistant":
            found = assistant_message(name, given)
            listed(mapping, limits.tools)(f"{name}.tool_calls", found.get("tool_calls", []))
            return {**found, "content": _content(f"{name}.content", found["content"], string)}
        if role == "tool":
            result = _result(f"{name}.content", given.get("content"), string)
            named = {field: given[field] for field in OF_RESULTS if isinstance(given.get(field), str)}
            return {"role": role, **named, "content": result}
        for field in ("tool_calls", "reasoning_content"):
            if given.get(field) is not None:
                raise BadField(f"{name}.{field}", f"is for messages of the assistant, not of role {role}")
        if given.get("tool_call_id") is not None:
            raise BadField(f"{name}.tool_call_id", f"is for messages of role tool, not {role}")
        known = {field: one for field, one in given.items() if field not in ("role", *INERT)}
        return {"role": role, **asked(name, known)}

    def check_all(name: str, value: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = listed(check, limits.messages, least=1)(name, value)
        texts = written(found, lambda chunk: chunk.text)
        size = sum(len(each["content"]) + len(each.get("reasoning_content", "")) for each in texts)
        if size > limits.characters:
            raise BadField(name, f"must have at most {limits.characters} characters in all, got {size}")
        if len(chunks_of(found)) > limits.chunks:
            raise BadField(name, f"must have at most {limits.chunks} parts of type chunk in all")
        return found

    return check_all


def _content(name: str, value: Any, string: Check) -> tuple[str | Chunk, ...]:
    """The texts and chunks of a message, out of one string or parts."""
    if isinstance(value, str):
        return (str(string(name, value)),)
    if not isinstance(value, list):
        raise BadField(name, f"must be a string or a list of parts, got {shown(value)}")
    found: list[str | Chunk] = []
    for at, part in enumerate(value):
        if isinstance(part, str):
            found.append(str(string(f"{name}.{at}", part)))
            continue
        kind = mapping(f"{name}.{at}", part).get("type")
        if kind not in TEXTS:
            raise BadField(f"{name}.{at}.type", f"must be text or chunk, got {shown(kind)}", "unsupported_parameter")
        known = {field: one for field, one in part.items() if field not in INERT}
        given = str(record({"type": text(16), "text": string}, needed=("text",))(f"{name}.{at}", known)["text"])
        if kind == CHUNK and not given:
            raise BadField(f"{name}.{at}.text", "of a chunk must have some text")
        found.append(Chunk(given) if kind == CHUNK else given)
    return tuple(found)


def _result(name: str, value: Any, string: Check) -> tuple[str | Chunk, ...]:
    """The content of a tool's message: nothing for null, and JSON for what is neither a string nor parts."""
    if value is None:
        return ()
    return _content(name, value if isinstance(value, str | list) else json.dumps(value, ensure_ascii=False), string)
