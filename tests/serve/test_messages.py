"""`/v1/messages`: its events, blocks and errors, and the chat that a request stands for."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import (
    NAME,
    TOOLS,
    VOCABULARY,
    Answer,
    RawClient,
    ScriptedService,
    Served,
    ask,
    events,
    says,
    serving,
    usage,
)
from windlass.engine.request import Event, Failure, Finish, Piece, Progress, Request
from windlass.serve.prompts import PromptTokenizer

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CALLS = (
    "{% for call in message.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}"
)
THOUGHTS = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
CLOCK: dict[str, Any] = {
    "name": "clock",
    "description": "Tells the time.",
    "input_schema": {"type": "object", "properties": {"zone": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>'
WROTE = f"<think>A clock?</think>I look.{CALL}\n{CALL.replace('CET', 'UTC')}"
USER = {"role": "user", "content": "Time?"}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = TOOLS + TEMPLATE.replace("{{ message.content", f"{THOUGHTS}{{{{ message.content")
    words = PromptTokenizer(with_template(template.replace("<|eos|>", f"{CALLS}<|eos|>")), [1], VOCABULARY)
    with serving(ScriptedService(says(WROTE)), words) as server:
        yield server


def body(**given: Any) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 500, "messages": [USER], **given}


def prompt(served: Served) -> str:
    return served.server.tokenizer.decoded(served.service.requests[-1].prompt)


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, whose names are the types of their data."""
    assert answer.status == 200, answer.body
    found = []
    for part in answer.body.split(b"\n\n"):
        lines = part.split(b"\n")
        if lines[0].startswith(b"event: "):
            document = json.loads(lines[1].removeprefix(b"data: "))
            assert lines[0] == f"event: {document['type']}".encode()
            found.append(document)
    return found


