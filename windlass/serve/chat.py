"""The documents of the two routes that write: a chat's, and a completion's."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from windlass.engine.request import Finish, Piece, Usage
from windlass.serve.errors import DONE, ApiError, comment, event
from windlass.serve.parsers import Call, CallPart, ReplyReader, TextPart
from windlass.serve.prompts import Echo, PromptTokenizer

LEAST: Final = -9999.0  # OpenAI's value for impossible tokens, as JSON has no infinity

Pieces = Sequence[Piece]


def of_chat(pieces: Pieces, tokenizer: PromptTokenizer, top: int) -> dict[str, Any]:
    """`logprobs` of a choice of a chat, or of a part of it."""

    def one(token: int, value: float) -> dict[str, Any]:
        text, codes = tokenizer.shown(token)
        return {"token": text, "logprob": max(value, LEAST), "bytes": codes}

    return {
        "content": [
            one(own.token, own.value) | {"top_logprobs": [one(each.token, each.value) for each in others[:top]]}
            for own, *others in (piece.logprobs for piece in pieces if piece.logprobs)
        ],
        "refusal": None,
    }


def of_completion(pieces: Pieces, tokenizer: PromptTokenizer, top: int) -> dict[str, Any]:
    """`logprobs` of a choice of a completion, or of a part of it. A prompt's first token has none."""
    tops: list[dict[str, float] | None] = []
    for piece in pieces:
        if not piece.logprobs:
            tops.append(None)
            continue
        own, *others = piece.logprobs
        # OpenAI lists the sampled token with the likeliest ones, even if it is not among them. Of two with one text,
        # the likelier is shown.
        each = [own, *(other for other in others[:top] if other.token != own.token)]
        tops.append(
            {_name(one.token, tokenizer): max(one.value, LEAST) for one in sorted(each, key=lambda one: one.value)}
        )
    return {
        "tokens": [_name(piece.token, tokenizer) for piece in pieces],
        "token_logprobs": [max(piece.logprobs[0].value, LEAST) if piece.logprobs else None for piece in pieces],
        "top_logprobs": tops,
        "text_offset": [piece.offset for piece in pieces],
    }


def _name(token: int, tokenizer: PromptTokenizer) -> str:
    """A token's text, or, of a part of a character, its bytes as OpenAI writes them, which have no other place."""
    text, codes = tokenizer.shown(token)
    if codes is None or bytes(codes) == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{code:02x}" for code in codes)


Options = Mapping[str, int | str | None]


def windlass_of(usages: Sequence[Usage], options: Options, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """The tokens that the cache read, keeps and has evicted, summed over texts, and its options.

    `left_out` has a note for each part of the request that the answer is without.
    """
    names = ("seen", "kept", "evicted", "recalled", "recomputed", "bytes")
    notes = {"left_out": [*left_out]} if left_out else {}
    return {name: sum(getattr(each, name) for each in usages) for name in names} | {"options": dict(options)} | notes


def usage_of(usages: Sequence[Usage], choices: int, options: Options, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """OpenAI's usage of an answer. Each prompt has `choices` texts, and counts once."""
    firsts = usages[::choices]
    prompt, written = sum(each.prompt for each in firsts), sum(each.written for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.cached for each in firsts),
            "moved_tokens": sum(each.moved for each in firsts),
        },
        "windlass": windlass_of(usages, options, left_out),
    }


@dataclass
class PartialText:
    """One text so far.

    The `reader` reads thoughts and calls of functions out of it. With an `echo`, the text begins with the prompt.
    """

    reader: ReplyReader | None = None
    echo: Echo | None = None
    text: str = ""
    thought: str = ""
    thought_tokens: int = 0
    """Number of tokens up to the end of the thought, including its marks (0: no thought)."""
    pieces: list[Piece] = field(default_factory=list)
    called: list[Call] = field(default_factory=list)
    finished: Finish | None = None

    def add(self, pieces: Sequence[Piece]) -> TextPart:
        """Add new pieces, and return the parts that can now be shown."""
        self.pieces += pieces
        if self.reader is None:
            return self._note(TextPart("".join(piece.text for piece in pieces)))
        said, tokens = TextPart(), 0
        for piece in pieces:
            tokens += self.reader.is_thinking
            said = said.then(self.reader.feed(piece.text))
        self.thought_tokens += tokens
        return self._note(said)

    def end(self, finished: Finish) -> TextPart:
        """Record the end, and return the parts that were held back until then."""
        self.finished = finished
        said = self._note(TextPart() if self.reader is None else self.reader.end())
        self.thought_tokens *= bool(self.thought)
        return said

    def _note(self, said: TextPart) -> TextPart:
        self.text += said.text
        self.thought += said.thought
        for part in said.calls:
            if part.name:
                self.called.append(Call(part.name, part.arguments))
            else:
                call = self.called[-1]
                self.called[-1] = replace(call, arguments=call.arguments + part.arguments)
        return said._replace(calls=tuple(part._replace(id=self.called[part.number].id) for part in said.calls))

    @property
    def is_cut(self) -> bool:
        """Return True if the text ends within a call, because it was too long or by a stop string."""
        assert self.finished is not None
        is_ended = self.finished.reason == "length" or self.finished.stopped_by is not None
        return is_ended and self.reader is not None and self.reader.is_cut

    @property
    def reason(self) -> str:
        """OpenAI's word for why it ended."""
        assert self.finished is not None
        return "tool_calls" if self.called and not self.is_cut else self.finished.reason

    @property
    def usage(self) -> Usage:
        assert self.finished is not None
        return self.finished.usage


@dataclass(frozen=True)
class AnswerHeader:
    """Facts that all documents of an answer share. `top_logprobs` is None where no log probabilities were asked for."""

    tokenizer: PromptTokenizer
    model: str
    options: Options
    choices: int
    top_logprobs: int | None
    has_usage: bool
    left_out: tuple[str, ...] = ()
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


