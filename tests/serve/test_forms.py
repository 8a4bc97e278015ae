"""Replies of each family of models: the same parts at every cut, and the same form from its chat template."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.serve.forms import (
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
    THOUGHT_FORMS,
    CallForm,
    ReplyForm,
    ThoughtForm,
    typed,
)
from windlass.serve.parsers import CallPart, TextPart, reader_of

THINK, MISTRAL_THINK = THOUGHT_FORMS
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "limit": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
    },
}
FUNCTIONS: Mapping[str, Any] = {"search": SEARCH, "clock": {}, "db.read-all_2": {"type": "object"}}
BAR, SPACE = "\uff5c", "\u2581"


def deep(text: str) -> str:
    """A text with DeepSeek's marks, written with plain bars."""
    return text.replace("<|", f"<{BAR}").replace("|>", f"{BAR}>").replace("~", SPACE)


@dataclass(frozen=True)
class Case:
    """A reply in a form, and its parts."""

    form: CallForm
    written: str
    text: str = ""
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    thoughts: ThoughtForm | None = None
    is_open: bool = False
    hidden: tuple[str, ...] = ()


CLOCK: tuple[str, Any] = ("clock", {"zone": "CET"})
BOTH: tuple[tuple[str, Any], ...] = (("search", {"query": 'a } " b', "limit": 5}), ("clock", {}))
CASES = {
    "hermes": Case(
        HERMES,
        'Let me see. <tool_call>\n{"name": "search", "arguments": {"query": "a } \\" b", "limit": 5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        "Let me see. ",
        calls=BOTH,
    ),
    "hermes, other order": Case(
        HERMES, '<tool_call>{"arguments": {"zone": "CET"}, "name": "clock"}</tool_call>', calls=(CLOCK,)
    ),
    "hermes, arguments as a string": Case(
        HERMES, '<tool_call>{"name": "clock", "arguments": "{\\"zone\\": \\"CET\\"}"}</tool_call>', calls=(CLOCK,)
    ),
    "hermes, no arguments": Case(
        HERMES, '<tool_call>{"name": "clock", "arguments": null}</tool_call>', calls=(("clock", {}),)
    ),
    "hermes, more fields": Case(
        HERMES,
        '<tool_call>{"id": "7", "type": "function", "name": "clock", "arguments": {"zone": "CET"}, "a": [{}]}'
        "</tool_call>\n\nDone.",
        "Done.",
        calls=(CLOCK,),
    ),
    "hermes, a brace is missing": Case(
        HERMES,
        '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}</tool_call> a <tool_call> b',
        "a <tool_call> b",
        calls=(CLOCK,),
    ),
    "hermes, a mark is missing": Case(
        HERMES,
        '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}\n'
        '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}',
        calls=(CLOCK, CLOCK),
    ),
    "hermes, a name that is none": Case(
        HERMES,
        '<tool_call>{"name": "no", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "clock"}</tool_call>',
        '<tool_call>{"name": "no", "arguments": {"a": 1}}</tool_call>',
        calls=(("clock", {}),),
    ),
    "hermes, a special mark": Case(
        HERMES,
        'a <tool_call>b</tool_call> <tool_call>{"name": "clock"}</tool_call>',
        "a b ",
        calls=(("clock", {}),),
        hidden=("<tool_call>", "</tool_call>"),
    ),
    "hermes, behind a thought": Case(
        HERMES,
        'Is <tool_call>{"name": "clock"}</tool_call> it?\n</think>\n\n<tool_call>{"name": "clock"}</tool_call>',
        "",
        'Is <tool_call>{"name": "clock"}</tool_call> it?',
        calls=(("clock", {}),),
        thoughts=THINK,
        is_open=True,
    ),
    "a mark in an argument": Case(
        HERMES,
        '<tool_call>{"name": "clock", "arguments": {"zone": "</tool_call>"}}</tool_call>',
        calls=(("clock", {"zone": "</tool_call>"}),),
    ),
    "qwen": Case(
        QWEN_XML,
        "I look.\n\n<tool_call>\n<function=search>\n<parameter=query>\nof\n\n<b>5\n</parameter>\n<parameter=limit>\n7\n"
        '</parameter>\n<parameter=tags>\n["x", "y"]\n</parameter>\n<parameter=near>\nnull\n</parameter>\n'
        "<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n"
        "</tool_call>",
        "I look.\n\n",
        calls=(
            ("search", {"query": "of\n\n<b>5", "limit": 7, "tags": ["x", "y"], "near": None, "exact": True}),
            ("clock", {}),
        ),
    ),
    "qwen, without the outer mark": Case(
        QWEN_XML,
        "<function=search>\n<parameter=query>\n12\n</parameter>\n</function>\nand\n<function=clock></function>",
        "and\n",
        calls=(("search", {"query": "12"}), ("clock", {})),
    ),
    "qwen, cut off": Case(
        QWEN_XML, "<tool_call>\n<function=search>\n<parameter=qu", "<tool_call>\n<function=search>\n<parameter=qu"
    ),
    "qwen, without the last mark": Case(QWEN_XML, "<tool_call><function=clock></function>", calls=(("clock", {}),)),
    "qwen, as JSON": Case(
        QWEN_XML, '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>', calls=(CLOCK,)
    ),
    "qwen, a name that is none": Case(
        QWEN_XML, "<tool_call><function=no></function></tool_call>", "<tool_call><function=no></function></tool_call>"
    ),
    "glm": Case(
        GLM,
        "\n<think>Two?</think>\nLet me.\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        "Let me.\n",
        "Two?",
        calls=(("search", {"query": "5", "limit": 5}), ("clock", {})),
        thoughts=THINK,
    ),
    "glm, in one line": Case(
        GLM,
        "<tool_call>clock<arg_key>zone</arg_key><arg_value>[1, {}]</arg_value></tool_call><tool_call>clock</tool_call>",
        calls=(("clock", {"zone": [1, {}]}), ("clock", {})),
    ),
    "minimax": Case(
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">a b</parameter>\n'
        '<parameter name="limit">3</parameter>\n</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        calls=(("search", {"query": "a b", "limit": 3}), ("clock", {})),
    ),
    "llama": Case(
        LLAMA,
        '<|python_tag|>{"name": "search", "parameters": {"query": "a } \\" b", "limit": 5}}; '
        '{"name": "clock", "parameters": {}}',
        calls=BOTH,
        hidden=("<|python_tag|>",),
    ),
    "llama, bare": Case(
        LLAMA,
        '{"type": "function", "name": "search", "parameters": {"query": "a } \\" b", "limit": 5}}\n'
        '{"name": "clock", "parameters": {}}',
        calls=BOTH,
    ),
    "llama, python": Case(LLAMA, "<|python_tag|>print({1: 2})", "print({1: 2})", hidden=("<|python_tag|>",)),
    "mistral": Case(
        MISTRAL,
        'Wait.[TOOL_CALLS]search[ARGS]{"query": "a } \\" b", "limit": 5}[TOOL_CALLS]clock[CALL_ID]a1B[ARGS]{}',
        "Wait.",
        calls=BOTH,
    ),
    "mistral, other names": Case(
        MISTRAL,
        '[TOOL_CALLS] db.read-all_2{"a": [{}, "]"]} Done.',
        "Done.",
        calls=(("db.read-all_2", {"a": [{}, "]"]}),),
        hidden=("[TOOL_CALLS]", "[ARGS]"),
    ),
    "mistral, a name that is none": Case(
        MISTRAL, 'a[TOOL_CALLS]no[ARGS]{"b": 1}', 'ano{"b": 1}', hidden=("[TOOL_CALLS]", "[ARGS]")
    ),
    "magistral": Case(
        MISTRAL,
        '[THINK]A clock?\n[/THINK]Yes.[TOOL_CALLS]clock[ARGS]{"zone": "CET"}',
        "Yes.",
        "A clock?",
        calls=(CLOCK,),
        thoughts=MISTRAL_THINK,
    ),
    "magistral, special marks": Case(
        MISTRAL,
        "[THINK]A [ARGS]clock [T[/THINK]Yes [/THINK].",
        "Yes .",
        "A clock [T",
        thoughts=MISTRAL_THINK,
        hidden=("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
    ),
    "mistral, a list": Case(
        MISTRAL_LIST,
        '[TOOL_CALLS] [{"name": "search", "arguments": {"query": "a } \\" b", "limit": 5}, "id": "bbc5b7ede"}, '
        '{"name": "clock", "arguments": {}, "id": "x"}]',
        calls=BOTH,
    ),
    "mistral, a list in another order": Case(
        MISTRAL_LIST,
        '[TOOL_CALLS][{"arguments": {"zone": "CET"}, "name": "clock"},{"name": "clock"}] Done.',
        "Done.",
        calls=(CLOCK, ("clock", {})),
    ),
    "granite": Case(
        GRANITE,
        '<|tool_call|>[{"name": "search", "arguments": {"query": "a } \\" b", "limit": 5}},{"name": "clock"}]',
        calls=BOTH,
        hidden=("<|tool_call|>",),
    ),
    "granite, no call": Case(GRANITE, "a <|tool_call|>[5] b", "a [5] b", hidden=("<|tool_call|>",)),
    "deepseek": Case(
        DEEPSEEK,
        deep(
            'Hm.<|tool~calls~begin|><|tool~call~begin|>search<|tool~sep|>{"query": "a } \\" b", "limit": 5}'
            "<|tool~call~end|><|tool~call~begin|>clock<|tool~sep|>{}<|tool~call~end|><|tool~calls~end|>"
        ),
        "Hm.",
        calls=BOTH,
        hidden=tuple(map(deep, ("<|tool~calls~begin|>", "<|tool~calls~end|>"))),
    ),
    "deepseek v3": Case(
        DEEPSEEK_V3,
        deep(
            "<|tool~calls~begin|><|tool~call~begin|>function<|tool~sep|>search\n```json\n"
            '{"query": "a } \\" b", "limit": 5}\n```<|tool~call~end|>'
            "\n<|tool~call~begin|>function<|tool~sep|>clock\n```json\n{}\n```<|tool~call~end|>"
            "<|tool~calls~end|>"
        ),
        calls=BOTH,
        hidden=tuple(map(deep, ("<|tool~calls~begin|>", "<|tool~calls~end|>"))),
    ),
    "kimi": Case(
        KIMI,
        "So.<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        '{"query": "a } \\" b", "limit": 5}<|tool_call_end|><|tool_call_begin|>functions.clock:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "So.",
        calls=BOTH,
        hidden=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "harmony": Case(
        HARMONY,
        "<|channel|>analysis<|message|>A clock? <b><|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Now.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.clock <|constrain|>json<|message|>{"zone": "CET"}',
        "I look.",
        "A clock? <b>\nNow.",
        calls=(CLOCK,),
    ),
    "harmony, another order": Case(
        HARMONY,
        ' to=functions.db.read-all_2<|channel|>commentary json<|message|>{"a": 1}<|call|>'
        "<|start|>assistant to=functions.clock<|channel|>analysis<|message|><|call|>",
        calls=(("db.read-all_2", {"a": 1}), ("clock", {})),
    ),
    "harmony, an answer": Case(
        HARMONY,
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>a < b <|x|> c<|return|>",
        "a < b <|x|> c",
        "So.",
    ),
    "harmony, no channel": Case(HARMONY, "It is <|late", "It is <|late"),
    "harmony, the answer comes in a new channel": Case(
        HARMONY, "<|channel|>analysis<|message|>So.<|channel|>final<|message|>Late.", "Late.", "So."
    ),
    "harmony, a name that is none": Case(
        HARMONY, "<|channel|>commentary to=functions.no json<|message|>{}<|call|>", "{}"
    ),
    "harmony, a thought is cut off": Case(HARMONY, "<|channel|>analysis<|message|>So <|en", "", "So <|en"),
    "harmony, a header is cut off": Case(HARMONY, "<|channel|>final<|mess"),
}


