"""Chat templates of many kinds: whatever one refuses or hides, the text has each part of the conversation once."""

import json
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tests.helpers.chats import with_template
from windlass.engine.templates import rendered

TOOLS: Any = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
LOOP = "{% for m in messages %}"
LINE = "[{{ m.role }}]{{ m.content }}\n"
END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
SHOWN_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ ARGUMENTS }}>{% endfor %}"
RAISE = "{{ raise_exception('refused') }}"


def calls(arguments: str) -> str:
    return CALLS.replace("ARGUMENTS", arguments)


TEMPLATES = {
    "shows all": SHOWN_TOOLS + LOOP + LINE + calls("c.function.arguments | tojson") + END,
    "no tools, no calls": LOOP + LINE + END,
    "no roles but two": LOOP + "{% if m.role in ('user', 'assistant') %}" + LINE + "{% endif %}" + END,
    "raises for a tool": LOOP + "{% if m.role == 'tool' %}" + RAISE + "{% endif %}" + LINE + END,
    "raises for tools": "{% if tools %}" + RAISE + "{% endif %}" + LOOP + LINE + END,
    "raises for a system": LOOP + "{% if m.role == 'system' %}" + RAISE + "{% endif %}" + LINE + END,
    "system first": LOOP + "{% if m.role == 'system' and not loop.first %}" + RAISE + "{% endif %}" + LINE + END,
    "one call": SHOWN_TOOLS + LOOP + LINE + "{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}" + END,
    "refuses two calls": SHOWN_TOOLS
    + LOOP
    + LINE
    + "{% if m.tool_calls | default([]) | length > 1 %}"
    + RAISE
    + "{% endif %}"
    + calls("c.function.arguments | tojson")
    + END,
    "objects": SHOWN_TOOLS + LOOP + LINE + calls("c.function.arguments | items | list") + END,
    "keys alone": SHOWN_TOOLS
    + LOOP
    + LINE
    + calls("'' }}{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }}{% endfor %}{{ ''")
    + END,
    "strings": SHOWN_TOOLS + LOOP + LINE + calls("'' + c.function.arguments") + END,
    "turns alternate": LOOP
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    + RAISE
    + "{% endif %}"
    + LINE
    + END,
}


def call(arguments: Any, name: str = "clock") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM: dict[str, Any] = {"role": "system", "content": "Be short."}
USER: dict[str, Any] = {"role": "user", "content": "Time?"}
LATER: dict[str, Any] = {"role": "user", "content": "Sure?"}
MID: dict[str, Any] = {"role": "system", "content": "Now be long."}


def turn(*arguments: Any) -> list[dict[str, Any]]:
    """A message with calls, and a result of each."""
    results = [{"role": "tool", "tool_call_id": "c", "content": f"result{at}"} for at in range(len(arguments))]
    return [{"role": "assistant", "content": "Hm.", "tool_calls": [*map(call, arguments)]}, *results]


TALKS = {
    "plain": [USER],
    "system": [SYSTEM, USER],
    "two systems": [SYSTEM, MID, USER],
    "system later": [SYSTEM, USER, {"role": "assistant", "content": "Late."}, MID, LATER],
    "two users": [USER, LATER],
    "a call": [SYSTEM, USER, *turn({"zone": "CET"})],
    "no argument": [USER, *turn({})],
    "no JSON": [USER, *turn("{zone: CET"), LATER],
    "two calls": [USER, *turn({"zone": "CET"}, "no object"), LATER],
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["", "tools"])
def test_each_part_is_in_the_text(template: str, talk: str, tools: list[dict[str, Any]]) -> None:
    text, _ = rendered(with_template(TEMPLATES[template]), TALKS[talk], tools)
    assert text.endswith("[assistant]")
    assert ('"parameters"' in text) == bool(tools)
    for each in TALKS[talk]:
        assert text.count(each["content"]) == 1
        for one in each.get("tool_calls", ()):
            arguments = one["function"]["arguments"]
            for part in arguments.values() if isinstance(arguments, dict) else [arguments]:
                assert part in text
    names = sum(len(each.get("tool_calls", ())) for each in TALKS[talk])
    assert text.count("clock") == names + bool(tools)


def test_a_template_that_shows_all_is_given_all_as_it_is() -> None:
    """Equal to the template's own text, so that nothing changes for models with tools."""
    tokenizer = with_template(TEMPLATES["shows all"])
    for talk in TALKS.values():
        own = tokenizer.apply_chat_template(talk, tools=TOOLS, tokenize=False, add_generation_prompt=True)
        text, form = rendered(tokenizer, talk, TOOLS)
        assert (text, [*form.told()]) == (own, [])


def test_the_default_form() -> None:
    """As Hermes and Qwen write tools, calls and results."""
    talk = [SYSTEM, USER, *turn({"zone": "CET"}, "no"), LATER]
    text, form = rendered(with_template(TEMPLATES["no roles but two"]), talk, TOOLS)
    assert text == (
        "[user]Be short.\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        f"{json.dumps(TOOLS[0])}\n</tools>\n\nFor each function call, return a json object with function name and "
        "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>\n\nTime?\n'
        '[assistant]Hm.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": "no"}\n</tool_call>\n'
        "[user]<tool_response>\nresult0\n</tool_response>\n<tool_response>\nresult1\n</tool_response>\n"
        "[user]Sure?\n[assistant]"
    )
    assert [line.partition(".")[0] for line in form.told()] == [
        "shows no tools",
        "shows no earlier calls",
        "shows no results of tools",
        "forbids a system message",
    ]


def test_a_template_that_takes_nothing_says_why() -> None:
    with pytest.raises(TemplateError, match="refused"):
        rendered(with_template(RAISE), [USER])
    assert rendered(with_template("{{ messages | length }}"), [SYSTEM, USER])[0] == "2"
