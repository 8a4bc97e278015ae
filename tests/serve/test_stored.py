"""Prefixes kept from one request to the next: who finds it, who sees that it is there, and who may delete it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.chats import with_template
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import NAME, Answer, RawClient, ask, complete
from windlass.hf.load import load

KEYS = ("long-enough-1", "long-enough-2")
PROMPT = "The sea was calm, and nobody was there. " * 3
COMPLETIONS, CACHE = "/v1/completions", "/v1/cache"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return with_template()


@pytest.fixture(scope="module")
def port(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    with engine_served(model, tokenizer, reuse_bytes=4 << 20, keys=KEYS) as (port, _):
        yield port


def head(key: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


def cached(port: int, key: int = 0, **fields: Any) -> int:
    document = complete(prompt=PROMPT, max_tokens=1, **fields)
    usage = ask(port, COMPLETIONS, document, **head(key)).document["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def stored(port: int, key: int = 0, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(port, CACHE + query, **head(key)).document["stored"]
    return found


def delete(port: int, path: str, key: int = 0) -> Answer:
    client = RawClient(port)
    client.send("DELETE", path, b"", **head(key))
    answer = client.answer()
    client.close()
    return answer


@pytest.fixture(autouse=True)
def _emptied(port: int) -> Iterator[None]:
    yield
    for key in range(2):
        assert delete(port, CACHE, key).status == 200
        assert stored(port, key) == []


def test_lookup_and_store(port: int) -> None:
    assert [cached(port, cache={"store": False}), cached(port)] == [0, 0]
    found = cached(port)
    assert found > 0
    assert cached(port, cache={"lookup": False}) == 0
    assert cached(port, cache={"store": False}) >= found  # or its very end, as it is known to come again
    assert [cached(port, cache={"name": "novel"}), cached(port, cache={"name": "novel"})] == [0, found]
    assert cached(port, cache={}) >= found


def test_each_key_sees_and_deletes_its_own(port: int) -> None:
    for user in ("anna", "ben"):
        cached(port, user=user)
    cached(port, 1)
    own, others = stored(port), stored(port, 1)
    assert [len(own), len(others)] == [2, 1]
    assert {*own[0]} == {"id", "kind", "name", "tokens", "bytes", "place"}
    assert (own[0]["kind"], own[0]["name"], own[0]["place"]) == ("prefix", "", "memory")
    refused = delete(port, f"{CACHE}/{others[0]['id']}")
    assert (refused.status, refused.document["error"]["code"]) == (404, "not_found")
    gone = delete(port, f"{CACHE}/{own[0]['id']}").document
    assert gone == {"object": "cache.deleted", "deleted": [own[0]["id"]], "bytes": own[0]["bytes"]}
    assert stored(port) == own[1:]
    assert cached(port, user="ben") == 0  # the latest, which was the first of the list
    assert cached(port, user="anna") > 0
    assert len(delete(port, CACHE).document["deleted"]) == 2
    assert cached(port, user="anna") == 0
    assert stored(port, 1) == others


def test_what_has_a_name_is_deleted_by_it(port: int) -> None:
    for name in ("novel", "letters"):
        cached(port, cache={"name": name})
    assert [each["name"] for each in stored(port)] == ["letters", "novel"]
    assert [each["name"] for each in stored(port, query="?name=novel")] == ["novel"]
    assert len(delete(port, f"{CACHE}?name=novel").document["deleted"]) == 1
    assert [each["name"] for each in stored(port)] == ["letters"]
    assert delete(port, f"{CACHE}?name=novel").document["deleted"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{CACHE}?name=", 400),
        (f"{CACHE}?name=../up", 400),
        (f"{CACHE}?other=x", 400),
        (f"{CACHE}/{'f' * 16}", 404),
        (f"{CACHE}/", 404),
        (f"{CACHE}/a/b", 404),
        ("/v1/models", 405),
    ],
)
def test_what_cannot_be_deleted(port: int, path: str, status: int) -> None:
    answer = delete(port, path)
    assert answer.status == status
    assert {*answer.document["error"]} == {"message", "type", "param", "code"}


def test_without_a_key_nothing_is_told_or_deleted(port: int) -> None:
    cached(port)
    assert ask(port, CACHE).status == 401
    client = RawClient(port)
    client.send("DELETE", CACHE)
    assert client.answer().status == 401
    client.close()
    assert len(stored(port)) == 1


def test_what_is_on_disk_outlives_the_server(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """For the key that it belongs to, which may delete it."""
    given: dict[str, Any] = {"reuse_bytes": 4 << 20, "folder": tmp_path, "keys": KEYS}
    with engine_served(model, tokenizer, **given) as (port, _):
        assert cached(port) == 0
    with engine_served(model, tokenizer, **given) as (port, _):
        assert [each["place"] for each in stored(port)] == ["disk"]
        assert stored(port, 1) == []
        assert [cached(port, 1), cached(port, user="ben")] == [0, 0]
        assert cached(port) > 0
        assert stored(port)[0]["place"] == "memory"
    with engine_served(model, tokenizer, **given) as (port, _):
        assert len(delete(port, CACHE).document["deleted"]) == 2
        assert [stored(port), len(stored(port, 1))] == [[], 1]
        assert cached(port) == 0


def test_one_model(port: int) -> None:
    assert ask(port, f"/v1/models/{NAME}", **head(0)).document["id"] == NAME
    for other in ("gpt-4", f"{NAME}/b", f"a/{NAME}"):
        answer = ask(port, f"/v1/models/{other}", **head(0))
        assert (answer.status, answer.document["error"]["code"]) == (404, "model_not_found")
