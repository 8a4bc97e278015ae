"""A conversation whose history was edited, through the server."""

from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.helpers.chats import with_template
from tests.helpers.models import MODEL
from tests.helpers.served_engine import engine_served
from tests.helpers.serving import ask
from windlass.cache.options import CacheOptions
from windlass.engine.request import ReuseMode
from windlass.hf.load import load

CHAT = "/v1/chat/completions"
STORY = "He was sitting in the boat, and the river went on before the night had come to the old house. "
MESSAGES = [
    {"role": "system", "content": "Request 4711. You answer in one word."},
    {"role": "user", "content": STORY + "Who was sitting in the boat?"},
    {
        "role": "assistant",
        "content": "They took the long way down to the town, and nobody said a word of it to her. He",
    },
    {"role": "user", "content": "And who rowed it down the river, and how far, while the others were at home?"},
]
EDITED = [
    {"role": "system", "content": "Request 8. You answer in one word."},
    MESSAGES[1],
    {"role": "assistant", "content": "He"},
    MESSAGES[3],
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load(MODEL, "float32")[0]


@pytest.mark.parametrize("budget", [400, 60])
def test_an_edited_history_is_not_read_again(model: PreTrainedModel, budget: int) -> None:
    """By the same user alone, and only where the request or the server says so."""
    options = CacheOptions(budget=budget, policy="key_diff")

    def usage(port: int, messages: list[dict[str, str]], **given: Any) -> dict[str, int]:
        body = {"messages": messages, "max_tokens": 6, "temperature": 0, "user": "ann", **given}
        found: dict[str, Any] = ask(port, CHAT, body).document["usage"]
        details = found["prompt_tokens_details"]
        again = found["windlass"]["recomputed"]
        return {
            "read": found["prompt_tokens"] - details["cached_tokens"],
            "moved": details["moved_tokens"],
            "again": again,
        }

    with engine_served(model, with_template(), options, reuse_bytes=1 << 26) as (port, _):
        usage(port, MESSAGES)
        prefix = usage(port, EDITED)
        assert (prefix["moved"], prefix["again"]) == (0, 0)
    with engine_served(model, with_template(), options, reuse_bytes=1 << 26) as (port, _):
        usage(port, MESSAGES)
        other = usage(port, EDITED, user="bob", cache={"reuse": "edited(0)"})
        found = usage(port, EDITED, cache={"reuse": "edited(0)"})
        assert other["moved"] == 0
        assert 0 < found["read"] < prefix["read"] // 4 < other["read"] // 4
        assert found["moved"] > other["read"] // 2
        assert found["again"] == 0
    mode = ReuseMode("edited", 3)
    with engine_served(model, with_template(), options, reuse_bytes=1 << 26, reuse=mode) as (port, _):
        usage(port, MESSAGES)
        assert usage(port, EDITED) == {
            "read": found["read"] + 3 * 2,  # behind the number of the request, and behind the thought
            "moved": found["moved"] - 3 * 2,
            "again": 3 * 2,
        }
        answer = ask(port, CHAT, {"messages": EDITED, "cache": {"reuse": "edited(-1)"}})
        assert answer.status == 400
        assert answer.document["error"]["param"] == "cache.reuse"
