"""A model's thoughts are returned beside its answer, in any form, and a template's switches reach it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import NAME, VOCABULARY, ScriptedService, Served, says, serving
from windlass.serve.parsers import TextPart, ThoughtReader
from windlass.serve.prompts import PromptTokenizer

CASES = {
    # Whether the prompt began a thought, the text written after it, and the parsed part.
    (False, "It is late."): TextPart("It is late."),
    (False, " It is late.\n"): TextPart(" It is late.\n"),
    (False, "<think>\nA clock?\n\nNo.\n</think>\n\nLate.\n"): TextPart("Late.\n", "A clock?\n\nNo."),
    (False, "\n<think>a</think>b</think> <think>c"): TextPart("b</think> <think>c", "a"),
    (False, "<think>\n\n</think>\n\nLate."): TextPart("Late."),
    (False, "<think>a < b, </thin ice"): TextPart("", "a < b, </thin ice"),
    (False, "<think> cut off </th"): TextPart("", "cut off </th"),
    (False, "<thinking> is a word"): TextPart("<thinking> is a word"),
    (False, "a <think>b</think>"): TextPart("a <think>b</think>"),
    (False, "<thi"): TextPart("<thi"),
    (False, "  "): TextPart("  "),
    (True, "\nA clock?\n</think>\nLate."): TextPart("Late.", "A clock?"),
    (True, "<think>A clock?</think>Late."): TextPart("Late.", "A clock?"),
    (True, "A clock?\n\n"): TextPart("", "A clock?"),
    (True, "</think>Late."): TextPart("Late."),
    (True, "<thi"): TextPart("", "<thi"),
    (True, ""): TextPart(),
    (False, ""): TextPart(),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1][:20]!r}")
@given(data=st.data())
def test_a_text_in_pieces(case: tuple[bool, str], data: st.DataObject) -> None:
    is_open, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ThoughtReader(is_open)
    said = [reader.feed(text[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    said.append(reader.end())
    assert TextPart("".join(each.text for each in said), "".join(each.thought for each in said)) == CASES[case]


def test_each_part_is_given_out_as_soon_as_it_is_certain() -> None:
    reader = ThoughtReader(is_open=False)
    pieces = ("<th", "ink>\n", "A ", "clock", "? </", "b> </think", ">", "\n", "Late", ".")
    assert [reader.feed(piece) for piece in pieces] == [
        *((TextPart(),) * 2),
        TextPart(thought="A"),
        TextPart(thought=" clock"),
        TextPart(thought="?"),
        TextPart(thought=" </b>"),
        *((TextPart(),) * 2),
        TextPart("Late"),
        TextPart("."),
    ]


THINKS = TEMPLATE.replace("{{ message.content", "{{ message.reasoning_content }}</think>{{ message.content")
SWITCH = "{% if effort is defined %}[{{ effort }}]{% endif %}{% if not quiet %}<think>\n{% endif %}"
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
ASKED: Any = [{"role": "user", "content": "What time is it?"}]
WROTE = "Two\nclocks. </think>\n\nIt is late."


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = THINKS.replace("[assistant]{%", f"[assistant]{SWITCH}{{%")
    with serving(ScriptedService(says(WROTE)), PromptTokenizer(with_template(template), [1], VOCABULARY)) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    served.service.script = says(WROTE)
    with served.openai_client() as made:
        yield made


def prompt(served: Served) -> str:
    return served.server.tokenizer.decoded(served.service.requests[-1].prompt)


def test_a_whole_answer(served: Served, client: openai.OpenAI) -> None:
    message = client.chat.completions.create(model=NAME, messages=ASKED).choices[0].message
    assert (message.content, message.model_extra) == ("It is late.", {"reasoning_content": "Two\nclocks."})
    again = [*ASKED, message.model_dump(), {"role": "user", "content": "So?"}]
    client.chat.completions.create(model=NAME, messages=again)
    assert "[assistant]Two\nclocks.</think>It is late.<|eos|>" in prompt(served)
    assert prompt(served).endswith("[assistant]<think>\n")


def test_a_stream(client: openai.OpenAI) -> None:
    deltas = [
        chunk.choices[0].delta for chunk in client.chat.completions.create(model=NAME, messages=ASKED, stream=True)
    ]
    thoughts = [delta.model_extra.get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "Two\nclocks."
    assert "".join(delta.content or "" for delta in deltas) == "It is late."
    last_thought = max(at for at, thought in enumerate(thoughts) if thought)
    assert not any(delta.content for delta in deltas[:last_thought])


@pytest.mark.parametrize("thought", ["Two\nclo", "Two\nclocks. </th"])
def test_a_thought_that_is_cut_off_is_no_answer(client: openai.OpenAI, thought: str) -> None:
    choice = client.chat.completions.create(model=NAME, messages=ASKED, max_tokens=len(thought)).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.model_extra == {"reasoning_content": thought}


def test_a_call_behind_a_thought(served: Served, client: openai.OpenAI) -> None:
    call = '{"name": "clock", "arguments": {}}'
    served.service.script = says(f"Is {call} it?</think>\n{call}")
    message = client.chat.completions.create(model=NAME, messages=ASKED, tools=[CLOCK]).choices[0].message
    assert [each.function.name for each in message.tool_calls] == ["clock"]
    assert (message.content, message.model_extra) == (None, {"reasoning_content": f"Is {call} it?"})


def test_a_grammar_leaves_no_room_for_a_thought(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says('{"a": "</think>"}')
    wanted: Any = {"type": "json_object"}
    message = client.chat.completions.create(model=NAME, messages=ASKED, response_format=wanted).choices[0].message
    assert (message.content, message.model_extra) == ('{"a": "</think>"}', {})


def test_a_switch_of_the_template(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says("It is late.")
    switches: Any = {"chat_template_kwargs": {"quiet": True, "effort": "low"}}
    message = client.chat.completions.create(model=NAME, messages=ASKED, extra_body=switches).choices[0].message
    assert (message.content, message.model_extra) == ("It is late.", {})
    assert prompt(served).endswith("[assistant][low]")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (
            "chat_template_kwargs",
            {"loud": True},
            "chat_template_kwargs.loud is nothing that this model's chat template",
        ),
        ("chat_template_kwargs", {"messages": "x"}, "chat_template_kwargs.messages is nothing"),
        ("chat_template_kwargs", {"tokenize": True}, "chat_template_kwargs.tokenize is nothing"),
        ("chat_template_kwargs", {"a b": True}, "chat_template_kwargs.a b must be the name of a variable"),
        (
            "chat_template_kwargs",
            {"quiet": [1]},
            "chat_template_kwargs.quiet must be a valid boolean or a valid integer",
        ),
        ("chat_template_kwargs", {f"v{at}": 1 for at in range(17)}, "at most 16 items, got 17"),
        ("chat_template_kwargs", 5, "must be an object"),
        (
            "messages",
            [{"role": "user", "content": "a", "reasoning_content": "b"}],
            "0.reasoning_content is not supported",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(client: openai.OpenAI, field: str, value: Any, said: str) -> None:
    asked: dict[str, Any] = {"messages": ASKED} | ({"messages": value} if field == "messages" else {})
    extra = {} if field == "messages" else {field: value}
    with pytest.raises(openai.BadRequestError, match=said):
        client.chat.completions.create(model=NAME, **asked, extra_body=extra)


def test_a_model_that_does_not_think_has_its_text_as_it_is() -> None:
    with (
        serving(ScriptedService(says("<think>a</think>b"))) as server,
        server.openai_client() as client,
    ):
        message = client.chat.completions.create(model=NAME, messages=ASKED).choices[0].message
    assert (message.content, message.model_extra) == ("<think>a</think>b", {})
