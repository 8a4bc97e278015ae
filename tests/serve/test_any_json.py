"""Whatever JSON a route is sent, it answers with JSON, and with 2xx or 4xx."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers.serving import NAME, ScriptedService, Served, ask, chat, complete, says, serving
from windlass.serve.errors import RequestLimits
from windlass.serve.messages import MessagesPrompt, MessagesRequest
from windlass.serve.responses import ResponsesRequest
from windlass.serve.schema import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = RequestLimits(characters=5000, texts=6)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("fine")), request=LIMITS) as server:
        yield server


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
BODIES: dict[str, type[Body]] = {
    CHAT: ChatRequest,
    COMPLETIONS: CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": MessagesPrompt,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
FIELDS = {route: sorted(body.model_fields) for route, body in BODIES.items()}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: chat(),
    COMPLETIONS: complete(),
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"model": NAME, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]},
    "/v1/messages/count_tokens": {"model": NAME, "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


CHUNK = {"type": "chunk", "text": "a"}
CALL = {"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"}
LIKELY: list[Any] = [
    {"type": "json_object"},
    {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}},
    {"recompute": "first(3)"},
    {"texts": ["a", "b"], "recompute": "divergent(0.5)"},
    {"lookup": False, "store": True, "name": "a"},
    [{"role": "user", "content": [CHUNK, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": [{"type": "input_text", "text": "b"}, CHUNK], "id": "a"}],
    [{"role": "user", "content": [CHUNK, CHUNK, {"type": "output_text"}]}],
    [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]}, CALL],
    [CALL, {"type": "function_call_output", "call_id": "a", "output": [CHUNK]}],
    [{"role": "assistant", "content": "a", "reasoning_content": "b"}],
    [{"type": "function", "name": "a", "parameters": {"type": "object"}}],
    [{"type": "function", "function": {"name": "a"}}],
    {"type": "function", "name": "a"},
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}]}],
    [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}, {"type": "tool_use", "input": {}}]}],
    [{"name": "a", "input_schema": {"properties": [5]}}, {"type": "bash_20250124"}],
    {"type": "any", "name": "a"},
]


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_is_answered_by_json(served: Served, data: st.DataObject) -> None:
    route = data.draw(st.sampled_from(sorted(FIELDS)))
    names = st.sampled_from(FIELDS[route]) | st.text(max_size=12)
    likely = st.sampled_from([0, 1, 2, 0.5, True, "auto", "plain", "recent", [1], ["a"], {}, *LIKELY])
    fields = data.draw(st.dictionaries(names, likely | JSON, max_size=3))
    document = {**GOOD[route], **fields} if data.draw(st.booleans()) else data.draw(JSON)
    answer = ask(served.port, route, document)
    assert answer.status == 200 or 400 <= answer.status < 500, (answer.status, document, answer.body)
    if "text/event-stream" in answer.headers["content-type"]:
        ends = (b"data: [DONE]\n\n", b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
        assert answer.body.endswith(ends) or b"event: response.completed\n" in answer.body
        lines = [line for line in answer.body.split(b"\n") if line.startswith(b"data: {")]
        assert all(isinstance(json.loads(line[6:]), dict) for line in lines)
    else:
        assert (answer.document.get("error") is not None) == (answer.status != 200)