def rebuilt(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream make up. Blocks come one after the other."""
    assert found[0]["type"] == "message_start"
    assert found[-1] == {"type": "message_stop"}
    message, is_open, inputs = found[0]["message"], False, ""
    assert message["content"] == []
    for each in found[1:-1]:
        kind, blocks = each["type"], message["content"]
        if kind == "content_block_start":
            assert (is_open, each["index"]) == (False, len(blocks))
            blocks.append(each["content_block"])
            is_open, inputs = True, ""
        elif kind == "content_block_delta":
            assert (is_open, each["index"]) == (True, len(blocks) - 1)
            delta = each["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                inputs += delta["partial_json"]
            else:
                blocks[-1][name] += delta[name]
        elif kind == "content_block_stop":
            assert (is_open, each["index"]) == (True, len(blocks) - 1)
            is_open = False
            if inputs:
                blocks[-1]["input"] = json.loads(inputs)
        elif kind == "message_delta":
            assert not is_open
            message |= each["delta"]
            message["usage"] |= each["usage"]
            message["windlass"] = each["windlass"]
        else:
            assert kind == "ping"
    return message


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its random ids."""
    content = [{name: value for name, value in each.items() if name != "id"} for each in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_whole_message_and_its_stream(served: Served) -> None:
    served.service.script = says(WROTE)
    asked = body(tools=[CLOCK], stop_sequences=["\n\n"], system=[{"type": "text", "text": "Be short."}], top_k=5)
    whole = ask(served.port, PATH, asked).document
    length = len(served.service.requests[-1].prompt)
    assert whole["id"].startswith("msg_")
    ids = [each["id"] for each in whole["content"] if "id" in each]
    assert len({*ids}) == 2
    assert all(each.startswith("toolu_") for each in ids)
    windlass = whole.pop("windlass")
    assert (windlass["kept"], windlass["options"]["budget"]) == (7, 96)
    assert plain(whole) == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": NAME,
        "content": [
            {"type": "thinking", "thinking": "A clock?", "signature": "windlass"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "name": "clock", "input": {"zone": "CET"}},
            {"type": "tool_use", "name": "clock", "input": {"zone": "UTC"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": length - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(WROTE),
        },
    }
    found = events_of(ask(served.port, PATH, asked | {"stream": True}))
    assert [each["type"] for each in found[:2]] == ["message_start", "ping"]
    found = [each for each in found if each["type"] != "ping"]  # a slow machine sends more of them
    assert found[1]["type"] == "content_block_start"
    start = found[0]["message"]
    assert (start["stop_reason"], start["usage"]["input_tokens"], start["usage"]["output_tokens"]) == (None, length, 0)
    pieces = [each["delta"] for each in found if each["type"] == "content_block_delta"]
    assert sum("partial_json" in each for each in pieces) > 20
    streamed = rebuilt(found)
    assert streamed.pop("windlass") == windlass
    assert plain(streamed) == plain(whole)
    request = served.service.requests[-1]
    assert (request.stops.strings, request.max_tokens, request.sampling.top_k) == (("\n\n",), 500, 5)


@pytest.mark.parametrize(
    ("text", "most", "by", "reason", "content"),
    [
        ("Late.", 99, None, "end_turn", [{"type": "text", "text": "Late."}]),
        ("Late.", 3, None, "max_tokens", [{"type": "text", "text": "Lat"}]),
        ("Late.", 99, "\n", "stop_sequence", [{"type": "text", "text": "Late."}]),
        ("", 99, None, "end_turn", []),
        ("<think>So", 99, None, "end_turn", [{"type": "thinking", "thinking": "So", "signature": "windlass"}]),
        (CALL, 99, "\n", "tool_use", [{"type": "tool_use", "name": "clock", "input": {"zone": "CET"}}]),
        (CALL, 50, None, "max_tokens", [{"type": "tool_use", "name": "clock", "input": {"arguments": '{"zone":'}}]),
    ],
)
def test_the_end_of_a_message(
    served: Served, text: str, most: int, by: str | None, reason: str, content: list[dict[str, Any]]
) -> None:
    def script(request: Request) -> Iterator[Event | None]:
        yield Progress(1, 2)
        for at, sign in enumerate(text[:most]):
            yield Piece(10 + at, sign)
        yield Finish("stop" if len(text) <= most else "length", usage(request, 5), by)

    served.service.script = script
    asked = body(tools=[CLOCK])
    whole = plain(ask(served.port, PATH, asked).document)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, by if reason == "stop_sequence" else None)
    assert whole["content"] == content
    found = events_of(ask(served.port, PATH, asked | {"stream": True}))
    if content and "arguments" in content[-1].get("input", {}):
        assert [each["delta"]["partial_json"] for each in found if "partial_json" in each.get("delta", ())] == [
            *'{"zone":'
        ]
    else:
        assert plain(rebuilt(found)) == whole


TURNS: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "A clock?", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "a", "name": "clock", "input": {"zone": "CET"}, "caller": {"type": "direct"}},
            {"type": "tool_use", "id": "b", "name": "clock", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "10 pm"},
            {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "No."}]},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Soon."},
        ],
    },
    {"role": "assistant", "content": "Late."},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
]
READ = (
    "[user]Time?<|eos|>\n[assistant]<think>A clock?</think>I look."
    '<clock {"zone": "CET"}><clock {}><|eos|>\n[tool]10 pm<|eos|>\n[tool]No.<|eos|>\n[user]And?\nSoon.<|eos|>\n'
    "[assistant]Late.<|eos|>\n[system]Be kind.<|eos|>\n[tool]<|eos|>\n[assistant]"
)


def test_a_conversation_is_read_whole_and_counted(served: Served) -> None:
    served.service.script = says("Late.")
    asked = {"messages": TURNS, "system": "Be short.", "tools": [CLOCK, {"type": "bash_20250124", "name": "bash"}]}
    answer = ask(served.port, PATH, body(**asked, output_config={"effort": "low"}, metadata={"user_id": "anna"}))
    notes = answer.document["windlass"]["left_out"]
    assert notes == ["tools.1: bash_20250124", "messages.1.content.1: redacted_thinking", "output_config.effort: low"]
    text = prompt(served)
    assert text.endswith(f"[system]Be short.<|eos|>\n{READ}")
    listed = text[text.index("[tools]") + 7 : text.index("\n")]
    function = {"name": "clock", "description": "Tells the time.", "parameters": CLOCK["input_schema"]}
    assert json.loads(listed) == [{"type": "function", "function": function}]
    counted = ask(served.port, COUNT, {"model": NAME, **asked})
    assert counted.document == {"input_tokens": len(served.service.requests[-1].prompt)}