def read(case: Case, cuts: list[int]) -> list[TextPart]:
    form = ReplyForm(case.form, case.thoughts)
    reader = reader_of(form, FUNCTIONS, case.is_open if case.thoughts is not None else None, case.hidden)
    assert reader is not None
    pieces = (case.written[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(case.written)], strict=True))
    return [*map(reader.feed, pieces), reader.end()]


def joined(parts: list[TextPart]) -> tuple[str, str, list[tuple[str, str]]]:
    """All text, thought and calls. Each call has its name first, then its arguments."""
    calls: list[tuple[str, str]] = []
    for call in [each for part in parts for each in part.calls]:
        if call.name:
            assert call.number == len(calls)
            calls.append((call.name, call.arguments))
        else:
            assert call.number == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    return "".join(each.text for each in parts), "".join(each.thought for each in parts), calls


def cuts_of(length: int) -> Iterator[list[int]]:
    """No cut, one at each place, and one at all places."""
    yield []
    yield from ([at] for at in range(length + 1))
    yield [*range(1, length)]


@pytest.mark.parametrize("name", CASES)
def test_a_reply_cut_anywhere(name: str) -> None:
    case = CASES[name]
    for cuts in cuts_of(len(case.written)):
        text, thought, calls = joined(read(case, cuts))
        assert (text, thought) == (case.text, case.thought), cuts
        assert tuple((name, json.loads(arguments)) for name, arguments in calls) == case.calls, cuts


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_reply_in_pieces(name: str, data: st.DataObject) -> None:
    case = CASES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.written)), max_size=8)))
    assert joined(read(case, cuts)) == joined(read(case, []))


