"""Anthropic's Messages API: the body of `/v1/messages`, the chat that it stands for, and the answer's documents."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, final

from pydantic import ConfigDict, Discriminator, Field, Tag

from windlass.engine.request import Piece
from windlass.serve.chat import AnswerDocuments, AnswerHeader, PartialText, windlass_of
from windlass.serve.errors import UNSUPPORTED, ApiError, BadField, named_event
from windlass.serve.parsers import Call, CallPart, TextPart
from windlass.serve.prompts import tool_call
from windlass.serve.schema import (
    FUNCTION_TAG,
    Body,
    CacheFields,
    ChatRequest,
    Count,
    Function,
    FunctionName,
    FunctionTool,
    JsonSchema,
    Label,
    NamedChoice,
    Object,
    OtherTool,
    PlainFormat,
    SamplingFields,
    SchemaFormat,
    StopStrings,
    Text,
    Word,
    unread_tools,
)

APART: Final = "\n"  # between blocks of text in one message
SIGNATURE: Final = "windlass"  # of a thought: clients send a thought back only with one
# Anthropic's client then sends whole conversations.
UNTHREADED: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": TOOL_USE, "interrupted": "end_turn"}


class TextBlock(Body):
    """A block of text."""

    ignored = frozenset(("cache_control", "citations"))
    type: Literal["text"]
    text: Text


class ThinkingBlock(Body):
    """A thought of an earlier answer."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["thinking"]
    thinking: Text


class RedactedBlock(Body):
    """A thought that only its maker can decrypt. The answer's usage lists it as left out."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["tool_use"]
    id: str
    name: str
    input: Object


class ToolResultBlock(Body):
    """The result of a call."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    is_error: bool = False


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[AnyBlock], Field(fail_fast=True)]
    pin: bool = False
    """Never evict the tokens of this message."""

    def messages(self) -> list[dict[str, Any]]:
        """The messages as `prompts.conversation` has them. Each result of a call is a message of its own."""
        return [each | {"pin": True} for each in self._messages()] if self.pin else self._messages()

    def _messages(self) -> list[dict[str, Any]]:
        blocks = [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        results = [each for each in blocks if isinstance(each, ToolResultBlock)]
        found: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": (text_of(each.content),)} for each in results
        ]
        texts = [each for each in blocks if isinstance(each, TextBlock)]
        thoughts = [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]
        calls = [tool_call(each.id, each.name, each.input) for each in blocks if isinstance(each, ToolUseBlock)]
        if len(results) == len(blocks) and blocks:
            return found
        own: dict[str, Any] = {"role": self.role, "content": (text_of(texts),)}
        if thoughts:
            own["reasoning_content"] = APART.join(thoughts)
        if calls:
            own["tool_calls"] = calls
        return [*found, own]


def text_of(content: str | Sequence[TextBlock]) -> str:
    """The text of a message or of a result."""
    return content if isinstance(content, str) else APART.join(each.text for each in content)


class CustomTool(Body):
    """A function that the model may call. Its `input_schema` is a JSON schema."""

    ignored = frozenset(
        ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "strict")
    )
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
    description: Annotated[str, Field(max_length=65_536)] | None = None
    input_schema: Object

    def as_tool(self) -> FunctionTool:
        """The same function as chats have it."""
        given: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        given |= {} if self.description is None else {"description": self.description}
        return FunctionTool.model_construct(type="function", function=Function.model_construct(**given))


def custom_kind(value: Any) -> str:
    """The tag of a tool: a function, or a tool that runs on Anthropic's machines or is known to its models."""
    return FUNCTION_TAG if isinstance(value, Mapping) and value.get("type") in (None, "custom") else "other"


AnyTool = Annotated[CustomTool, Tag(FUNCTION_TAG)] | Annotated[OtherTool, Tag("other")]


