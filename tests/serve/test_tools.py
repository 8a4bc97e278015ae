"""Where a text has calls: the same, however it is cut into pieces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.chats import with_template
from windlass.serve.forms import HERMES
from windlass.serve.parsers import Call, CallReader, TextPart
from windlass.serve.prompts import PromptTokenizer

CALL = '{"name": "clock", "arguments": {"zone": "CET"}}'
CLOCK = Call("clock", '{"zone": "CET"}')
CASES = {
    "It is late.": ("It is late.", []),
    "": ("", []),
    CALL: ("", [CLOCK]),
    f"\n {CALL}\n": ("", [CLOCK]),
    '{"name": "clock", "parameters": {}}': ("", [Call("clock", "{}")]),
    f"<tool_call>\n{CALL}\n</tool_call>": ("", [CLOCK]),
    f"Let me see.<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>": ("Let me see.", [CLOCK, CLOCK]),
    f"Let me see.<tool_call>{CALL}": ("Let me see.", [CLOCK]),
    # Templates write the newline before a call again.
    f"Let me see.\n<tool_call>{CALL}": ("Let me see.", [CLOCK]),
    f"Let me see.\n\n<tool_call>{CALL}": ("Let me see.\n", [CLOCK]),
    "a\n<tool_call>{cut": ("a\n<tool_call>{cut", []),
    "a\n": ("a\n", []),
    "a <tool_call>{cut": ("a <tool_call>{cut", []),
    "a < b and <tool": ("a < b and <tool", []),
    '{"name": "unknown", "arguments": {}}': ('{"name": "unknown", "arguments": {}}', []),
    '{"name": "clock", "arguments": "no"}': ('{"name": "clock", "arguments": "no"}', []),
    '{"temperature": 5}': ('{"temperature": 5}', []),
    f"Write {CALL} to call": (f"Write {CALL} to call", []),
    "[" * 5000: ("[" * 5000, []),
    '{"a":' * 5000: ('{"a":' * 5000, []),
}


@pytest.mark.parametrize("text", CASES, ids=lambda text: text[:30])
@given(data=st.data())
def test_a_text_in_pieces(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader, said = CallReader(HERMES, {"clock": {}}), TextPart()
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        said = said.then(reader.feed(text[start:stop]))
    said = said.then(reader.end())
    names = [part.name for part in said.calls if part.name]
    arguments = ["".join(part.arguments for part in said.calls if part.number == at) for at in range(len(names))]
    assert (said.text, [*map(Call, names, arguments)]) == CASES[text]


def test_text_is_given_out_as_soon_as_it_can_be_no_call() -> None:
    reader = CallReader(HERMES, {"clock": {}})
    pieces = ("\n", "Hi ", "<to", "m>", "<tool", "_call>", "{")
    assert [reader.feed(piece).text for piece in pieces] == ["", "\nHi ", "", "<tom>", "", "", ""]


SHORT = (
    "{# [TOOL_CALLS] #}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% if call.id is not defined or call.id | length != 9 %}{{ raise_exception('no id') }}{% endif %}"
    "<{{ call.function.name }} {{ call.id }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}/{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "[{{ m.role }}]{# message.thinking #}{{ m.thinking }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
    "/{% endfor %}"
)


def call(number: str | None) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": "clock", "arguments": {}}}
    return made if number is None else {"id": number, **made}


def read(template: str, messages: list[dict[str, Any]]) -> str:
    words = PromptTokenizer(with_template(template), [1], 2048)
    return words.decoded(words.chat([{**each, "content": (each["content"],)} for each in messages], ()).ids)


def test_ids_of_calls_are_of_the_length_that_a_template_asks_for() -> None:
    ids = ("call_0123456789", "abcDEF123", None)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", "tool_calls": [call(each) for each in ids]},
        *({"role": "tool", "content": "ten", **({} if each is None else {"tool_call_id": each})} for each in ids),
    ]
    _, called, *results = read(SHORT, messages).strip("/").split("/")
    found = [each.split()[1] for each in called.split("<")[1:]]
    assert found[1] == ids[1]
    assert len({*found}) == 3
    assert all(len(each) == 9 and each.isalnum() for each in found)
    assert [each.partition("=")[2] for each in results] == found


def test_a_thought_has_the_name_that_a_template_reads() -> None:
    said: dict[str, Any] = {"role": "assistant", "content": "Late.", "reasoning_content": "So."}
    calls: list[dict[str, Any]] = [
        said,
        {**said, "tool_calls": [call("a")]},
        {**said, "content": "", "tool_calls": [call("a")]},
    ]
    text = read(THINKING, [{"role": "user", "content": "Time?"}, *calls])
    assert text.strip("/").split("/")[1:] == [
        "[assistant]So.|Late.",
        "[assistant]|Late.<clock {}>",
        "[assistant]So.|<clock {}>",
    ]
