"""The page with a server, in a real Chromium: a chat, and frames of its text while it is written."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers import chromium
from tests.helpers.asgi import STATUS_NOW, served
from tests.helpers.chromium import Browser
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.recordings import serving
from windlass import KVCache
from windlass.core.positions import RotaryIndex
from windlass.core.step import Step
from windlass.engine.generate import stream
from windlass.hf.load import load
from windlass.view import server as watch
from windlass.view.recording import Recorder, about, recording_of
from windlass.view.server import SchedulerWatcher, ViewApp

browser = chromium.browser  # fixture
KEY = "a key"
SHOWN = "document.body.dataset.step !== undefined"


class Server:
    """A chat of one row, as OpenAI's API streams it. Frames are behind the key where one is `needed`."""

    def __init__(self, is_key_needed: bool = False) -> None:
        self.model, self.tokenizer = load(MODEL, "float32")
        self.watch, self.asked, self._is_key_needed = SchedulerWatcher(), list[dict[str, Any]](), is_key_needed
        self.view = ViewApp(self.watch, self.tokenizer, lambda: replace(STATUS_NOW, steps_total=len(self.asked)))

    async def __call__(self, scope: Mapping[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        is_allowed = not self._is_key_needed or ("authorization", f"Bearer {KEY}") in scope["headers"]
        if not is_allowed and not ViewApp.is_public(scope["path"]):
            await self._answer(send, 401, json.dumps({"error": {"message": "the key is wrong"}}))
        elif scope["path"] == "/v1/models":
            await self._answer(send, 200, json.dumps({"data": [{"id": "finder"}]}))
        elif scope["path"] == "/v1/chat/completions":
            await self._chat(json.loads((await receive())["body"]), send)
        else:
            await self.view(scope, receive, send)

    async def _answer(self, send: Callable[..., Any], status: int, text: str) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"x/y")]})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _chat(self, asked: dict[str, Any], send: Callable[..., Any]) -> None:
        self.asked.append(asked)
        number = len(self.asked)
        if asked["messages"][-1]["content"] == "fail":
            await self._answer(send, 400, json.dumps({"error": {"message": "messages: this one <b>fails</b>"}}))
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        cache = KVCache(self.model, budget=64, sinks=4, window=16, chunk=32)

        def step(*_: int) -> None:
            if self.watch.is_watched:
                self.watch.step(cache, number=number)

        async def say(chunk: object) -> None:
            await send({"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode()})

        await say({"choices": [{"delta": {"role": "assistant"}}]})
        written = stream(self.model, self.tokenizer, asked["messages"][-1]["content"], cache, 24, progress=step)
        while (piece := await asyncio.to_thread(next, written, None)) is not None:
            await say({"choices": [{"delta": {"content": piece}}]})
            step()
            await asyncio.sleep(0.05)
        self.watch.step(cache, number=number, is_last=True)
        told = {"seen": cache.tokens_seen[0], "kept": 64, "evicted": 9}
        await say({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 24, "windlass": told}})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def is_watched(server: Server) -> bool:
    """Read anew at each call, which type checkers do not expect of an attribute."""
    return server.watch.is_watched


def said(browser: Browser) -> list[str]:
    found: list[str] = browser.run(
        "[...document.querySelectorAll('.message')].map((each) => each.children[1].textContent)"
    )
    return found


def test_a_chat_is_seen_while_it_is_written(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "COST", 1.0)  # with shapes checked, a copy may take longer than all of the text
    prompt = "He was sitting in the boat, and the river was quiet. " * 8
    server = Server()
    with served(server) as address:
        browser.open(address + "/")
        browser.until("document.getElementById('state').textContent === 'live'")
        assert is_watched(server)
        browser.until("document.getElementById('row').options.length === 2")
        browser.run("document.getElementById('prompt').focus()")
        browser.call("Input.insertText", text=prompt)
        browser.press("Enter", 13, "\r")
        browser.until("document.querySelector('.usage') !== null")
        assert server.asked[0]["messages"] == [{"role": "user", "content": prompt.strip()}]
        assert server.asked[0]["stream"] is True
        assert server.asked[0]["model"] == "finder"
        mine, reply = said(browser)
        assert mine == prompt.strip()
        assert len(reply) > 20
        assert "64 kept, 9 evicted" in browser.run("document.querySelector('.usage').textContent")
        ended = json.dumps(reply[-12:])
        browser.until(f"document.getElementById('text').textContent.endsWith({ended})")
        assert browser.run("Number(document.body.dataset.step)") >= 3, "frames came while it was written"
        levels = browser.run("[...document.querySelectorAll('#text span')].map((each) => each.className.split(' ')[0])")
        assert {"s0", "s8"} <= set(levels)
        told = browser.run("document.getElementById('numbers').textContent")
        assert "rows in use1 of 2" in told
        assert "queue5 of 77 tokens" in told
        assert "8.00 KiB of at most 8.79 KiB" in told
        saved = browser.run("""(async () => {
          let blob = null;
          const make = URL.createObjectURL;
          URL.createObjectURL = (given) => make.call(URL, blob = given);
          document.getElementById("save").click();
          return [...new Uint8Array(await blob.arrayBuffer())];
        })()""")
        frames = recording_of(bytes(saved)).frames
        assert "".join(frames[-1].strings).endswith(reply[-12:])
        assert browser.said == []
        browser.run("document.getElementById('prompt').focus()")
        browser.call("Input.insertText", text="fail")
        browser.press("Enter", 13, "\r")
        browser.until("document.querySelector('.message.error') !== null")
        assert said(browser)[-1] == "messages: this one <b>fails</b>"
        assert browser.run("document.querySelectorAll('.message b').length") == 0
        browser.open("about:blank")
        for _ in range(200):
            if not is_watched(server):
                break
            browser.run("new Promise((done) => setTimeout(done, 20))")
        assert not is_watched(server), "nobody looks any more"


def test_a_key_is_asked_for(browser: Browser) -> None:
    server = Server(is_key_needed=True)
    with served(server) as address:
        browser.open(address + "/")
        browser.until("!document.getElementById('key-label').hidden")
        assert not is_watched(server)
        browser.call("Input.insertText", text=KEY)
        browser.press("Tab", 9)
        browser.until("document.getElementById('state').textContent === 'live'")
        assert is_watched(server)
        browser.open("about:blank")


def _index(mode: Any, slots: torch.Tensor, step: Any) -> RotaryIndex:
    [reading] = mode.readings(slots, step, slots.shape[-1])
    index: RotaryIndex = reading.index
    return index


@torch.no_grad()
@pytest.mark.parametrize("positions", ["original", "compact", "clamp(9)", "self_extend(4, 8)", "auto"])
@pytest.mark.parametrize("tokens", [30, 90, 700])
def test_where_a_key_is_read_is_what_the_cache_says(
    browser: Browser, attached_model: Models, text: Text, tmp_path: Path, positions: str, tokens: int
) -> None:
    """The page's own arithmetic against the position modes, with `auto` in each of its three ways."""
    model: PreTrainedModel = attached_model("llama")
    budget = 600 if tokens == 700 else 20
    cache = KVCache(model, budget=budget, sinks=2, window=4, chunk=64, positions=positions)
    for piece in text(tokens).split(64, 1):
        model(piece, past_key_values=cache)
    with Recorder(tmp_path / "a.view", cache) as recorder:
        recorder.step()
    data = list((tmp_path / "a.view").read_bytes())
    layer = cache.layers[0]
    slots = layer.positions.expand(-1, 3, -1)
    newest = int(slots.max())
    assert newest == tokens - 1
    at = torch.tensor([[newest]])
    step = Step(at, (1,), at[0] + 1, torch.tensor([0]), newest + 1)
    mode = cache.positions.within(cache.trained_length, True)
    index = _index(mode, slots, step).near
    with serving(tmp_path / "a.view") as server:
        browser.open(server.address)
        browser.until(SHOWN)
        found = browser.run(f"""(async () => {{
          const {{ parseFile }} = await import("/view/wire.js");
          const {{ Timeline, readAt }} = await import("/view/state.js");
          const {{ header, headerBytes, frames }} = parseFile(new Uint8Array({data}));
          const state = new Timeline(header, headerBytes, frames).seek(0);
          const plane = state.planeAt({{ layer: 0, head: 1 }});
          return [...state.positions.subarray(plane.start, plane.start + plane.slots)]
            .map((position) => position < 0 ? null : readAt(state, header, plane, position));
        }})()""")
    assert about(cache)["positions"] == positions
    held = slots[0, 1] >= 0
    assert [each is not None for each in found] == held.tolist()
    distances = (index.queries[0, 1] - index.keys[0, 1])[held].tolist()
    assert [each["query"] - each["key"] for each in found if each is not None] == distances
    if positions in ("original", "compact"):
        assert [each["key"] for each in found if each is not None] == index.keys[0, 1][held].tolist()
