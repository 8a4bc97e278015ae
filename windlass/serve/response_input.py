"""What a client sends to `/v1/responses`, as the fields of a chat."""

from collections.abc import Mapping
from typing import Any, Final

from windlass.serve.errors import BadField
from windlass.serve.fields import Check, flag, listed, mapping, name_of, one_of, record, text
from windlass.serve.messages import messages
from windlass.serve.settings import RequestLimits

TEXTS: Final = ("input_text", "output_text")  # what chats call text
DROPPED: Final = ("type", "id", "status")  # of items that come back
OF_PARTS: Final = ("annotations", "logprobs")  # which are dropped
SHARED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stream", "user"),
)  # fields that are those of a chat
OTHER: Final = {"input", "instructions", "max_output_tokens", "text", "truncation"}  # and those that are not


def fields(limits: RequestLimits, common: Mapping[str, Check], own: Mapping[str, Check]) -> dict[str, Check]:
    """The checks of every field, by name; `common` and `own` are those of all routes that write."""
    form = record(
        {"type": one_of(("text", "json_object", "json_schema")), "name": name_of(64), "schema": mapping, "strict": flag}
        | {"description": text(4096)},
        needed=("type",),
    )
    return {
        **{name: common[name] for name in SHARED},
        **own,
        "input": _input(limits),
        "instructions": text(limits.characters),
        "max_output_tokens": common["max_tokens"],
        "text": record({"format": form}),
        "tools": listed(_tool, limits.tools),
        "tool_choice": _tool_choice,
        "parallel_tool_calls": flag,
        "truncation": one_of(("disabled",)),
        "store": _store(own["store"]),
        "previous_response_id": _no_answer,
        "chunks": record({"recompute": text(64)}),
    }


def as_chat(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked fields under the names that a chat has for them.

    Raises: BadField for a schema that is asked for, and not there.
    """
    before = [{"role": "system", "content": (given["instructions"],)}] if given.get("instructions") else []
    form = given.get("text", {}).get("format", {"type": "text"})
    if form["type"] == "json_schema":
        if "schema" not in form:
            raise BadField("text.format.schema", "is missing", "missing_required_parameter")
        form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
    chat = {name: value for name, value in given.items() if name not in OTHER}
    most = {"max_tokens": given["max_output_tokens"]} if "max_output_tokens" in given else {}
    return {**chat, **most, "messages": before + given["input"], "response_format": form}


def _input(limits: RequestLimits) -> Check:
    """A string, or a list of items: messages, calls of functions and what they gave, and thoughts."""
    check = messages(limits)

    def checked(name: str, value: Any) -> Any:
        if isinstance(value, str):
            return check(name, [{"role": "user", "content": value}])
        if not isinstance(value, list):
            raise BadField(name, "must be a string or a list of items")
        return _together(check(name, [_message(f"{name}.{at}", each) for at, each in enumerate(value)]))

    return checked


def _message(name: str, value: Any) -> dict[str, Any]:
    """An item as a message of a chat, from which `_together` makes one with those beside it."""
    given = mapping(name, value)
    kind = one_of(tuple(ITEMS))(f"{name}.type", given.get("type", "message"))
    return ITEMS[kind](name, {field: each for field, each in given.items() if field not in DROPPED})


def _plain(name: str, given: dict[str, Any]) -> dict[str, Any]:
    if isinstance(given.get("content"), list):
        given["content"] = [_part(f"{name}.content.{at}", each) for at, each in enumerate(given["content"])]
    return given


def _call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    record(dict.fromkeys(("call_id", "name", "arguments"), text(2**30)), needed=("call_id", "name", "arguments"))(
        name, given
    )
    function = {"name": given["name"], "arguments": given["arguments"]}
    return {"role": "assistant", "tool_calls": [{"id": given["call_id"], "type": "function", "function": function}]}


def _output(name: str, given: dict[str, Any]) -> dict[str, Any]:
    found = record({"call_id": text(256), "output": _any}, needed=("call_id", "output"))(name, given)
    return _plain(name, {"role": "tool", "tool_call_id": found["call_id"], "content": found["output"]})


def _thought(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """What `content` has of it; a summary is none of what the model wrote."""
    part = record({"type": one_of(("reasoning_text",)), "text": text(2**30)}, needed=("type", "text"))
    checks = {"content": listed(part, 64), "summary": _any}
    parts = record(checks)(name, given).get("content", [])
    return {"role": "assistant", "content": "", "reasoning_content": "".join(each["text"] for each in parts)}


ITEMS: Final = {"message": _plain, "function_call": _call, "function_call_output": _output, "reasoning": _thought}


def _together(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which each has its thought before it and its calls behind it."""
    found: list[dict[str, Any]] = []
    for item in items:
        last = found[-1] if found else {"role": ""}
        is_begun = "reasoning_content" in last and not any(last["content"]) and "tool_calls" not in last
        is_call = "tool_calls" in item and not any(item["content"])
        if last["role"] == item["role"] == "assistant" and (is_begun or is_call):
            calls = last.get("tool_calls", []) + item.get("tool_calls", [])
            found[-1] = {**last, **item, "content": last["content"] + item["content"]}
            found[-1] |= {"tool_calls": calls} if calls else {}
        else:
            found.append(item)
    return found


def _part(name: str, value: Any) -> dict[str, Any]:
    given = {field: each for field, each in mapping(name, value).items() if field not in OF_PARTS}
    return {**given, "type": "text"} if given.get("type") in TEXTS else given


def _store(own: Check) -> Check:
    """How a cache holds keys; OpenAI's name for keeping an answer is the same."""

    def check(name: str, value: Any) -> Any:
        if value is True:
            raise BadField(name, "must be false: this server keeps no answers; or a store of the cache, such as int8")
        return own(name, value)

    return check


def _no_answer(name: str, _: Any) -> Any:
    raise BadField(
        name,
        "needs an answer that was kept, and this server keeps none; send the whole conversation as input",
        "unsupported_parameter",
    )


def _any(_: str, value: Any) -> Any:
    return value


def _tool(name: str, value: Any) -> dict[str, Any]:
    """A function, which chats have one level deeper."""
    function = record(
        {"type": one_of(("function",)), "name": name_of(64), "description": text(65_536), "parameters": mapping}
        | {"strict": flag},
        needed=("type", "name"),
    )(name, value)
    return {"type": function.pop("type"), "function": function}


def _tool_choice(name: str, value: Any) -> str:
    """`none`, `auto`, `required`, or `=` and the name of a function."""
    if isinstance(value, str):
        return str(one_of(("none", "auto", "required"))(name, value))
    given = record({"type": one_of(("function",)), "name": name_of(64)}, needed=("type", "name"))(name, value)
    return "=" + str(given["name"])
