"""The page with a recording, in a real Chromium."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import chromium
from tests.helpers.chromium import Browser, BrowserError
from tests.helpers.models import MODEL
from tests.helpers.pages import SHOWN, kinds, seek
from tests.helpers.recordings import serving
from windlass import KVCache
from windlass.hf.load import load
from windlass.policies import H2O
from windlass.view.recording import Frame, Recorder, Recording, read_recording

browser = chromium.browser  # fixture
SENTENCES = "The river was quiet, and the boat lay by the bank. Harris said that he was hungry.\n\n"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """finder-3m reads some sentences, and single tokens after them."""
    path = tmp_path_factory.mktemp("recorded") / "a novel.view"
    model, tokenizer = load(MODEL, "float32")
    ids = tokenizer(SENTENCES * 16, return_tensors="pt")["input_ids"]
    cache = KVCache(model, budget=48, sinks=4, window=8, chunk=64, policy=H2O(), positions="compact")
    with torch.no_grad(), Recorder(path, cache, tokenizer=tokenizer) as recorder:
        for piece in (*ids[:, :-9].split(64, 1), *ids[:, -9:].split(1, 1)):
            model(piece, past_key_values=cache)
            recorder.step()
    return path


@pytest.fixture(scope="module")
def recording(recorded: Path) -> Recording:
    return read_recording(recorded)


@pytest.fixture(scope="module")
def address(recorded: Path) -> Iterator[str]:
    with serving(recorded) as server:
        yield server.address


def level_of(frame: Frame, position: int) -> int:
    heads = sum(len(plane.heads) for plane in frame.planes)
    pairs = zip(frame.planes, frame.by_plane(), strict=True)
    share = sum(len(plane.heads) for plane, own in pairs if position in own) / heads
    return 1 + min(7, int(share * 8)) if share else 0


def test_the_page_shows_the_text_and_who_holds_it(browser: Browser, address: str, recording: Recording) -> None:
    """Each token on the screen has the shade of its share, at the first step, in the middle, and at the end."""
    browser.open(address)
    browser.until(SHOWN)
    last = len(recording.frames) - 1
    shades = []
    for step in (0, 5, last, 2):
        seek(browser, step)
        frame = recording.frames[step]
        found = kinds(browser)
        assert len(found) >= min(frame.seen, 256)
        assert {token: kind[0] for token, kind in found.items()} == {
            token: f"s{level_of(frame, token)}" for token in found
        }
        shown = browser.run("[...document.querySelectorAll('#text span')].map((each) => each.textContent).join('')")
        assert shown == "".join(frame.strings[: len(found)])
        shades.append([kind[0] for token, kind in sorted(found.items())][:64])
    assert "s0" not in shades[0][-8:]
    assert shades[1].count("s0") > shades[0].count("s0"), "what was evicted is dim"
    seek(browser, 0)
    found = kinds(browser)
    assert [token for token, kind in found.items() if "sink" in kind] == [0, 1, 2, 3]
    assert [token for token, kind in found.items() if "window" in kind] == list(range(56, 64))
    told = browser.run("document.getElementById('numbers').textContent")
    assert "tokens seen64" in told
    assert "kept, at most in a head48" in told
    assert "evicted16" in told
    assert browser.said == []


def test_every_frame_is_the_one_that_python_reads(browser: Browser, address: str, recording: Recording) -> None:
    """In any order: forwards, backwards and by jumps."""
    browser.open(address)
    browser.until(SHOWN)
    last = len(recording.frames) - 1
    order = [*range(last + 1), 3, 2, last, 0, last - 1, 7, 8, 1]
    name = json.dumps(f"/view/replay/{address.rpartition('=')[2]}")
    found = browser.run(f"""(async () => {{
      const {{ parseFile, fileOf }} = await import("/view/wire.js");
      const {{ Timeline }} = await import("/view/state.js");
      const bytes = new Uint8Array(await (await fetch({name})).arrayBuffer());
      const {{ header, headerBytes, frames }} = parseFile(bytes);
      const again = new Uint8Array(await fileOf(headerBytes, frames).arrayBuffer());
      const timeline = new Timeline(header, headerBytes, frames);
      const shown = {json.dumps(order)}.map((at) => {{
        const state = timeline.seek(at);
        const mass = [...(state.numbers.mass ?? [])].map((each) => Number.isNaN(each) ? -1 : each);
        return [[...state.positions], state.ids.length, state.strings.join(""), mass, state.kept];
      }});
      return {{ shown, isSame: again.length === bytes.length && again.every((byte, at) => byte === bytes[at]) }};
    }})()""")
    assert found["isSame"], "a recording that the page saves is the one it has read"
    for at, (positions, ids, strings, mass, kept) in zip(order, found["shown"], strict=True):
        frame = recording.frames[at]
        assert positions == frame.positions.tolist()
        assert (ids, strings) == (len(frame.ids), "".join(frame.strings))
        assert mass == pytest.approx(frame.numbers["mass"].tolist())
        assert kept == max((own >= 0).sum() for own in frame.by_plane())


def test_keys_do_all_that_a_mouse_does(browser: Browser, address: str, recording: Recording) -> None:
    browser.open(address)
    browser.until(SHOWN)
    browser.run("document.getElementById('step').focus()")
    browser.press("ArrowRight", 39)
    browser.until("document.body.dataset.step === '1'")
    browser.run("document.getElementById('text').focus()")
    browser.press("Home", 36)
    for _ in range(3):
        browser.press("ArrowRight", 39)
    detail = browser.run("document.getElementById('detail').textContent")
    frame = recording.frames[1]
    assert detail.startswith(json.dumps(frame.strings[3]))
    assert f"position, id3, {frame.ids[3]}" in detail
    assert "held by8 of 8 kv heads" in detail
    assert "read at (compact)3" in detail
    assert "mass" in detail
    assert browser.run("document.getElementById('text').getAttribute('aria-activedescendant')") == "token-3"
    evicted = next(token for token in range(4, 120) if level_of(frame, token) == 0)
    for _ in range(evicted - 3):
        browser.press("ArrowRight", 39)
    assert "none: evicted" in browser.run("document.getElementById('detail').textContent")
    browser.run("document.getElementById('grid').focus()")
    browser.press("ArrowDown", 40)
    browser.press("ArrowDown", 40)
    browser.until("!document.getElementById('zoom-box').hidden")
    held = recording.frames[1].of_head(0, 1).tolist()
    browser.until("document.getElementById('zoom-text').textContent.startsWith('layer 0, kv head 1 holds 48 of 128')")
    assert [token for token, kind in kinds(browser).items() if kind[0] == "s8"] == held
    browser.press("Escape", 27)
    browser.until("document.getElementById('zoom-box').hidden")
    browser.run("document.getElementById('play').focus()")
    browser.press("Enter", 13, "\r")
    browser.until(f"document.body.dataset.step === '{len(recording.frames) - 1}'")
    browser.until("document.getElementById('play').textContent === 'Play'")
    assert browser.said == []


def test_a_mouse_points_at_tokens_and_heads(browser: Browser, address: str, recording: Recording) -> None:
    browser.open(address)
    browser.until(SHOWN)
    browser.click("#token-7")
    assert f"position, id7, {recording.frames[0].ids[7]}" in browser.run(
        "document.getElementById('detail').textContent"
    )
    browser.click("#grid", 100, 8)
    browser.until("document.getElementById('zoom-text').textContent.startsWith('layer 0, kv head 0')")
    browser.click("#grid", 100, 8)
    browser.until("document.getElementById('zoom-box').hidden")
    names = browser.run("[...document.getElementById('colour').options].map((each) => each.value)")
    assert names == ["", "mass"]
    last = len(recording.frames) - 1
    seek(browser, last)
    browser.click("#overview", 5)
    browser.until("document.getElementById('text').scrollTop < 100")
    assert browser.said == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_all_is_readable_in_both_schemes(browser: Browser, address: str, is_dark: bool) -> None:
    """Contrast of 4.5 and more, by the formula of WCAG 2, for every shade. Shades go one way in lightness."""
    browser.open(address, is_dark=is_dark)
    browser.until(SHOWN)
    found = browser.run("""(() => {
      const page = getComputedStyle(document.body).backgroundColor, box = document.getElementById("text");
      return [...Array(9).keys()].map((level) => {
        const span = document.createElement("span");
        span.className = `s${level}`;
        box.append(span);
        const { color, backgroundColor } = getComputedStyle(span);
        span.remove();
        return [color, backgroundColor === "rgba(0, 0, 0, 0)" ? page : backgroundColor];
      });
    })()""")

    def luminance(colour: str) -> float:
        parts = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
        linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = [luminance(ground) for _, ground in found]
    assert (grounds[0] < 0.1) == is_dark
    assert grounds == sorted(grounds, reverse=not is_dark)
    for text, ground in found:
        light, dark = sorted((luminance(text), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


def test_what_cannot_be_replayed_is_told(browser: Browser, address: str, recorded: Path) -> None:
    browser.open(address.rpartition("=")[0] + "=other.view")
    browser.until("!document.getElementById('error').hidden")
    said = browser.run("document.getElementById('error').textContent")
    assert said == "other.view: the server has no recording of this name (404)"
    data = recorded.read_bytes()
    damaged: dict[str, Any] = {
        "This is no recording of windlass.": b"something else",
        "The recording is cut off, or not one of windlass.": data[: len(data) // 2],
        "The recording is damaged in record 0.": data[:30] + bytes([data[30] ^ 4]) + data[31:],
    }
    for wanted, content in damaged.items():
        with pytest.raises(BrowserError, match=re.escape(wanted)):
            browser.run(
                f"import('/view/wire.js').then(({{ parseFile }}) => parseFile(new Uint8Array({list(content)})))"
            )


def test_a_narrow_window_has_all_of_it(browser: Browser, address: str) -> None:
    browser.open(address, width=420, height=800)
    browser.until(SHOWN)
    assert browser.run("document.documentElement.scrollWidth") <= 420
    assert browser.run("document.getElementById('text').clientHeight") > 200