class ToolChoice(Body):
    """Choice of the function that is to be called, if any."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool = False

    def as_choice(self) -> Any:
        """The same choice as chats have it. Raises: BadField for a function without a name."""
        if self.type != "tool":
            return {"any": "required"}.get(self.type, self.type)
        if self.name is None:
            raise BadField("tool_choice.name", "is missing", "missing_required_parameter")
        return NamedChoice(type="function", function=FunctionName.model_construct(name=self.name))


class Thinking(Body):
    """Switch of a model's thoughts. `disabled` turns a model's thinking off if its chat template can."""

    ignored = frozenset(("display",))
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None


class OutputFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Object, Field(alias="schema")]


class OutputConfig(Body):
    """The form of the answer."""

    effort: Word | None = None
    format: OutputFormat | None = None


class MessagesPrompt(Body):
    """The body of `/v1/messages/count_tokens`."""

    ignored = frozenset(
        (
            *("cache_control", "container", "context_management", "diagnostics", "inference_geo", "mcp_servers"),
            *("metadata", "service_tier", "speed", "user_profile_id", "workspace_id"),
        )
    )
    model: Label
    """The model's name, as `/v1/models` has it."""
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    """The conversation, oldest message first. The last one is of the user."""
    system: Text | Annotated[list[TextBlock], Field(fail_fast=True)] = ""
    """The system text."""
    tools: Annotated[list[Annotated[AnyTool, Discriminator(custom_kind)]], Field(max_length=128, default_factory=list)]
    """Functions that the model may call."""
    tool_choice: ToolChoice = ToolChoice(type="auto")
    """`none`, `auto`, `any`, or the function that must be called."""
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    def as_messages(self) -> list[dict[str, Any]]:
        """The messages as `prompts.conversation` has them.

        Raises: BadField where the last one is of the assistant, whose reply cannot be begun.
        """
        if self.messages[-1].role == "assistant":
            raise BadField("messages", "must end with a message of the user: this server cannot go on with a reply")
        system = text_of(self.system)
        before = [{"role": "system", "content": (system,)}] if system else []
        return [*before, *(each for message in self.messages for each in message.messages())]

    def as_chat(self) -> ChatRequest:
        """All but the messages as a chat has it."""
        return ChatRequest.model_construct(
            messages=[],
            reasoning_effort="none" if self.thinking is not None and self.thinking.type == "disabled" else None,
            response_format=self._format(),
            tools=[tool.as_tool() for tool in self.tools if isinstance(tool, CustomTool)],
            tool_choice=self.tool_choice.as_choice(),
        )

    def _format(self) -> PlainFormat | SchemaFormat:
        form = self.output_config.format
        if form is None:
            return PlainFormat(type="text")
        return SchemaFormat(type="json_schema", json_schema=JsonSchema.model_construct(schema_=form.schema_))

    @property
    def left_out(self) -> list[str]:
        """A note for each part of the request that the answer is without."""
        blocks = [
            (f"messages.{at}.content.{number}", each.type)
            for at, message in enumerate(self.messages)
            for number, each in enumerate(message.content if isinstance(message.content, list) else ())
        ]
        redacted = [f"{place}: {kind}" for place, kind in blocks if kind == "redacted_thinking"]
        effort = self.output_config.effort
        return unread_tools(self.tools) + redacted + ([f"output_config.effort: {effort}"] if effort else [])


class MessagesRequest(MessagesPrompt, SamplingFields, CacheFields):
    """The body of `/v1/messages`."""

    max_tokens: Count
    """Maximum number of tokens to write."""
    stop_sequences: Annotated[StopStrings, Field(default_factory=list)]
    """Strings that end the text."""
    stream: bool = False
    """Answer with server-sent events."""
    thread: Object | None = None
    """A conversation that the server holds, which this one does not."""
    user: Label = ""
    """Requests with the same `user` share cached prefixes. Other requests cannot use them."""

    def as_messages(self) -> list[dict[str, Any]]:
        if self.thread is not None:
            raise ApiError(
                400,
                "thread is not supported by this server. Send the whole conversation",
                "thread",
                UNSUPPORTED,
                details=UNTHREADED,
            )
        return super().as_messages()

    def as_chat(self) -> ChatRequest:
        shared = {name: getattr(self, name) for name in (*SamplingFields.model_fields, *CacheFields.model_fields)}
        shared |= {"max_tokens": self.max_tokens, "stop": self.stop_sequences, "stream": self.stream}
        return super().as_chat().model_copy(update={**shared, "user": self.user})


