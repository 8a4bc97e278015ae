"""The Responses API: the body of `/v1/responses`, the chat that it stands for, and the documents that answer it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, final

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter

from windlass.engine.request import Piece
from windlass.serve.chat import AnswerDocuments, AnswerHeader, PartialText, usage_of
from windlass.serve.errors import MISSING, ApiError, BadField, named_event
from windlass.serve.parsers import Call, TextPart
from windlass.serve.prompts import content_of, of_message, tool_call
from windlass.serve.schema import (
    FUNCTION_TAG,
    Body,
    ChatRequest,
    Choice,
    Content,
    Count,
    Function,
    FunctionName,
    FunctionTool,
    JsonSchema,
    Message,
    NamedChoice,
    NeutralFields,
    Object,
    OtherTool,
    PlainFormat,
    Recompute,
    SchemaFormat,
    SharedFields,
    StoreName,
    Text,
    Variables,
    Verbosity,
    Word,
    only,
    text_of_json,
    tool_kind,
    unread_tools,
)

SHELL: Final = "local_shell"  # the function that stands for a call of OpenAI's own shell
EMPTY: Final = {"role": "assistant", "content": ("",), "reasoning_content": ""}  # begins a turn without content


class Item(Body):
    """An item of an earlier answer. Fields beyond those of its model are ignored."""

    model_config = ConfigDict(extra="ignore")

    def message(self) -> dict[str, Any]:
        """Return the item as `prompts.conversation` has messages. An item without a text begins a turn."""
        return EMPTY


class FunctionCall(Item):
    """A function call. Its arguments are JSON text, or an object from clients that parse the text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str | Object

    def message(self) -> dict[str, Any]:
        return _call(self.call_id, self.name, self.arguments)


class CustomCall(Item):
    """A call whose only argument is a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str

    def message(self) -> dict[str, Any]:
        return _call(self.call_id, self.name, {"input": self.input})


class ShellCall(Item):
    """A call of OpenAI's own shell."""

    type: Literal["local_shell_call"]
    call_id: Any = None
    action: Object

    def message(self) -> dict[str, Any]:
        arguments = {name: each for name, each in self.action.items() if name != "type" and each is not None}
        return _call(self.call_id, SHELL, arguments)


class CallOutput(Item):
    """The result of a call. JSON that is neither a string nor a list of parts is read as text."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[Content, BeforeValidator(text_of_json, Any)]

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": content_of(self.output)}


class ShellOutput(Item):
    """The output of a shell, which has the id of its call where others have `call_id`."""

    type: Literal["local_shell_call_output"]
    output: Annotated[Content, BeforeValidator(text_of_json, Any)]

    def message(self) -> dict[str, Any]:
        return {"role": "tool", "content": content_of(self.output)}


class ThoughtPart(Body):
    """A part of a thought."""

    model_config = ConfigDict(extra="ignore")
    type: Annotated[str, only("reasoning_text", "text")]
    text: str


class Reasoning(Item):
    """A thought. Only its text is read: a summary is no text of the model, and only its maker can decrypt the rest."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], Field(max_length=4096, default_factory=list)]
    encrypted_content: Any = None

    def message(self) -> dict[str, Any]:
        return EMPTY | {"reasoning_content": "".join(part.text for part in self.content)}


class UnreadItem(Item):
    """An item without a text. The answer's usage lists it as left out."""

    type: Literal["ghost_snapshot", "tool_search_call", "tool_search_output", "web_search_call"]


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _typed(value: Any) -> Any:
    usual = "item_reference" if isinstance(value, Mapping) and [*value] == ["id"] else "message"
    return {**value, "type": value.get("type") or usual} if isinstance(value, Mapping) else value


AnyItem = Annotated[
    Message | FunctionCall | CustomCall | ShellCall | CallOutput | ShellOutput | Reasoning | UnreadItem | ItemReference,
    Field(discriminator="type"),
]
STORED_ITEM: Final[TypeAdapter[Message | FunctionCall | Reasoning]] = TypeAdapter(
    Annotated[Message | FunctionCall | Reasoning, Field(discriminator="type")]
)


