"""Stored responses, as OpenAI's own client has them: each is a point to go on from."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.serving import NAME, RawClient, ScriptedService, Served, ask, events, says, serving
from windlass.engine.request import Failure, Piece
from windlass.serve.errors import SessionLimits

PATH = "/v1/responses"
KEYS = ("long-enough-1", "long-enough-2")
FIRST = "<|bos|>[user]Time?<|eos|>\n[assistant]It is late.<|eos|>\n"


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("It is late."))) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.openai_client() as made:
        yield made


def read_by(served: Served) -> str:
    """The last prompt as text."""
    return served.server.tokenizer.decoded(served.service.requests[-1].prompt)


def delete(port: int, path: str, **headers: str) -> Any:
    client = RawClient(port)
    client.send("DELETE", path, b"", **headers)
    answer = client.answer()
    client.close()
    return answer


def respond(port: int, **fields: Any) -> Any:
    answer = ask(port, PATH, {"input": "Time?"} | fields)
    assert answer.status == 200, answer.body
    return answer.document


def test_a_response_is_a_branch_point(served: Served, client: openai.OpenAI) -> None:
    first: Any = client.responses.create(model=NAME, input="Time?", instructions="Be short.")
    assert (first.store, first.previous_response_id) == (True, None)
    for text in ("Sure?", "Really?"):
        second = client.responses.create(model=NAME, input=text, previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert read_by(served) == f"{FIRST}[user]{text}<|eos|>\n[assistant]"  # instructions are of one request
    streamed = list(client.responses.create(model=NAME, input="And?", previous_response_id=second.id, stream=True))
    last: Any = streamed[-1]
    assert last.response.store
    client.responses.create(model=NAME, input="Go.", previous_response_id=last.response.id, instructions="Loud.")
    turns = "".join(f"[user]{text}<|eos|>\n[assistant]It is late.<|eos|>\n" for text in ("Really?", "And?"))
    before = FIRST.replace("<|bos|>", "<|bos|>[system]Loud.<|eos|>\n")
    assert read_by(served) == f"{before}{turns}[user]Go.<|eos|>\n[assistant]"


def test_a_response_is_told_and_deleted(client: openai.OpenAI, served: Served) -> None:
    first = client.responses.create(model=NAME, input="Time?")
    second = client.responses.create(model=NAME, input="Sure?", previous_response_id=first.id)
    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(second.id).output_text == "It is late."
    client.responses.delete(first.id)
    assert ask(served.port, f"{PATH}/{second.id}").status == 200
    for answer in (
        ask(served.port, f"{PATH}/{first.id}"),
        delete(served.port, f"{PATH}/{first.id}"),
        ask(served.port, PATH, {"input": "x", "previous_response_id": first.id}),
    ):
        error = answer.document["error"]
        assert (answer.status, error["code"], error["type"]) == (404, "response_not_found", "not_found_error")
        assert f"Response with id '{first.id}' not found" in error["message"]
    third = client.responses.create(model=NAME, input="And?", previous_response_id=second.id)
    assert read_by(served).startswith(FIRST + "[user]Sure?")
    assert delete(served.port, f"{PATH}/{third.id}").document == {
        "id": third.id,
        "object": "response",
        "deleted": True,
    }
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")


def test_calls_and_thoughts_are_those_of_a_whole_input(served: Served) -> None:
    """As the same items sent by the client are."""
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]
    served.service.script = says('Well.<tool_call>{"name": "clock", "arguments": {"b": 1.0}}</tool_call>')
    given: dict[str, Any] = {"tools": tools, "max_output_tokens": 400}
    first = respond(served.port, **given)
    output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "noon"}
    respond(served.port, **given | {"input": [output], "previous_response_id": first["id"]})
    ours = served.service.requests[-1].prompt
    items = [{"role": "user", "content": "Time?"}, *first["output"], output]
    respond(served.port, **given | {"input": items, "store": False})
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    assert ours == served.service.requests[-1].prompt


def test_what_is_not_stored(served: Served) -> None:
    for given in ({"store": False}, {"store": False, "stream": True}):
        answer = ask(served.port, PATH, {"input": "x", **given})
        assert b'"store":false' in answer.body
        number = answer.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
        assert number.startswith("resp_")
        assert ask(served.port, f"{PATH}/{number}").status == 404
    assert respond(served.port, store="int8")["store"] is True
    assert served.service.requests[-1].options.store.name == "int8"
    served.service.script = events(Piece(5, "a"), Failure("it took too long", is_ours=False))
    answer = ask(served.port, PATH, {"input": "x", "stream": True})
    number = answer.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
    assert ask(served.port, f"{PATH}/{number}").status == 404


def test_each_key_and_user_has_its_own(tmp_path: Path) -> None:
    """Also in the next server."""
    heads = [{"Authorization": f"Bearer {key}"} for key in KEYS]
    given: dict[str, Any] = {"keys": KEYS, "folder": tmp_path, "salt": b"s" * 32}
    with serving(ScriptedService(says("It is late.")), **given) as server:
        first = ask(server.port, PATH, {"input": "Time?", "user": "anna"}, **heads[0]).document["id"]
        document = {"input": "Sure?", "user": "anna", "previous_response_id": first}
        second = ask(server.port, PATH, document, **heads[0]).document["id"]
    with serving(ScriptedService(says("It is late.")), **given) as server:
        assert ask(server.port, f"{PATH}/{second}?user=anna", **heads[0]).document["id"] == second
        for query, head in (("", heads[0]), ("?user=ben", heads[0]), ("?user=anna", heads[1])):
            assert ask(server.port, f"{PATH}/{second}{query}", **head).status == 404
            assert delete(server.port, f"{PATH}/{second}{query}", **head).status == 404
        for user, head in (("", heads[0]), ("anna", heads[1])):
            document = {"input": "x", "user": user, "previous_response_id": first}
            assert ask(server.port, PATH, document, **head).status == 404
        document = {"input": "And?", "user": "anna", "previous_response_id": second}
        assert ask(server.port, PATH, document, **heads[0]).status == 200
        assert read_by(server).count("It is late.") == 2


def test_a_deep_document_is_read_again(tmp_path: Path) -> None:
    """A body may be nested 64 deep, and the document that repeats it is deeper."""
    deep: Any = "x"
    for _ in range(62):
        deep = {"a": deep}
    given: dict[str, Any] = {"folder": tmp_path, "salt": b"s" * 32}
    with serving(ScriptedService(says("It is late.")), **given) as server:
        first = respond(server.port, metadata={"a": deep})
        second = respond(server.port, previous_response_id=first["id"])
    with serving(ScriptedService(says("It is late.")), **given) as server:
        assert ask(server.port, f"{PATH}/{first['id']}").document == first
        assert ask(server.port, f"{PATH}/{second['id']}").document == second


def test_the_conversation_used_least_recently_leaves(tmp_path: Path) -> None:
    limits = SessionLimits(responses=4)
    with serving(ScriptedService(says("It is late.")), folder=tmp_path, salt=b"s" * 32, sessions=limits) as server:
        first, second, third = (respond(server.port)["id"] for _ in range(3))
        respond(server.port, previous_response_id=first)
        respond(server.port)
        statuses = [ask(server.port, f"{PATH}/{each}").status for each in (first, second, third)]
        assert statuses == [200, 404, 200]
        assert len([*tmp_path.iterdir()]) == 3
        last = first
        while (answer := ask(server.port, PATH, {"input": "x", "previous_response_id": last})).status == 200:
            last = answer.document["id"]
        assert answer.document["error"]["code"] == "store_limit"
        assert "or send store: false" in answer.document["error"]["message"]
        assert respond(server.port, previous_response_id=last, store=False)["store"] is False


def test_an_item_may_stand_for_itself(served: Served, client: openai.OpenAI) -> None:
    """The AI SDK sends back the ids of items, as OpenAI stores them, in place of thoughts, texts and calls."""
    tool: Any = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}
    served.service.script = says('I look.<tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call>')
    first = client.responses.create(model=NAME, input="Time?", tools=[tool])
    text, call = first.output
    assert call.type == "function_call"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "ten"}
    reference: Any = [{"type": "item_reference", "id": text.id}, {"id": call.id}, result]
    whole: Any = [text.model_dump(), call.model_dump(), result]
    prompts = []
    for items in (reference, whole):
        client.responses.create(model=NAME, input=[{"role": "user", "content": "Time?"}, *items], tools=[tool])
        prompts.append(read_by(served))
    assert prompts[0] == prompts[1]
    assert "I look." in prompts[0]
    for wrong in ("msg_1", text.id.replace("msg", "rs"), "nonsense", "_"):
        unknown: Any = [{"type": "item_reference", "id": wrong}]
        with pytest.raises(openai.NotFoundError, match="Send the item itself"):
            client.responses.create(model=NAME, input=unknown)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model=NAME, input=reference, user="bob")


LOST: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "the first response": lambda lines: [lines[0], *lines[2:]],
    "a deletion of another": lambda lines: [*lines, b'{"id": "resp_gone"}\n'],
    "one twice": lambda lines: [*lines, lines[1]],
    "a circle": lambda lines: [lines[0], lines[1].replace(b'"previous":null', b'"previous":"resp_b"'), *lines[2:]],
}


@pytest.mark.parametrize("name", LOST)
def test_a_log_of_responses_that_lacks_a_line_is_told_and_kept(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"folder": tmp_path, "salt": b"s" * 32}
    with serving(ScriptedService(says("It is late.")), **given) as server:
        first = respond(server.port)["id"]
        second = respond(server.port, previous_response_id=first)["id"]
    [path] = tmp_path.iterdir()
    content = b"".join(LOST[name](path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(content)
    with serving(ScriptedService(says("It is late.")), **given) as server:
        assert ask(server.port, PATH, {"input": "x", "previous_response_id": second}).status == 404
    assert path.with_suffix(".damaged").read_bytes() == content
    assert "was renamed to .damaged" in caplog.text