@given(
    form=st.sampled_from([HERMES, QWEN_XML, GLM, LLAMA, MISTRAL, DEEPSEEK_V3, KIMI, MINIMAX, HARMONY]),
    parts=st.lists(st.sampled_from([*{part for case in CASES.values() for part in case.written.split()}]), max_size=9),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_a_broken_reply_in_pieces(form: CallForm, parts: list[str], data: st.DataObject) -> None:
    """Parts of calls in any order. What they are read as does not depend on the cuts."""
    case = Case(form, " ".join(parts), thoughts=THINK)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(case.written)), max_size=8)))
    assert joined(read(case, cuts)) == joined(read(case, []))
    assert joined(read(case, [*range(1, len(case.written))])) == joined(read(case, []))


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral", "deepseek v3", "kimi", "harmony"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    case = CASES[name]
    parts = read(case, [*range(1, len(case.written))])
    calls = [call for part in parts for call in part.calls]
    assert [call.arguments for call in calls if call.name] == [""] * len(case.calls)
    pieces = [call.arguments for call in calls if call.number == 0 and not call.name]
    first = json.dumps(case.calls[0][1])
    assert pieces == [*first]


def test_a_reply_that_is_cut_within_a_call() -> None:
    for form, text in (
        (HERMES, '<tool_call>{"name": "clock", "arguments": {"zone": "C'),
        (MISTRAL, '[TOOL_CALLS]clock[ARGS]{"zone": "C'),
        (HARMONY, '<|channel|>commentary to=functions.clock<|message|>{"zone": "C'),
    ):
        reader = reader_of(ReplyForm(form), FUNCTIONS, None)
        assert reader is not None
        parts = [reader.feed(text), reader.end()]
        assert joined(parts) == ("", "", [("clock", '{"zone": "C')])
        assert reader.is_cut