class AnswerDocuments(ABC):
    """The documents of a route."""

    head: AnswerHeader

    @abstractmethod
    def opening(self, at: int) -> list[dict[str, Any]]:
        """The first chunks of text `at`, which come before its text."""

    @abstractmethod
    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        """Chunks with a part of text `at`."""

    @abstractmethod
    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        """The last chunks of text `at`."""

    @abstractmethod
    def ending(self, texts: Sequence[PartialText]) -> bytes:
        """The last bytes of a stream, once all texts have ended."""

    @abstractmethod
    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        """The whole answer at once."""

    def wire(self, document: dict[str, Any]) -> bytes:
        """A chunk as it is sent."""
        return event(document)

    def waiting(self) -> bytes:
        """Bytes that show that the connection is alive."""
        return comment("waiting")

    def failure(self, error: ApiError) -> bytes:
        """The last bytes of a stream that fails."""
        return event(error.document())


class _Documents:
    """The frame around the choices."""

    def __init__(self, head: AnswerHeader, prefix: str) -> None:
        self.head = head
        self._common = {"id": prefix + head.number, "created": head.created, "model": head.model}

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.head.has_usage else {}
        return {**self._common, "object": kind, "choices": [choice], **usage}

    def whole(self, kind: str, choices: list[dict[str, Any]], texts: Sequence[PartialText]) -> dict[str, Any]:
        head = self.head
        usage = usage_of([each.usage for each in texts], head.choices, head.options, head.left_out)
        if any(each.reader is not None for each in texts):
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(each.thought_tokens for each in texts)}
        return {**self._common, "object": kind, "choices": choices, "usage": usage}

    def ending(self, kind: str, texts: Sequence[PartialText]) -> bytes:
        """Return the usage of all texts, if it was asked for, and the end."""
        return (event(self.whole(kind, [], texts)) if self.head.has_usage else b"") + DONE

    def closed(self, chunk: dict[str, Any], written: PartialText) -> dict[str, Any]:
        """Return a last chunk with the cache's figures and options, which need no `include_usage`."""
        return {**chunk, "windlass": windlass_of([written.usage], self.head.options, self.head.left_out)}


class ChatDocuments(AnswerDocuments):
    """`chat.completion`, and its chunks."""

    def __init__(self, head: AnswerHeader) -> None:
        self.head, self._documents = head, _Documents(head, "chatcmpl-")

    def opening(self, at: int) -> list[dict[str, Any]]:
        return [self._chunk(at, {"role": "assistant", "content": "", "refusal": None})]

    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        shown = {"reasoning_content": said.thought} if said.thought else {}
        if said.text or not (said.thought or said.calls):
            shown["content"] = said.text
        found: list[dict[str, Any]] = [shown] if shown else []
        found += [{"tool_calls": [_part_of_call(each)]} for each in said.calls]
        first, *rest = found
        return [self._chunk(at, first, self._logprobs(pieces)), *(self._chunk(at, each) for each in rest)]

    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        return [self._documents.closed(self._chunk(at, {}, None, written.reason), written)]

    def ending(self, texts: Sequence[PartialText]) -> bytes:
        return self._documents.ending("chat.completion.chunk", texts)

    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        choices = [
            {
                "index": at,
                "message": message_of(each),
                "logprobs": self._logprobs(each.pieces),
                "finish_reason": each.reason,
            }
            for at, each in enumerate(texts)
        ]
        return self._documents.whole("chat.completion", choices, texts)

    def _chunk(
        self, at: int, delta: dict[str, Any], found: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        choice = {"index": at, "delta": delta, "logprobs": found, "finish_reason": reason}
        return self._documents.chunk("chat.completion.chunk", choice)

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        top = self.head.top_logprobs
        return None if top is None else of_chat(pieces, self.head.tokenizer, top)


class CompletionDocuments(AnswerDocuments):
    """`text_completion`, and its chunks, which have the same name."""

    def __init__(self, head: AnswerHeader) -> None:
        self.head, self._documents = head, _Documents(head, "cmpl-")

    def opening(self, at: int) -> list[dict[str, Any]]:
        return []

    def deltas(self, at: int, said: TextPart, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        choice = {"index": at, "text": said.text, "logprobs": self._logprobs(pieces), "finish_reason": None}
        return [self._documents.chunk("text_completion", choice)]

    def closing(self, at: int, written: PartialText) -> list[dict[str, Any]]:
        choice = {"index": at, "text": "", "logprobs": None, "finish_reason": written.reason}
        return [self._documents.closed(self._documents.chunk("text_completion", choice), written)]

    def ending(self, texts: Sequence[PartialText]) -> bytes:
        return self._documents.ending("text_completion", texts)

    def answer(self, texts: Sequence[PartialText]) -> dict[str, Any]:
        choices = [
            {"index": at, "text": each.text, "logprobs": self._logprobs(each.pieces), "finish_reason": each.reason}
            for at, each in enumerate(texts)
        ]
        return self._documents.whole("text_completion", choices, texts)

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        top = self.head.top_logprobs
        return None if top is None else of_completion(pieces, self.head.tokenizer, top)


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _part_of_call(part: CallPart) -> dict[str, Any]:
    if not part.name:
        return {"index": part.number, "function": {"arguments": part.arguments}}
    return {"index": part.number, **_call(Call(part.name, part.arguments, part.id))}


def message_of(written: PartialText) -> dict[str, Any]:
    """The text as a message of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
    if written.thought:
        message["reasoning_content"] = written.thought
    if written.called:
        message |= {"content": written.text or None, "tool_calls": [_call(each) for each in written.called]}
    return message