def test_our_own_fields_reach_the_engine(served: Served) -> None:
    served.service.script = says("Late.")
    asked = body(budget=64, policy="snapkv", seed=3, temperature=0.5, user="anna", cache={"store": False})
    assert ask(served.port, PATH, asked).status == 200
    request = served.service.requests[-1]
    assert (request.options.labels()["budget"], request.sampling.seed, request.sampling.temperature) == (64, 3, 0.5)
    assert (request.reuse.store, request.tenant) == (False, "/anna")


@pytest.mark.parametrize(
    ("choice", "named"),
    [({"type": "any"}, True), ({"type": "tool", "name": "clock"}, True), ({"type": "auto"}, False)],
)
def test_a_call_is_demanded(served: Served, choice: dict[str, Any], named: bool) -> None:
    served.service.script = says(CALL)
    answer = ask(served.port, PATH, body(tools=[CLOCK], tool_choice=choice)).document
    assert answer["stop_reason"] == "tool_use"
    assert (served.service.requests[-1].grammar is not None) == named


def test_no_tool_and_no_thought(served: Served) -> None:
    served.service.script = says(CALL)
    answer = ask(served.port, PATH, body(tools=[CLOCK], tool_choice={"type": "none"})).document
    assert answer["content"] == [{"type": "text", "text": CALL}]
    assert "[tools]" not in prompt(served)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = body(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert ask(served.port, PATH, asked).status == 200
    assert served.service.requests[-1].grammar is not None


@pytest.mark.parametrize(
    ("given", "status", "kind", "said"),
    [
        ({"model": "gpt"}, 404, "not_found_error", "this server has the model finder-3m only"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens is missing"),
        ({"messages": []}, 400, "invalid_request_error", "messages must have at least 1 item"),
        ({"prompt": "a"}, 400, "invalid_request_error", "prompt is not supported by this server"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "tool"}, "tools": [CLOCK]},
            400,
            "invalid_request_error",
            "tool_choice.name is missing",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "It"}]},
            400,
            "invalid_request_error",
            "messages must end with a message of the user",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0.type must be one of 'text'",
        ),
    ],
)
def test_errors_have_anthropics_form(served: Served, given: dict[str, Any], status: int, kind: str, said: str) -> None:
    answer = ask(served.port, PATH, body(**given))
    assert (answer.status, answer.document["type"], answer.document["error"]["type"]) == (status, "error", kind)
    assert said in answer.document["error"]["message"]
    assert {*answer.document} == {"type", "error"}