def test_signs_behind_a_call_without_marks() -> None:
    """They are text, in one piece or two."""
    text = '{"name": "clock", "arguments": {}}\n```'
    for cut in (len(text), len(text) - 3):
        reader = reader_of(ReplyForm(DEEPSEEK_V3), FUNCTIONS, None)
        assert reader is not None
        parts = [reader.feed(text[:cut]), reader.feed(text[cut:]), reader.end()]
        assert joined(parts) == ("```", "", [("clock", "{}")])


def test_a_call_whose_closing_mark_ends_the_text_is_whole() -> None:
    reader = reader_of(ReplyForm(HARMONY), FUNCTIONS, None)
    assert reader is not None
    reader.feed('<|channel|>commentary to=functions.clock<|message|>{"zone": "C"')
    assert reader.is_cut
    reader.feed("}")
    reader.end()
    assert not reader.is_cut


LONG = " " * 20_000
LONG_CASES = [
    Case(GLM, f"<tool_call>search<arg_key>{LONG}</tool_call>", "", calls=(("search", {}),)),
    Case(GLM, "<tool_call>search" + "<arg_key>a</arg_key><arg_value>" * 3_000, "all"),
    Case(QWEN_XML, "<function=search>" * 3_000, "all"),
    Case(QWEN_XML, "<tool_call>" * 3_000, "all"),
    Case(MISTRAL, f"[TOOL_CALLS]a{LONG}a", "all"),
    Case(MISTRAL_LIST, f"[TOOL_CALLS]a[CALL_ID]{LONG}[ARGS]{LONG}", "all"),
    Case(HERMES, '<tool_call>{"name"' + LONG, "all"),
    Case(HERMES, '{"type": "a", ' * 3_000, "all"),
    Case(KIMI, f"<|tool_call_begin|>functions.functions.{LONG}", "all"),
    Case(HARMONY, "<|channel|>" * 3_000),
]


