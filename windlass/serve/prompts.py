"""Prompts: messages of a chat, templates, and the tokens of a text."""

import codecs
import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import count
from threading import Lock
from types import MappingProxyType
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import shown
from windlass.core.types import bounds_of
from windlass.engine.request import Event, Logprob, Piece, PromptLogprobs
from windlass.engine.templates import (
    HEAD,
    MessageEnds,
    Render,
    TemplateLayout,
    has_template,
    head_tokens,
    message_ends,
    rendered,
    renderer,
    template_problem,
    tokens_until,
    without_start,
)
from windlass.engine.text import PromptEncoder, Stops, encode, special_tokens, stops_of, token_bytes, token_text
from windlass.serve.errors import ApiError, BadField
from windlass.serve.forms import HERMES, MISTRAL_LIST, PLAIN, ReplyForm
from windlass.serve.schema import AnyMessage, AssistantMessage, Part, ToolMessage

ANSWER_TEXTS: Final = ("text", "input_text", "output_text")  # types of parts with a `text`
REFUSAL: Final = "refusal"
THOUGHTS: Final = ("thinking", "reasoning", "reasoning_text")
CALLS: Final = ("tool_use", "tool_call", "tool-call")
CALL_NAMES, CALL_IDS = ("name", "toolName"), ("id", "toolCallId")
CALL_ARGUMENTS: Final = ("input", "args", "arguments")
CHUNK: Final = "chunk"
PIN: Final = "pin"  # key of messages that are never evicted
SHORT_ID: Final = re.compile("[A-Za-z0-9]{9}")
MOST_CHUNKS: Final = 256  # chunks of a conversation

Messages = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """A part of a message that is read once, wherever it stands."""

    text: str


def conversation(messages: Iterable[AnyMessage]) -> list[dict[str, Any]]:
    """Messages as `PromptTokenizer.chat` takes them: the content is a tuple of texts and chunks."""
    return [of_message(each) for each in messages]


def of_message(message: AnyMessage) -> dict[str, Any]:
    """One message as `conversation` gives it."""
    found = _of_message(message)
    return found | {PIN: True} if message.pin else found


