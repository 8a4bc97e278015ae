"""Requests of real clients, recorded turn by turn, and an engine that writes the texts that these clients were told."""

import gzip
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import anthropic.types
import torch
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_usage import PromptTokensDetails
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from torch import Tensor

from tests.helpers.serving import Answer, RawClient
from windlass.engine.request import Grammar, Request, Ticket
from windlass.engine.scheduler import Service
from windlass.serve.prompts import PromptTokenizer

FOLDER = Path(__file__).parents[1] / "serve" / "clients"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in FOLDER.glob("*.json.gz"))
END: Final = 1
ID: Final = re.compile(r"\b(?:resp|msg|rs|fc)_[0-9a-f]+(?:_\d+)?\b")
EVENTS: Final[TypeAdapter[ResponseStreamEvent]] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENTS: Final[TypeAdapter[anthropic.types.RawMessageStreamEvent]] = TypeAdapter(
    anthropic.types.RawMessageStreamEvent
)
# Tools, calls and results as Qwen's templates write them.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{{ tools | tojson }}<|eos|>\n{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|eos|>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class Turn:
    """A request, the `text` that answered it, and whether it only adds messages to the request before.

    `ids`: the recorded ids in the answer, where later requests name some of them.
    """

    body: dict[str, Any]
    text: str
    adds: bool
    ids: list[str]


@dataclass(frozen=True)
class Recording:
    """The requests of a client, in the order in which it sent them."""

    client: str
    path: str
    headers: dict[str, str]
    turns: list[Turn]

    @classmethod
    def of(cls, name: str) -> "Recording":
        """Read a file, in which a turn has the messages beyond the first `keep` of the request before."""
        found = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
        where = "input" if found["path"] == "/v1/responses" else "messages"
        talk, turns = list[Any](), list[Turn]()
        for turn in found["turns"]:
            before, talk = talk, talk[: turn["keep"]] + turn["add"]
            adds = len(talk) > len(before) and unmarked(talk[: len(before)]) == unmarked(before)
            body = {"model": "finder-3m", **found["shared"], **turn.get("fields", {}), where: talk}
            turns.append(Turn(body, turn["text"], adds, turn.get("ids", [])))
        return cls(found["client"], found["path"], found["headers"], turns)


class Dictation(Grammar):
    """Allows these tokens, one after the other, and then the end."""

    def __init__(self, tokens: tuple[int, ...], vocabulary: int) -> None:
        self._tokens, self._vocabulary, self._at = tokens, vocabulary, 0

    def allowed(self) -> Tensor:
        mask = torch.zeros(self._vocabulary, dtype=torch.bool)
        mask[(*self._tokens, END)[self._at]] = True
        return mask

    def accept(self, token: int) -> None:
        self._at += 1


