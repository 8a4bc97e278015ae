"""The page and its frames as an ASGI application, called without a server."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.asgi import STATUS_NOW, called, scope_of
from tests.helpers.models import Models, Text
from windlass import KVCache
from windlass.view.recording import DELTA, FULL, HEADER, STATUS, Record, end_record, frames_of, records_of
from windlass.view.server import MOST_VIEWERS, SchedulerWatcher, ViewApp, page_files


def test_the_page_is_whole_and_comes_from_here_alone() -> None:
    app = ViewApp(SchedulerWatcher(), None)
    status, headers, page = called(app, "/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:href|src)="([^"]+)"', page.decode())
    named += re.findall(r'from "\./([^"]+)"', b"".join(each.content for each in page_files().values()).decode())
    assert {"view/style.css", "view/main.js", "state.js", "wire.js"} <= set(named)
    for name in named:
        assert called(app, "/view/" + name.removeprefix("view/"))[0] == 200, name
    folder = Path(__file__).parents[2] / "windlass" / "view" / "page"
    assert {*page_files()} == {"/", *(f"/view/{each.name}" for each in folder.iterdir() if each.name != "index.html")}


def test_the_page_has_no_outside_address_and_makes_no_code_of_text() -> None:
    for path, (_, content) in page_files().items():
        source = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]|@import|innerHTML|outerHTML|insertAdjacent|eval\(", source), (
            path
        )
        assert not re.search(r"<script(?! type=\"module\" src)|\son\w+=|\sstyle=", source), path
        assert len(source.splitlines()) <= 300, path


def test_what_is_not_there_is_not_given() -> None:
    app = ViewApp(SchedulerWatcher(), None)
    for path in ("/view/", "/view/../frames.py", "/view/index.html", "/etc/passwd", "//", "/view/main.js/"):
        assert called(app, path)[0] == 404
    assert called(app, "/", method="POST")[0] == 405
    for query in ("text=x", "text=-1", "text=1e3", "text=" + "9" * 40, "text=%D9%A3"):
        assert called(app, "/view/frames", query)[0] == 400
    assert json.loads(called(app, "/view/mode")[2]) == {"live": True, "replays": []}
    assert [path for path in ("/", "/view/main.js", "/view/mode") if not app.is_public(path)] == []
    assert not app.is_public("/view/frames")


def test_prompts_may_be_kept_from_everybody() -> None:
    app = ViewApp(SchedulerWatcher(), None, tells_prompts=False)
    assert called(app, "/view/frames")[0] == 403
    assert json.loads(called(app, "/view/mode")[2])["live"] is False


class Client:
    """Reads a stream of frames until it leaves."""

    def __init__(self, app: ViewApp, query: str = "") -> None:
        self.data, self.status, self._leaves = b"", 0, asyncio.Event()
        self.task = asyncio.create_task(self._ran(app, query))

    async def _ran(self, app: ViewApp, query: str) -> None:
        await app(scope_of("/view/frames", query), self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")

    def records(self) -> list[Record]:
        count, at = 0, 8
        while at < len(self.data):
            at += 12 + int.from_bytes(self.data[at + 4 : at + 8], "little")
            count += 1
        return list(records_of(self.data + end_record(count)))

    async def leave(self) -> None:
        self._leaves.set()
        await asyncio.wait_for(self.task, 20)


@torch.no_grad()
def test_frames_come_while_a_client_reads(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9)
    watch = SchedulerWatcher()
    app = ViewApp(watch, None, lambda: STATUS_NOW)

    async def look() -> Client:
        client = Client(app)
        while not watch.is_watched:
            await asyncio.sleep(0.01)
        for number, piece in enumerate(text(45).split(9, 1)):
            model(piece, past_key_values=cache)
            watch.step(cache, number=3 if number < 3 else 4, is_last=True)
            await asyncio.sleep(0.1)
        await client.leave()
        return client

    client = asyncio.run(look())
    assert not watch.is_watched, "nothing is copied for one who has left"
    records = client.records()
    kinds = [record.kind for record in records]
    assert kinds[0] == STATUS
    shown = [FULL if kind == DELTA else kind for kind in kinds if kind != STATUS]
    assert shown == [HEADER, FULL, FULL, FULL, HEADER, FULL, FULL]
    assert [kinds[at + 1] for at, kind in enumerate(kinds) if kind == HEADER] == [FULL, FULL]
    told = [json.loads(record.payload) for record in records if record.kind == HEADER]
    assert [each["number"] for each in told] == [3, 4]
    status = json.loads(records[0].payload)
    assert (status["queued"], status["rows"][0]["phase"]) == (5, "writing")
    frames = list(frames_of([record for record in records if record.kind in (FULL, DELTA)]))
    assert [frame.seen for frame in frames] == [9, 18, 27, 36, 45]
    assert frames[-1].ids == tuple(text(45)[0].tolist()), "the text of a new header begins anew"
    assert np.array_equal(frames[-1].by_plane()[0], cache.layers[0].positions[0, 0].clamp(min=-1).numpy())


def test_so_many_may_look_and_no_more() -> None:
    watch = SchedulerWatcher()
    app = ViewApp(watch, None)

    async def look() -> list[int]:
        clients = [Client(app) for _ in range(MOST_VIEWERS + 1)]
        await asyncio.sleep(0.1)
        for client in clients:
            await client.leave()
        again = Client(app)
        await asyncio.sleep(0.1)
        await again.leave()
        return [client.status for client in (*clients, again)]

    assert asyncio.run(look()) == [200] * MOST_VIEWERS + [503, 200]
    assert not watch.is_watched


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_other_scopes_are_none_of_ours(kind: str) -> None:
    async def never(*_: Any) -> Any:
        raise AssertionError

    asyncio.run(ViewApp(SchedulerWatcher(), None)({"type": kind, "path": "/"}, never, never))