def _of_message(message: AnyMessage) -> dict[str, Any]:
    if isinstance(message, AssistantMessage):
        return _of_assistant(message)
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    named: dict[str, Any] = {"name": message.name}
    if isinstance(message, ToolMessage):
        found, named = {"role": "tool"}, named | {"tool_call_id": message.tool_call_id}
    found |= {name: each for name, each in named.items() if isinstance(each, str)}
    return found | {"content": content_of(message.content)}


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of `conversation` as a client sends it."""
    parts = [(CHUNK, each.text) if isinstance(each, Chunk) else ("text", each) for each in message["content"]]
    is_text = all(kind == "text" for kind, _ in parts)
    shown = "".join(text for _, text in parts) if is_text else [{"type": kind, "text": text} for kind, text in parts]
    found = {**message, "content": shown}
    if "tool_calls" in message:
        found["tool_calls"] = [_call_as_sent(each) for each in message["tool_calls"]]
    return found


def _call_as_sent(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if isinstance(function["arguments"], str):
        return dict(call)
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def check_conversation(name: str, messages: Messages, most: int) -> None:
    """Raises: BadField, for the field `name`, where messages have more than `most` characters, or too many chunks."""
    texts = plain_messages(messages, lambda chunk: chunk.text)
    size = sum(len(each["content"]) + len(each.get("reasoning_content", "")) for each in texts)
    if size > most:
        raise BadField(name, f"must have at most {most} characters in all, got {size}")
    if len(chunks_of(messages)) > MOST_CHUNKS:
        raise BadField(name, f"must have at most {MOST_CHUNKS} parts of type chunk in all")


def content_of(content: str | Sequence[str | Part]) -> tuple[str | Chunk, ...]:
    """The texts and chunks of a message."""
    if isinstance(content, str):
        return (content,)
    parts = ((each, "text") if isinstance(each, str) else (each.text, each.type) for each in content)
    return tuple(Chunk(text) if kind == CHUNK else text for text, kind in parts)


def _of_assistant(message: AssistantMessage) -> dict[str, Any]:
    """The content, the thought and the calls of a message, each where there is one.

    Arguments of a call are an object, or a string where they are none. A refusal is the text of an answer that has no
    other.
    """
    parts: list[Any] = [message.content] if isinstance(message.content, str) else message.content
    content = [part for part in map(_shown_part, parts) if part is not None]
    if not any(content) and isinstance(message.refusal, str):
        content = [message.refusal]
    thoughts = [_first_string(part, ("thinking", "reasoning", "text")) for part in parts if _kind(part) in THOUGHTS]
    told = next((each for each in (message.reasoning_content, message.reasoning) if isinstance(each, str)), "")
    thought = told or "".join(thoughts)
    calls = _calls(message) or [_call_of_part(part) for part in parts if _kind(part) in CALLS]
    found: dict[str, Any] = {"role": "assistant", "content": tuple(content)}
    if thought:
        found["reasoning_content"] = thought
    if calls:
        found["tool_calls"] = calls
    if isinstance(message.name, str):
        found["name"] = message.name
    return found


def tool_call(number: Any, function: str, arguments: Any) -> dict[str, Any]:
    """A call as templates take it: arguments that are an object of JSON as an object, all others as a string."""
    made = {"type": "function", "function": {"name": function, "arguments": _object_or_string(arguments)}}
    return {"id": number, **made} if isinstance(number, str) else made


def _kind(part: Any) -> Any:
    return part.get("type", "text") if isinstance(part, Mapping) else None


def _shown_part(part: Any) -> str | Chunk | None:
    """A part of the text, or None for a part of another kind."""
    if isinstance(part, str):
        return part
    kind = _kind(part)
    text = part.get(REFUSAL if kind == REFUSAL else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        return None
    if kind == CHUNK:
        return Chunk(text)
    return text if kind in (*ANSWER_TEXTS, REFUSAL) else None


def _calls(message: AssistantMessage) -> list[dict[str, Any]]:
    if message.tool_calls:
        return [_call(each) for each in message.tool_calls]
    return [_call({"function": message.function_call})] if isinstance(message.function_call, Mapping) else []


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    custom, function = given.get("custom"), given.get("function")
    if isinstance(custom, Mapping):
        return tool_call(given.get("id"), _first_string(custom, CALL_NAMES), {"input": custom.get("input")})
    parts = function if isinstance(function, Mapping) else given
    return tool_call(given.get("id"), _first_string(parts, CALL_NAMES), parts.get("arguments"))


def _call_of_part(part: Mapping[str, Any]) -> dict[str, Any]:
    arguments = next((part[name] for name in CALL_ARGUMENTS if part.get(name) is not None), None)
    return tool_call(_first_string(part, CALL_IDS) or None, _first_string(part, CALL_NAMES), arguments)


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


def plain_messages(messages: Messages, chunk: Callable[[Chunk], str]) -> list[dict[str, Any]]:
    """Return the messages as templates take them, with all text in strings. `chunk` returns the text of a chunk."""

    def joined(content: tuple[str | Chunk, ...]) -> str:
        return "".join(chunk(each) if isinstance(each, Chunk) else each for each in content)

    plain = [{name: value for name, value in each.items() if name != PIN} for each in messages]
    return [{**each, "content": joined(each["content"])} for each in plain]


def chunks_of(messages: Messages) -> list[Chunk]:
    """All chunks, in the order of the text."""
    return [part for each in messages for part in each["content"] if isinstance(part, Chunk)]


def pins_of(messages: Sequence[Mapping[str, Any]]) -> tuple[int, list[int]]:
    """The number of messages up to the last one that is pinned with all before it, and the numbers of further ones.

    Messages of the system count as pinned. Raises: BadField for pins and chunks in one conversation.
    """
    pins = [at for at, each in enumerate(messages) if each.get(PIN)]
    if pins and chunks_of(messages):
        raise BadField(PIN, "and parts of type chunk exclude each other. Leave one of them out")
    loose = (at for at, each in enumerate(messages) if not each.get(PIN) and each["role"] not in HEAD)
    end = next(loose, len(messages))
    return max((at + 1 for at in pins if at < end), default=0), [at for at in pins if at >= end]


# Tokens before the prefix, before the suffix, and before the text to write between them.
MARKS: Final = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite, Stable Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001  # DeepSeek
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),  # Yi-Coder, Seed-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
)
SUFFIX_FIRST: Final = ("[PREFIX]", "[SUFFIX]")  # Codestral, which has the suffix before the prefix and no third mark
# Tokens with which these models end the text between, beside the end tokens of any text.
ENDS: Final = (
    *("▁<EOT>", "<EOT>", "<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|file_separator|>"),
    *("<|file_sep|>", "<file_sep>", "<|repo_name|>", "<repo_name>"),
)
PROBE: Final = "☺"  # SentencePiece joins it to no following text


@dataclass(frozen=True)
class Infill:
    """A tokenizer's marks of a gap. `middle` is None where the suffix comes first. Tokens of `ends` end the text."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Infill | None":
        """Find the marks by the names of tokens. Returns None for a tokenizer without them."""
        ids = tokenizer.get_vocab()
        marks = next((each for each in (*MARKS, SUFFIX_FIRST) if all(name in ids for name in each)), None)
        if marks is None:
            return None
        prefix, suffix, *middle = (ids[name] for name in marks)
        ends = {ids[name] for name in ENDS if name in ids}
        return cls(prefix, suffix, middle[0] if middle else None, frozenset({prefix, suffix, *middle, *ends}))

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The tokens of both texts with the marks, up to where the model is to write."""
        if self.middle is None:
            return [self.suffix, *after, self.prefix, *before]
        return [self.prefix, *before, self.suffix, *after, self.middle]


def encode_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that goes on from another one: without the space that some tokenizers put before a text."""
    probe, both = encode(tokenizer, PROBE, False), encode(tokenizer, PROBE + text, False)
    if token_text(tokenizer, probe[0]).startswith(" ") and both[: len(probe)] == probe:
        return both[len(probe) :]
    return encode(tokenizer, text, False)


