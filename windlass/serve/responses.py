"""The documents of `/v1/responses`: one answer, and the events of its stream."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from windlass.engine.request import Piece
from windlass.serve.chat import AnswerDocuments, AnswerHeader, PartialText, usage_of
from windlass.serve.errors import (
    ApiError,
    BadField,
    Check,
    RequestLimits,
    flag,
    listed,
    mapping,
    name_of,
    named_event,
    one_of,
    record,
    text,
)
from windlass.serve.neutral import NEUTRAL, UNREAD, VERBOSITY
from windlass.serve.parsers import Call, TextPart, functions
from windlass.serve.prompts import messages

ECHOED: Final[dict[str, Any]] = {
    "instructions": None,
    "temperature": 1.0,
    "top_p": 1.0,
    "max_output_tokens": None,
    "user": None,
    "truncation": "disabled",
    "metadata": {},
}
FAILURE: Final = ("code", "message", "param")
THOUGHT: Final = "reasoning"
MESSAGE: Final = "message"
EVENTS: Final = {THOUGHT: "reasoning_text", MESSAGE: "output_text"}  # begin the names of events about a text
MORE: Final[dict[str, dict[str, Any]]] = {  # what an event, and a part, says of a text beside the text
    THOUGHT: {},
    MESSAGE: {"logprobs": []},
}


@final
class ResponseDocuments(AnswerDocuments):
    """`response`, and its events, which are numbered. Nothing of it is kept: `store` is false.

    An answer has a thought, a message and calls of functions, each as an item, and of these what there is.
    """

    def __init__(self, head: AnswerHeader, given: Mapping[str, Any]) -> None:
        self.head, self._events = head, 0
        self._begun: list[str] = []  # kinds of items that a stream has begun, of which the last is not over
        self._thought = ""
        self._echoed = {name: given.get(name, default) for name, default in ECHOED.items()}
        self._echoed |= _tools_of(given)
        self._format = given.get("text", {}).get("format", {"type": "text"})

    def opening(self, at: int) -> list[dict[str, Any]]:
        begun = self._response("in_progress", [])
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]

    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        self._thought += said.thought
        for kind, piece in ((THOUGHT, said.thought), (MESSAGE, said.text)):
            if piece:
                found += self._begin(kind)
                found.append(self._event(kind, "delta", {"delta": piece}))
        return found

    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        items = self._items(written)
        found = self._begin(MESSAGE) if not self._begun and items[0]["type"] == MESSAGE else []
        if self._begun:
            found += self._done(items[len(self._begun) - 1])
        for index, item in enumerate(items[len(self._begun) :], len(self._begun)):
            place = {"item_id": item["id"], "output_index": index}
            begun = {**item, "status": "in_progress", "arguments": ""}
            name = "response.function_call_arguments"
            found += [
                {"type": "response.output_item.added", "output_index": index, "item": begun},
                {"type": f"{name}.delta", **place, "delta": item["arguments"]},
                {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]},
                {"type": "response.output_item.done", "output_index": index, "item": item},
            ]
        return found

    def ending(self, texts: Sequence[PartialText]) -> bytes:
        done = self.answer(texts)
        return self.wire({"type": f"response.{done['status']}", "response": done})

    def failure(self, error: ApiError) -> bytes:
        """A response that failed, which agents read, and the error, which other clients do."""
        told = {name: error.document()["error"][name] for name in FAILURE}
        failed = self._response("failed", []) | {"error": {"code": told["code"], "message": told["message"]}}
        return self.wire({"type": "response.failed", "response": failed}) + self.wire({"type": "error", **told})

    def wire(self, document: dict[str, Any]) -> bytes:
        numbered = {**document, "sequence_number": self._events}
        self._events += 1
        return named_event(document["type"], numbered)

    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        [written] = texts
        status = _status(written)
        taken = usage_of([written.usage], 1, self.head.options, self.head.left_out)
        usage = {
            "input_tokens": taken["prompt_tokens"],
            "input_tokens_details": taken["prompt_tokens_details"],
            "output_tokens": taken["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": written.thought_tokens},
            "total_tokens": taken["total_tokens"],
            "windlass": taken["windlass"],
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, self._items(written)) | {"usage": usage, "incomplete_details": why}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{self.head.number}",
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "text": {"format": self._format},
            "usage": None,
            **self._echoed,
        }

    def _items(self, written: PartialText) -> list[dict[str, Any]]:
        """All that was written; the last item is cut where the text is."""
        texts = [(THOUGHT, written.thought)] if written.thought else []
        if written.text or not (written.thought or written.called):
            texts.append((MESSAGE, written.text))
        items = [self._item(kind, "completed", [_part_of_answer(kind, text)]) for kind, text in texts]
        items += [self._call(number, call) for number, call in enumerate(written.called)]
        items[-1]["status"] = _status(written)
        return items

    def _item(self, kind: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        own: dict[str, Any] = {"summary": []} if kind == THOUGHT else {"role": "assistant"}
        return {"id": self._id(kind), "type": kind, **own, "status": status, "content": content}

    def _id(self, kind: str) -> str:
        return f"{'rs' if kind == THOUGHT else 'msg'}_{self.head.number}"

    def _call(self, number: int, call: Call) -> dict[str, Any]:
        item = {"id": f"fc_{self.head.number}_{number}", "type": "function_call", "status": "completed"}
        return {**item, "call_id": call.id, "name": call.name, "arguments": call.arguments}

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        """An item of this kind, unless it has begun; the one before it is over then."""
        if kind in self._begun:
            return []
        found = (
            self._done(self._item(THOUGHT, "completed", [_part_of_answer(THOUGHT, self._thought)]))
            if self._begun
            else []
        )
        self._begun.append(kind)
        item = {"output_index": len(self._begun) - 1, "item": self._item(kind, "in_progress", [])}
        return [
            *found,
            {"type": "response.output_item.added", **item},
            {"type": "response.content_part.added", **self._place(kind), "part": _part_of_answer(kind, "")},
        ]

    def _done(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """The last item that has begun is over."""
        kind, [part] = item["type"], item["content"]
        return [
            self._event(kind, "done", {"text": part["text"]}),
            {"type": "response.content_part.done", **self._place(kind), "part": part},
            {"type": "response.output_item.done", "output_index": len(self._begun) - 1, "item": item},
        ]

    def _event(self, kind: str, what: str, text: Mapping[str, str]) -> dict[str, Any]:
        return {"type": f"response.{EVENTS[kind]}.{what}", **self._place(kind), **text, **MORE[kind]}

    def _place(self, kind: str) -> dict[str, Any]:
        return {"item_id": self._id(kind), "output_index": self._begun.index(kind), "content_index": 0}


def _part_of_answer(kind: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {} if kind == THOUGHT else {"annotations": []}
    return {"type": EVENTS[kind], "text": text, **more, **MORE[kind]}


def _status(written: PartialText) -> str:
    return "incomplete" if written.reason == "length" else "completed"


def _tools_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of functions, as it came."""
    tools = [{"type": "function", **tool["function"]} for tool in given.get("tools", [])]
    choice: Any = given.get("tool_choice", "auto")
    if choice.startswith("="):
        choice = {"type": "function", "name": choice[1:]}
    defaults = {"description": None, "parameters": None, "strict": None}
    return {
        "tools": [{**defaults, **tool} for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
    }


TEXTS: Final = ("input_text", "output_text")  # what chats call text
DROPPED: Final = ("type", "id", "status", "phase", "end_turn")  # of items that come back
THOUGHTS: Final = ("reasoning_text", "text")  # types of a part of a thought
MOST_THOUGHTS: Final = 4096  # parts of one
SHELL: Final = "local_shell"  # the function that stands for a call of OpenAI's own shell
NO_THOUGHT: Final = {"reasoning_content": ""}
NO_TEXT: Final = {"role": "assistant", "content": "", **NO_THOUGHT}  # an item that says nothing to the model
SHARED: Final = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "stream", "stream_options", "user"),
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
        **NEUTRAL,
        **{name: common[name] for name in SHARED},
        **own,
        "input": _input(limits),
        "instructions": text(limits.characters),
        "max_output_tokens": common["max_tokens"],
        "text": record({"format": form, "verbosity": VERBOSITY}),
        "reasoning": record(dict.fromkeys(("effort", "summary", "generate_summary", "context"), text(64))),
        "tools": functions(_tool, limits.tools),
        "tool_choice": _tool_choice,
        "truncation": one_of(("auto", "disabled")),
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
        given = [_message(f"{name}.{at}", each) for at, each in enumerate(value)]
        pairs = zip(given, check(name, given), strict=True)
        # An item without a text begins a turn, as any thought does, and is none by itself.
        turns = _together([message | (NO_THOUGHT if item == NO_TEXT else {}) for item, message in pairs])
        found = [each for each in turns if any(each["content"]) or {**each, "content": ""} != NO_TEXT]
        if not found:
            raise BadField(name, "must have a message")
        return found

    return checked


