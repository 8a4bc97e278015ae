"""A message of the assistant as clients send it back: out of many dialects, the fields that a template may read.

Libraries send back what they received, with fields of their own in it. A field that is not known is dropped, whatever
its value, for an answer that was given once can be no reason to refuse the next one.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from windlass.core.check import shown
from windlass.serve.errors import BadField
from windlass.serve.fields import mapping

TEXTS: Final = ("text", "output_text")  # types of a part, which `text` is the text of
REFUSAL: Final = "refusal"
THOUGHTS: Final = ("thinking", "reasoning", "reasoning_text")
CALLS: Final = ("tool_use", "tool_call", "tool-call")
THOUGHT_FIELDS: Final = ("reasoning_content", "reasoning")
CALL_NAMES, CALL_IDS = ("name", "toolName"), ("id", "toolCallId")
CALL_ARGUMENTS: Final = ("input", "args", "arguments")


def assistant_message(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The content, the thought and the calls of a message, each where there is one.

    Arguments of a call are an object, or a string where they are none. A refusal is the text of an answer that has no
    other.

    Raises: BadField for a content or calls of another kind of JSON.
    """
    parts = _parts(name, given.get("content"))
    content = [part for part in map(_shown_part, parts) if part is not None]
    if not any(part["text"] for part in content) and isinstance(given.get(REFUSAL), str):
        content = [{"type": "text", "text": given[REFUSAL]}]
    thoughts = [_first_string(part, ("thinking", "reasoning", "text")) for part in parts if _kind(part) in THOUGHTS]
    thought = _first_string(given, THOUGHT_FIELDS) or "".join(thoughts)
    calls = _calls(name, given) or [_call_of_part(part) for part in parts if _kind(part) in CALLS]
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        found["reasoning_content"] = thought
    if calls:
        found["tool_calls"] = calls
    if isinstance(given.get("name"), str):
        found["name"] = given["name"]
    return found


def called(number: Any, function: str, arguments: Any) -> dict[str, Any]:
    """A call as templates take it: arguments that are an object of JSON as an object, all others as a string."""
    made = {"type": "function", "function": {"name": function, "arguments": _object_or_string(arguments)}}
    return {"id": number, **made} if isinstance(number, str) else made


def _parts(name: str, content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadField(f"{name}.content", f"must be a string or a list of parts, got {shown(content)}")
    return content


def _kind(part: Any) -> Any:
    return part.get("type", "text") if isinstance(part, Mapping) else None


def _shown_part(part: Any) -> dict[str, Any] | None:
    """A part of the text, or None for a part of another kind."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _kind(part)
    text = part.get(REFUSAL if kind == REFUSAL else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        return None
    if kind == "chunk":
        return {"type": kind, "text": text}
    return {"type": "text", "text": text} if kind in (*TEXTS, REFUSAL) else None


def _calls(name: str, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls, old = given.get("tool_calls"), given.get("function_call")
    if calls is not None and not isinstance(calls, list):
        raise BadField(f"{name}.tool_calls", f"must be a list, got {shown(calls)}")
    if calls:
        return [_call(mapping(f"{name}.tool_calls.{at}", each)) for at, each in enumerate(calls)]
    return [_call({"function": old})] if isinstance(old, Mapping) else []


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    custom, function = given.get("custom"), given.get("function")
    if isinstance(custom, Mapping):
        return called(given.get("id"), _first_string(custom, CALL_NAMES), {"input": custom.get("input")})
    parts = function if isinstance(function, Mapping) else given
    return called(given.get("id"), _first_string(parts, CALL_NAMES), parts.get("arguments"))


def _call_of_part(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = next((part[name] for name in CALL_ARGUMENTS if part.get(name) is not None), None)
    return called(_first_string(part, CALL_IDS) or None, _first_string(part, CALL_NAMES), arguments)


def _first_string(given: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((given[name] for name in names if isinstance(given.get(name), str)), "")


def _object_or_string(arguments: Any) -> Any:
    if isinstance(arguments, Mapping):
        return arguments
    if not isinstance(arguments, str):
        return {} if arguments is None else json.dumps(arguments)
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments
