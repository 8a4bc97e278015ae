"""Items of an answer of `/v1/responses` beside its text: thoughts, and calls of functions, whole and as events."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import NAME, VOCABULARY, ScriptedService, Served, says, serving
from windlass.serve.prompts import PromptTokenizer

CLOCK: Any = {"type": "function", "name": "clock", "description": "The time.", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>'
LINE = "[{{ message.role }}]{% if message.reasoning_content %}({{ message.reasoning_content }})</think>{% endif %}"
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = TEMPLATE.replace("[{{ message.role }}]", LINE).replace("<|eos|>", CALLS + "<|eos|>")
    with serving(ScriptedService(says("")), PromptTokenizer(with_template(template), [1], VOCABULARY)) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai_client() as made:
        yield made


def told(item: Any) -> dict[str, Any]:
    """An item as it was sent, without the client's own fields."""
    found: dict[str, Any] = item.model_dump(exclude={"parsed_arguments": True, "content": {"__all__": {"parsed"}}})
    return found


def kinds(answer: Any) -> list[str]:
    return [item.type for item in answer.output]


SAID = {
    f"<think>\nA clock?</think>\nLet me see.\n{CALL}{CALL}": ["reasoning", "message", "function_call", "function_call"],
    f"<think>A clock?</think>{CALL}": ["reasoning", "function_call"],
    CALL: ["function_call"],
    "<think>A clock?</think>Late.": ["reasoning", "message"],
    "<think>A clock?": ["reasoning"],
    "Late.": ["message"],
    "": ["message"],
}


@pytest.mark.parametrize("text", SAID)
def test_a_stream_tells_what_a_whole_answer_does(served: Served, client: openai.OpenAI, text: str) -> None:
    """As OpenAI's own client puts the events together, item by item."""
    served.service.script = says(text)
    asked: Any = {"model": NAME, "input": "What time is it?", "tools": [CLOCK]}
    whole = client.responses.create(**asked)
    assert kinds(whole) == SAID[text]
    assert {item.status for item in whole.output} == {"completed"}
    with client.responses.stream(**asked) as stream:
        found: list[Any] = list(stream)
        final = stream.get_final_response()
    done = [each.item for each in found if each.type == "response.output_item.done"]
    assert [told(item) for item in final.output] == [told(item) for item in done]
    made_up = {"id", "call_id"}
    for one, other in zip(done, whole.output, strict=True):
        assert {k: v for k, v in told(one).items() if k not in made_up} == {
            k: v for k, v in told(other).items() if k not in made_up
        }
    added = [each for each in found if each.type == "response.output_item.added"]
    assert [each.output_index for each in added] == [*range(len(done))]
    assert [each.item.id for each in added] == [item.id for item in done]
    assert {each.item.status for each in added} == {"in_progress"}
    for kind, name in (("reasoning", "reasoning_text"), ("message", "output_text")):
        parts = [each for each in found if each.type == f"response.{name}.delta"]
        assert "".join(each.delta for each in parts) == "".join(
            item.content[0].text for item in done if item.type == kind
        )
        assert {each.item_id for each in parts} <= {item.id for item in done if item.type == kind}
    arguments = [each.arguments for each in found if each.type == "response.function_call_arguments.done"]
    assert arguments == [item.arguments for item in done if item.type == "function_call"]


def test_what_was_thought_is_counted(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says("<think>A clock?</think>\nLate.")
    used: Any = client.responses.create(model=NAME, input="x").usage
    assert used.output_tokens_details.reasoning_tokens == len("<think>A clock?</think>")
    asked: Any = [{"role": "user", "content": "x"}]
    of_chat: Any = client.chat.completions.create(model=NAME, messages=asked).usage
    assert of_chat.completion_tokens_details.reasoning_tokens == len("<think>A clock?</think>")
    served.service.script = says("<thin air")
    used = client.responses.create(model=NAME, input="x").usage
    assert used.output_tokens_details.reasoning_tokens == 0


def test_an_answer_that_is_cut_in_a_thought(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says("<think>A clock?</think>Late.")
    answer: Any = client.responses.create(model=NAME, input="x", max_output_tokens=11)
    assert (kinds(answer), answer.status, answer.output[0].status) == (["reasoning"], "incomplete", "incomplete")
    answer = client.responses.create(model=NAME, input="x", max_output_tokens=25)
    assert [item.status for item in answer.output] == ["completed", "incomplete"]


def test_an_output_comes_back_as_input(served: Served, client: openai.OpenAI) -> None:
    """A thought stands before its message, and calls behind it, in one turn of the assistant."""
    served.service.script = says(f"<think>A clock?</think>Let me see.{CALL}{CALL}")
    first: Any = client.responses.create(model=NAME, input="Time?", tools=[CLOCK])
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": each.call_id, "output": "9 p.m."} for each in calls]
    items: Any = [{"role": "user", "content": "Time?"}, *(item.model_dump() for item in first.output), *outputs]
    client.responses.create(model=NAME, input=items)
    call = '<clock {"zone": "CET"}>'
    assert served.server.tokenizer.decoded(served.service.requests[-1].prompt) == (
        f"<|bos|>[user]Time?<|eos|>\n[assistant](A clock?)</think>Let me see.{call}{call}<|eos|>\n"
        "[tool]9 p.m.<|eos|>\n[tool]9 p.m.<|eos|>\n[assistant]"
    )
    assert len({each.call_id for each in calls}) == 2


def test_turns_of_the_assistant_stay_apart(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says("Late.")
    items: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "c"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "d"}]},
        {"role": "assistant", "content": "e"},
        {"type": "reasoning", "id": "rs_2", "summary": []},
        {"type": "function_call", "call_id": "f", "name": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "f", "output": [{"type": "input_text", "text": "g"}]},
    ]
    client.responses.create(model=NAME, input=items)
    assert served.server.tokenizer.decoded(served.service.requests[-1].prompt) == (
        "<|bos|>[user]a<|eos|>\n[assistant]b<|eos|>\n[assistant]c<|eos|>\n[assistant](d)</think>e<|eos|>\n"
        "[assistant]<clock {}><|eos|>\n[tool]g<|eos|>\n[assistant]"
    )


def test_a_call_that_is_demanded(served: Served, client: openai.OpenAI) -> None:
    served.service.script = says('{"name": "clock", "arguments": {}}')
    choice: Any = {"type": "function", "name": "clock"}
    answer: Any = client.responses.create(
        model=NAME, input="x", tools=[CLOCK], tool_choice=choice, parallel_tool_calls=False
    )
    assert kinds(answer) == ["function_call"]
    assert (answer.tools[0].name, answer.tool_choice.name, answer.parallel_tool_calls) == ("clock", "clock", False)
    assert served.service.requests[-1].grammar is not None
    none: Any = client.responses.create(model=NAME, input="x", tools=[CLOCK], tool_choice="none")
    assert kinds(none) == ["message"]
