"""`/v1/responses` as OpenAI's own client has it: streamed and not, and refusals."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.serving import NAME, ScriptedService, Served, ask, events, says, serving
from windlass.engine.request import Failure, Piece

TEXT = "It is late."
CLOCK: Any = {"type": "function", "name": "clock", "description": "The time.", "parameters": {"type": "object"}}
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says(TEXT))) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    served.service.script = says(TEXT)
    with served.openai_client() as made:
        yield made


def read_by(served: Served) -> str:
    """The last prompt as text."""
    return served.server.tokenizer.decoded(served.service.requests[-1].prompt)


def test_an_answer(served: Served, client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(
        model=NAME, input="What time is it?", instructions="Be short.", max_output_tokens=50, store=False, top_p=0.5
    )
    assert (answer.output_text, answer.status, answer.object, answer.store) == (TEXT, "completed", "response", False)
    assert (answer.instructions, answer.max_output_tokens, answer.top_p) == ("Be short.", 50, 0.5)
    [message] = answer.output
    assert (message.type, message.role, message.status, message.content[0].type) == (
        "message",
        "assistant",
        "completed",
        "output_text",
    )
    request = served.service.requests[-1]
    prompt = len(request.prompt)
    used = answer.usage
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (prompt, len(TEXT), prompt + len(TEXT))
    assert used.input_tokens_details.cached_tokens == 3
    assert used.model_extra["windlass"]["evicted"] == prompt + len(TEXT) - 7
    assert (request.max_tokens, request.sampling.top_p) == (50, 0.5)
    assert read_by(served) == "<|bos|>[system]Be short.<|eos|>\n[user]What time is it?<|eos|>\n[assistant]"


def test_a_stream(client: openai.OpenAI) -> None:
    found: list[Any] = list(client.responses.create(model=NAME, input="What time is it?", stream=True))
    assert [each.type for each in found[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert [each.type for each in found[-4:]] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert {each.type for each in found[4:-4]} == {"response.output_text.delta"}
    assert "".join(each.delta for each in found[4:-4]) == TEXT == found[-4].text
    assert [each.sequence_number for each in found] == [*range(len(found))]
    last = found[-1].response
    assert (last.output_text, last.usage.output_tokens, last.id) == (TEXT, len(TEXT), found[0].response.id)
    assert len({each.item_id for each in found[3:-3]} | {last.output[0].id}) == 1


def test_the_client_puts_a_stream_together(client: openai.OpenAI) -> None:
    with client.responses.stream(model=NAME, input="What time is it?") as stream:
        assert stream.get_final_response().output_text == TEXT


def test_an_answer_that_is_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=NAME, input="What time is it?", max_output_tokens=4)
    assert (answer.output_text, answer.status) == (TEXT[:4], "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    last: Any = list(client.responses.create(model=NAME, input="x", max_output_tokens=4, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


def test_a_conversation_comes_whole(served: Served, client: openai.OpenAI) -> None:
    """With the answer as it was sent, which is an item of the next input."""
    first = client.responses.create(model=NAME, input="What time is it?")
    items: Any = [
        {"role": "user", "content": "What time is it?"},
        *(item.model_dump() for item in first.output),
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
    ]
    client.responses.create(model=NAME, input=items)
    assert (
        read_by(served)
        == f"<|bos|>[user]What time is it?<|eos|>\n[assistant]{TEXT}<|eos|>\n[user]Sure?<|eos|>\n[assistant]"
    )


def test_own_fields_and_schemas(served: Served, client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["a"]}, "strict": True}}
    items: Any = [
        {"role": "user", "content": [{"type": "chunk", "text": "The sea."}, {"type": "input_text", "text": "?"}]}
    ]
    own = {"budget": 64, "cache": {"name": "novel"}, "chunks": {"recompute": "none"}, "seed": 5, "store": "int8"}
    client.responses.create(model=NAME, input=items, text=form, user="anna", extra_body=own)
    request = served.service.requests[-1]
    assert request.grammar is not None
    assert request.parts is not None
    assert (request.options.budget, request.reuse.name, request.sampling.seed) == (64, "novel", 5)
    assert (request.options.store.name, str(request.parts.recompute), request.tenant) == ("int8", "none", "/anna")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "gzip"}, "store"),
        ({"tools": [{"type": "function", "function": {"name": "clock"}}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"chat_template_kwargs": {"loud": True}}, "chat_template_kwargs.loud"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"reasoning": {"depth": "x"}}, "reasoning.depth"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "always"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input.0"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"input": [{"type": "function_call_output", "output": "y"}]}, "input.0.call_id"),
        ({"input": ["x", {"type": "function_call", "name": "y", "arguments": "{}"}]}, "input.0"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "y", "arguments": 5}]}, "input.0.arguments"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"input": [{"role": "user", "content": [5]}]}, "input.0.content.0"),
    ],
)
def test_what_is_refused_by_name(served: Served, given: dict[str, Any], param: str) -> None:
    answer = ask(served.port, PATH, {"input": "x"} | given)
    assert (answer.status, answer.document["error"]["param"]) == (400, param)


def test_what_null_stands_for(served: Served) -> None:
    assert ask(served.port, PATH, {"input": "x", "previous_response_id": None, "tools": None}).status == 200


def test_a_stream_that_fails(served: Served) -> None:
    served.service.script = events(Piece(5, "a"), Failure("it took too long", is_ours=False))
    *_, failed, last = ask(served.port, PATH, {"input": "x", "stream": True}).body.strip().split(b"\n\n")
    response = json.loads(failed.partition(b"\ndata: ")[2])["response"]
    assert failed.startswith(b"event: response.failed\n")
    assert (response["status"], response["error"]["message"]) == ("failed", "it took too long")
    name, _, data = last.partition(b"\ndata: ")
    told = json.loads(data)
    assert (name, told["type"], told["message"]) == (b"event: error", "error", "it took too long")
