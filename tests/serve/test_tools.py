"""Where a text has calls: the same, however it is cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.serve.forms import HERMES
from windlass.serve.parsers import Call, CallReader, TextPart

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
