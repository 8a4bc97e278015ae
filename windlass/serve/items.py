"""The body of `/v1/responses` as a pydantic model, and the chat that it stands for."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag
from pydantic_core import PydanticCustomError

from windlass.serve.errors import MISSING, UNSUPPORTED, BadField
from windlass.serve.prompts import called, content_of, of_message
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


def _typed(value: Any) -> Any:
    return {**value, "type": value.get("type") or "message"} if isinstance(value, Mapping) else value


AnyItem = Annotated[
    Message | FunctionCall | CustomCall | ShellCall | CallOutput | ShellOutput | Reasoning | UnreadItem,
    Field(discriminator="type"),
]


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


def _no_answer(_: Any) -> Any:
    raise PydanticCustomError(
        UNSUPPORTED, "needs a stored answer, and this server stores none. Send the whole conversation as input"
    )


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
    """Value of `tool_choice`: which function is to be called, if any."""
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: Annotated[None, PlainValidator(_no_answer)] = None
    """Not supported, as answers are not stored."""
    chat_template_kwargs: Annotated[Variables, Field(default_factory=dict)]
    """Variables of the model's chat template."""
    chunks: Recompute | None = None

    def _messages(self) -> list[dict[str, Any]]:
        if isinstance(self.input, str):
            turns: list[dict[str, Any]] = [{"role": "user", "content": (self.input,)}]
        else:
            turns = _together([each.message() if isinstance(each, Item) else of_message(each) for each in self.input])
        found = [each for each in turns if any(each["content"]) or {**each, "content": ("",)} != EMPTY]
        if not found:
            raise BadField("input", "must have a message")
        before = [{"role": "system", "content": (self.instructions,)}] if self.instructions else []
        return before + found

    def as_chat(self) -> tuple[list[dict[str, Any]], ChatRequest]:
        """The messages as `prompts.conversation` has them, and the rest of the request as a chat has it.

        Raises: BadField for an input without a message, and a schema that is asked for, and not there.
        """
        choice = self.tool_choice
        shared: dict[str, Any] = {name: getattr(self, name) for name in SharedFields.model_fields}
        chat = ChatRequest.model_construct(
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
        return self._messages(), chat

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
        asked = {"effort": self.reasoning.effort or "none", "summary": self.reasoning.summary or "none"}
        options = [f"reasoning.{name}: {value}" for name, value in asked.items() if value != "none"]
        return unread_tools(self.tools) + unread + options

    def _format(self) -> PlainFormat | SchemaFormat:
        form = self.text.format
        if form.type != "json_schema":
            return PlainFormat(type=form.type)
        if form.schema_ is None:
            raise BadField("text.format.schema", "is missing", MISSING)
        return SchemaFormat(type="json_schema", json_schema=JsonSchema.model_construct(schema_=form.schema_))


def _call(number: Any, name: str, arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": (), "tool_calls": [called(number, name, arguments)]}


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