def _message(name: str, value: Any) -> dict[str, Any]:
    """An item as a message of a chat, from which `_together` makes one with those beside it."""
    given = mapping(name, value)
    kind = one_of(tuple(ITEMS))(f"{name}.type", given.get("type") or "message")
    return ITEMS[kind](name, {field: each for field, each in given.items() if field not in DROPPED})


def _plain(_name: str, given: dict[str, Any]) -> dict[str, Any]:
    if isinstance(given.get("content"), list):
        given["content"] = [*map(_part_of_input, given["content"])]
    return given


def _call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Its arguments are a string, or an object as some clients parse them."""
    known = _known(name, given, ("call_id", "name", "arguments"))
    arguments = known["arguments"]
    function = {
        "name": _string(f"{name}.name", known["name"]),
        "arguments": arguments if isinstance(arguments, dict) else _string(f"{name}.arguments", arguments),
    }
    return _called(_string(f"{name}.call_id", known["call_id"]), function)


def _custom_call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    known = _known(name, given, ("call_id", "name", "input"))
    number, function, text_of = (_string(f"{name}.{field}", one) for field, one in known.items())
    return _called(number, {"name": function, "arguments": {"input": text_of}})


def _shell_call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    action = mapping(f"{name}.action", _known(name, given, ("action",))["action"])
    arguments = {field: one for field, one in action.items() if field != "type" and one is not None}
    return _called(given.get("call_id"), {"name": SHELL, "arguments": arguments})


def _called(number: Any, function: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": number, "type": "function", "function": function}]}


def _output(name: str, given: dict[str, Any]) -> dict[str, Any]:
    known = _known(name, given, ("call_id", "output"))
    number = _string(f"{name}.call_id", known["call_id"])
    return _plain(name, {"role": "tool", "tool_call_id": number, "content": known["output"]})


def _shell_output(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The output of a shell, which has the id of its call where others have `call_id`."""
    return {"role": "tool", "content": _known(name, given, ("output",))["output"]}


