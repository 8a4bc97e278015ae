"""The page at `/docs` describes the routes' fields, and the one error of a body names its fix."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from tests.helpers.serving import ScriptedService, Served, ask, chat, complete, says, serving
from windlass.cache.options import CacheOptions
from windlass.core.fields import field_info
from windlass.engine.sampling import Sampling
from windlass.serve.messages import MessagesRequest
from windlass.serve.responses import ResponsesRequest
from windlass.serve.schema import CacheFields, ChatRequest, CompletionRequest, SamplingFields

BODIES = {
    "/v1/chat/completions": "ChatRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/sessions": "SessionRequest",
    "/v1/sessions/{name}/rewind": "RewindRequest",
    "/v1/sessions/{name}/branch": "BranchRequest",
    "/v1/messages/count_tokens": "MessagesPrompt",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("fine"))) as server:
        yield server


def test_every_route_is_described(served: Served) -> None:
    document = ask(served.port, "/openapi.json").document
    for path, name in BODIES.items():
        route = document["paths"][path]["post"]
        body = route["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert {*route["responses"]} == {"200", "4XX"}
    assert {*document["paths"]} > {"/v1/models", "/v1/models/{name}", "/v1/cache", "/v1/cache/{number}", "/metrics"}
    schemas = document["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["ChatRequest"]["additionalProperties"] is False
    budget = schemas["ChatRequest"]["properties"]["budget"]
    assert budget["description"] == f"{field_info(CacheOptions)['budget'].help} (default: the server's)."
    assert budget["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 1 << 20}
    assert b"/openapi.json" in ask(served.port, "/docs").body


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
def test_the_fields_that_are_ours_have_help(model: Any) -> None:
    for name in {*SamplingFields.model_fields, *CacheFields.model_fields}:
        assert model.model_fields[name].description, name


def test_the_fields_are_those_of_the_library() -> None:
    assert {*SamplingFields.model_fields} == {each.name for each in fields(Sampling)}
    assert {*CacheFields.model_fields} - {"cache"} < {each.name for each in fields(CacheOptions)}
    made = ChatRequest.model_validate(chat(seed=5, top_k=-1, min_p=0.25))
    assert made.sampling(2) == Sampling(temperature=1.0, min_p=0.25, seed=7)


def test_help_and_ranges_are_those_of_the_declaration() -> None:
    described = ChatRequest.model_json_schema()["properties"]
    for name, option in field_info(Sampling).items():
        assert described[name]["description"].startswith(f"{option.help} (default: "), name
    for name in ("budget", "recall", "window"):
        option, (number, *_) = field_info(CacheOptions)[name], described[name]["anyOf"]
        assert described[name]["description"] == f"{option.help} (default: the server's)."
        assert number["minimum"] == option.least
        assert number["maximum"] <= option.most
    assert described["min_p"]["maximum"] == field_info(Sampling)["min_p"].most
    assert described["repetition_penalty"]["exclusiveMinimum"] == 0


MESSAGE = {"role": "user", "content": "x"}
ONE_OF_SEVERAL: list[tuple[dict[str, Any], str, str]] = [
    ({"promt": "x", "prompt": None, "temperature": 9}, "promt", "promt is not supported by this server. Leave it out"),
    ({"prompt": None, "temperature": 9}, "prompt", "prompt is missing"),
    ({"temperature": 9, "stream_options": {"more": 1}}, "stream_options.more", "is not supported. Leave it out"),
    ({"sinks": "all"}, "sinks", "sinks must be 'system' or a valid integer, got 'all'"),
    ({"stop": ["a", 5]}, "stop.1", "stop.1 must be a valid string, got 5"),
    ({"user": "x" * 300}, "user", "user must have at most 256 characters, got 300"),
    ({"cache": {f"f{at}": 1 for at in range(1025)}}, "cache", "cache must have at most 1024 items, got 1025"),
]


@pytest.mark.parametrize(("given", "param", "said"), ONE_OF_SEVERAL, ids=lambda each: str(each)[:40])
def test_one_error_of_several_is_told(served: Served, given: dict[str, Any], param: str, said: str) -> None:
    error = ask(served.port, "/v1/completions", complete(**given)).document["error"]
    assert error["param"] == param
    assert said in error["message"]


def test_an_error_names_the_place_in_a_list(served: Served) -> None:
    """Not the types that pydantic passes on the way to it."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        asked = {field: [MESSAGE, {"role": "user", "content": parts}]}
        error = ask(served.port, path, asked).document["error"]
        assert (error["param"], error["code"]) == (f"{field}.1.content.1.text", "invalid_value")
        assert error["message"].endswith("must be a valid string, got 5")