class FlatTool(Function):
    """A function that the model may call, one level flatter than that of a chat."""

    type: Literal["function"]

    def as_tool(self) -> FunctionTool:
        """The same function as chats have it."""
        given = self.model_dump(exclude_unset=True, exclude={"type"})
        return FunctionTool.model_construct(type=self.type, function=Function.model_construct(**given))


AnyTool = Annotated[FlatTool, Tag(FUNCTION_TAG)] | Annotated[OtherTool, Tag("other")]


class FlatChoice(FunctionName):
    """A demand that one function is called."""

    type: Literal["function"]

    def as_choice(self) -> NamedChoice:
        """The same demand as chats have it."""
        return NamedChoice(type=self.type, function=FunctionName(name=self.name))


class TextFormat(Body):
    """Text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Word | None = None
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """The form of the answer."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Verbosity = "medium"


class ReasoningOptions(Body):
    """The effort of a thought. `none` turns the thought off where the chat template can."""

    effort: Word | None = None
    summary: Word | None = None
    generate_summary: Word | None = None
    context: Word | None = None


class ResponsesRequest(NeutralFields, SharedFields):
    """The body of `/v1/responses`."""

    input: (
        str
        | Annotated[
            list[Annotated[AnyItem, BeforeValidator(_typed)]], Field(min_length=1, max_length=4096, fail_fast=True)
        ]
    )
    """The conversation: a text, or messages, calls of functions with their results, and thoughts."""
    instructions: Text | None = None
    """The system message before the input."""
    max_output_tokens: Count | None = None
    """Maximum number of tokens to write."""
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    tools: Annotated[list[Annotated[AnyTool, Discriminator(tool_kind)]], Field(max_length=128, default_factory=list)]
    """Functions that the model may call."""
    tool_choice: Choice | FlatChoice = "auto"
    """`none`, `auto`, `required`, or the function that must be called."""
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: Word | None = None
    """Id of the stored response that the input goes on from."""
    store: bool | StoreName | None = None  # type: ignore[assignment]
    """Store the answer (default: true), or the format of cached keys and values, and store the answer."""
    chat_template_kwargs: Annotated[Variables, Field(default_factory=dict)]
    """Variables of the model's chat template."""
    chunks: Recompute | None = None

    def messages(self, stored: Callable[[str], Object]) -> list[dict[str, Any]]:
        """The messages of the input as `prompts.conversation` has them. `stored` finds an item of a response by its id.

        Raises: BadField where there is none. ApiError as `stored` does.
        """
        if isinstance(self.input, str):
            turns: list[dict[str, Any]] = [{"role": "user", "content": (self.input,)}]
        else:
            items = [
                STORED_ITEM.validate_python(stored(each.id)) if isinstance(each, ItemReference) else each
                for each in self.input
            ]
            turns = _together([each.message() if isinstance(each, Item) else of_message(each) for each in items])
        found = [each for each in turns if any(each["content"]) or {**each, "content": ("",)} != EMPTY]
        if not found:
            raise BadField("input", "must have a message")
        return found

    @property
    def system(self) -> list[dict[str, Any]]:
        """The message of the instructions, before all others."""
        return [{"role": "system", "content": (self.instructions,)}] if self.instructions else []

    def as_chat(self) -> ChatRequest:
        """All but the messages as a chat has it. Raises: BadField for a schema that is asked for, and not there."""
        choice = self.tool_choice
        shared: dict[str, Any] = {name: getattr(self, name) for name in SharedFields.model_fields}
        shared["store"] = self.store if isinstance(self.store, str) else None
        return ChatRequest.model_construct(
            **shared,
            messages=[],
            chat_template_kwargs=self.chat_template_kwargs,
            chunks=self.chunks,
            max_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning_effort or self.reasoning.effort,
            response_format=self._format(),
            tools=[tool.as_tool() for tool in self.tools if isinstance(tool, FlatTool)],
            tool_choice=choice.as_choice() if isinstance(choice, FlatChoice) else choice,
        )

    @property
    def echoed(self) -> dict[str, Any]:
        """The fields that the answer repeats."""
        defaults = {"description": None, "parameters": None, "strict": None}
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools if isinstance(tool, FlatTool)]
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_output_tokens": self.max_output_tokens,
            "user": self.user or None,
            "truncation": self.truncation,
            "metadata": self.metadata,
            "text": {"format": self.text.format.model_dump(by_alias=True, exclude_unset=True)},
            "tools": [{**defaults, **tool} for tool in tools],
            "tool_choice": choice.model_dump() if isinstance(choice, FlatChoice) else choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
        }

    @property
    def left_out(self) -> list[str]:
        """A note for each part of the request that the answer is without."""
        items = [] if isinstance(self.input, str) else [*enumerate(self.input)]
        unread = [f"input.{at}: {item.type}" for at, item in items if isinstance(item, UnreadItem)]
        unread += [
            f"input.{at}: encrypted_content"
            for at, item in items
            if isinstance(item, Reasoning) and item.encrypted_content and not item.content
        ]
        effort = self.reasoning_effort or self.reasoning.effort
        asked = {"effort": effort, "summary": self.reasoning.summary}
        options = [f"reasoning.{name}: {value}" for name, value in asked.items() if value not in (None, "none")]
        return unread_tools(self.tools) + unread + options

    def _format(self) -> PlainFormat | SchemaFormat:
        form = self.text.format
        if form.type != "json_schema":
            return PlainFormat(type=form.type)
        if form.schema_ is None:
            raise BadField("text.format.schema", "is missing", MISSING)
        return SchemaFormat(type="json_schema", json_schema=JsonSchema.model_construct(schema_=form.schema_))


