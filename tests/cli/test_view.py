"""`windlass generate --record FILE` and `windlass view FILE`."""

import os
import signal
import socket
import struct
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.cli import PROMPT, START, Ran, assert_refused
from tests.helpers.models import MODEL
from windlass.view.recording import read_recording

run, loaded_once = cli.run, cli.loaded_once  # fixtures
OPTIONS = ("--budget", "24", "--chunk", "8", "-n", "6", "--raw", "--device", "cpu", "--policy", "h2o")


def test_a_text_is_the_same_while_it_is_recorded(run: Callable[..., Ran], tmp_path: Path) -> None:
    path = tmp_path / "a.view"
    recorded = run("generate", MODEL, PROMPT, *OPTIONS, "--record", str(path))
    plain = run("generate", MODEL, PROMPT, *OPTIONS)
    assert (recorded.code, recorded.out) == (0, plain.out)
    assert f"{path} written. `windlass view {path}` shows it" in recorded.err
    recording = read_recording(path)
    frames = recording.frames
    assert "".join(frames[-1].strings).replace("<|bos|>", "") == PROMPT + plain.out.rstrip("\n")
    assert [frame.seen for frame in frames[:2]] == [8, 16]
    assert all((own >= 0).sum() <= 24 for frame in frames for own in frame.by_plane())
    assert recording.header["policy"] == "H2O()"
    again = run("generate", MODEL, PROMPT, *OPTIONS, "--json", "--record", str(path))
    assert again.code == 0


def test_what_cannot_be_recorded_or_shown_is_one_line(run: Callable[..., Ran], tmp_path: Path) -> None:
    assert_refused(run("generate", MODEL, PROMPT, "--record", str(tmp_path)), "is a folder")
    assert_refused(run("generate", MODEL, PROMPT, "--record", str(tmp_path / "no" / "a.view")), "does not exist")
    assert_refused(run("view", str(tmp_path / "a.view")), "a.view cannot be read: No such file")
    (tmp_path / "a.view").write_bytes(b"text")
    assert_refused(run("view", str(tmp_path / "a.view")), "is no recording")
    assert_refused(run("view", str(tmp_path / "a.view"), "--port", "70000"), "--port")


@pytest.mark.parametrize("name", [pytest.param("a.view", marks=pytest.mark.slow), "a novel & <more>.view"])
def test_a_recording_is_served_until_ctrl_c(run: Callable[..., Ran], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert run("generate", MODEL, PROMPT, *OPTIONS, "-q", "--record", str(path)).code == 0
    shown = subprocess.Popen(
        [*START, "view", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A test runner in the background passes on that it ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert shown.stdout is not None
    address = shown.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:")
    root, _, query = address.partition("?replay=")
    page = urllib.request.urlopen(root)
    assert page.headers["Content-Security-Policy"].startswith("default-src 'self'")
    assert b"view/main.js" in page.read()
    assert urllib.request.urlopen(f"{root}view/replay/{query}").read() == path.read_bytes()
    assert urllib.request.urlopen(f"{root}view/main.js").headers["Content-Type"].startswith("text/javascript")
    for missing in ("view/replay/other", "view/replay/../../etc/passwd", "etc/passwd", "view/"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(root + missing)
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(urllib.request.Request(root, headers={"Host": "elsewhere.example"}))
    url = urllib.parse.urlsplit(root)
    for _ in range(3):  # browsers that are closed before they have read
        with socket.create_connection((url.hostname, url.port)) as left:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            left.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert urllib.request.urlopen(root).status == 200
    shown.send_signal(signal.SIGINT)
    _, err = shown.communicate(timeout=30)
    assert shown.returncode == 0
    assert "Traceback" not in err
