"""`/v1/models`, the origins from which a browser may ask, and paths that end in a slash."""

import os
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

import windlass
from tests.helpers import gguf_files
from tests.helpers.models import MODEL
from tests.helpers.serving import NAME, RawClient, ScriptedService, ask, chat, complete, says, serving
from windlass import UsageError
from windlass.cache.options import CacheOptions
from windlass.cli.serve import ServeArguments, options_of
from windlass.engine.request import EngineLimits
from windlass.serve.metrics import ModelFacts
from windlass.serve.run import ServeOptions

PAGE = "https://app.example"
KEY = "a-key-of-ours"


def test_the_model_tells_its_length_and_what_happens_beyond() -> None:
    service = ScriptedService(says("fine"), EngineLimits(prompt_tokens=5000, max_tokens=60))
    for trained, length in ((2048, 2048), (8192, 5060), (None, 5060)):
        with serving(service, facts=ModelFacts(1_700_000_000, trained)) as served:
            listed = ask(served.port, "/v1/models").document["data"]
            one = ask(served.port, f"/v1/models/{NAME}").document
        assert listed == [one]
        assert (one["id"], one["object"], one["created"]) == (NAME, "model", 1_700_000_000)
        names = ("max_model_len", "context_length", "context_window", "max_context_length")
        assert [one[name] for name in names] == [length] * 4
        assert one["meta"] == {"n_ctx_train": trained, "n_vocab": 2048}
        own = one["windlass"]
        assert (own["budget"], own["beyond_budget"], own["options"]["policy"]) == (96, "evicts", "Recent()")
        assert (own["max_prompt_tokens"], own["max_tokens"]) == (5000, 60)


@pytest.mark.parametrize(
    ("options", "beyond"), [({"recall": 64}, "recalls"), ({"budget": None, "policy": None}, "grows")]
)
def test_what_happens_beyond_a_budget(options: dict[str, Any], beyond: str) -> None:
    service = ScriptedService(says("fine"))
    service.options = CacheOptions(**dict[str, Any](budget=96, policy="recent") | options)
    with serving(service) as served:
        assert ask(served.port, f"/v1/models/{NAME}/").document["windlass"]["beyond_budget"] == beyond


def test_a_model_is_as_old_as_its_weights(tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    for at, path in enumerate(sorted(folder.glob("*.*"))):
        os.utime(path, (1_500_000_000 + at, 1_500_000_000 + at))
    weights = folder / "model.safetensors"
    os.utime(weights, (1_234_567_890, 1_234_567_890.5))
    model, _ = windlass.load(folder, "float32")
    facts = ModelFacts.of(model)
    assert facts == ModelFacts(1_234_567_890, model.config.max_position_embeddings)
    weights.unlink()
    os.utime(folder / "config.json", (1_222_222_222, 1_222_222_222))
    assert ModelFacts.of(model).created == 1_222_222_222
    (folder / "config.json").unlink()
    assert ModelFacts.of(model).created > 1_700_000_000  # now: there is no file


def test_a_gguf_file_is_as_old_as_itself(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.Q8_0.gguf"
    gguf_files.write(file, "llama")
    os.utime(file, (1_234_567_890, 1_234_567_890.5))
    for name in (file, tmp_path):
        model, _ = windlass.load(name, "float32")
        assert ModelFacts.of(model).created == 1_234_567_890


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("files/tiny.Q8_0.gguf", "tiny.Q8_0"),
        ("files/link.gguf", "link"),
        ("files", "files"),
        ("files/", "files"),
        ("files/../files/.", "files"),
        ("files:Q8_0", "files:Q8_0"),
        ("owner/name:Q4_K_M", "owner/name:Q4_K_M"),
        ("owner/name", "owner/name"),
    ],
)
def test_a_model_is_called_by_its_folder_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, name: str
) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tiny.Q8_0.gguf").touch()
    (tmp_path / "files" / "link.gguf").symlink_to("tiny.Q8_0.gguf")
    monkeypatch.chdir(tmp_path)
    assert options_of(model, {}, ServeArguments()).name == name
    if not model.startswith("owner"):
        assert options_of(f"{tmp_path}/{model}", {}, ServeArguments()).name == name


