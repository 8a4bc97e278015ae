"""Agent loops of ten tool turns through clients that people use, against `windlass serve`.

    pip install openai langchain-openai llm
    python benchmarks/clients/agents.py MODEL      # a folder or a hub name; prints a table and writes no file

Every client sends back the assistant messages that it received, as its own library builds them. A small model rarely
calls a tool of its own accord, so ten turns demand a call (`tool_choice`), and the eleventh asks for text. A loop
passes when ten calls have arguments that fit the schema and the last turn has text. The Responses loop sends the fields
that Codex CLI sends.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, NamedTuple

import openai
from pydantic import BaseModel

TURNS: Final = 10
STARTUP_S: Final = 120.0
LAST_TOKENS: Final = 200  # of the last turn: OpenAI's helpers raise where a text is cut
PLACES: Final = ("Oslo", "Lima", "Quito", "Cairo", "Hanoi", "Paris", "Accra", "Delhi", "Perth", "Sofia")
SYSTEM: Final = "You are a weather assistant. Use the tools to look up temperatures."
PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(PLACES)}},
    "required": ["city"],
    "additionalProperties": False,
}
DESCRIPTION: Final = "The temperature of a city in degrees Celsius."
TOOL: Final = {
    "type": "function",
    "function": {"name": "temperature", "description": DESCRIPTION, "parameters": PARAMETERS, "strict": True},
}


class Loop(NamedTuple):
    """How far a client came: calls answered, the last text, and tokens of the tenth prompt that were cached."""

    calls: int
    text: str
    cached_tokens: int = 0


class Weather(BaseModel):
    """The answer that `parse` asks for."""

    city: str
    degrees: int


def degrees(arguments: str) -> str:
    """The tool: its answer for `arguments`, which must fit the schema."""
    city = json.loads(arguments)["city"]
    return f"{3 * PLACES.index(city) + 2} degrees"


def question(turn: int) -> str:
    """The question of the user in `turn`."""
    return f"Question {turn + 1}: how warm is it in {PLACES[turn]}?"


def _by_stream(client: Any, model: str) -> Loop:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(turn)})
        with client.chat.completions.stream(
            model=model,
            messages=messages,
            tools=[TOOL],
            tool_choice="required",
            temperature=0.0,
            max_tokens=60,
            stream_options={"include_usage": True},
        ) as stream:
            called = stream.get_final_completion()
        message = called.choices[0].message
        assert message.tool_calls, f"turn {turn}: no call"
        messages.append(message)
        messages += [_result(call.id, call.function.arguments) for call in message.tool_calls]
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        tools=[TOOL],
        tool_choice="none",
        temperature=0.0,
        max_tokens=LAST_TOKENS,
    ) as stream:
        done = stream.get_final_completion()
    return Loop(TURNS, done.choices[0].message.content or "", _cached(called.usage))


def _by_parse(client: Any, model: str) -> Loop:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": question(turn)})
        called = client.chat.completions.parse(
            model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0.0, max_tokens=60
        )
        message = called.choices[0].message
        assert message.tool_calls, f"turn {turn}: no call"
        messages.append(message)
        messages += [_result(call.id, call.function.arguments) for call in message.tool_calls]
    done = client.chat.completions.parse(
        model=model, messages=messages, response_format=Weather, temperature=0.0, max_tokens=60
    )
    parsed = done.choices[0].message.parsed
    return Loop(TURNS, repr(parsed) if parsed else "", _cached(called.usage))


def _by_langchain(client: Any, model: str) -> Loop:
    said, chat_models = import_module("langchain_core.messages"), import_module("langchain_openai")
    chat = chat_models.ChatOpenAI(
        model=model,
        base_url=str(client.base_url),
        api_key=client.api_key,
        temperature=0.0,
        max_completion_tokens=LAST_TOKENS,
    )
    with_tools = chat.bind_tools([TOOL], tool_choice="required")
    messages: list[Any] = [said.SystemMessage(SYSTEM)]
    for turn in range(TURNS):
        messages.append(said.HumanMessage(question(turn)))
        answer = with_tools.invoke(messages)
        assert answer.tool_calls, f"turn {turn}: no call"
        messages.append(answer)
        for call in answer.tool_calls:
            messages.append(said.ToolMessage(degrees(json.dumps(call["args"])), tool_call_id=call["id"]))
    done = chat.bind_tools([TOOL], tool_choice="none").invoke(messages)
    cached = (answer.usage_metadata or {}).get("input_token_details", {}).get("cache_read", 0)
    return Loop(TURNS, str(done.content), cached)


def _by_llm(client: Any, model: str) -> Loop:
    llm, chats = import_module("llm"), import_module("llm.default_plugins.openai_models")
    chat = chats.Chat(
        f"windlass-{model}", model_name=model, api_base=str(client.base_url), supports_tools=True, can_stream=True
    )
    build_kwargs, choice = chat.build_kwargs, "required"  # llm has no option for `tool_choice`
    chat.build_kwargs = lambda prompt, stream: {**build_kwargs(prompt, stream), "tool_choice": choice}
    chat.key = client.api_key
    tool = llm.Tool(name="temperature", description=DESCRIPTION, input_schema=PARAMETERS)
    conversation, results = chat.conversation(tools=[tool]), list[Any]()
    for turn in range(TURNS):
        answer = conversation.prompt(
            question(turn), system=SYSTEM if turn == 0 else None, tool_results=results, temperature=0.0, max_tokens=60
        )
        answer.text()
        assert answer.tool_calls(), f"turn {turn}: no call"
        results = [
            llm.ToolResult(name=call.name, output=degrees(json.dumps(call.arguments)), tool_call_id=call.tool_call_id)
            for call in answer.tool_calls()
        ]
    choice = "none"
    last = conversation.prompt("Summarise.", tool_results=results, temperature=0.0, max_tokens=LAST_TOKENS)
    details = (answer.response_json or {}).get("usage", {}).get("prompt_tokens_details") or {}
    return Loop(TURNS, last.text(), details.get("cached_tokens", 0))


def _by_responses(client: Any, model: str) -> Loop:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]}
    ]
    for turn in range(TURNS):
        items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": question(turn)}]})
        done = _responded(client, model, items, {"type": "function", "name": "temperature"})
        calls = [each for each in done.output if each.type == "function_call"]
        assert calls, f"turn {turn}: no call"
        items += [each.model_dump() for each in done.output]
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": degrees(call.arguments)})
    last = _responded(client, model, items, "none")
    return Loop(TURNS, last.output_text, done.usage.input_tokens_details.cached_tokens)


def _responded(client: Any, model: str, items: list[Any], choice: Any) -> Any:
    """The completed response to a request with the fields of Codex CLI."""
    function = {"type": "function", "name": "temperature", "description": DESCRIPTION, "strict": False}
    stream = client.responses.create(
        model=model,
        instructions=SYSTEM,
        input=items,
        tools=[{**function, "parameters": PARAMETERS}, {"type": "web_search"}],
        tool_choice=choice,
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0193a5e4-7c1b-7000-8000-000000000001",
        text={"verbosity": "medium"},
        truncation="auto",
        temperature=0.0,
        max_output_tokens=60 if choice != "none" else LAST_TOKENS,
        extra_headers={"originator": "codex_cli_rs"},
    )
    done = [event for event in stream if event.type in ("response.completed", "response.incomplete")]
    assert done, "the stream ended without a response"
    return done[-1].response


def _result(call_id: str, arguments: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call_id, "content": degrees(arguments)}


def _cached(usage: Any) -> int:
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


LOOPS: Final[dict[str, Callable[[Any, str], Loop]]] = {
    "openai stream()": _by_stream,
    "openai parse()": _by_parse,
    "LangChain": _by_langchain,
    "llm": _by_llm,
    "Responses, as Codex": _by_responses,
}


@contextmanager
def served(model: str, options: list[str]) -> Iterator[str]:
    """The URL of a server of `model` on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "windlass", "serve", model, "--port", str(port), *options]
    process = subprocess.Popen(command)
    try:
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + STARTUP_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Run all loops, or one, and print how each ended; exits with 1 if any failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", default="", help="loops whose names contain this")
    options, rest = parser.parse_known_args()
    failed = 0
    with served(options.model, rest) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        name = client.models.list().data[0].id
        print(f"{'client':22} result")
        for client_name, loop in LOOPS.items():
            if options.only not in client_name:
                continue
            try:
                done = loop(client, name)
            except Exception as error:  # one client's failure must not hide the others' results
                print(f"{client_name:22} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
                failed += 1
                continue
            is_complete = done.calls == TURNS and bool(done.text.strip())
            failed += not is_complete
            print(
                f"{client_name:22} {done.calls} calls, {done.cached_tokens} tokens of the tenth prompt cached, "
                f"last text {done.text[:60]!r}",
                flush=True,
            )
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
