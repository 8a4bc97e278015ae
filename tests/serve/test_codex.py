"""`/v1/responses` as Codex CLI asks it, turn after turn: its fields, items, headers, and the events that it reads."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import NAME, VOCABULARY, Answer, ScriptedService, Served, ask, events, says, serving
from windlass.engine.request import Failure, Piece
from windlass.serve.prompts import PromptTokenizer

PATH = "/v1/responses"
HEADERS = {"originator": "codex_cli_rs", "session_id": "0193a5e4", "conversation_id": "0193a5e4"}
COMMAND: dict[str, Any] = {"command": ["ls"]}
CALL = f'<tool_call>{{"name": "shell", "arguments": {json.dumps(COMMAND)}}}</tool_call>'
SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a shell command and returns its output.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}, "description": "The command"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    SHELL,
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    {"type": "namespace", "name": "mcp__a__", "description": "b", "tools": [SHELL]},
]
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %}"
)


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


START = [said("developer", "<permissions>"), said("user", "<environment_context>"), said("user", "List files.")]


def request(items: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    """The body of a request, with all that Codex sends."""
    return {
        "model": NAME,
        "instructions": "You are a coding agent.",
        "input": items,
        "tools": TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": None,
        "prompt_cache_key": "0193a5e4-7c1b-7000-8000-000000000001",
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "client_metadata": {"x-codex-installation-id": "a"},
        **given,
    }


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    template = TEMPLATE.replace("<|eos|>", CALLS + "<|eos|>")
    template = template.replace(
        "{% for message", "{# </think> #}{% if tools %}{{ tools | tojson }}\n{% endif %}{% for message", 1
    )
    with serving(ScriptedService(says("")), PromptTokenizer(with_template(template), [1], VOCABULARY)) as server:
        yield server


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events that Codex parses, by the `type` of the data, not by the event's name."""
    assert answer.status == 200, answer.body
    parts = [part.partition(b"data: ")[2] for part in answer.body.split(b"\n\n")]
    return [json.loads(part) for part in parts if part]


def read_by(served: Served) -> str:
    text = served.server.tokenizer.decoded(served.service.requests[-1].prompt)
    return text[text.index("[system]") :]


@pytest.mark.parametrize("call", [f"Let me look.{CALL}", CALL, f"<think>Files?</think>{CALL}"])
def test_turns_of_an_agent(served: Served, call: str) -> None:
    """Each item that was done comes back without its id, as Codex keeps it."""
    items = [*START]
    for turn in range(3):
        served.service.script = says(call)
        found = events_of(ask(served.port, PATH, request(items), **HEADERS))
        assert [each["type"] for each in (found[0], found[-1])] == ["response.created", "response.completed"]
        done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
        added = [each["item"] for each in found if each["type"] == "response.output_item.added"]
        assert [each["type"] for each in added] == [each["type"] for each in done]
        text = "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
        assert text == "".join(part["text"] for each in done if each["type"] == "message" for part in each["content"])
        usage = found[-1]["response"]["usage"]
        numbers = (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"])
        assert numbers[0] + numbers[1] == numbers[2]
        assert {*usage["input_tokens_details"], *usage["output_tokens_details"]} == {
            "cached_tokens",
            "moved_tokens",
            "cache_write_tokens",
            "reasoning_tokens",
        }
        assert usage["windlass"]["left_out"] == [
            *("tools.1: local_shell", "tools.2: web_search", "tools.3: custom", "tools.4: namespace"),
            *("reasoning.effort: medium", "reasoning.summary: auto"),
        ]
        last = done[-1]
        assert (last["type"], last["name"], json.loads(last["arguments"])) == ("function_call", "shell", COMMAND)
        pieces = [each["delta"] for each in found if each["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == last["arguments"]
        items += [{name: value for name, value in each.items() if name != "id"} for each in done]
        items.append({"type": "function_call_output", "call_id": last["call_id"], "output": f"file{turn}"})
    before = "Let me look." if call.startswith("Let") else ""
    assert read_by(served) == (
        "[system]You are a coding agent.<|eos|>\n[system]<permissions><|eos|>\n[user]<environment_context><|eos|>\n"
        "[user]List files.<|eos|>\n"
        + "".join(
            f'[assistant]{before}<shell {{"command": ["ls"]}}><|eos|>\n[tool]file{at}<|eos|>\n' for at in range(2)
        )
        + "[assistant]"
    )


ITEMS: list[tuple[list[dict[str, Any]], str]] = [
    ([said("assistant", "Done.") | {"phase": "final_answer", "end_turn": True}], "[assistant]Done.<|eos|>\n"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}], ""),
    ([{"type": "reasoning", "summary": [], "content": None, "encrypted_content": None}], ""),
    ([{"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}], ""),
    ([{"type": "ghost_snapshot", "ghost_commit": {"id": "x"}}], ""),
    (
        [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "function_call", "name": "shell", "arguments": "{broken", "call_id": "a", "namespace": None},
            {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "failed"}]},
        ],
        '[assistant]<shell "{broken"><|eos|>\n[tool]failed<|eos|>\n',
    ),
    (
        [
            {"type": "function_call", "name": "shell", "arguments": COMMAND, "call_id": "a", "parsed_arguments": {}},
            {"type": "function_call_output", "call_id": "a", "output": {"content": "no", "success": False}},
        ],
        '[assistant]<shell {"command": ["ls"]}><|eos|>\n[tool]{"content": "no", "success": false}<|eos|>\n',
    ),
    (
        [
            {
                "type": "custom_tool_call",
                "status": "completed",
                "call_id": "a",
                "name": "apply_patch",
                "input": "*** x",
            },
            {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
        ],
        '[assistant]<apply_patch {"input": "*** x"}><|eos|>\n[tool]ok<|eos|>\n',
    ),
    (
        [
            {
                "type": "local_shell_call",
                "call_id": "a",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "timeout_ms": None, "env": None},
            },
            {"type": "function_call_output", "call_id": "a", "output": "file"},
        ],
        '[assistant]<local_shell {"command": ["ls"]}><|eos|>\n[tool]file<|eos|>\n',
    ),
]


@pytest.mark.parametrize(("items", "text"), ITEMS, ids=lambda each: str(each)[:50])
def test_items_of_a_conversation(served: Served, items: list[dict[str, Any]], text: str) -> None:
    served.service.script = says("Done.")
    answer = ask(served.port, PATH, request([*START, *items, said("user", "Go on.")]), **HEADERS)
    assert events_of(answer)[-1]["type"] == "response.completed"
    assert read_by(served).partition("List files.<|eos|>\n")[2] == f"{text}[user]Go on.<|eos|>\n[assistant]"


def test_items_that_cannot_be_read_are_noted(served: Served) -> None:
    unread = [{"type": "web_search_call"}, {"type": "reasoning", "encrypted_content": "gAAA"}]
    given = request([*START, *unread], tools=[], reasoning=None, stream=False)
    answer = ask(served.port, PATH, given, **HEADERS)
    notes = answer.document["usage"]["windlass"]["left_out"]
    assert notes == ["input.3: web_search_call", "input.4: encrypted_content"]


def test_a_failure_has_a_message_that_codex_shows(served: Served) -> None:
    served.service.script = events(Piece(5, "a"), Failure("it took too long", is_ours=False))
    found = events_of(ask(served.port, PATH, request(START), **HEADERS))
    [failed] = [each["response"] for each in found if each["type"] == "response.failed"]
    assert (failed["status"], failed["error"]["message"]) == ("failed", "it took too long")