@final
class MessageDocuments(AnswerDocuments):
    """`message`, and the events of its stream.

    A thought, a text and each call are blocks of the content. A block is over where the next one begins. `prompt` is
    the number of its tokens.
    """

    def __init__(self, head: AnswerHeader, prompt: int) -> None:
        self.head, self._prompt = head, prompt
        self._blocks, self._open = 0, ""

    def opening(self, at: int) -> list[dict[str, Any]]:
        usage = {"input_tokens": self._prompt, "output_tokens": 0}
        usage |= dict.fromkeys(("cache_creation_input_tokens", "cache_read_input_tokens"), 0)
        message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if said.thought:
            found += self._begin(THINKING, {"type": THINKING, "thinking": "", "signature": ""})
            found.append(self._delta({"type": "thinking_delta", "thinking": said.thought}))
        if said.text:
            found += self._begin(TEXT, {"type": TEXT, "text": ""})
            found.append(self._delta({"type": "text_delta", "text": said.text}))
        for part in said.calls:
            found += self._call(part)
        return found

    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        usage = usage_of_message(written)
        delta = {"type": "message_delta", "delta": self._stopped(written), "usage": usage}
        return [*self._end(), delta | {"windlass": self._windlass(written)}]

    def ending(self, texts: Sequence[PartialText]) -> bytes:
        return self.wire({"type": "message_stop"})

    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        [written] = texts
        content: list[dict[str, Any]] = []
        if written.thought:
            content.append({"type": THINKING, "thinking": written.thought, "signature": SIGNATURE})
        if written.text:
            content.append({"type": TEXT, "text": written.text})
        content += [_block_of(each) | {"input": _input(each)} for each in written.called]
        message = self._message(content, usage_of_message(written)) | self._stopped(written)
        return message | {"windlass": self._windlass(written)}

    def wire(self, document: dict[str, Any]) -> bytes:
        return named_event(document["type"], document)

    def waiting(self) -> bytes:
        return self.wire({"type": "ping"})

    def failure(self, error: ApiError) -> bytes:
        return self.wire(error.document_of_message())

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        message = {"id": f"msg_{self.head.number}", "type": "message", "role": "assistant", "model": self.head.model}
        return message | {"content": content, "usage": usage}

    def _stopped(self, written: PartialText) -> dict[str, Any]:
        assert written.finished is not None
        by = written.finished.stopped_by if written.reason == "stop" else None
        return {"stop_reason": REASONS[written.reason] if by is None else "stop_sequence", "stop_sequence": by}

    def _windlass(self, written: PartialText) -> dict[str, Any]:
        return windlass_of([written.usage], self.head.options, self.head.left_out)

    def _call(self, part: CallPart) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if part.name:
            block = _block_of(Call(part.name, part.arguments, part.id)) | {"input": {}}
            found += self._begin(part.id, block)
        if part.arguments:
            found.append(self._delta({"type": "input_json_delta", "partial_json": part.arguments}))
        return found

    def _begin(self, name: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        """End the block that is open, and begin this one, unless it is open."""
        if self._open == name:
            return []
        found = self._end()
        self._open = name
        return [*found, {"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _end(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE})
        found = [*([signed] if self._open == THINKING else []), {"type": "content_block_stop", "index": self._blocks}]
        self._open, self._blocks = "", self._blocks + 1
        return found


def usage_of_message(written: PartialText) -> dict[str, Any]:
    """Anthropic's usage, in which cached tokens are no input tokens."""
    usage = written.usage
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }


def _block_of(call: Call) -> dict[str, Any]:
    return {"type": TOOL_USE, "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}


def _input(call: Call) -> dict[str, Any]:
    """The arguments of a call. Text that is no object, because it was cut off, is one argument."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": call.arguments}
