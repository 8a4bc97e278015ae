"""Calls that are demanded: each form is written as its family writes it, and nothing else is allowed."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.families import EVIDENCE, words_of
from tests.helpers.serving import ScriptedService, ask, chat, says, serving
from windlass.engine.request import Grammar
from windlass.engine.text import TextStream
from windlass.serve.errors import BadField
from windlass.serve.forms import (
    CALL_FORMS,
    DEEPSEEK,
    DEEPSEEK_V3,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_LIST,
    QWEN_XML,
    CallForm,
    ReplyForm,
)
from windlass.serve.grammar import Grammars
from windlass.serve.parsers import TextPart, reader_of

SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer", "minimum": 3},
        "place": {"$ref": "#/$defs/Place"},
        "sort": {"enum": ["up", "down"]},
    },
    "required": ["query", "sort"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
FUNCTIONS: Mapping[str, Any] = {"search": SEARCH, "searches": {"type": "object", "properties": {}}, "clock": {}}
ARGUMENTS = {"query": "a\n\n<b>5", "limit": 7, "place": {"x": 1.5}, "sort": "up"}
BARE = '{"query": "a\\n\\n<b>5", "limit": 7, "place": {"x": 1.5}, "sort": "up"}'
QWEN = (
    "<tool_call>\n<function=search>\n<parameter=query>\na\n\n<b>5\n</parameter>\n<parameter=limit>\n7\n</parameter>\n"
    '<parameter=place>\n{"x": 1.5}\n</parameter>\n<parameter=sort>\nup\n</parameter>\n</function>\n</tool_call>'
)
WRITTEN = {
    HARMONY: f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{BARE}",
    DEEPSEEK_V3: (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n"  # noqa: RUF001
        f"```json\n{BARE}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
    ),
    DEEPSEEK: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{BARE}"  # noqa: RUF001
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
    ),
    KIMI: (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        f"{BARE}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    MISTRAL: f"[TOOL_CALLS]search[ARGS]{BARE}",
    MISTRAL_LIST: f'[TOOL_CALLS][{{"name": "search", "arguments": {BARE}}}]',
    GRANITE: f'<|tool_call|>[{{"name": "search", "arguments": {BARE}}}]',
    GLM: (
        "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a\n\n<b>5</arg_value>\n<arg_key>limit</arg_key>\n"
        '<arg_value>7</arg_value>\n<arg_key>place</arg_key>\n<arg_value>{"x": 1.5}</arg_value>\n'
        "<arg_key>sort</arg_key>\n<arg_value>up</arg_value>\n</tool_call>"
    ),
    QWEN_XML: QWEN,
    MINIMAX: (
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">a\n\n<b>5</parameter>\n'
        '<parameter name="limit">7</parameter>\n<parameter name="place">{"x": 1.5}</parameter>\n'
        '<parameter name="sort">up</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    HERMES: f'<tool_call>\n{{"name": "search", "arguments": {BARE}}}\n</tool_call>',
    LLAMA: f'{{"name": "search", "parameters": {BARE}}}',
}


def grammar_of(form: CallForm, choice: str = "required", functions: Mapping[str, Any] = FUNCTIONS) -> Grammar:
    return Grammars(words_of(form), 64 << 10, 32).of_call(form, functions, choice, 1)[0]


def takes(form: CallForm, grammar: Grammar, text: str) -> bool:
    """Return True if the grammar allows this text, up to an end."""
    for token in words_of(form).encoded(text, False):
        if not grammar.allowed()[token]:
            return False
        grammar.accept(token)
    return bool(grammar.allowed()[1])


def shown(form: CallForm, tokens: tuple[int, ...]) -> list[str]:
    """The pieces of text that the engine gives out for these tokens, where a client's tools are read."""
    words = words_of(form)
    hidden = words.hidden(ReplyForm(form).marks(has_calls=True))
    stream, pieces = TextStream.after(words.tokenizer, [5, 6], words.stops([]), hidden), list[str]()
    for token in tokens:
        stream = stream.pushed(token)
        pieces.append(stream.piece)
    return [*pieces, stream.ended().piece]


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.family)
def test_a_demanded_call_is_in_the_form_of_its_family(form: CallForm) -> None:
    text, words = WRITTEN[form], words_of(form)
    assert takes(form, grammar_of(form), text)
    assert takes(form, grammar_of(form, "=search"), text)
    assert not takes(form, grammar_of(form, "=clock"), text)
    pieces = shown(form, words.encoded(text, False))
    assert "".join(pieces) == text
    reader, said = reader_of(ReplyForm(form), FUNCTIONS, None, [*words.marks(form.spelled)]), TextPart()
    assert reader is not None
    for piece in pieces:
        said = said.then(reader.feed(piece))
    said = said.then(reader.end())
    assert (said.text, [part.name for part in said.calls if part.name]) == ("", ["search"])
    assert json.loads("".join(part.arguments for part in said.calls)) == ARGUMENTS


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.family)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("search", "find"),
        ("7", "2"),
        ("7", "seven"),
        ("1.5", "true"),
        ("up", "left"),
        ("sort", "sorted"),
    ],
)
def test_another_call_is_not_allowed(form: CallForm, old: str, new: str) -> None:
    assert WRITTEN[form].count(old) == 1
    assert not takes(form, grammar_of(form), WRITTEN[form].replace(old, new))


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.family)
def test_arguments_that_may_be_left_out(form: CallForm) -> None:
    text = WRITTEN[form]
    if form.pairs is None:
        shorter, wrong = '{"query": "", "sort": "down"}', '{"query": "", "limit": 5}'
        assert takes(form, grammar_of(form), text.replace(BARE, shorter))
        assert not takes(form, grammar_of(form), text.replace(BARE, wrong))
    else:
        before, after = form.pairs.before, form.pairs.after
        start, stop = text.index(f"{before}limit"), text.index(f"{before}sort")
        assert takes(form, grammar_of(form), text[:start] + text[stop:])
        last = text.index(after, stop) + len(after)
        assert not takes(form, grammar_of(form), text[:stop] + text[last:])


