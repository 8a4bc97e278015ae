"""Texts of all kinds on the page, in a real Chromium."""

from pathlib import Path

import pytest
import torch

from tests.helpers import chromium
from tests.helpers.chromium import Browser
from tests.helpers.pages import SHOWN, kinds, seek
from tests.helpers.recordings import moment, serving, write
from windlass.view.recording import RecalledPlane, SlotGroup

browser = chromium.browser  # fixture
SENTENCES = "The river was quiet, and the boat lay by the bank. Harris said that he was hungry.\n\n"


def test_the_text_of_a_model_is_never_code(browser: Browser, tmp_path: Path) -> None:
    bad = "<img src=x onerror=\"document.body.dataset.bad = 'yes'\"><script>document.body.dataset.bad = 'yes'</script>"
    planes = [SlotGroup(0, (0,), 12)]
    path = tmp_path / "<b>bad.view"
    write(path, [moment(5, planes, [range(5)])], [bad], model=bad, policy=bad)
    with serving(path) as server:
        browser.open(server.address)
        browser.until(SHOWN)
        assert browser.run("document.querySelectorAll('#text img, #text script, #about img, #detail img').length") == 0
        assert browser.run("document.getElementById('token-2').textContent") == bad
        browser.click("#token-2", 5, 5)
        assert browser.run("document.body.dataset.bad ?? 'no'") == "no"
    assert browser.said == []


def test_tokens_that_come_back_are_lit(browser: Browser, tmp_path: Path) -> None:
    planes = [SlotGroup(0, (0, 1), 12), SlotGroup(1, (0,), 12), SlotGroup(1, (1,), 12)]
    first = moment(20, planes, [range(12), range(12), range(12)], words=30)
    second = moment(21, planes, [[*range(10), 15, 20], range(12), range(12)], words=30, told=20)
    path = tmp_path / "a.view"
    write(path, [first, second], [f"w{number} " for number in range(30)])
    with serving(path) as server:
        browser.open(server.address)
        browser.until(SHOWN)
        assert [token for token, kind in kinds(browser).items() if "back" in kind] == []
        seek(browser, 1)
        assert [token for token, kind in kinds(browser).items() if "back" in kind] == [15]
        assert kinds(browser)[15][0] == "s5", "two of four heads"
        assert kinds(browser)[10][0] == "s5"
        assert kinds(browser)[2][0] == "s8"


def test_recalled_tokens_are_lit(browser: Browser, tmp_path: Path) -> None:
    """Tokens that any head, or a chosen one, read in the newest step."""
    planes = [SlotGroup(0, (0, 1), 6), SlotGroup(1, (0,), 6), SlotGroup(1, (1,), 6)]
    held = [range(14, 20)] * 3
    recalled = [(RecalledPlane(0, (0, 1), 2), [3, 4, 4, -1]), (RecalledPlane(1, (1,), 1), [9])]
    moments = [moment(20, planes, held, words=30, recalled=recalled), moment(20, planes, held, words=30, told=20)]
    path = tmp_path / "a.view"
    write(path, moments, [f"w{number} " for number in range(30)], recall=8)
    lit = "[...document.querySelectorAll('#text .recalled')].map((each) => Number(each.dataset.token))"
    with serving(path) as server:
        browser.open(server.address)
        browser.until(SHOWN)
        assert browser.run(lit) == [3, 4, 9]
        assert "recalled by the newest step" in browser.run("document.getElementById('legend').textContent")
        browser.click("#token-4", 5, 5)
        assert "recalled by2 of 4 kv heads" in browser.run("document.getElementById('detail').textContent")
        browser.run("document.getElementById('grid').focus()")
        for wanted in ([3, 4], [4], [], [9]):
            browser.press("ArrowDown", 40)
            browser.until(f"JSON.stringify({lit}) === '{wanted}'.replaceAll(' ', '')")
        browser.press("Escape", 27)
        seek(browser, 1)
        assert browser.run(lit) == []
    assert browser.said == []


def test_a_long_text_has_few_elements(browser: Browser, tmp_path: Path) -> None:
    """200,000 tokens, of which 128 heads hold 1,024 each: the page stays quick, and every token can be reached."""
    tokens, slots = 200_000, 1024
    planes = [SlotGroup(layer, (head,), slots) for layer in range(16) for head in range(8)]
    draw = torch.Generator().manual_seed(0)
    held = [sorted(torch.randperm(tokens, generator=draw)[:slots].tolist()) for _ in planes]
    later = [[*own[1:], tokens] for own in held]
    path = tmp_path / "a.view"
    moments = [moment(tokens, planes, held, words=6), moment(tokens + 1, planes, later, words=6, told=tokens)]
    write(path, moments, ["It ", "was ", "a ", "long ", "text", ".\n"], layers=16)
    with serving(path) as server:
        browser.open(server.address)
        browser.until(SHOWN)
        assert browser.run("document.querySelectorAll('#text span').length") < 6000
        browser.run("document.getElementById('text').focus()")
        browser.press("End", 35)
        browser.until(f"document.getElementById('token-{tokens - 1}') !== null")
        assert browser.run("document.querySelectorAll('#text span').length") < 12_000
        assert f"position, id{tokens - 1:,}, {(tokens - 1) % 6}" in browser.run(
            "document.getElementById('detail').textContent"
        )
        took = browser.run("""(async () => {
          const step = document.getElementById("step"), began = performance.now();
          step.value = 1;
          step.dispatchEvent(new Event("input"));
          while (document.body.dataset.step !== "1") await new Promise(requestAnimationFrame);
          return performance.now() - began;
        })()""")
        assert took < 3000, "milliseconds from one step to the next, on whatever machine this is"
    assert browser.said == []


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_a_short_text_is_shown_too(browser: Browser, tmp_path: Path, tokens: int) -> None:
    planes = [SlotGroup(0, (0,), 12), SlotGroup(0, (1,), 12)] if tokens else []
    path = tmp_path / "a.view"
    write(path, [moment(tokens, planes, [range(min(tokens, 12))] * len(planes))], ["word "])
    with serving(path) as server:
        browser.open(server.address)
        browser.until(SHOWN)
        assert len(kinds(browser)) == tokens
        assert browser.run("document.getElementById('play').disabled")
    assert browser.said == []
