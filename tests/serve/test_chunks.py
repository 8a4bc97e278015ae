"""Parts in any order as content of a request: the engine's input, and the client's response."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import NAME, ScriptedService, Served, ask, chat, complete, says, serving, soon, words
from windlass.cache.options import CacheOptions
from windlass.engine.recompute import First, Nothing
from windlass.engine.request import Request
from windlass.engine.scheduler import Scheduler
from windlass.hf.load import load
from windlass.serve.errors import ApiError
from windlass.serve.prompts import Chunk, PromptTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SEA = "The sea was calm, and nobody was there."
KEY = "One of the special magic numbers for quiet-river is: 4821376."
ROAD = "A road went over the hills."


def chunk(text: str) -> dict[str, str]:
    return {"type": "chunk", "text": text}


def message(*texts: str, question: str = "Which?") -> list[dict[str, Any]]:
    content: list[dict[str, str]] = [{"type": "text", "text": "Read:"}, *map(chunk, texts)]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("fine"))) as server:
        yield server


def asked(served: Served, path: str, document: Any) -> Request:
    answer = ask(served.port, path, document)
    assert answer.status == 200, answer.body
    return served.service.requests[-1]


def pieces(request: Request) -> list[str]:
    """Its parts as text."""
    assert request.parts is not None
    return [words().decoded(request.prompt[slice(*span)]) for span in request.parts.spans]


def test_chunks_of_a_chat(served: Served) -> None:
    """Each keeps the tokens that it has by itself, wherever the template puts it."""
    request = asked(served, CHAT, chat(messages=[{"role": "system", "content": "x"}, *message(SEA, ROAD)]))
    assert pieces(request) == [SEA, ROAD]
    assert request.parts is not None
    assert request.parts.recompute == First(16)
    assert words().decoded(request.prompt) == (
        f"<|bos|>[system]x<|eos|>\n[user]Read:{SEA}{ROAD}Which?<|eos|>\n[assistant]"
    )
    start, stop = request.parts.spans[1]
    assert request.prompt[start:stop] == words().encoded(ROAD, False)
    tokens = ask(served.port, "/tokenize", {"messages": message(SEA)}).document["tokens"]
    assert tokens == list(asked(served, CHAT, chat(messages=message(SEA))).prompt)


def test_chunks_before_a_prompt(served: Served) -> None:
    given = {"texts": [SEA, KEY], "recompute": "none"}
    request = asked(served, COMPLETIONS, complete(prompt=" Which?", chunks=given))
    assert pieces(request) == [SEA, KEY]
    assert request.parts is not None
    assert request.parts.recompute == Nothing()
    assert words().decoded(request.prompt) == f"<|bos|>{SEA}{KEY} Which?"
    bare = asked(served, COMPLETIONS, complete(prompt=[7, 8], chunks={"texts": [SEA]}))
    assert bare.prompt == (*words().encoded(SEA, False), 7, 8)


def test_a_request_without_chunks_has_no_parts(served: Served) -> None:
    assert asked(served, CHAT, chat()).parts is None
    assert asked(served, COMPLETIONS, complete()).parts is None
    assert asked(served, CHAT, chat(messages=message(SEA), chunks={"recompute": "all"})).parts is not None


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (chat(chunks={"recompute": "none"}), "chunks"),
        (chat(messages=message(SEA), chunks={"recompute": "some"}), "chunks.recompute"),
        (chat(messages=message(SEA), chunks={"recompute": "first(0)"}), "chunks.recompute"),
        (chat(messages=message(SEA), chunks={"recompute": 5}), "chunks.recompute"),
        (chat(messages=message(SEA), chunks={"texts": [SEA]}), "chunks.texts"),
        (chat(messages=message(SEA), chunks=[SEA]), "chunks"),
        (chat(messages=message("")), "messages.0.content.1.text"),
        (chat(messages=message(*"x" * 257)), "messages"),
    ],
)
def test_a_bad_chunk_of_a_chat(served: Served, document: Any, param: str) -> None:
    answer = ask(served.port, CHAT, document)
    assert (answer.status, answer.document["error"]["param"]) == (400, param)


@pytest.mark.parametrize("given", [{}, {"texts": []}, {"texts": [""]}, {"texts": "x"}, {"texts": ["x"] * 257}, [], "x"])
def test_a_bad_chunk_before_a_prompt(served: Served, given: Any) -> None:
    answer = ask(served.port, COMPLETIONS, complete(chunks=given))
    assert answer.status == 400
    assert answer.document["error"]["param"].startswith("chunks")


@pytest.mark.parametrize(
    "template", [TEMPLATE.replace("message.content", at) for at in ("''", "(message.content + message.content)")]
)
def test_a_template_that_does_not_show_each_chunk_once(template: str) -> None:
    with pytest.raises(ApiError, match="does not show each chunk once"):
        PromptTokenizer(with_template(template), [1], 2048).chat([{"role": "user", "content": ("a", Chunk(SEA))}], [])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return with_template()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, Scheduler]]:
    with engine_served(model, tokenizer, CacheOptions(budget=256, policy="recent", chunk=64), 4 << 20) as running:
        yield running


def test_an_answer_out_of_stored_parts(engine: tuple[int, Scheduler]) -> None:
    """The number is in one of them, in any order. Usage counts read and reused tokens."""
    port, running = engine
    question = " What is the special magic number for quiet-river mentioned above? The special magic number"
    found = []
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
        for texts in ((SEA, KEY, ROAD), (KEY, ROAD, SEA), (ROAD, SEA, KEY)):
            answer = client.completions.create(
                model=NAME,
                prompt=f"{question} for quiet-river is:",
                max_tokens=9,
                temperature=0,
                extra_body={"chunks": {"texts": [f" {text}" for text in texts], "recompute": "first(4)"}},
            )
            took: Any = answer.usage
            assert answer.choices[0].text.strip().startswith("4821376")
            found.append((took.prompt_tokens_details.cached_tokens, took.model_extra["windlass"]["recomputed"]))
    size = sum(len(words().encoded(f" {text}", False)) for text in (SEA, KEY, ROAD))
    assert found == [(0, 8), (size - 8, 8), (size - 8, 8)]  # the first part still stands behind the same token
    assert soon(lambda: running.status().bytes_held <= running.status().bytes_limit)


@pytest.mark.parametrize("recompute", ["none", "first(2)", "divergent(0.2)", "all"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_all_equals_the_plain_prompt(engine: tuple[int, Scheduler], recompute: str, is_streamed: bool) -> None:
    port, _ = engine
    fields = {"max_tokens": 6, "temperature": 0, "stream": is_streamed}
    document = chat(messages=message(SEA, ROAD), chunks={"recompute": recompute}, **fields)
    ids = ask(port, "/tokenize", {"messages": document["messages"]}).document["tokens"]
    answer = ask(port, CHAT, document)
    plain = ask(port, COMPLETIONS, complete(prompt=ids, max_tokens=6, temperature=0)).document
    assert answer.status == 200
    if is_streamed:
        assert answer.body.endswith(b"[DONE]\n\n")
    elif recompute == "all":
        assert answer.document["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        assert answer.document["usage"]["windlass"] == plain["usage"]["windlass"]


@pytest.mark.parametrize("recompute", ["none", "first(2)", "divergent(0.2)"])
def test_parts_of_a_server_that_never_evicts_system_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, engine: tuple[int, Scheduler], recompute: str
) -> None:
    """As served by default. Nothing is evicted here, so the answer is that with 4 sinks."""
    options = CacheOptions(budget=256, policy="recent", chunk=64, sinks="system")
    with engine_served(model, tokenizer, options, 4 << 20) as (port, _):
        for system in ([], [{"role": "system", "content": "Be short."}]):
            document = chat(messages=[*system, *message(SEA, KEY)], max_tokens=6, temperature=0)
            document |= {"chunks": {"recompute": recompute}}
            answers = [ask(each, CHAT, document) for each in (port, port, engine[0])]
            assert [answer.status for answer in answers] == [200] * 3
            first, again, other = (answer.document["choices"][0]["message"]["content"] for answer in answers)
            assert first == again == other


@pytest.mark.parametrize(
    "own", [{"budget": 8, "sinks": 1, "window": 2}, {"policy": "kvzip"}, {"recall": 8}, {"positions": "compact"}]
)
def test_what_parts_exclude_is_refused_by_name(engine: tuple[int, Scheduler], own: dict[str, Any]) -> None:
    port, _ = engine
    answer = ask(port, CHAT, chat(messages=message(SEA, ROAD), **own))
    assert (answer.status, answer.document["error"]["param"]) == (400, "chunks")
    assert ask(port, CHAT, chat(messages=message(SEA), chunks={"recompute": "all"}, max_tokens=2, **own)).status == 200


def test_a_server_that_keeps_nothing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    with engine_served(model, tokenizer) as (port, _):
        error = ask(port, CHAT, chat(messages=message(SEA))).document["error"]
        assert (error["param"], "--reuse" in error["message"]) == ("chunks", True)


def test_who_keeps_parts_apart(engine: tuple[int, Scheduler]) -> None:
    port, _ = engine

    def cached(**fields: Any) -> int:
        given = chat(messages=message("Only here: " + ROAD), max_tokens=1, chunks={"recompute": "none"}, **fields)
        return int(ask(port, CHAT, given).document["usage"]["prompt_tokens_details"]["cached_tokens"])

    size = len(words().encoded("Only here: " + ROAD, False))
    assert [cached(), cached(), cached(user="ben"), cached(user="ben")] == [0, size, 0, size]
    assert [cached(cache={"name": "a"}), cached(cache={"name": "a"})] == [0, size]
    assert [cached(cache={"lookup": False}), cached(cache={"store": False})] == [0, size]
