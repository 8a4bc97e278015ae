"""A real Chromium, driven by its DevTools protocol over a pipe."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 30.0
NARROW = {"width": 760, "height": 900}


class BrowserError(AssertionError):
    """Refusals of the page or the browser."""


class Browser:
    """One page. `said` are the errors and warnings of its console, and answers that failed."""

    def __init__(self, program: str, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def to_3_and_4() -> None:
            # Through numbers that neither of them is: one may be 3 or 4 already.
            read, write = os.dup2(theirs_in, 100), os.dup2(theirs_out, 101)
            os.dup2(read, 3)
            os.dup2(write, 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-proxy-server", "about:blank"]
        self._process = subprocess.Popen(
            [program, *options],
            preexec_fn=to_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb", buffering=0), os.fdopen(ours_out, "wb", buffering=0)
        self._rest, self._number, self._session = b"", 0, None
        self.said: list[str] = []
        pages = [each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        number = self._number
        while (answer := self._read()).get("id") != number:
            self._note(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._in.read(1 << 20)
            if not more:
                raise BrowserError("Chromium has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(told["exceptionDetails"])[:2000])
        elif event.get("method") == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.said.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    def open(self, address: str, width: int = 1280, height: int = 800, is_dark: bool = False) -> None:
        """Load a page anew."""
        self.said.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)

    def run(self, code: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        asked = {"expression": code, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **asked)
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"].get("exception", answer))[:3000])
        return answer["result"].get("value")

    def until(self, code: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                if value := self.run(f"document.readyState === 'complete' && ({code})"):
                    return value
            except BrowserError as error:
                if "context" not in str(error):  # the page is being loaded
                    raise
            time.sleep(0.05)
        raise BrowserError(f"{code} did not come true; the page said {self.said}")

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key of the keyboard."""
        asked = {"key": key, "code": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
        self.call("Input.dispatchKeyEvent", type="keyDown", **asked)
        self.call("Input.dispatchKeyEvent", type="keyUp", **asked)

    def click(self, selector: str, x: float | None = None, y: float | None = None) -> None:
        """Click into the middle of an element, or at x, y from its corner."""
        box = self.run(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.left, b.top, b.width, b.height] })()"
        )
        at = {"x": box[0] + (box[2] / 2 if x is None else x), "y": box[1] + (box[3] / 2 if y is None else y)}
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            pressed = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **at, **pressed)

    def picture(self) -> bytes:
        """The page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        """End the browser, and wait until it is gone."""
        self._out.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._in.close()


def found() -> str | None:
    """The program, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = found()
    if program is None:
        pytest.skip(f"no Chromium: none of {', '.join(NAMES)} is installed; on Debian, apt-get install chromium")
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