class DictatedService:
    """Makes a service write texts. `rows` has the tokens of each row at its end, which begin with one of `prompts`.

    `told` hears each text. Without it, the service is an engine, whose requests get a grammar of the text.
    """

    def __init__(self, service: Service, words: PromptTokenizer, told: Callable[[str], None] | None = None) -> None:
        self.prompts, self.rows = list[tuple[int, ...]](), list[tuple[int, ...]]()
        self._text, self._told, submit = "", told, service.submit_all

        def dictated(requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
            [request] = requests
            tokens = words.encoded(self._text, False)
            self.prompts.append(tuple(request.prompt))
            self.rows.append((*request.prompt, *tokens))
            grammar = Dictation(tokens, words.vocabulary) if told is None else None
            return submit([replace(request, grammar=grammar)], notify)

        service.submit_all = dictated  # type: ignore[method-assign]

    def dictate(self, text: str) -> None:
        """Write this text next."""
        self._text = text
        if self._told is not None:
            self._told(text)


@dataclass(frozen=True)
class Reply:
    """An answer as its client's library reads it: text, calls, and cached tokens of the prompt (None: not told)."""

    text: str
    calls: list[tuple[str, Any]]
    cached: int | None

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any], answer: Answer) -> "Reply":
        """Read an answer by the types of OpenAI's and Anthropic's libraries."""
        assert answer.status == 200, answer.body
        documents = documents_of(answer) if body.get("stream") else [answer.document]
        if path == "/v1/responses":
            return cls._of_response(documents)
        of = cls._of_messages if path.startswith("/v1/messages") else cls._of_chats
        return of(documents, bool(body.get("stream")))

    @classmethod
    def _of_chats(cls, documents: list[Any], is_streamed: bool) -> "Reply":
        if not is_streamed:
            [choice] = (found := ChatCompletion.model_validate(documents[0])).choices
            calls = [each.function for each in choice.message.tool_calls or [] if each.type == "function"]
            assert found.usage is not None
            return cls(
                choice.message.content or "",
                [(each.name, json.loads(each.arguments)) for each in calls],
                cached_of(found.usage.prompt_tokens_details),
            )
        chunks = [ChatCompletionChunk.model_validate(each) for each in documents]
        deltas = [each.choices[0].delta for each in chunks if each.choices]
        parts: dict[int, list[str]] = {}
        for call in (each for delta in deltas for each in delta.tool_calls or []):
            assert call.function is not None
            name, arguments = parts.setdefault(call.index, ["", ""])
            parts[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
        usage = chunks[-1].usage
        return cls(
            "".join(each.content or "" for each in deltas),
            [(name, json.loads(arguments)) for name, arguments in parts.values()],
            None if usage is None else cached_of(usage.prompt_tokens_details),
        )

    @classmethod
    def _of_response(cls, documents: list[Any]) -> "Reply":
        if "sequence_number" in documents[0]:
            events = [EVENTS.validate_python(each) for each in documents]
            assert [each.sequence_number for each in events] == [*range(len(events))]
            documents = [documents[-1]["response"]]
        found = Response.model_validate(documents[0])
        calls = [(each.name, json.loads(each.arguments)) for each in found.output if each.type == "function_call"]
        assert found.usage is not None
        return cls(found.output_text, calls, found.usage.input_tokens_details.cached_tokens)

    @classmethod
    def _of_messages(cls, documents: list[Any], is_streamed: bool) -> "Reply":
        if is_streamed:
            documents = [accumulated([MESSAGE_EVENTS.validate_python(each) for each in documents])]
        found = anthropic.types.Message.model_validate(documents[0])
        text = "".join(each.text for each in found.content if each.type == "text")
        calls = [(each.name, each.input) for each in found.content if each.type == "tool_use"]
        return cls(text, calls, found.usage.cache_read_input_tokens or 0)


def accumulated(events: Sequence[anthropic.types.RawMessageStreamEvent]) -> dict[str, Any]:
    """The message that the events of a stream make up."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        if event.type == "message_start":
            message = event.message.model_dump()
        elif event.type == "content_block_start":
            message["content"].append(event.content_block.model_dump())
        elif event.type == "content_block_delta" and event.delta.type == "text_delta":
            message["content"][event.index]["text"] += event.delta.text
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            inputs[event.index] = inputs.get(event.index, "") + event.delta.partial_json
        elif event.type == "message_delta":
            message["usage"] |= {name: each for name, each in event.usage.model_dump().items() if each is not None}
            message["stop_reason"] = event.delta.stop_reason
    for index, given in inputs.items():
        message["content"][index]["input"] = json.loads(given)
    return message


def documents_of(answer: Answer) -> list[Any]:
    """The documents of a stream, without comments and the mark of its end."""
    lines = [line.removeprefix(b"data: ") for line in answer.body.splitlines() if line.startswith(b"data: ")]
    return [document for line in lines if line != b"[DONE]" and (document := json.loads(line)) != {"type": "ping"}]


def cached_of(details: PromptTokensDetails | None) -> int:
    """The cached tokens of a chat's usage."""
    assert details is not None
    assert details.cached_tokens is not None
    return details.cached_tokens


@dataclass(frozen=True)
class Replayed:
    """A turn of a recording, answered. `shared`: the tokens at the start of `prompt` that an earlier row has, too.

    `written` has the text and the calls that were dictated, `row` the tokens of the prompt and of all that.
    """

    adds: bool
    prompt: tuple[int, ...]
    row: tuple[int, ...]
    shared: int
    written: tuple[str, list[tuple[str, Any]]]
    reply: Reply


def replayed(recording: Recording, port: int, service: DictatedService) -> list[Replayed]:
    """Send all requests of a recording in turn. Where a request names an answer, it gets the id that was given here."""
    found, ids = list[Replayed](), dict[str, str]()
    client = RawClient(port)
    try:
        for turn in recording.turns:
            body = with_ids(turn.body, ids)
            service.dictate(turn.text)
            client.post(recording.path, body, **recording.headers)
            answer = client.answer()
            reply = Reply.of(recording.path, body, answer)
            if turn.ids:
                ids |= dict(zip(turn.ids, dict.fromkeys(ID.findall(answer.body.decode())), strict=True))
            prompt, row = service.prompts[-1], service.rows[-1]
            shared = max((common(each, prompt) for each in service.rows[:-1]), default=0)
            found.append(Replayed(turn.adds, prompt, row, shared, parted(turn.text), reply))
    finally:
        client.close()
    return found


def with_ids(body: dict[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    """A request that names answers by the ids that they have now."""
    found: dict[str, Any] = json.loads(ID.sub(lambda match: ids.get(match[0], match[0]), json.dumps(body)))
    return found


def unmarked(value: Any) -> Any:
    """Messages without the marks of Anthropic's cache, which move from turn to turn."""
    if isinstance(value, list):
        return [unmarked(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: unmarked(each) for name, each in value.items() if name != "cache_control"}


def parted(text: str) -> tuple[str, list[tuple[str, Any]]]:
    """The answer and the calls in a text of Hermes' form."""
    answer, *calls = re.split(r"\n?<tool_call>\n|\n</tool_call>", text)
    found = [json.loads(each) for each in calls if each.strip()]
    return answer, [(each["name"], each["arguments"]) for each in found]


def common(row: Sequence[int], prompt: Sequence[int]) -> int:
    """The number of tokens at the start of both."""
    pairs = zip(row, prompt, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