def _call(number: Any, name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": (), "tool_calls": [tool_call(number, name, arguments)]}


def _together(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which each has its thought before it and its calls behind it."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {"role": ""}
        is_begun = "reasoning_content" in last and not any(last["content"]) and "tool_calls" not in last
        is_call = "tool_calls" in message and not any(message["content"])
        if last["role"] == message["role"] == "assistant" and (is_begun or is_call):
            calls = last.get("tool_calls", []) + message.get("tool_calls", [])
            found[-1] = {**last, **message, "content": last["content"] + message["content"]}
            found[-1] |= {"tool_calls": calls} if calls else {}
        else:
            found.append(message)
    return found


FAILURE: Final = ("code", "message", "param")
THOUGHT: Final = "reasoning"
MESSAGE: Final = "message"
EVENTS: Final = {THOUGHT: "reasoning_text", MESSAGE: "output_text"}  # prefixes of the names of events about a text
MORE: Final[dict[str, dict[str, Any]]] = {  # further fields of an event and of a part, beside the text
    THOUGHT: {},
    MESSAGE: {"logprobs": []},
}


@final
class ResponseDocuments(AnswerDocuments):
    """`response`, and its events, which are numbered. `is_stored`: whether a later one can go on from it.

    The thought, the message and each function call of an answer are items. An answer without any of them has an empty
    message.
    """

    def __init__(self, head: AnswerHeader, body: ResponsesRequest, is_stored: bool) -> None:
        self.head, self._events = head, 0
        self.number = f"resp_{head.number}"
        self._begun: list[str] = []  # kinds of items that a stream has begun, the last of them unfinished
        self._thought = ""
        self._echoed = {**body.echoed, "store": is_stored}

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
            "input_tokens_details": {**taken["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": taken["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": written.thought_tokens},
            "total_tokens": taken["total_tokens"],
            "windlass": taken["windlass"],
        }
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(status, self._items(written)) | {"usage": usage, "incomplete_details": why}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.number,
            "object": "response",
            "created_at": self.head.created,
            "model": self.head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": None,
            **self._echoed,
        }

    def _items(self, written: PartialText) -> list[dict[str, Any]]:
        """Return all items of a text. Where the text is cut, the last item is incomplete."""
        texts = [(THOUGHT, written.thought)] if written.thought else []
        if written.text or not (written.thought or written.called):
            texts.append((MESSAGE, written.text))
        items = [self._item(kind, "completed", [_part_of_answer(kind, text)]) for kind, text in texts]
        items += [self._call(number, call) for number, call in enumerate(written.called)]
        items[-1]["status"] = "incomplete" if written.is_cut else _status(written)
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
        """Return the events that end the item before and begin one of this kind, or none if it has begun."""
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
        """Events that end the last item."""
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
