"""OpenAI's own client, sync and async, streamed and not, whose types define an answer."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.serving import NAME, ScriptedService, Served, says, serving, usage
from windlass.engine.request import Event, Finish, Logprob, Piece, Request

TEXT = "It is late."
MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What time is it?"}]
TOOLS: Any = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says(TEXT))) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    served.service.script = says(TEXT)
    with served.openai_client() as made:
        yield made


def told_of(document: Any) -> Any:
    """Our own part of an answer."""
    return document.model_extra["windlass"]


def asked(served: Served) -> Request:
    return served.service.requests[-1]


def test_a_chat(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, max_completion_tokens=50, seed=3)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    took = answer.usage
    prompt = len(asked(served).prompt)
    assert (took.prompt_tokens, took.completion_tokens, took.total_tokens) == (prompt, len(TEXT), prompt + len(TEXT))
    assert took.prompt_tokens_details.cached_tokens == 3
    told = told_of(took)
    numbers = {name: told[name] for name in ("seen", "kept", "evicted", "recalled", "bytes")}
    seen = prompt + len(TEXT)
    assert numbers == {"seen": seen, "kept": 7, "evicted": seen - 7, "recalled": 2, "bytes": 4096}
    assert (told["options"]["budget"], told["options"]["policy"]) == (96, "Recent()")
    assert answer.model_extra == {}
    words = served.server.tokenizer
    assert words.decoded(asked(served).prompt) == (
        "<|bos|>[system]Be short.<|eos|>\n[user]What time is it?<|eos|>\n[assistant]"
    )
    assert (asked(served).max_tokens, asked(served).sampling.seed, asked(served).sampling.temperature) == (50, 3, 1.0)


def test_a_streamed_chat(served: Served, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    first, *middle, last, usage_chunk = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in middle) == TEXT
    assert {chunk.choices[0].delta.role for chunk in middle} == {None}
    assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("stop", None)
    assert told_of(last)["evicted"] == len(asked(served).prompt) + len(TEXT) - 7
    assert usage_chunk.choices == []
    assert usage_chunk.usage.completion_tokens == len(TEXT)
    assert [chunk.usage for chunk in (first, *middle, last)] == [None] * (len(middle) + 2)
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in (first, *middle, last, usage_chunk)}) == 1


def test_a_stream_without_usage_has_no_usage(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True))
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_completion(served: Served, client: openai.OpenAI, is_streamed: bool) -> None:
    given = client.completions.create(model=NAME, prompt="He was", stream=is_streamed)
    answers: list[Any] = list(given) if is_streamed else [given]
    assert "".join(each.choices[0].text for each in answers) == TEXT
    assert [each.choices[0].finish_reason for each in answers][-1] == "stop"
    assert {each.object for each in answers} == {"text_completion"}
    assert asked(served).max_tokens == 16
    assert served.server.tokenizer.decoded(asked(served).prompt) == "<|bos|>He was"


def test_the_asynchronous_client(served: Served) -> None:
    served.service.script = says(TEXT)

    async def talk() -> tuple[list[str | None], str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            chats = [client.chat.completions.create(model=NAME, messages=MESSAGES) for _ in range(5)]
            whole = [answer.choices[0].message.content for answer in await asyncio.gather(*chats)]
            stream = await client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True)
            return whole, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(talk()) == ([TEXT] * 5, TEXT)


def test_several_choices_and_prompts(served: Served, client: openai.OpenAI) -> None:
    def numbered(request: Request) -> Iterator[Event | None]:
        text = f"{request.prompt[-1]}/{request.sampling.seed}"
        yield Piece(5, text)
        yield Finish("stop", usage(request, 1))

    served.service.script = numbered
    answer = client.completions.create(model=NAME, prompt=[[7, 8], [9]], n=2, seed=40)
    assert [(each.index, each.text) for each in answer.choices] == [(0, "8/40"), (1, "8/41"), (2, "9/40"), (3, "9/41")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)
    stream = client.chat.completions.create(model=NAME, messages=MESSAGES, n=3, seed=4, stream=True)
    texts = {0: "", 1: "", 2: ""}
    ends = set()
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends |= {chunk.choices[0].index} if chunk.choices[0].finish_reason else set()
    assert [text.partition("/")[2] for text in texts.values()] == ["4", "5", "6"]
    assert ends == {0, 1, 2}


def likely(request: Request) -> Iterator[Event | None]:
    for token, text in ((65, ""), (66, "ab"), (67, "c")):
        others = tuple(Logprob(each, -float(each)) for each in (token, 90, 91)[: request.top_logprobs])
        yield Piece(token, text, (Logprob(token, -0.5 if token != 67 else float("-inf")), *others))
    yield Finish("length", usage(request, 3))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_log_probabilities(served: Served, client: openai.OpenAI, is_streamed: bool) -> None:
    served.service.script = likely
    given: Any = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=is_streamed
    )
    choices = [chunk.choices[0] for chunk in (list(given) if is_streamed else [given])]
    content = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    shown = served.server.tokenizer.shown
    assert [(each.token, each.bytes) for each in content] == [shown(65), shown(66), shown(67)]
    assert [each.logprob for each in content] == [-0.5, -0.5, -9999.0]
    assert [[top.logprob for top in each.top_logprobs] for each in content] == [[-65, -90], [-66, -90], [-67, -90]]
    old: Any = client.completions.create(model=NAME, prompt="He", logprobs=2, stream=is_streamed)
    found = [chunk.choices[0].logprobs for chunk in (list(old) if is_streamed else [old])]
    tokens = [token for each in found if each for token in each.tokens]
    assert tokens == [shown(token)[0] for token in (65, 66, 67)]
    assert [value for each in found if each for value in each.token_logprobs] == [-0.5, -0.5, -9999.0]
    tops = [{*top.values()} for each in found if each for top in each.top_logprobs]
    assert tops == [{-65.0, -90.0, -0.5} - {-65.0}, {-66.0, -90.0, -0.5} - {-66.0}, {-9999.0, -90.0}]
    assert asked(served).top_logprobs == 2


def test_everything_that_can_be_asked_reaches_the_engine(served: Served, client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        stop=["\n", "<|eos|>"],
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"17": -100, "18": 2},
        user="anna",
        extra_body={
            "top_k": 11,
            "min_p": 0.05,
            "budget": 64,
            "policy": "snapkv",
            "positions": "self_extend(4, 16)",
            "store": "int8",
            "recall": 16,
            "sinks": 2,
            "window": 8,
        },
    )
    request = asked(served)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 11, 0.05)
    assert (request.stops.strings, request.stops.ids) == (("\n",), {1})
    assert (request.presence_penalty, request.frequency_penalty) == (0.25, -0.5)
    assert (dict(request.logit_bias), request.max_tokens) == ({17: -100.0, 18: 2.0}, 9)
    labels = request.options.labels()
    assert {name: labels[name] for name in ("budget", "sinks", "window", "store", "recall")} == {
        "budget": 64,
        "sinks": 2,
        "window": 8,
        "store": "int8",
        "recall": 16,
    }
    assert str(labels["policy"]).startswith("SnapKV(")
    assert str(labels["positions"]) == "self_extend(4, 16)"


def test_users_of_one_key_share_nothing(served: Served, client: openai.OpenAI) -> None:
    tenants = []
    for user in ("anna", "ben", None):
        extra = {} if user is None else {"user": user}
        client.chat.completions.create(model=NAME, messages=MESSAGES, extra_body=extra)
        tenants.append(asked(served).tenant)
    assert len({*tenants}) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}])
def test_calls_of_functions(served: Served, client: openai.OpenAI, choice: Any, is_streamed: bool) -> None:
    written = '{"name": "clock", "arguments": {"zone": "CET"}}'
    before = "Let me look. " if choice == "auto" else ""
    served.service.script = says(f"{before}<tool_call>{written}</tool_call>" if choice == "auto" else written)
    given: Any = client.chat.completions.create(
        model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice, stream=is_streamed
    )
    if is_streamed:
        chunks = [chunk.choices[0] for chunk in given]
        text = "".join(each.delta.content or "" for each in chunks)
        first, *more = [call for each in chunks for call in each.delta.tool_calls or ()]
        assert (first.index, first.type, first.function.arguments) == (0, "function", "")
        assert {(each.index, each.id, each.function.name) for each in more} == {(0, None, None)}
        assert len(more) > 1
        whole = "".join(each.function.arguments for each in more)
        calls = [first.model_copy(update={"function": first.function.model_copy(update={"arguments": whole})})]
        reason = chunks[-1].finish_reason
    else:
        choice_given = given.choices[0]
        text, calls, reason = (
            choice_given.message.content or "",
            choice_given.message.tool_calls,
            choice_given.finish_reason,
        )
    assert (text.strip(), reason) == (before.strip(), "tool_calls")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [("clock", {"zone": "CET"})]
    assert "[tools]" in served.server.tokenizer.decoded(asked(served).prompt)
    assert (asked(served).grammar is None) == (choice == "auto")
    told = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "10 pm"},
    ]
    served.service.script = says("Late.")
    answer = client.chat.completions.create(model=NAME, messages=told, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == "Late."
    shown = served.server.tokenizer.decoded(asked(served).prompt)
    assert "[tool]10 pm" in shown
    assert "[tools]" not in shown


def test_the_models(client: openai.OpenAI) -> None:
    assert [(model.id, model.object) for model in client.models.list()] == [(NAME, "model")]


def test_errors_are_those_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="has the model finder-3m only"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, web_search_options={})
    assert (caught.value.param, caught.value.code) == ("web_search_options", "unsupported_parameter")


def test_log_probabilities_do_not_wait_for_a_text_of_others(served: Served, client: openai.OpenAI) -> None:
    """They are written in the event loop. While a long prompt is tokenized, it must go on."""
    served.service.script = likely
    with served.server.tokenizer._lock:
        answer = client.with_options(timeout=5.0).completions.create(model=NAME, prompt=[5, 6], logprobs=1)
    assert answer.choices[0].logprobs is not None