def test_a_thread_is_refused_so_that_anthropics_client_goes_on_without_one(served: Served) -> None:
    """The tool runner of its library asks for a thread first."""
    anthropic = pytest.importorskip("anthropic")
    served.service.script = says("Late.")

    def clock(zone: str) -> str:
        """Tell the time."""
        return zone

    tool = anthropic.beta_tool(clock)
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(model=NAME, max_tokens=50, messages=[USER], tools=[tool])
        assert [each.content[0].text for each in runner] == ["Late."]
    error = ask(served.port, PATH, body(thread={"type": "create"})).document["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_other_errors_have_anthropics_form_too(served: Served) -> None:
    for path in (PATH, COUNT):
        assert ask(served.port, path).document["error"]["type"] == "invalid_request_error"
    served.service.script = events(Piece(5, "a"), Failure("it took too long", is_ours=True))
    found = events_of(ask(served.port, PATH, body(stream=True)))
    assert found[-1] == {"type": "error", "error": {"type": "api_error", "message": "it took too long"}}
    served.service.is_full = True
    try:
        answer = ask(served.port, PATH, body())
    finally:
        served.service.is_full = False
    assert (answer.status, answer.document["error"]["type"]) == (429, "rate_limit_error")
    assert answer.headers["retry-after"] == "7"


def test_a_key_in_either_header() -> None:
    with serving(ScriptedService(says("Late.")), keys=("secret-key", "other-key")) as server:
        for path, given in ((PATH, body()), (COUNT, {"model": NAME, "messages": [USER]})):
            answer = ask(server.port, path, given)
            assert (answer.status, answer.document["error"]["type"]) == (401, "authentication_error")
            assert ask(server.port, path, given, x_api_key="wrong-key").status == 401
        tenants = []
        for headers in (
            {"x_api_key": "secret-key"},
            {"Authorization": "Bearer secret-key"},
            {"x_api_key": "other-key"},
        ):
            assert ask(server.port, PATH, body(), **headers).status == 200
            tenants.append(server.service.requests[-1].tenant)
        assert tenants[0] == tenants[1] != tenants[2]


def test_a_stream_is_kept_alive() -> None:
    with serving(ScriptedService(events(Piece(5, "a"), None)), ping_seconds=0.05) as server:
        client = RawClient(server.port)
        try:
            client.post(PATH, body(stream=True))
            blocks = [client.until(b"\n\n") for _ in range(8)]
            assert sum(b'event: ping\ndata: {"type":"ping"}' in each for each in blocks) >= 4
        finally:
            client.close()


def test_a_coding_agents_request_runs(served: Served) -> None:
    """The fields, blocks and headers that agents made for Anthropic's API send."""
    cached = {"cache_control": {"type": "ephemeral"}}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **CLOCK["input_schema"], "required": ["zone"]}
    asked = {
        "system": [
            {"type": "text", "text": "x-billing: 5f2a"},
            {"type": "text", "text": "You are an agent.", **cached},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nBe short.\n</system-reminder>"},
                    {"type": "text", "text": "Time?", **cached},
                ],
            }
        ],
        "tools": [{**CLOCK, "input_schema": schema, **cached}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "user_0_account_1_session_2"},
        "output_config": {"effort": "medium"},
        "max_tokens": 32_000,
        "temperature": 1,
        "stream": True,
    }
    served.service.script = says(WROTE)
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "interleaved-thinking-2025-05-14", "x_api_key": "a"}
    message = rebuilt(events_of(ask(served.port, f"{PATH}?beta=true", body(**asked), **headers)))
    assert [each["type"] for each in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["windlass"]["left_out"] == ["tools.1: web_search_20250305", "output_config.effort: medium"]
    assert prompt(served).endswith(
        "[system]x-billing: 5f2a\nYou are an agent.<|eos|>\n"
        "[user]<system-reminder>\nBe short.\n</system-reminder>\nTime?<|eos|>\n[assistant]"
    )


# Anthropic's own client, where it is installed.


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0) as made:
        yield made


def test_the_client_loops_over_tools(served: Served, client: Any) -> None:
    """Ten turns, whole and streamed in turn. Each block goes back as the client has it."""
    messages: list[Any] = [USER]
    for turn in range(10):
        served.service.script = says(WROTE)
        asked: dict[str, Any] = {"model": NAME, "max_tokens": 500, "messages": messages, "tools": [CLOCK]}
        if turn % 2:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert [each.type for each in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (answer.stop_reason, answer.usage.cache_read_input_tokens) == ("tool_use", 3)
        calls = [each for each in answer.content if each.type == "tool_use"]
        assert [each.input for each in calls] == [{"zone": "CET"}, {"zone": "UTC"}]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": f"{turn} pm"} for each in calls]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    turns = "".join(
        '[assistant]<think>A clock?</think>I look.<clock {"zone": "CET"}><clock {"zone": "UTC"}><|eos|>\n'
        f"[tool]{turn} pm<|eos|>\n[tool]{turn} pm<|eos|>\n"
        for turn in range(9)
    )
    assert prompt(served).endswith(f"[user]Time?<|eos|>\n{turns}[assistant]")


def test_the_client_reads_a_stream(served: Served, client: Any) -> None:
    served.service.script = says("It is late.")
    with client.messages.stream(model=NAME, max_tokens=50, messages=[USER]) as stream:
        assert "".join(stream.text_stream) == "It is late."
        assert stream.get_final_message().stop_reason == "end_turn"
    count = client.messages.count_tokens(model=NAME, messages=[USER])
    assert count.input_tokens == len(served.service.requests[-1].prompt)


def test_the_client_knows_our_errors(client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="has the model finder-3m only"):
        client.messages.create(model="claude", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="must end with a message of the user"):
        client.messages.create(model=NAME, max_tokens=5, messages=[USER, {"role": "assistant", "content": "It"}])
