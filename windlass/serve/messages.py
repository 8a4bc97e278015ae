"""The messages of a chat, from what a client sends to what a template takes."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from windlass.core.check import shown
from windlass.serve.errors import BadField
from windlass.serve.fields import Check, listed, mapping, one_of, record, text
from windlass.serve.settings import RequestLimits

CHUNK: Final = "chunk"
TEXTS: Final = ("text", CHUNK)  # types of a part of a message
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


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
    """A check for a list of messages. The content of each becomes a tuple of texts and chunks; see `written`."""
    string = text(limits.characters)
    function = record({"name": text(64), "arguments": string}, needed=("name", "arguments"))
    call = record({"id": text(256), "type": one_of(("function",)), "function": function}, needed=("function",))
    checks: dict[str, Check] = {
        "role": one_of(tuple(ROLES)),
        "content": lambda name, value: _content(name, value, string),
        "name": text(256),
        "tool_calls": listed(call, limits.tools),
        "tool_call_id": text(256),
        "reasoning_content": string,
    }
    one = record(checks, needed=("role",))

    def check(name: str, value: Any) -> dict[str, Any]:
        given: dict[str, Any] = one(name, value)
        role = given["role"] = ROLES[given["role"]]
        if "tool_calls" in given and role != "assistant":
            raise BadField(f"{name}.tool_calls", f"is for messages of the assistant, not of role {role}")
        if "tool_call_id" in given and role != "tool":
            raise BadField(f"{name}.tool_call_id", f"is for messages of role tool, not {role}")
        if "reasoning_content" in given and role != "assistant":
            raise BadField(f"{name}.reasoning_content", f"is for messages of the assistant, not of role {role}")
        if "content" not in given and "tool_calls" not in given:
            raise BadField(f"{name}.content", "is missing", "missing_required_parameter")
        for at, each in enumerate(given.get("tool_calls", [])):
            each["function"]["arguments"] = _arguments(f"{name}.tool_calls.{at}.function.arguments", each)
        return {"content": (), **given}

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
    """What a message has, out of one string or parts."""
    if isinstance(value, str):
        return (str(string(name, value)),)
    if not isinstance(value, list):
        raise BadField(name, f"must be a string or a list of parts, got {shown(value)}")
    found: list[str | Chunk] = []
    for at, part in enumerate(value):
        kind = mapping(f"{name}.{at}", part).get("type")
        if kind not in TEXTS:
            raise BadField(f"{name}.{at}.type", f"must be text or chunk, got {shown(kind)}", "unsupported_parameter")
        given = str(record({"type": text(16), "text": string}, needed=("text",))(f"{name}.{at}", part)["text"])
        if kind == CHUNK and not given:
            raise BadField(f"{name}.{at}.text", "of a chunk must have some text")
        found.append(Chunk(given) if kind == CHUNK else given)
    return tuple(found)


def _arguments(name: str, call: dict[str, Any]) -> Any:
    """A call's arguments as an object, which templates write as they like to have them."""
    try:
        return mapping(name, json.loads(call["function"]["arguments"] or "{}"))
    except (ValueError, RecursionError):
        raise BadField(name, "must be an object of JSON, written as a string") from None