@pytest.mark.parametrize("name", ["searches", "clock"])
@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.family)
def test_a_call_without_arguments(form: CallForm, name: str) -> None:
    text = WRITTEN[form].replace("search", name)
    if form.pairs is None:
        text = text.replace(BARE, "{}")
    else:
        last = text.rindex(form.pairs.after) + len(form.pairs.after)
        text = text[: text.index(form.pairs.before)] + text[last:]
    assert takes(form, grammar_of(form), text)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"anyOf": [{"type": "object"}]}, "tools has anyOf in the parameters of search"),
        ({"$ref": "#/$defs/A"}, r"tools has \$ref in the parameters of search"),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}}, "tools has pattern in a of search"),
        ({"properties": {"a": {"maxLength": 5}}}, "tools has maxLength in a of search"),
    ],
)
def test_a_schema_that_pairs_cannot_hold_is_refused(parameters: dict[str, Any], said: str) -> None:
    for form in (GLM, QWEN_XML, MINIMAX):
        with pytest.raises(BadField, match=said) as caught:
            grammar_of(form, functions={"search": parameters})
        assert caught.value.code == "invalid_schema"
        assert "give tool_choice auto" in caught.value.message
    assert grammar_of(HERMES, functions={"search": {"type": "object", "properties": {"a": {"maxLength": 5}}}})


@pytest.mark.parametrize("parameters", [{"properties": 5}, {"properties": {"a": 5}}, {"required": 5}, {"type": 5}])
def test_a_schema_that_is_none(parameters: dict[str, Any]) -> None:
    for form in (GLM, QWEN_XML):
        takes(form, grammar_of(form, functions={"search": parameters}), "")
        reader = reader_of(ReplyForm(form), {"search": parameters}, None)
        assert reader is not None
        said = reader.feed(WRITTEN[form]).then(reader.end())
        assert "".join(part.arguments for part in said.calls).startswith('{"query": "a\\n')


TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in FUNCTIONS.items()]


@pytest.mark.parametrize("form", CALL_FORMS, ids=lambda form: form.family)
def test_the_template_tells_the_form(form: CallForm) -> None:
    """A whole request: the form, the special tokens that are shown, the tokens that end it, and the parts."""
    written = WRITTEN[form]
    if form is HARMONY:
        written = f"<|channel|>analysis<|message|>Now.<|end|><|start|>assistant{written}"
    words = words_of(form)
    with serving(ScriptedService(says(written)), words) as server:
        for is_streamed in (False, True):
            answer = ask(server.port, "/v1/chat/completions", chat(tools=TOOLS, stream=is_streamed))
            if is_streamed:
                parts = [json.loads(each[6:]) for each in answer.body.split(b"\n\n") if each.startswith(b"data: {")]
                calls = [call for each in parts for call in each["choices"][0]["delta"].get("tool_calls", ())]
                assert {each["index"] for each in calls} == {0}
                assert [each["function"]["name"] for each in calls if "name" in each["function"]] == ["search"]
                arguments = "".join(each["function"]["arguments"] for each in calls)
                assert (len(calls) > 3) == (form.pairs is None)
                assert parts[-1]["choices"][0]["finish_reason"] == "tool_calls"
            else:
                [choice] = answer.document["choices"]
                [call] = choice["message"]["tool_calls"]
                assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
                thought = "Now." if form is HARMONY else None
                assert choice["message"].get("reasoning_content") == thought
                arguments = call["function"]["arguments"]
            assert json.loads(arguments) == ARGUMENTS
        asked = server.service.requests[-1]
        assert {words.shown(each)[0] for each in asked.stops.ids - {1}} == {*form.ends} & {
            *words.marks("".join(form.ends))
        }
        marks = words.marks(form.spelled)
        assert (asked.hidden is None) == (not marks)
        assert not {*marks.values()} & (asked.hidden or {*()})


def test_an_answer_of_a_schema_is_in_its_channel() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"a": 5}}}}
    written = '<|channel|>final<|message|>{"a": 5}'
    for is_harmony, family in ((True, HARMONY), (False, HERMES)):
        with serving(ScriptedService(says(written if is_harmony else written[27:])), words_of(family)) as server:
            answer = ask(server.port, "/v1/chat/completions", chat(response_format=form)).document
            assert answer["choices"][0]["message"]["content"] == '{"a": 5}'
            grammar = server.service.requests[-1].grammar
            assert grammar is not None
            assert takes(family, grammar, written if is_harmony else written[27:])


def test_every_family_is_told_by_its_marks() -> None:
    for form in CALL_FORMS:
        assert ReplyForm.of(EVIDENCE[form.family]).calls is form
    assert ReplyForm.of("{{ message.content }}").calls is HERMES