@dataclass(frozen=True)
class Echo:
    """The text of a prompt and its tokens, with how many characters of the text stand before each."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str | None, tokens: tuple[int, ...], lead: tuple[int, ...]
    ) -> "Echo":
        """Return the echo of a prompt whose first tokens, `lead`, no text shows. `text` is None for token ids."""
        decoder, read, offsets = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        before = lead if tokens[: len(lead)] == lead else ()
        for token in tokens[len(before) :]:
            own = token_bytes(tokenizer, token)
            codes = token_text(tokenizer, token).encode() if own is None else own
            # A character that was never finished.
            is_broken = bool(decoder.getstate()[0] and codes) and codes[0] >> 6 != 0b10
            offsets.append(len(read) + is_broken)
            read += decoder.decode(codes)
        shown = (read if text is None else text).removeprefix(_added_space(tokenizer, tokens[len(before) :], text))
        moved = len(read) - len(shown)
        return cls(shown, tokens, (0,) * len(before) + tuple(max(each - moved, 0) for each in offsets))

    @property
    def piece(self) -> Piece:
        """The prompt as if its first token had given out all of its text."""
        return Piece(self.tokens[0], self.text)

    def scored(self, logprobs: Sequence[tuple[Logprob, ...]]) -> list[Event]:
        """Return the prompt as if it were written, token by token. The first token has no log probabilities."""
        rest = zip(self.tokens[1:], logprobs, self.offsets[1:], strict=True)
        return [self.piece, *(Piece(token, "", each, offset) for token, each, offset in rest)]

    def before(self, event: Event) -> list[Event]:
        """An event of the engine as that of a text which the prompt begins."""
        if isinstance(event, PromptLogprobs):
            return self.scored(event.logprobs)
        if isinstance(event, Piece):
            return [replace(event, offset=event.offset + len(self.text))]
        return [event]


def _added_space(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], text: str | None) -> str:
    """The space that a tokenizer puts before a text, which is not the text's, if there is one."""
    if not tokens or text is not None:
        return ""
    alone = str(tokenizer.decode([tokens[0]]))
    return " " if token_text(tokenizer, tokens[0]) == f" {alone}" else ""