@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.written[:30])
def test_a_long_broken_reply_is_read_soon(case: Case) -> None:
    """Patterns that try each length of each gap would take hours."""
    text, _, calls = joined(read(case, [*range(25, len(case.written), 25)]))
    assert text == (case.written if case.text == "all" else case.text)
    assert [name for name, _ in calls] == [name for name, _ in case.calls]


def test_a_thought_comes_before_the_text() -> None:
    for case in CASES.values():
        if case.form is not HARMONY:
            parts = read(case, [*range(1, len(case.written))])
            thoughts, texts = ([at for at, each in enumerate(parts) if each[kind]] for kind in (1, 0))
            assert not texts or max(thoughts, default=-1) <= texts[0]


def test_numbers_of_calls_go_on() -> None:
    parts = read(CASES["mistral, a list in another order"], [])
    assert [call for part in parts for call in part.calls] == [
        CallPart(0, "clock"),
        CallPart(0, "", '{"zone": "CET"}'),
        CallPart(1, "clock"),
        CallPart(1, "", "{}"),
    ]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("null", {"type": "string"}, "null"),
        ('{"a": 1}', {"type": "string"}, '{"a": 1}'),
        ("5", {"type": "integer"}, 5),
        ("5", {}, 5),
        ("five", {"type": "integer"}, "five"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("None", {}, "None"),
        ("['x', {'a': True}]", {"type": "array"}, ["x", {"a": True}]),
        ("{'a': None}\n", {"type": "object"}, {"a": None}),
        ("{'a', 'b'}", {"type": "object"}, "{'a', 'b'}"),
        ("(1, 2)", {"type": "array"}, "(1, 2)"),
        ("'x'", {"type": ["string", "null"]}, "'x'"),
        ("open('x')", {"type": "array"}, "open('x')"),
        ("[" * 65 + "]" * 65 + ",", {"type": "array"}, "[" * 65 + "]" * 65 + ","),
        ("True", {"type": ["string", "boolean"]}, True),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ('"a"', {"type": ["string", "null"]}, '"a"'),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"enum": [1, 2]}, 1),
        ("{" * 9000, {"type": "object"}, "{" * 9000),
        ("5", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, 5),
        ("x", True, "x"),
    ],
)
def test_a_value_has_the_type_of_its_schema(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))
