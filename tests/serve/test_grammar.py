"""JSON of a schema, drawn from random logits under the grammar's mask: whatever is drawn, it is valid."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.helpers.serving import NAME, VOCABULARY, ScriptedService, Served, ask, chat, serving, usage, words
from windlass.core.errors import UsageError
from windlass.engine.request import Event, Finish, Grammar, Piece, Request
from windlass.engine.text import TextStream
from windlass.serve.errors import BadField
from windlass.serve.grammar import MOST_KEPT, Grammars

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "clock"}},
    {"type": "function", "function": {"name": "call", "parameters": PERSON}},
]


def draws(request: Request) -> Iterator[Event | None]:
    """A model that says anything: a token at random of those that are allowed."""
    grammar, generator = request.grammar, torch.Generator().manual_seed(request.sampling.seed)
    assert grammar is not None
    stream, reason = TextStream.after(words().tokenizer, request.prompt, request.stops), "length"
    written = 0
    for _ in range(request.max_tokens):
        scores = torch.randn(VOCABULARY, generator=generator).masked_fill(~grammar.allowed(), float("-inf"))
        token = int(scores.argmax())
        if token in request.stops.ids:
            reason = "stop"
            break
        grammar.accept(token)
        stream, written = stream.pushed(token), written + 1
        yield Piece(token, stream.piece)
    yield Piece(0, stream.ended().piece)
    yield Finish("stop" if reason == "stop" else "length", usage(request, written))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(draws)) as server:
        yield server


def is_person(found: Any) -> bool:
    return (
        [*found] == ["name", "age", "pets"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and 0 <= found["age"] <= 150
        and isinstance(found["age"], int)
        and len(found["pets"]) <= 2
        and {*found["pets"]} <= {"cat", "dog"}
    )


def test_an_answer_is_json_of_the_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(6):
        answer = ask(served.port, "/v1/chat/completions", chat(response_format=form, n=4, seed=seed * 10)).document
        for choice in answer["choices"]:
            assert choice["finish_reason"] == "stop"
            assert is_person(json.loads(choice["message"]["content"]))


def test_an_answer_is_a_json_object(served: Served) -> None:
    fields = {"response_format": {"type": "json_object"}, "n": 8, "max_tokens": 60, "seed": 1}
    ended = []
    for choice in ask(served.port, "/v1/chat/completions", chat(**fields)).document["choices"]:
        assert choice["message"]["content"].startswith("{")
        if choice["finish_reason"] == "stop":
            ended.append(json.loads(choice["message"]["content"]))
    assert all(isinstance(each, dict) for each in ended)
    assert ended


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "call"}}])
def test_a_call_that_is_demanded_is_made(served: Served, choice: Any) -> None:
    answer = ask(served.port, "/v1/chat/completions", chat(tools=TOOLS, tool_choice=choice, n=8, seed=3)).document
    names = set()
    for each in answer["choices"]:
        assert each["finish_reason"] == "tool_calls"
        assert each["message"]["content"] is None
        [call] = each["message"]["tool_calls"]
        names.add(call["function"]["name"])
        arguments = json.loads(call["function"]["arguments"])
        assert is_person(arguments) if call["function"]["name"] == "call" else arguments == {}
    assert names == ({"clock", "call"} if choice == "required" else {"call"})


FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def test_an_answer_of_a_schema_or_a_call(served: Served) -> None:
    """Agents ask for both in each turn: calls first, and the answer of the schema at the end."""
    asked = chat(tools=TOOLS, response_format=FORMAT, n=8)
    found = [ask(served.port, "/v1/chat/completions", asked | {"seed": seed}).document for seed in (1, 21)]
    choices = [each for document in found for each in document["choices"]]
    called = [each for each in choices if each["finish_reason"] == "tool_calls"]
    answered = [each for each in choices if each["finish_reason"] == "stop"]
    assert (len(called) + len(answered), bool(called), bool(answered)) == (16, True, True)
    assert all(is_person(json.loads(each["message"]["content"])) for each in answered)
    assert {each["message"]["tool_calls"][0]["function"]["name"] for each in called} == {"clock", "call"}


def test_a_call_that_is_demanded_needs_no_schema_of_an_answer(served: Served) -> None:
    asked = chat(tools=TOOLS, tool_choice="required", response_format=FORMAT, seed=3)
    answer = ask(served.port, "/v1/chat/completions", asked).document
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_off_is_text(served: Served) -> None:
    answer = ask(served.port, "/v1/chat/completions", chat(tools=TOOLS, tool_choice="required", max_tokens=9)).document
    [choice] = answer["choices"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("length", False)
    assert choice["message"]["content"].startswith("<tool_c")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stop_string_within_a_call(path: str) -> None:
    """The call is broken, so the answer has not stopped to call a tool."""

    def script(request: Request) -> Iterator[Event | None]:
        yield Piece(7, '<tool_call>\n{"name": "clock", "arguments": {"zone": "C')
        yield Finish("stop", usage(request, 1), "ET")

    parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
    with serving(ScriptedService(script)) as served:
        if path == "/v1/messages":
            tools: Any = [{"name": "clock", "input_schema": parameters}]
            asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "tools": tools}
            found = ask(served.port, path, asked | {"model": NAME}).document
            assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "ET")
        elif path == "/v1/responses":
            tools = [{"type": "function", "name": "clock", "parameters": parameters}]
            found = ask(served.port, path, {"model": NAME, "input": "x", "tools": tools}).document
            assert found["output"][-1]["status"] == "incomplete"
        else:
            tools = [{"type": "function", "function": {"name": "clock", "parameters": parameters}}]
            [choice] = ask(served.port, path, chat(tools=tools)).document["choices"]
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "parameters",
    [
        {"description": "x"},
        {"type": ["null", "object"]},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"$ref": "#/$defs/any", "$defs": {"any": {}}},
    ],
)
def test_arguments_are_an_object(parameters: dict[str, Any], served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(6):
        document = chat(tools=tools, tool_choice="required", seed=seed, max_tokens=60)
        [choice] = ask(served.port, "/v1/chat/completions", document).document["choices"]
        begun = '<tool_call>\n{"name": "f", "arguments": '
        text = choice["message"]["content"]
        assert "tool_calls" in choice["message"] or text.removeprefix(begun)[:1] in ("", "{"), text


@pytest.mark.parametrize("kind", ["array", "string", ["null", "integer"]])
def test_parameters_that_are_no_object(kind: Any, served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]
    error = ask(served.port, "/v1/chat/completions", chat(tools=tools, tool_choice="required")).document["error"]
    assert (error["param"], error["code"]) == ("tools", "invalid_schema")
    assert "Arguments are an object" in error["message"]


def test_grammars_do_not_know_of_each_other() -> None:
    first, second = Grammars(words(), 10_000, 32).of("x", PERSON, 2)
    before = second.allowed()
    written(first, '{"name": "')
    assert torch.equal(second.allowed(), before)
    assert not torch.equal(first.allowed(), before)


def test_an_end_is_allowed_only_where_the_json_is_whole() -> None:
    [grammar] = Grammars(words(), 10_000, 32).of("x", PERSON, 1)
    assert not grammar.allowed()[1]
    written(grammar, '{"name": "a", "age": 5, "pets": []}')
    assert grammar.allowed().nonzero().flatten().tolist() == [1]
    assert grammar.allowed().shape == (VOCABULARY,)


def written(grammar: Grammar, text: str) -> None:
    for token in words().encoded(text, False):
        assert grammar.allowed()[token], words().shown(token)
        grammar.accept(token)


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(words(), 10_000, 32)
    compiled: list[str] = []
    before = Grammars._compiled

    def counted(self: Grammars, name: str, source: str) -> Any:
        compiled.append(name)
        return before(self, name, source)

    monkeypatch.setattr(Grammars, "_compiled", counted)
    for number in (*range(MOST_KEPT + 1), MOST_KEPT, 0):
        grammars.of(str(number), {"const": number}, 1)
    assert compiled == [str(number) for number in (*range(MOST_KEPT + 1), 0)]
    assert len(grammars._kept) == MOST_KEPT


NESTED: dict[str, Any] = {"type": "integer"}
for _ in range(33):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "nonsense"}, "cannot be honoured"),
        ({"type": "string", "pattern": "("}, "cannot be honoured"),
        ({"type": "string", "pattern": r"(?=a)b"}, "cannot be honoured"),
        ({"$ref": "http://localhost/schema.json"}, "cannot be honoured"),
        ({"$ref": "file:///etc/passwd"}, "cannot be honoured"),
        ({"type": "string", "pattern": "(" * 200 + "a{100}" + "){100}" * 200}, "cannot be honoured"),
        ({"enum": ["x" * 10_001]}, "at most 10000 bytes"),
        (NESTED, "nested at most 32 deep"),
        ({"const": "<|eos|>"}, r"forces '<\|eos\|>', the text of a special token"),
        ({"anyOf": [{"enum": [1, {"a": ["b <|pad|>"]}]}]}, r"forces '<\|pad\|>'"),
        ({"properties": {"x": {"properties": {"<|bos|>": {}}}}}, r"forces '<\|bos\|>'"),
    ],
)
def test_a_schema_that_cannot_be_honoured(schema: Any, problem: str) -> None:
    with pytest.raises(BadField, match=problem) as caught:
        Grammars(words(), 10_000, 32).of("response_format", schema, 1)
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert len(caught.value.message) < 300


def written_first(grammar: Grammar, tokens: int) -> None:
    """Write the first token that is allowed, so many times."""
    for _ in range(tokens):
        grammar.accept(int(grammar.allowed().nonzero()[0, 0]))


def test_a_grammar_without_a_token_says_so() -> None:
    """A pattern may force a special token's text too. The error is then llguidance's own."""
    [grammar] = Grammars(words(), 10_000, 32).of("x", {"type": "string", "pattern": "^<[|]eos[|]>$"}, 1)
    with pytest.raises(UsageError, match=r"allows no further token: .*<"):
        written_first(grammar, 20)
