"""Fields and values without effect are accepted on every route, and those with an effect are refused."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import NAME, VOCABULARY, ScriptedService, Served, ask, says, serving
from windlass.serve.prompts import PromptTokenizer

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Time?"}]},
    "/v1/completions": {"prompt": "Time?"},
    "/v1/responses": {"input": "Time?"},
}
NEUTRAL: dict[str, list[Any]] = {
    "echo": [False],
    "best_of": [1],
    "suffix": [""],
    "metadata": [{}, {"a": "b"}],
    "service_tier": ["auto", "flex"],
    "store": [False],
    "prompt_cache_key": ["a"],
    "prompt_cache_retention": ["24h"],
    "safety_identifier": ["a"],
    "include": [[], ["reasoning.encrypted_content"]],
    "include_obfuscation": [True, False],
    "reasoning_effort": ["none"],
    "modalities": [["text"]],
    "functions": [[]],
    "function_call": ["none"],
    "verbosity": ["low", "medium", "high"],
    "prediction": [{"type": "content", "content": "x"}],
    "parallel_tool_calls": [True, False],
    "top_logprobs": [0],
    "n": [1],
    "background": [False],
    "max_tool_calls": [3],
    "client_metadata": [{"a": "b"}],
    "top_p": [0, 0.0, 1],
    "top_k": [-1, 0],
    "seed": [-1, 0, 2**62, 2**63 - 1, 2**64 - 1, -(2**63)],
}
OTHER: dict[str, list[Any]] = {
    "echo": [True, 0],
    "best_of": [2, True],
    "suffix": ["x"],
    "functions": [[{"name": "clock"}]],
    "modalities": [["audio"], []],
    "reasoning_effort": ["", "most"],
    "include": [["message.output_text.logprobs"], "all"],
    "background": [True],
    "n": [0],
    "metadata": ["x"],
    "service_tier": [5],
    "web_search_options": [{}],
    "nonsense": [False],
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("Late."))) as server:
        yield server


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_field_is_taken(served: Served, route: str, name: str) -> None:
    for value in [*NEUTRAL[name], None]:
        answer = ask(served.port, route, {"model": NAME, **ROUTES[route], name: value})
        assert answer.status == 200, (value, answer.body)
        assert "left_out" not in answer.document["usage"]["windlass"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", OTHER)
def test_a_value_that_would_change_the_answer_is_refused(served: Served, route: str, name: str) -> None:
    for value in OTHER[name]:
        if route == "/v1/completions" and name == "echo" and value is True:
            continue  # which completions do
        answer = ask(served.port, route, {"model": NAME, **ROUTES[route], name: value})
        assert (answer.status, answer.document["error"]["param"].split(".")[0]) == (400, name), value
        assert name in answer.document["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
def test_the_meaning_of_numbers(served: Served, route: str) -> None:
    def sampling(**given: Any) -> Any:
        assert ask(served.port, route, {"model": NAME, **ROUTES[route], **given}).status == 200
        return served.service.requests[-1].sampling

    greedy = sampling(top_p=0, temperature=0.7)
    assert (greedy.temperature, greedy.top_p) == (0.0, 1.0)
    assert (sampling(temperature=0.7).temperature, sampling(top_k=-1).top_k, sampling(top_k=3).top_k) == (0.7, 0, 3)
    assert sampling(seed=-1).seed != sampling(seed=-1).seed
    assert sampling(seed=2**62 - 1).seed == 2**62 - 1
    assert sampling(seed=2**64 - 5).seed == sampling(seed=2**64 - 5).seed != sampling(seed=2**64 - 6).seed
    assert sampling(seed=-7).seed == sampling(seed=-7).seed


@pytest.mark.parametrize("effort", [{"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}])
def test_no_effort_switches_a_thought_off(effort: dict[str, Any]) -> None:
    """Where the template has the variable. The client's own value comes first."""
    template = "{% if enable_thinking is false %}[quick]{% endif %}" + TEMPLATE
    route = "/v1/responses" if "reasoning" in effort else "/v1/chat/completions"
    with serving(ScriptedService(says("Late.")), PromptTokenizer(with_template(template), [1], VOCABULARY)) as server:
        prompts = []
        for given in (effort, {}, effort | {"chat_template_kwargs": {"enable_thinking": True}}):
            assert ask(server.port, route, {"model": NAME, **ROUTES[route], **given}).status == 200
            prompts.append(server.server.tokenizer.decoded(server.service.requests[-1].prompt))
    assert ["[quick]" in prompt for prompt in prompts] == [True, False, False]


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh"])
def test_an_effort_is_noted(served: Served, effort: str) -> None:
    asked = {"model": NAME, "reasoning_effort": effort}
    answer = ask(served.port, "/v1/chat/completions", asked | ROUTES["/v1/chat/completions"])
    assert answer.document["usage"]["windlass"]["left_out"] == [f"reasoning_effort: {effort}"]
    answer = ask(served.port, "/v1/responses", asked | ROUTES["/v1/responses"])
    assert answer.document["usage"]["windlass"]["left_out"] == [f"reasoning.effort: {effort}"]


def test_obfuscation_of_a_stream(served: Served) -> None:
    for route, given in ROUTES.items():
        options = {"stream": True, "stream_options": {"include_obfuscation": False}}
        assert ask(served.port, route, {"model": NAME, **given, **options}).status == 200


CLOCK = {"name": "clock", "parameters": {"type": "object"}}
FLAT = {"type": "function", **CLOCK, "strict": None, "defer_loading": False}
DEEP = {"type": "function", "function": {**CLOCK, "cache_control": {}}, "cache_control": {"type": "ephemeral"}}
UNKNOWN: list[dict[str, Any]] = [{"type": "web_search", "filters": {}}, {"type": "custom", "custom": {"name": "x"}}]


@pytest.mark.parametrize(("route", "function"), [("/v1/chat/completions", DEEP), ("/v1/responses", FLAT)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_of_another_type_are_left_out(
    served: Served, route: str, function: dict[str, Any], is_streamed: bool
) -> None:
    given = {"model": NAME, **ROUTES[route], "tools": [UNKNOWN[0], function, UNKNOWN[1]], "stream": is_streamed}
    answer = ask(served.port, route, given)
    assert answer.status == 200, answer.body
    assert b'"left_out":["tools.0: web_search","tools.2: custom"]' in answer.body
    shown = served.server.tokenizer.decoded(served.service.requests[-1].prompt)
    assert ("clock" in shown, "web_search" in shown, "custom" in shown) == (True, False, False)
    alone = ask(served.port, route, {**given, "tools": UNKNOWN, "stream": False})
    assert alone.status == 200
    assert "[tools]" not in served.server.tokenizer.decoded(served.service.requests[-1].prompt)
