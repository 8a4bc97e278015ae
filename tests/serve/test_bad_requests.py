"""Fields that cannot be honoured are refused by name, in OpenAI's shape, and nothing reaches the engine."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.serving import NAME, RawClient, ScriptedService, Served, ask, chat, complete, says, serving
from windlass.engine.request import EngineLimits, Failure, Ticket
from windlass.serve.errors import RequestLimits
from windlass.serve.prompts import PromptTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = RequestLimits(characters=5000, texts=6)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    service = ScriptedService(says("fine"), EngineLimits(max_tokens=100, seconds=50.0))
    with serving(service, request=LIMITS) as server:
        yield server


def refused(served: Served, path: str, document: Any, status: int = 400) -> dict[str, Any]:
    before = len(served.service.requests)
    answer = ask(served.port, path, document)
    assert answer.status == status, answer.body
    error: dict[str, Any] = answer.document["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert len(served.service.requests) == before
    return error


WRONG: list[tuple[str, Any]] = [
    ("temperature", float("1e999")),
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", True),
    ("temperature", "1"),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 3.0),
    ("min_p", 1.5),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("max_tokens", 101),
    ("max_tokens", 10**400),
    ("max_seconds", 0),
    ("max_seconds", 50.5),
    ("max_seconds", 1e7),
    ("max_seconds", "1"),
    ("seed", -(2**63) - 1),
    ("seed", 2**64),
    ("seed", 1.0),
    ("seed", True),
    ("n", 0),
    ("n", 9),
    ("n", True),
    ("stop", ["a"] * 17),
    ("stop", ""),
    ("stop", [1]),
    ("stop", "x" * 300),
    ("presence_penalty", 2.1),
    ("frequency_penalty", "0"),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": True}),
    ("logit_bias", {"99999": 1}),
    ("logit_bias", [1]),
    ("logit_bias", {str(number): 0 for number in range(1025)}),
    ("stream", 1),
    ("stream_options", {"include_usage": 1}),
    ("stream_options", {"include_usage": True}),
    ("stream_options", {"more": True}),
    ("user", 5),
    ("budget", 0),
    ("budget", 2**31),
    ("budget", True),
    ("budget", 4),
    ("sinks", -1),
    ("window", 0),
    ("window", 95),
    ("recall", 7),
    ("recall", -8),
    ("policy", "nonsense"),
    ("policy", "file.py:Mine"),
    ("policy", "Pairs(/etc/passwd)"),
    ("policy", "pairs"),
    ("policy", "snapkv(pool=1000000)"),
    ("policy", "os.system"),
    ("policy", ["recent"]),
    ("positions", "nowhere"),
    ("positions", "self_extend(-4, 16)"),
    ("positions", "clamp(" + "9" * 80 + ")"),
    ("store", "int3"),
    ("store", True),
    ("store", "/elsewhere/store"),
    ("cache", "name"),
    ("cache", {"lookup": 1}),
    ("cache", {"name": "../up"}),
    ("cache", {"name": "x" * 65}),
    ("cache", {"ttl": 5}),
    ("chunks", []),
    ("chunks", {"recompute": "none"}),
    ("nonsense", 1),
    ("best_of", 2),
    ("suffix", "x"),
    ("echo", "yes"),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("response_format", {"type": "text"}),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda each: str(each)[:40])
def test_a_bad_field_is_refused_by_name(served: Served, name: str, value: Any) -> None:
    client = RawClient(served.port)
    body = json.dumps(complete(**{name: value})).replace("Infinity", "1e999")
    before = len(served.service.requests)
    client.send("POST", COMPLETIONS, body.encode())
    answer = client.answer()
    client.close()
    error = answer.document["error"]
    assert answer.status == 400
    assert error["param"].split(".")[0] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(served.service.requests) == before
    assert "passwd" not in error["message"] or "got" in error["message"]


CHAT_WRONG: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", "Hello"),
    ("messages", [{"role": "user"}]),
    ("messages", [{"content": "x"}]),
    ("messages", [{"role": "robot", "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": "x" * 5001}]),
    ("messages", [{"role": "user", "content": "x" * 3000}] * 2),
    ("messages", [{"role": "user", "content": "x", "mood": "good"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": "x", "tool_calls": []}]),
    ("messages", [{"role": "user", "content": "x", "tool_call_id": "x"}]),
    ("messages", [{"role": "assistant", "content": 5}]),
    ("messages", [{"role": "assistant", "tool_calls": "f"}]),
    ("messages", [{"role": "assistant", "tool_calls": [5]}]),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}] * 129}]),
    ("messages", [{"role": "tool", "content": [{"type": "image_url"}]}]),
    ("top_logprobs", 2),
    ("top_logprobs", 21),
    ("logprobs", 5),
    ("max_completion_tokens", 101),
    ("response_format", "json"),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 70_000]}}},
    ),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "function", "function": {"name": "bad name"}}]),
    ("tools", "clock"),
    ("tool_choice", "required"),
    ("tool_choice", "any"),
    ("tool_choice", {"type": "function", "function": {"name": "clock"}}),
    ("reasoning_effort", "most"),
    ("reasoning_effort", ""),
    ("functions", [{"name": "clock"}]),
    ("function_call", {"name": "clock"}),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("include", ["message.output_text.logprobs"]),
    ("tools", [{}]),
    ("tools", [{"type": 5}]),
    ("tool_choice", {"type": "custom", "custom": {"name": "clock"}}),
    ("audio", {}),
    ("prompt", "x"),
]


@pytest.mark.parametrize(("name", "value"), CHAT_WRONG, ids=lambda each: str(each)[:40])
def test_a_bad_field_of_a_chat_is_refused_by_name(served: Served, name: str, value: Any) -> None:
    error = refused(served, CHAT, chat(**{name: value}))
    assert error["param"].split(".")[0] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    "value", ["x" * 5001, [], 5, [[]], [1, "a"], ["a", 1], [-1], [True], [2048], ["x" * 3000] * 2, ["a"] * 17, ""]
)
def test_a_bad_prompt(served: Served, value: Any) -> None:
    assert refused(served, COMPLETIONS, complete(prompt=value))["param"].split(".")[0] == "prompt"


def test_numbers_that_contradict_each_other(served: Served) -> None:
    assert "differs" in refused(served, CHAT, chat(max_tokens=5, max_completion_tokens=6))["message"]
    assert "at most 6 texts" in refused(served, COMPLETIONS, complete(prompt=["a"] * 4, n=2))["message"]
    error = refused(served, CHAT, chat(budget=5, sinks=4))
    assert (error["param"], "must be at least sinks" in error["message"]) == ("budget", True)


def test_what_is_null_is_not_there(served: Served) -> None:
    nulls = dict.fromkeys(("temperature", "stop", "tools", "budget", "nonsense", "user"))
    assert ask(served.port, CHAT, chat(**nulls)).status == 200
    assert ask(served.port, CHAT, chat(store=False)).status == 200


BODIES = [
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'{"prompt": NaN}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b"[" * 100_000,
    b'{"a":' * 70 + b"1" + b"}" * 70,
    b'{"prompt": "x", "temperature": ' + b"1" * 5000 + b"}",
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[:20].decode("latin-1"))
def test_a_body_that_is_no_json(served: Served, body: bytes) -> None:
    client = RawClient(served.port)
    client.send("POST", COMPLETIONS, body)
    answer = client.answer()
    client.close()
    assert (answer.status, {*answer.document["error"]}) == (400, {"message", "type", "param", "code"})


def test_a_body_of_another_type_which_a_browser_sends_to_anybody(served: Served) -> None:
    client = RawClient(served.port)
    client.send("POST", COMPLETIONS, json.dumps(complete()).encode(), Content_Type="text/plain")
    assert client.answer().status == 415
    client.close()


def test_a_missing_field_and_another_model(served: Served) -> None:
    assert refused(served, CHAT, {"model": NAME})["param"] == "messages"
    assert refused(served, COMPLETIONS, {"model": NAME})["param"] == "prompt"
    assert refused(served, CHAT, chat(model="other"), 404)["code"] == "model_not_found"
    assert ask(served.port, "/v2/none").document["error"]["code"] == "unknown_route"
    assert ask(served.port, CHAT).status == 405


def test_tokens_and_back(served: Served) -> None:
    text = "naïve 漢字"
    tokens = ask(served.port, "/tokenize", {"prompt": text}).document
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["tokens"][0] == 0
    plain = ask(served.port, "/tokenize", {"prompt": text, "add_special_tokens": False}).document["tokens"]
    assert plain == tokens["tokens"][1:]
    assert ask(served.port, "/detokenize", {"tokens": plain}).document == {"prompt": text}
    of_chat = ask(served.port, "/tokenize", {"messages": chat()["messages"]}).document["tokens"]
    assert ask(served.port, "/detokenize", {"tokens": of_chat}).document["prompt"].endswith("[assistant]")
    refused(served, "/tokenize", {})
    refused(served, "/detokenize", {"tokens": [2048]})


def test_a_time_limit_reaches_the_engine(served: Served) -> None:
    for path, document in ((CHAT, chat), (COMPLETIONS, complete)):
        for fields, seconds in (({"max_seconds": 12.5}, 12.5), ({"max_seconds": 50}, 50.0), ({}, None)):
            assert ask(served.port, path, document(**fields)).status == 200
            assert served.service.requests[-1].seconds == seconds


def test_a_time_limit_counts_from_before_the_prompt_is_tokenized(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is told when a request came, not when its tokens were there."""
    begun = list[float]()
    encoded, chat_of = PromptTokenizer.encoded, PromptTokenizer.chat

    def slowly(plain: Callable[..., Any]) -> Callable[..., Any]:
        def tokenized(*args: Any, **kwargs: Any) -> Any:
            begun.append(time.monotonic())
            time.sleep(0.01)
            return plain(*args, **kwargs)

        return tokenized

    monkeypatch.setattr(PromptTokenizer, "encoded", slowly(encoded))
    monkeypatch.setattr(PromptTokenizer, "chat", slowly(chat_of))
    for path, document in ((CHAT, chat), (COMPLETIONS, complete)):
        begun.clear()
        assert ask(served.port, path, document()).status == 200
        request = served.service.requests[-1]
        assert request.arrived <= begun[0]
        assert Ticket(1, replace(request, seconds=0.005)).late(None) == Failure(
            "the request took longer than 0.005 seconds", is_ours=False
        )
