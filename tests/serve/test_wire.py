"""The bytes of a stream, to the letter, and JSON as it is read and written."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.helpers.serving import NAME, RawClient, ScriptedService, Served, chat, complete, says, serving
from windlass.serve.errors import DONE, comment, event, from_json, to_json

CHUNK = (
    r'data: \{"id":"chatcmpl-[0-9a-f]{24}","created":\d+,"model":"finder-3m","object":"chat.completion.chunk",'
    r'"choices":\[\{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s\}\]%s\}\n\n'
)
WINDLASS = (
    r',"windlass":\{"seen":17,"kept":7,"evicted":10,"recalled":2,"recomputed":0,"bytes":4096,"options":\{[^}]*\}\}'
)
DELTA = r'\{"content":"[ab]+"\}'
READ = r"(: read \d+ of 15\n\n)*"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("ab"))) as server:
        yield server


@pytest.mark.parametrize("has_usage", [False, True])
def test_a_stream(served: Served, has_usage: bool) -> None:
    client = RawClient(served.port)
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    client.post("/v1/chat/completions", chat(stream=True, **options))
    answer = client.answer()
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert re.fullmatch(r"req_[0-9a-f]{24}", answer.headers["x-request-id"])
    null = ',"usage":null' if has_usage else ""
    opening = CHUNK % (r'\{"role":"assistant","content":"","refusal":null\}', "null", null)
    deltas = f"({CHUNK % (DELTA, 'null', null)})+"
    closing = CHUNK % (r"\{\}", '"stop"', null + WINDLASS)
    last = r'data: \{"id":[^\n]*"choices":\[\],"usage":\{"prompt_tokens":15,[^\n]*\}\n\n' if has_usage else ""
    pattern = opening + READ + deltas + closing + last + re.escape(DONE.decode())
    assert re.fullmatch(pattern, answer.body.decode()), answer.body.decode()
    client.post("/v1/completions", complete())  # the connection is there for the next request
    assert client.answer().document["model"] == NAME
    client.close()


def test_json_is_ascii_and_has_no_nan() -> None:
    assert to_json({"a": "ü\ud800\n"}) == b'{"a":"\\u00fc\\ud800\\n"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert comment("x") == b": x\n\n"


@pytest.mark.parametrize("depth", [1, 64, 65, 100_000])
def test_json_that_is_nested(depth: int) -> None:
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):
        body = opened * depth + (b"1" if opened != b"[" else b"") + closed * depth
        if depth > 64:
            with pytest.raises(ValueError, match="more than 64 deep"):
                from_json(body)
        else:
            assert from_json(body) == json.loads(body)