LOG: Final = logging.getLogger("windlass.serve")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the `spans` [start, stop) of those that are chunks.

    `form`: the forms of thoughts and calls in the reply. `has_begun_thought`: whether it continues a thought.
    """

    ids: Sequence[int]
    spans: tuple[tuple[int, int], ...] = ()
    form: ReplyForm = PLAIN
    has_begun_thought: bool = False
    ends: tuple[int, ...] = ()
    """See `ends` and `head` of `Request`."""
    head: int = 0
    pins: int = 0
    """The number of pinned messages. The first ones belong to the head."""
    pinned: tuple[tuple[int, int], ...] = ()
    """See `pins` of `Request`."""

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], chunks: Sequence[tuple[int, ...]]) -> "Prompt":
        """Texts with a chunk between each two."""
        if not chunks:
            return cls(texts[0])
        ids, spans = list(texts[0]), list[tuple[int, int]]()
        for chunk, after in zip(chunks, texts[1:], strict=True):
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += [*chunk, *after]
        return cls(tuple(ids), tuple(spans))


class PromptTokenizer:
    """A tokenizer that encodes one text at a time.

    `ends` are the model's end-of-text tokens (default: the tokenizer's), and `vocabulary` is the number of its logits.
    With `marks_messages`, prompts tell where their messages end, so that prefixes are cached there.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], vocabulary: int, marks_messages: bool = True
    ) -> None:
        own = tokenizer.eos_token_id
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.ends = tuple(ends) or (() if own is None else (int(own),))
        self.infill, self._marks_messages = Infill.of(tokenizer), marks_messages
        self._lock, self._told = Lock(), set[str]()
        self._encoder, self._ends = PromptEncoder(tokenizer), MessageEnds()
        self._special = special_tokens(tokenizer)
        # The first call may change settings of the tokenizer, which must happen before other threads decode with it.
        encode(tokenizer, "a", True)

    def encoded(self, text: str, has_special: bool = True) -> tuple[int, ...]:
        """The token ids of a text, with those that a text begins with if `has_special`."""
        with self._lock:
            return tuple(encode(self.tokenizer, text, has_special))

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises: BadField for an id outside of the vocabulary."""
        self.check("tokens", tokens)
        return str(self.tokenizer.decode(list(tokens)))

    def check(self, name: str, tokens: Sequence[int]) -> None:
        """Raises: BadField for an id outside of the vocabulary."""
        bounds = bounds_of(tokens) if tokens else ()
        wrong = next((token for token in bounds if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise BadField(name, f"has the token id {wrong}, but ids are from 0 to {self.vocabulary - 1}")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """The token ids of a conversation, up to the start of the reply, and which of them are chunks.

        `variables` are of the template, beside messages and tools.

        Raises: ApiError for a model without a chat template, messages that it refuses, or variables that it has not.
        """
        if not has_template(self.tokenizer):
            raise ApiError(
                400, "this model has no chat template. Send a prompt to /v1/completions", "messages", "no_chat_template"
            )
        # A mark stands for each chunk, so that the template cannot join its tokens with those around it.
        mark, chunks, (pins, later) = secrets.token_hex(16), chunks_of(messages), pins_of(messages)
        numbers = iter(range(len(chunks)))
        given = plain_messages(messages, lambda _: f"<{mark}-{next(numbers)}>")
        with self._lock:
            source, given, text, form = self._rendered(given, tools, variables)
            reply = reply_form(source, form, bool(tools))
            begun_thought = reply.thoughts is not None and text.rstrip().endswith(reply.thoughts.opening)
            text = without_start(self.tokenizer, text)
            render = renderer(self.tokenizer, form, tools, variables)
            ends = (
                ()
                if chunks or not self._marks_messages
                else self._message_ends(render, (form, tools, variables), given, text)
            )
            head = head_tokens(self.tokenizer, render, given, text)

            def until(count: int) -> int:
                tokens = tokens_until(self.tokenizer, render, given[:count], text)
                if tokens is None:
                    raise BadField(PIN, "needs a chat template that shows where a message ends. Leave it out")
                return tokens

            head = max(head, until(pins) if pins else 0)
            pinned = tuple((until(at), until(at + 1)) for at in later)
            texts = []
            for number in range(len(chunks)):
                before, *behind = text.split(f"<{mark}-{number}>")
                if len(behind) != 1 or mark in before:
                    raise ApiError(
                        400,
                        "this model's chat template does not show each chunk once, in its order. Send them as text",
                        "messages",
                        "chat_template_failed",
                    )
                texts.append(before)
                text = behind[0]
            prompt = Prompt.of(self._pieces([*texts, text]), [self._chunk(each) for each in chunks])
            return replace(
                prompt,
                form=reply,
                has_begun_thought=begun_thought,
                ends=ends,
                head=head,
                pins=pins + len(later),
                pinned=pinned,
            )

    def reads(self, name: str) -> bool:
        """Return True if the chat template reads a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)) is not None

    def behind(self, chunks: Sequence[Chunk], prompt: Prompt) -> Prompt:
        """A prompt that chunks stand before: behind the tokens that a text begins with, where it has them."""
        with self._lock:
            lead = self._lead()
            has_lead = bool(lead) and prompt.ids[: len(lead)] == lead
            texts: list[tuple[int, ...]] = [lead if has_lead else (), *((),) * (len(chunks) - 1)]
            rest = prompt.ids[len(lead) * has_lead :]
            return Prompt.of([*texts, rest], [self._chunk(each) for each in chunks])

    def around(self, prompt: tuple[int, ...], suffix: str) -> tuple[int, ...]:
        """A prompt with a gap behind it, and `suffix` behind the gap.

        Raises: BadField where the tokenizer marks none.
        """
        if self.infill is None:
            raise BadField(
                "suffix",
                "needs a tokenizer with tokens around a gap, such as <|fim_prefix|>. Leave it out",
                "unsupported_parameter",
            )
        with self._lock:
            lead = self._lead()
            before = prompt[len(lead) :] if prompt[: len(lead)] == lead else prompt
            return (*lead, *self.infill.prompt(before, encode_inside(self.tokenizer, suffix)))

    def echo(self, text: str | None, tokens: tuple[int, ...]) -> Echo:
        """Return a prompt as an answer begins with it. `text` is None where the prompt came as token ids."""
        with self._lock:
            return Echo.of(self.tokenizer, text, tokens, self._lead())

    def _lead(self) -> tuple[int, ...]:
        """The tokens that a text begins with, whatever it is."""
        bare, start = encode(self.tokenizer, "a", False), encode(self.tokenizer, "a", True)
        return tuple(start[: len(start) - len(bare)] if start[-len(bare) :] == bare else ())

    def _pieces(self, texts: Sequence[str]) -> list[Sequence[int]]:
        first, *rest = texts
        return [self._encoder.tokenized(first).ids, *(tuple(encode(self.tokenizer, each, False)) for each in rest)]

    def _message_ends(
        self, render: Render, context: tuple[Any, ...], messages: Sequence[Mapping[str, Any]], text: str
    ) -> tuple[int, ...]:
        ends = self._ends.of(render, repr(context), messages, text)
        return message_ends(self.tokenizer, self._encoder.tokenized(text), ends)

    def _chunk(self, chunk: Chunk) -> tuple[int, ...]:
        ids = tuple(encode(self.tokenizer, chunk.text, False))
        if not ids:
            raise BadField("chunks", f"must have tokens, and {shown(chunk.text)} has none")
        return ids

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, list[dict[str, Any]], str, TemplateLayout]:
        """Return the template, the messages for it, its text for them, and the form in which it was given them."""
        given: Any = [dict(each) for each in tools] or None
        try:
            source = self.tokenizer.get_chat_template(tools=given)
            _check_variables(variables, source)
            messages = fit_to_template(messages, source)
            text, form = rendered(self.tokenizer, messages, tools, variables)
        except BadField:
            raise
        except Exception as error:  # a template is a program of the model's authors, and may raise anything
            raise ApiError(400, template_problem(error, 200), "messages", "chat_template_failed") from error
        for line in form.told():
            if line not in self._told:
                self._told.add(line)
                LOG.warning("this model's chat template %s", line)
        return source, messages, text, form

    def stops(self, strings: Sequence[str]) -> Stops:
        """Return the stops of a text: the model's own tokens, and these strings."""
        return stops_of(list(strings) or None, self.tokenizer, self.ends, self.vocabulary)

    def marks(self, text: str) -> dict[str, int]:
        """The special tokens whose text is part of `text`, with their ids."""
        return {mark: index for mark, index in self._special.items() if mark in text}

    def hidden(self, text: str) -> frozenset[int] | None:
        """The special tokens that a reply does not show, where those in `text` are shown. None: all of them."""
        marks = self.marks(text)
        return frozenset(index for mark, index in self._special.items() if mark not in marks) if marks else None

    def shown(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, and its bytes, which the text does not show for part of a character. Takes no lock."""
        codes = token_bytes(self.tokenizer, token)
        return token_text(self.tokenizer, token), None if codes is None else list(codes)


def fit_to_template(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages with the names and ids that a chat template asks for.

    gpt-oss reads a thought as `thinking`, and refuses one beside a text and a call. Mistral refuses ids of calls that
    are not nine letters and digits.
    """
    if "message.thinking" in source:
        messages = [_with_thinking(each) for each in messages]
    return _with_short_ids(messages) if MISTRAL_LIST.evidence.search(source) else messages


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    if "reasoning_content" not in message or ("tool_calls" in message and message["content"]):
        return rest
    return rest | {"thinking": message["reasoning_content"]}


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls, results = count(), count()
    found = []
    for message in messages:
        if message["role"] == "tool":
            message = message | {"tool_call_id": _short_id(message.get("tool_call_id"), next(results))}
        if "tool_calls" in message:
            made = [each | {"id": _short_id(each.get("id"), next(calls))} for each in message["tool_calls"]]
            message = message | {"tool_calls": made}
        found.append(message)
    return found


def _short_id(given: Any, number: int) -> str:
    """An id of nine letters and digits. Calls and results without ids belong together in their order."""
    text = given if isinstance(given, str) else str(number)
    return text if SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def reply_form(source: str, form: TemplateLayout, has_tools: bool) -> ReplyForm:
    """The forms that a chat template shows. A template that shows no tools leaves them to the system text."""
    found = ReplyForm.of(source)
    return replace(found, calls=HERMES) if has_tools and not form.has_tools else found


def _check_variables(variables: Mapping[str, Any], template: str) -> None:
    """Raises: BadField for a name that the template does not read, or that is the tokenizer's own."""
    own = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    for name in variables:
        if name in own or re.search(rf"\b{re.escape(name)}\b", template) is None:
            raise BadField(f"chat_template_kwargs.{name}", "is nothing that this model's chat template reads")
