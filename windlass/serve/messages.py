"""The messages of a chat, from what a client sends to what a template takes."""

import json
from typing import Any, Final

from windlass.core.check import shown
from windlass.serve.errors import BadField
from windlass.serve.fields import Check, listed, mapping, one_of, record, text
from windlass.serve.settings import RequestLimits

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def messages(limits: RequestLimits) -> Check:
    """A check for a list of messages; it gives those that templates take, with all text in strings."""
    string = text(limits.characters)
    function = record({"name": text(64), "arguments": string}, needed=("name", "arguments"))
    call = record({"id": text(256), "type": one_of(("function",)), "function": function}, needed=("function",))
    checks: dict[str, Check] = {
        "role": one_of(tuple(ROLES)),
        "content": lambda name, value: _content(name, value, string),
        "name": text(256),
        "tool_calls": listed(call, limits.tools),
        "tool_call_id": text(256),
    }
    one = record(checks, needed=("role",))

    def check(name: str, value: Any) -> dict[str, Any]:
        given: dict[str, Any] = one(name, value)
        role = given["role"] = ROLES[given["role"]]
        if "tool_calls" in given and role != "assistant":
            raise BadField(f"{name}.tool_calls", f"is for messages of the assistant, not of role {role}")
        if "tool_call_id" in given and role != "tool":
            raise BadField(f"{name}.tool_call_id", f"is for messages of role tool, not {role}")
        if "content" not in given and "tool_calls" not in given:
            raise BadField(f"{name}.content", "is missing", "missing_required_parameter")
        for at, each in enumerate(given.get("tool_calls", [])):
            each["function"]["arguments"] = _arguments(f"{name}.tool_calls.{at}.function.arguments", each)
        return {"content": "", **given}

    def check_all(name: str, value: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = listed(check, limits.messages, least=1)(name, value)
        written = sum(len(each["content"]) for each in found)
        if written > limits.characters:
            raise BadField(name, f"must have at most {limits.characters} characters in all, got {written}")
        return found

    return check_all


def _content(name: str, value: Any, string: Check) -> str:
    """The text of a message, out of one string or parts."""
    if isinstance(value, str):
        return str(string(name, value))
    if not isinstance(value, list):
        raise BadField(name, f"must be a string or a list of parts, got {shown(value)}")
    texts = []
    for at, part in enumerate(value):
        kind = mapping(f"{name}.{at}", part).get("type")
        if kind != "text":
            raise BadField(f"{name}.{at}.type", f"must be text, got {shown(kind)}", "unsupported_parameter")
        texts.append(record({"type": text(16), "text": string}, needed=("text",))(f"{name}.{at}", part)["text"])
    return "".join(texts)


def _arguments(name: str, call: dict[str, Any]) -> Any:
    """A call's arguments as an object, which templates write as they like to have them."""
    try:
        return mapping(name, json.loads(call["function"]["arguments"] or "{}"))
    except (ValueError, RecursionError):
        raise BadField(name, "must be an object of JSON, written as a string") from None