def sent(port: int, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    client = RawClient(port)
    client.send(method, path, b"", **headers)
    answer = client.answer()
    client.close()
    return answer.status, answer.headers


ALLOWED = "access-control-allow-origin"


def test_a_page_may_ask_where_it_is_allowed() -> None:
    """A browser asks first, without a key. Then it lets the page read the responses, errors too."""
    with serving(ScriptedService(says("fine")), origins=(PAGE, "http://localhost:3000"), keys=(KEY,)) as served:
        first = {
            "Origin": PAGE,
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os",
        }
        status, headers = sent(served.port, "OPTIONS", "/v1/chat/completions", **first)
        assert (status, headers[ALLOWED]) == (200, PAGE)
        assert "POST" in headers["access-control-allow-methods"]
        allowed = {each.strip() for each in headers["access-control-allow-headers"].split(",")}
        assert {"authorization", "content-type", "x-stainless-os"} <= allowed
        assert (
            sent(served.port, "OPTIONS", "/v1/chat/completions", **first | {"Origin": "https://evil.example"})[0] == 400
        )
        told = {"Authorization": f"Bearer {KEY}"}
        for given, wanted in ((told | {"Origin": PAGE}, 200), ({"Origin": PAGE}, 401)):
            answer = ask(served.port, "/v1/chat/completions", chat(), **given)
            assert (answer.status, answer.headers[ALLOWED]) == (wanted, PAGE)
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        streamed = ask(served.port, "/v1/chat/completions", chat(stream=True), **told, Origin=PAGE)
        assert (streamed.status, streamed.headers[ALLOWED]) == (200, PAGE)
        other = ask(served.port, "/v1/chat/completions", chat(), **told, Origin="https://evil.example")
        assert ALLOWED not in other.headers


def test_any_page_or_none() -> None:
    with serving(ScriptedService(says("fine")), origins=("*",)) as served:
        assert sent(served.port, "GET", "/v1/models", Origin=PAGE)[1][ALLOWED] == "*"
    with serving(ScriptedService(says("fine"))) as served:
        first = {"Origin": PAGE, "Access_Control_Request_Method": "POST"}
        status, headers = sent(served.port, "OPTIONS", "/v1/models", **first)
        assert (status, headers["allow"]) == (405, "GET")
        assert ALLOWED not in sent(served.port, "GET", "/v1/models", Origin=PAGE)[1]


@pytest.mark.parametrize(
    "origin",
    [f"{PAGE}/", "app.example", "https://app.example/a", "https://App.example", "", "https://", "null", "https://a b"],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    options = ServeOptions("a", 1, CacheOptions(budget=32), origins=(PAGE,))
    with pytest.raises(UsageError, match=r"is no origin\. Write https:"):
        replace(options, origins=(PAGE, origin))


def test_paths_may_end_in_a_slash() -> None:
    with serving(ScriptedService(says("fine")), keys=(KEY,)) as served:
        key = {"Authorization": f"Bearer {KEY}"}
        for path in ("/v1/models", f"/v1/models/{NAME}", "/v1/cache", "/ready", "/metrics"):
            assert ask(served.port, f"{path}/", **key).status == ask(served.port, path, **key).status == 200
        assert ask(served.port, "/health/").status == 200  # without a key, too
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/v1/completions", complete()),
            ("/v1/responses", {"input": "Hello"}),
            ("/tokenize", {"prompt": "a"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            assert ask(served.port, f"{path}/", body, **key).status == 200
            assert ask(served.port, f"{path}//", body, **key).status == 200
        assert ask(served.port, "/v1/cache/none/", **key).status == 405
        assert ask(served.port, "/v1/nothing/", **key).status == 404
        counted = ask(served.port, "/metrics", **key).body.decode()
        assert 'route="/tokenize",status="200"} 2.0' in counted