def _thought(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The text in `content`. A summary is no text of the model, and only its maker can read `encrypted_content`."""
    content = given.get("content")
    parts = listed(mapping, MOST_THOUGHTS)(f"{name}.content", [] if content is None else content)
    texts = [
        _string(f"{name}.content.{at}.text", part.get("text"))
        for at, part in enumerate(parts)
        if one_of(THOUGHTS)(f"{name}.content.{at}.type", part.get("type"))
    ]
    return {"role": "assistant", "content": "", "reasoning_content": "".join(texts)}


def _unread(_name: str, _given: dict[str, Any]) -> dict[str, Any]:
    return NO_TEXT


ITEMS: Final = {
    "message": _plain,
    "function_call": _call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "local_shell_call": _shell_call,
    "local_shell_call_output": _shell_output,
    "reasoning": _thought,
    **dict.fromkeys(UNREAD, _unread),
}


def _known(name: str, given: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """These fields of an item that comes back; all others are dropped.

    Raises: BadField where one of them is missing.
    """
    for field in fields:
        if given.get(field) is None:
            raise BadField(f"{name}.{field}", "is missing", "missing_required_parameter")
    return {field: given[field] for field in fields}


def _string(name: str, value: Any) -> str:
    return str(text(2**30)(name, value))


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


def _part_of_input(value: Any) -> Any:
    is_text = isinstance(value, dict) and value.get("type") in TEXTS
    return {**value, "type": "text"} if is_text else value


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


def _tool(name: str, value: Any) -> dict[str, Any]:
    """A function, which chats have one level deeper."""
    function = record(
        {"type": text(64), "name": name_of(64), "description": text(65_536), "parameters": mapping} | {"strict": flag},
        needed=("type", "name"),
    )(name, value)
    return {"type": function.pop("type"), "function": function}


def _tool_choice(name: str, value: Any) -> str:
    """`none`, `auto`, `required`, or `=` and the name of a function."""
    if isinstance(value, str):
        return str(one_of(("none", "auto", "required"))(name, value))
    given = record({"type": one_of(("function",)), "name": name_of(64)}, needed=("type", "name"))(name, value)
    return "=" + str(given["name"])
