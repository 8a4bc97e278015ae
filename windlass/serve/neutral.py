"""Fields that change nothing of an answer, and fields whose value is as if they were not there.

Clients send them to every route, so every route takes them. What would change the answer, and is not there, is refused.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from windlass.core.errors import shown
from windlass.serve.errors import BadField, Check, flag, listed, mapping, one_of, text, whole
from windlass.serve.parsers import FUNCTION

VERBOSITY: Final = one_of(("low", "medium", "high"))
INCLUDED: Final = (  # items and parts that no answer here has
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
ENCRYPTED: Final = "encrypted_content"  # of a thought, which only its maker can read
UNREAD: Final = ("ghost_snapshot", "tool_search_call", "tool_search_output", "web_search_call")  # items without a text


def only(*values: Any) -> Check:
    """A check for a field that has these values only."""

    def check(name: str, value: Any) -> Any:
        if not any(type(value) is type(each) and value == each for each in values):
            wanted = " or ".join(map(json.dumps, values))
            raise BadField(name, f"must be {wanted} on this server, got {shown(value)}", "unsupported_parameter")
        return value

    return check


NEUTRAL: Final[dict[str, Check]] = {
    "background": only(False),
    "best_of": only(1),
    "client_metadata": mapping,
    "echo": only(False),
    "function_call": only("none", "auto"),
    "functions": only([]),
    "include": listed(one_of(INCLUDED), len(INCLUDED)),
    "include_obfuscation": flag,
    "max_tool_calls": whole(0, 2**30),
    "metadata": mapping,
    "modalities": only(["text"]),
    "n": only(1),
    "parallel_tool_calls": flag,
    "prediction": mapping,
    "prompt_cache_key": text(4096),
    "prompt_cache_retention": text(256),
    "reasoning_effort": only("none"),
    "safety_identifier": text(4096),
    "service_tier": text(256),
    "suffix": only(""),
    "top_logprobs": only(0),
    "verbosity": VERBOSITY,
}


def left_out(document: Mapping[str, Any]) -> tuple[str, ...]:
    """The parts of a request's body, already checked, that the answer is without: a note each, for its `usage`."""
    tools = [("tools", at, each["type"]) for at, each in enumerate(document.get("tools") or ())]
    found = [f"{name}.{at}: {kind}" for name, at, kind in tools if kind != FUNCTION]
    given = document.get("input")
    items = enumerate(given if isinstance(given, list) else ())
    found += [f"input.{at}: {each['type']}" for at, each in items if each.get("type") in UNREAD]
    items = enumerate(given if isinstance(given, list) else ())
    found += [f"input.{at}: {ENCRYPTED}" for at, each in items if each.get(ENCRYPTED) and not each.get("content")]
    reasoning = document.get("reasoning") or {}
    asked = {name: reasoning.get(name) or "none" for name in ("effort", "summary")}
    return (*found, *(f"reasoning.{name}: {value}" for name, value in asked.items() if value != "none"))
