"""Named sessions: the server remembers a conversation as its client would send it again."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.serving import (
    TOOLS,
    VOCABULARY,
    Answer,
    RawClient,
    ScriptedService,
    Served,
    ask,
    chat,
    events,
    says,
    serving,
    soon,
)
from windlass.engine.request import Failure, Piece
from windlass.serve.errors import SessionLimits
from windlass.serve.prompts import PromptTokenizer

CHAT, PATH = "/v1/chat/completions", "/v1/sessions"
KEYS = ("long-enough-1", "long-enough-2")
CALLS = (
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
)
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("It is late."))) as server:
        yield server


@pytest.fixture(autouse=True)
def _emptied(served: Served) -> Iterator[None]:
    served.service.script = says("It is late.")
    yield
    for each in ask(served.port, PATH).document["data"]:
        assert call(served.port, "DELETE", f"{PATH}/{each['name']}").status == 200


def call(port: int, method: str, path: str, document: Any = None, **headers: str) -> Answer:
    client = RawClient(port)
    client.send(method, path, b"" if document is None else json.dumps(document).encode(), **headers)
    answer = client.answer()
    client.close()
    return answer


def turn(port: int, text: str, session: str = "s", **fields: Any) -> Answer:
    return ask(port, CHAT, chat(messages=[{"role": "user", "content": text}], session=session, **fields))


def messages(port: int, name: str = "s", query: str = "") -> list[Any]:
    found: list[Any] = ask(port, f"{PATH}/{name}{query}").document["messages"]
    return found


def read_by(served: Served) -> str:
    """The last prompt as text."""
    return served.server.tokenizer.decoded(served.service.requests[-1].prompt)


USER, LATE = {"role": "user", "content": "Time?"}, {"role": "assistant", "content": "It is late."}
SURE = {"role": "user", "content": "Sure?"}
TWO_TURNS = "<|bos|>[user]Time?<|eos|>\n[assistant]It is late.<|eos|>\n[user]Sure?<|eos|>\n[assistant]"


def test_turns(served: Served) -> None:
    assert turn(served.port, "Time?").document["choices"][0]["message"]["content"] == "It is late."
    assert messages(served.port) == [USER, LATE]
    streamed = turn(served.port, "Sure?", stream=True)
    assert streamed.body.endswith(b"data: [DONE]\n\n")
    assert read_by(served) == TWO_TURNS
    assert messages(served.port) == [USER, LATE, SURE, LATE]
    assert turn(served.port, "Time?", "other").status == 200
    assert read_by(served) == "<|bos|>[user]Time?<|eos|>\n[assistant]"


def test_a_session_is_made_told_and_deleted(served: Served) -> None:
    made = ask(served.port, PATH, {"name": "s", "messages": [{"role": "developer", "content": "Be short."}]}).document
    assert (made["object"], made["name"], made["count"], made["bytes"] > 50) == ("session", "s", 1, True)
    ask(served.port, PATH, {"name": "r"})
    listed = ask(served.port, PATH).document
    assert (listed["object"], [each["name"] for each in listed["data"]]) == ("list", ["r", "s"])
    assert listed["data"][1] == made
    turn(served.port, "Time?")
    assert read_by(served) == "<|bos|>[system]Be short.<|eos|>\n[user]Time?<|eos|>\n[assistant]"
    again = ask(served.port, PATH, {"name": "s"})
    assert (again.status, again.document["error"]["code"]) == (409, "session_exists")
    gone = call(served.port, "DELETE", f"{PATH}/s").document
    assert gone == {"object": "session.deleted", "name": "s", "deleted": True}
    for method, path, body in (
        ("GET", f"{PATH}/s", None),
        ("DELETE", f"{PATH}/s", None),
        ("POST", f"{PATH}/s/rewind", {"messages": 0}),
        ("POST", f"{PATH}/s/branch", {"name": "t"}),
    ):
        answer = call(served.port, method, path, body)
        assert (answer.status, answer.document["error"]["code"]) == (404, "session_not_found")


def test_rewind_and_branch(served: Served) -> None:
    turn(served.port, "Time?")
    turn(served.port, "Sure?")
    branched = ask(served.port, f"{PATH}/s/branch", {"name": "t", "messages": 3}).document
    assert (branched["name"], branched["count"]) == ("t", 3)
    assert ask(served.port, f"{PATH}/s/rewind", {"messages": 2}).document["count"] == 2
    assert messages(served.port, "t") == [USER, LATE, SURE]
    assert messages(served.port) == [USER, LATE]
    ask(served.port, f"{PATH}/t/branch", {"name": "u"})
    assert messages(served.port, "u") == [USER, LATE, SURE]
    turn(served.port, "Sure?")
    assert read_by(served) == TWO_TURNS
    answer = ask(served.port, f"{PATH}/s/rewind", {"messages": 5})
    assert (answer.status, answer.document["error"]["param"]) == (400, "messages")
    assert "must be at most 4" in answer.document["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "It is <late> é☺.",
        "  spaces \n",
        "<think>\nHow late?</think>\n\nLate.<tool_call>"
        '{"name": "clock", "arguments": {"b": 1.0, "a": "é"}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "clock", "arguments": {"c": [1]}}</tool_call>',
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_read_as_its_client_would_send_it(text: str, stream: bool) -> None:
    template = TEMPLATE.replace("<|eos|>", CALLS + "<|eos|>").replace("{% for", TOOLS + "{% for", 1)
    words = PromptTokenizer(with_template(template), [1], VOCABULARY)
    with serving(ScriptedService(says(text)), words) as server:
        given: dict[str, Any] = {"tools": [CLOCK], "max_tokens": 400}
        answer = ask(server.port, CHAT, chat(messages=[USER], **given)).document["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": "x", "content": "noon"}
        ask(server.port, CHAT, chat(messages=[USER, answer, result], **given))
        ask(server.port, CHAT, chat(messages=[USER], session="s", stream=stream, **given))
        ask(server.port, CHAT, chat(messages=[result], session="s", **given))
        assert ("tool_calls" in answer) == ("tool_call" in text)
        plain, ours = (server.service.requests[at].prompt for at in (1, 3))
        assert words.decoded(ours) == words.decoded(plain)
        assert ours == plain


def test_a_turn_that_does_not_end_leaves_no_trace(served: Served) -> None:
    turn(served.port, "Time?")
    served.service.script = events(Piece(5, "a"), Failure("it took too long", is_ours=False))
    assert turn(served.port, "Sure?").status == 400
    assert b"it took too long" in turn(served.port, "Sure?", stream=True).body
    for stream in (True, False):
        served.service.script = events(Piece(5, "a"), None, Piece(6, "b"))
        client = RawClient(served.port)
        client.post(CHAT, chat(messages=[SURE], session="s", stream=stream))
        assert soon(lambda: len(served.service._under_way) == 1)
        client.close()
        assert served.service.is_idle()
    assert turn(served.port, "Sure?", nonsense=1).status == 400
    assert turn(served.port, "Sure?", logit_bias={"99999": 1}).status == 400  # seen after the turn has begun
    assert messages(served.port) == [USER, LATE]
    served.service.script = says("It is late.")
    assert soon(lambda: turn(served.port, "Sure?").status == 200)
    assert read_by(served) == TWO_TURNS


def test_two_requests_at_once(served: Served) -> None:
    served.service.script = events(Piece(5, "a"), None)
    first = RawClient(served.port)
    first.post(CHAT, chat(messages=[USER], session="s", stream=True))
    first.until(b'"content":"a"')
    for answer in (
        turn(served.port, "Sure?"),
        turn(served.port, "Sure?", stream=True),
        ask(served.port, PATH, {"name": "s"}),
    ):
        assert answer.status == 409
    told = turn(served.port, "Sure?").document["error"]
    assert (told["code"], told["param"]) == ("session_busy", "session")
    assert "answers another request. Wait for its end" in told["message"]
    served.service.script = says("It is late.")
    assert turn(served.port, "Time?", "other").status == 200
    first.close()
    assert soon(lambda: turn(served.port, "Time?").status == 200)


def test_each_key_and_user_has_its_own() -> None:
    with serving(ScriptedService(says("It is late.")), keys=KEYS) as server:
        heads = [{"Authorization": f"Bearer {key}"} for key in KEYS]
        for at, (head, user) in enumerate([(heads[0], ""), (heads[0], "anna"), (heads[1], "")]):
            document = chat(messages=[{"role": "user", "content": f"Hello {at}"}], session="s", user=user)
            assert ask(server.port, CHAT, document, **head).status == 200
        for at, (head, query) in enumerate([(heads[0], ""), (heads[0], "?user=anna"), (heads[1], "")]):
            assert [each["count"] for each in ask(server.port, PATH + query, **head).document["data"]] == [2]
            assert ask(server.port, f"{PATH}/s{query}", **head).document["messages"][0]["content"] == f"Hello {at}"
        assert call(server.port, "DELETE", f"{PATH}/s?user=anna", **heads[1]).status == 404
        assert call(server.port, "DELETE", f"{PATH}/s?user=anna", **heads[0]).status == 200
        assert ask(server.port, f"{PATH}/s?user=anna", **heads[0]).status == 404
        assert [ask(server.port, f"{PATH}/s", **head).status for head in heads] == [200, 200]
        assert ask(server.port, PATH).status == 401


@pytest.mark.parametrize(
    ("path", "document", "param"),
    [
        (PATH, {"name": "a/b"}, "name"),
        (PATH, {"name": ""}, "name"),
        (PATH, {}, "name"),
        (PATH, {"name": "a", "messages": []}, "messages"),
        (PATH, {"name": "a", "messages": [{"role": "x", "content": ""}]}, "messages.0.role"),
        (PATH, {"name": "a", "other": 1}, "other"),
        (f"{PATH}/a/rewind", {}, "messages"),
        (f"{PATH}/a/rewind", {"messages": -1}, "messages"),
        (f"{PATH}/a/rewind", {"messages": "1"}, "messages"),
        (f"{PATH}/a/branch", {"messages": 1}, "name"),
        (CHAT, chat(session="a/b"), "session"),
        (CHAT, chat(session="a", n=2), "n"),
        ("/v1/completions", {"prompt": "x", "session": "a"}, "session"),
    ],
)
def test_what_is_refused_by_name(served: Served, path: str, document: Any, param: str) -> None:
    answer = ask(served.port, path, document)
    assert (answer.status, answer.document["error"]["param"]) == (400, param)
    assert ask(served.port, PATH).document["data"] == []


def test_the_limits_hold() -> None:
    limits = SessionLimits(sessions=2, responses=5, bytes=900)
    with serving(ScriptedService(says("It is late.")), sessions=limits) as server:
        assert ask(server.port, PATH, {"name": "a"}).status == 200
        assert ask(server.port, PATH, {"name": "b", "user": "anna"}).status == 200
        for answer in (
            ask(server.port, PATH, {"name": "c"}),
            turn(server.port, "Time?", "c"),
            ask(server.port, f"{PATH}/a/branch", {"name": "c"}),
        ):
            assert (answer.status, answer.document["error"]["code"]) == (400, "session_limit")
            assert "has 2 sessions, and may have 2" in answer.document["error"]["message"]
        while (answer := turn(server.port, "Time?", "a")).status == 200:
            pass
        assert "are the most" in answer.document["error"]["message"]
        held = ask(server.port, f"{PATH}/a").document
        assert 2 <= held["count"] <= 20
        assert held["bytes"] <= 900
        assert b"session_limit" in turn(server.port, "Time?", "a", stream=True).body
        assert ask(server.port, f"{PATH}/a").document == held
        call(server.port, "DELETE", f"{PATH}/a")
        assert turn(server.port, "Time?", "c").status == 200


def test_a_disk_that_fails_leaves_the_session_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ScriptedService(says("It is late.")), folder=tmp_path, salt=b"s" * 32) as server:
        turn(server.port, "Time?")
        [path] = tmp_path.iterdir()
        before, real, calls = path.read_bytes(), os.write, list[int]()

        def full(file: int, data: bytes) -> int:
            calls.append(file)
            if len(calls) % 2:
                return real(file, data[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("windlass.serve.sessions.os.write", full)
        answer = turn(server.port, "Sure?")
        assert (answer.status, answer.document["error"]["code"]) == (500, "not_written")
        assert "No space left on device" in answer.document["error"]["message"]
        assert b"not_written" in turn(server.port, "Sure?", stream=True).body
        assert turn(server.port, "Sure?", "new").status == 500
        monkeypatch.undo()
        assert [*tmp_path.iterdir()] == [path]
        assert path.read_bytes() == before
        assert path.stat().st_mode & 0o777 == 0o600
        assert turn(server.port, "Sure?").status == 200
        assert messages(server.port) == [USER, LATE, SURE, LATE]
    with serving(ScriptedService(says("It is late.")), folder=tmp_path, salt=b"s" * 32) as server:
        assert messages(server.port) == [USER, LATE, SURE, LATE]


def test_a_damaged_log_is_told_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line in the middle that is no line of ours. Nothing of it is lost."""
    given: dict[str, Any] = {"folder": tmp_path, "salt": b"s" * 32}
    with serving(ScriptedService(says("It is late.")), **given) as server:
        turn(server.port, "Time?", "s")
        turn(server.port, "Time?", "t")
    paths = sorted(tmp_path.iterdir())
    content = paths[0].read_bytes().replace(b'{"kind"', b'{"kinds"')
    paths[0].write_bytes(content)
    with serving(ScriptedService(says("It is late.")), **given) as server:
        assert len(ask(server.port, PATH).document["data"]) == 1
    assert paths[0].with_suffix(".damaged").read_bytes() == content
    assert "was renamed to .damaged" in caplog.text


def test_an_answer_that_cannot_be_sent_again_is_not_kept(served: Served) -> None:
    """More calls than a message may have."""
    turn(served.port, "Time?")
    served.service.script = says('<tool_call>{"name": "clock", "arguments": {}}</tool_call>\n' * 129)
    answer = turn(served.port, "Sure?", tools=[CLOCK], max_tokens=20_000)
    assert (answer.status, answer.document["error"]["code"]) == (400, "not_kept")
    assert "tool_calls" in answer.document["error"]["message"]
    assert messages(served.port) == [USER, LATE]


def test_replicas_remember_nothing() -> None:
    limits = SessionLimits(sessions=0, responses=0)
    with serving(ScriptedService(says("It is late.")), sessions=limits) as server:
        assert "Start it without --replicas" in turn(server.port, "Time?").document["error"]["message"]
        answer = ask(server.port, "/v1/responses", {"input": "Time?"}).document
        assert answer["store"] is False
        assert ask(server.port, f"/v1/responses/{answer['id']}").status == 404
