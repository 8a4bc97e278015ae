"""Messages as clients send them back, turn after turn: by OpenAI's helpers, and in the dialects of other libraries."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import NAME, VOCABULARY, ScriptedService, Served, ask, says, serving
from windlass.serve.prompts import PromptTokenizer

PATH = "/v1/chat/completions"
USER: dict[str, Any] = {"role": "user", "content": "Time?"}
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>'
SHOWN_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}"
LINE = "[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
)


class Zone(BaseModel):
    """The arguments of `clock`."""

    zone: str


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = TEMPLATE.replace("[{{ message.role }}]", LINE).replace("<|eos|>", CALLS + "<|eos|>")
    template = template.replace("{% for message", SHOWN_TOOLS + "{% for message")
    with serving(ScriptedService(says("")), PromptTokenizer(with_template(template), [1], VOCABULARY)) as server:
        yield server


def read_by(served: Served) -> str:
    """The last prompt, without the tools before it."""
    text = served.server.tokenizer.decoded(served.service.requests[-1].prompt)
    return text[text.index("[user]") :]


def clock() -> Any:
    return openai.pydantic_function_tool(Zone, name="clock")


@pytest.mark.parametrize("way", ["stream", "parse"])
def test_several_turns_of_the_helpers(served: Served, way: str) -> None:
    """Each message is sent back as the helper made it."""
    talk: list[Any] = [USER]
    with served.openai_client() as client:
        for turn in range(4):
            served.service.script = says(f"Turn {turn}. {CALL}{CALL}")
            asked: Any = {"model": NAME, "messages": talk, "tools": [clock()]}
            if way == "stream":
                with client.chat.completions.stream(**asked) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = client.chat.completions.parse(**asked).choices[0].message
            assert [call.function.parsed_arguments for call in message.tool_calls] == [Zone(zone="CET")] * 2
            talk.append(message)
            talk += [{"role": "tool", "tool_call_id": call.id, "content": f"{turn} pm"} for call in message.tool_calls]
    expected = "[user]Time?<|eos|>\n"
    for turn in range(3):
        call = '<clock {"zone": "CET"}>'
        expected += f"[assistant]Turn {turn}.{call}{call}<|eos|>\n" + f"[tool]{turn} pm<|eos|>\n" * 2
    assert read_by(served) == expected + "[assistant]"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the client's own message
def test_an_answer_that_was_parsed_comes_back(served: Served) -> None:
    """With `parsed`, an object of pydantic, in it."""
    served.service.script = says('{"zone": "CET"}')
    with served.openai_client() as client:
        talk: list[Any] = [USER]
        first = client.chat.completions.parse(model=NAME, messages=talk, response_format=Zone).choices[0].message
        assert first.parsed == Zone(zone="CET")
        talk += [first, USER]
        client.chat.completions.parse(model=NAME, messages=talk, response_format=Zone)
    assert '[assistant]{"zone": "CET"}<|eos|>' in read_by(served)


def function(**given: Any) -> dict[str, Any]:
    return {"name": "clock", "arguments": '{"zone": "CET"}'} | given


SENT_BACK: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"content": None, "tool_calls": [], "function_call": None, "refusal": None}, ""),
    ({"content": None, "audio": {"id": "a"}, "annotations": [{}], "parsed": {"a": 1}, "anything": [5]}, ""),
    ({"content": None, "refusal": "No."}, "No."),
    ({"content": "Yes.", "refusal": "No."}, "Yes."),
    ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ({"content": ["Ye", {"type": "text", "text": "s.", "annotations": [], "index": 0, "id": "a"}]}, "Yes."),
    ({"content": [{"type": "output_text", "text": "Yes.", "logprobs": []}, {"type": "image_url"}, 5]}, "Yes."),
    ({"content": "Yes.", "reasoning_content": "Hm.", "thinking_blocks": [{"thinking": "Hm."}]}, "(Hm.)Yes."),
    ({"content": "Yes.", "reasoning": "Hm.", "reasoning_details": [{}]}, "(Hm.)Yes."),
    (
        {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Yes."}]},
        "(Hm.)Yes.",
    ),
    ({"content": "Yes.", "reasoning_content": 5, "name": ["x"], "tool_calls": None}, "Yes."),
    ({"tool_calls": [{"function": function()}]}, '<clock {"zone": "CET"}>'),
    (
        {"tool_calls": [{"index": 0, "id": 5, "type": None, "function": function(parsed_arguments={})}]},
        '<clock {"zone": "CET"}>',
    ),
    ({"content": "", "function_call": function()}, '<clock {"zone": "CET"}>'),
    (
        {"tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "run", "input": "ls"}}]},
        '<run {"input": "ls"}>',
    ),
    (
        {"content": [{"type": "tool_use", "id": "a", "name": "clock", "input": {"zone": "CET"}}]},
        '<clock {"zone": "CET"}>',
    ),
    (
        {"content": [{"type": "tool-call", "toolCallId": "a", "toolName": "clock", "input": {"zone": "CET"}}]},
        '<clock {"zone": "CET"}>',
    ),
    (
        {"content": [{"type": "tool_use", "name": "clock", "input": {}}], "tool_calls": [{"function": function()}]},
        '<clock {"zone": "CET"}>',
    ),
    # Arguments that are no JSON object are passed on unchanged, so that no call poisons later ones.
    ({"tool_calls": [{"function": function(arguments={"zone": "CET"})}]}, '<clock {"zone": "CET"}>'),
    ({"tool_calls": [{"function": function(arguments="{zone: CET")}]}, '<clock "{zone: CET">'),
    ({"tool_calls": [{"function": function(arguments='["CET"]')}]}, '<clock "[\\"CET\\"]">'),
    ({"tool_calls": [{"function": function(arguments=["CET"])}]}, '<clock "[\\"CET\\"]">'),
    ({"tool_calls": [{"function": function(arguments="[" * 5000)}]}, f'<clock "{"[" * 5000}">'),
    ({"tool_calls": [{"function": function(arguments="")}]}, "<clock {}>"),
    ({"tool_calls": [{"function": function(arguments=None)}]}, "<clock {}>"),
    ({"tool_calls": [{"function": function(name=None, arguments="{}")}]}, "< {}>"),
    ({"tool_calls": [{"function": None}]}, "< {}>"),
]


@pytest.mark.parametrize(("message", "text"), SENT_BACK, ids=lambda each: str(each)[:60])
def test_a_message_of_the_assistant_in_many_dialects(served: Served, message: dict[str, Any], text: str) -> None:
    served.service.script = says("Late.")
    answer = ask(served.port, PATH, {"model": NAME, "messages": [USER, {"role": "assistant", **message}, USER]})
    assert answer.status == 200, answer.body
    assert read_by(served) == f"[user]Time?<|eos|>\n[assistant]{text}<|eos|>\n[user]Time?<|eos|>\n[assistant]"


RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"content": "9 pm", "tool_call_id": "a", "name": "clock", "is_error": False, "artifact": {}}, "9 pm"),
    ({"content": [{"type": "text", "text": "9 "}, {"type": "text", "text": "pm", "cache_control": {}}]}, "9 pm"),
    ({"content": ["9 ", "pm"], "tool_call_id": 5}, "9 pm"),
    ({"content": None}, ""),
    ({}, ""),
    ({"content": {"hour": 9}}, '{"hour": 9}'),
]


@pytest.mark.parametrize(("message", "text"), RESULTS, ids=lambda each: str(each)[:60])
@pytest.mark.parametrize("role", ["tool", "function"])
def test_a_result_in_many_dialects(served: Served, role: str, message: dict[str, Any], text: str) -> None:
    talk = [USER, {"role": "assistant", "tool_calls": [{"function": function()}]}, {"role": role, **message}]
    served.service.script = says("Late.")
    answer = ask(served.port, PATH, {"model": NAME, "messages": talk})
    assert answer.status == 200, answer.body
    assert f"[tool]{text}<|eos|>" in read_by(served)


def test_tools_that_the_template_hides_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The prompt has them, and a call that the model writes is read."""
    with serving(ScriptedService(says(CALL)), PromptTokenizer(with_template(TEMPLATE), [1], VOCABULARY)) as server:
        for _ in range(2):
            with server.openai_client() as client:
                asked: Any = {"model": NAME, "messages": [{"role": "system", "content": "Be short."}, USER]}
                plain = client.chat.completions.create(**asked).usage
                told = client.chat.completions.create(**asked, tools=[clock()])
        assert told.choices[0].message.tool_calls[0].function.arguments == '{"zone": "CET"}'
        assert told.usage.prompt_tokens > plain.prompt_tokens
        assert "[system]Be short.\n\n# Tools" in server.server.tokenizer.decoded(server.service.requests[-1].prompt)
    lines = [line for line in caplog.messages if "shows no tools" in line]
    assert lines == [
        "this model's chat template shows no tools. The system text lists them between <tools> and </tools>"
    ]


def test_a_system_text_that_the_template_forbids(caplog: pytest.LogCaptureFixture) -> None:
    refuse = "{% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}[{{ message.role }}]"
    words = PromptTokenizer(with_template(TEMPLATE.replace("[{{ message.role }}]", refuse)), [1], VOCABULARY)
    with serving(ScriptedService(says("Late.")), words) as server:
        asked = [{"role": "system", "content": "Be short."}, {"role": "developer", "content": "In English."}, USER]
        assert ask(server.port, PATH, {"model": NAME, "messages": asked}).status == 200
        prompt = words.decoded(server.service.requests[-1].prompt)
        assert prompt == "<|bos|>[user]Be short.\n\nIn English.\n\nTime?<|eos|>\n[assistant]"
        chunk = [{"role": "system", "content": [{"type": "chunk", "text": "The sea."}]}, USER]
        assert ask(server.port, PATH, {"model": NAME, "messages": chunk}).status == 200
        assert words.decoded(server.service.requests[-1].prompt) == "<|bos|>[user]The sea.\n\nTime?<|eos|>\n[assistant]"
    assert "forbids a system message. It is folded into the first message of the user" in caplog.text
