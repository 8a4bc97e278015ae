"""With the real engine: a client gets the library's text, alone and beside others."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jaxtyping
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.chats import with_template
from tests.helpers.models import MODEL
from tests.helpers.serving import Answer, RawClient, ask, chat, complete, soon
from windlass.cache.options import CacheOptions
from windlass.engine.request import EngineLimits
from windlass.engine.scheduler import Scheduler
from windlass.hf.load import load
from windlass.serve.app import Server
from windlass.serve.errors import ServerSettings
from windlass.serve.prompts import PromptTokenizer
from windlass.serve.run import HttpServer, bind

PROMPTS = ("He was sitting in the boat, and the river", "She said", "The sea was " * 40)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return with_template()


@pytest.fixture(scope="module")
def server(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, Scheduler]]:
    jaxtyping.config.update("jaxtyping_disable", True)  # of the engine's thread, which reads one setting for all
    limits = EngineLimits(max_tokens=4000)
    engine = Scheduler(model, tokenizer, [(2, CacheOptions(budget=48, policy="recent", chunk=16))], limits)
    engine.start()
    listener = bind("127.0.0.1", 0)
    http = HttpServer(Server(engine, PromptTokenizer(tokenizer, [1], 2048), ServerSettings("finder-3m")))
    listener.listen()  # clients may come before the thread runs
    thread = threading.Thread(target=http.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1], engine
    http.end()
    thread.join(20.0)
    assert not thread.is_alive()
    assert not engine.status().is_alive


def test_texts_are_those_of_the_library(
    server: tuple[int, Scheduler], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    port, engine = server

    def asked(prompt: str) -> Answer:
        return ask(port, "/v1/completions", complete(prompt=prompt, max_tokens=20, temperature=0))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(asked, PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        cache = windlass.KVCache(model, budget=48, policy="recent", chunk=16)
        [alone] = windlass.generate(model, tokenizer, [prompt], cache, 20)
        document = answer.document
        assert document["choices"][0]["text"] == alone.text
        usage, told = document["usage"], document["usage"]["windlass"]
        assert usage["prompt_tokens"] == alone.prompt_tokens
        assert (usage["completion_tokens"], told["kept"]) == (20, min(48, told["seen"]))
        assert told["evicted"] == told["seen"] - told["kept"]
    assert soon(lambda: engine.status().free_rows == 2)


def test_a_client_asks_for_drafts(server: tuple[int, Scheduler]) -> None:
    port, engine = server
    texts, steps = list[str](), list[int]()
    for speculate in ("off", "lookup"):
        before = engine.status().steps_total
        body = complete(prompt=PROMPTS[2], max_tokens=40, temperature=0, speculate=speculate)
        texts.append(ask(port, "/v1/completions", body).document["choices"][0]["text"])
        assert soon(lambda: not engine.status().rows)
        steps.append(engine.status().steps_total - before)
    assert texts[0] == texts[1]
    assert steps[0] == 39
    assert steps[1] < 30
    refused = ask(port, "/v1/completions", complete(prompt="She", speculate="draft"))
    assert (refused.status, refused.document["error"]["param"]) == (400, "speculate")


def test_a_schema_binds_the_real_model(server: tuple[int, Scheduler]) -> None:
    """Which knows nothing of JSON."""
    port, _ = server
    schema = {"type": "array", "items": {"enum": ["a boat", 12]}, "minItems": 1, "maxItems": 3}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choices = ask(port, "/v1/chat/completions", chat(response_format=form, n=3)).document["choices"]
    for each in choices:
        found = json.loads(each["message"]["content"])
        assert 1 <= len(found) <= 3
        assert {*found} <= {"a boat", 12}
        assert each["finish_reason"] == "stop"


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_row_is_free_once_its_client_has_gone(
    server: tuple[int, Scheduler], is_streamed: bool, is_reset: bool
) -> None:
    port, engine = server
    client = RawClient(port)
    client.post("/v1/completions", complete(max_tokens=4000, stream=is_streamed, logit_bias={"1": -100}))
    assert soon(lambda: engine.status().free_rows == 1)
    if is_streamed:
        client.until(b'"text":')
    client.close(is_reset)
    assert soon(lambda: engine.status().free_rows == 2)
    assert json.loads(ask(port, "/v1/cache").body)["rows"] == []
