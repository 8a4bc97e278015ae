"""Records the terminal sessions of start.md: python docs/terminal.py [--here [NAME ...]].

Drives tmux with the real program in a fresh copy of the last commit, which is installed as the page says, and writes
what is then on the screen into the page, long lines broken between words. With --here the sessions after the
installation run in the environment of this script, all or those that are named, and are only printed.
"""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "start.md"
COLUMNS, ROWS = 100, 40
SHELL, CHAT = r"^\$( |$)", r"^>( |$)"  # the line that asks for a command, and the one that asks for a message
SETTLED_S = 1.0  # a screen that stays the same for so long is complete


@dataclass(frozen=True)
class Step:
    """Text that is typed, and Enter; it is done when one more line on the screen matches `until`."""

    typed: str
    until: str = SHELL
    limit_s: float = 240.0


@dataclass(frozen=True)
class Session:
    """What is typed into a new shell; `name` is that of its place in the page."""

    name: str
    steps: tuple[Step, ...]


MODEL = "windlass/assets/finder-3m"
HIDE = "from windlass.evals.texts import novel, hide_pass_key as hide; print(hide(novel()[30000:50000], '48213', 0.4))"
ASKED = " What is the pass key? The pass key is"
SESSIONS = (
    Session(
        "install",
        (
            Step("python3 -m venv .venv"),
            Step(". .venv/bin/activate"),
            Step("pip install -q -e .", limit_s=1800),
            Step("windlass --version"),
        ),
    ),
    Session("demo", (Step("windlass demo --model finder-3m --depth 0.5", limit_s=600),)),
    Session(
        "generate",
        (
            Step(f'python -c "{HIDE}" > text.txt'),
            Step(f"windlass cache {MODEL} --prompt-cache text.safetensors -f text.txt --budget 256"),
            Step("windlass cache text.safetensors info"),
            Step(f'windlass generate {MODEL} "{ASKED}" --prompt-cache text.safetensors -n 6'),
        ),
    ),
    Session(
        "chat",
        (
            Step(f"windlass chat {MODEL} --prompt-cache text.safetensors -n 6", CHAT),
            Step(ASKED, CHAT),
            Step("/save evening.json", CHAT),
            Step("/quit"),
            Step(f"windlass chat {MODEL} --load evening.json -n 6", CHAT),
            Step(ASKED, CHAT),
        ),
    ),
    Session("tune", (Step(f"windlass tune {MODEL} -f text.txt --bytes 1MiB", limit_s=1800),)),
)


class Terminal:
    """A shell in tmux, with nothing of the user's own around it."""

    def __init__(self, name: str, folder: Path, home: Path, path: str) -> None:
        # A server of its own: one that was told to end may still be there.
        self._server = ["tmux", "-L", f"{home.parent.name}-{name}", "-f", os.devnull]
        # Without PIP_QUIET pip may tell where this machine's packages come from.
        clean = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8", "PS1": "$ ", "PIP_QUIET": "2"}
        clean |= {"TERM": "screen-256color", "VIRTUAL_ENV_DISABLE_PROMPT": "1"}
        shell = ["env", "-i", *(f"{name}={value}" for name, value in clean.items()), "bash", "--norc", "--noprofile"]
        self._do("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "-c", str(folder), shlex.join(shell))
        self._await(SHELL, 0, 30)

    def close(self) -> None:
        """End the shell, and what runs in it."""
        self._do("kill-server")

    def take(self, step: Step) -> None:
        """Do a step. Raises: TimeoutError, with the screen, where its end does not come."""
        before = _lines_like(step.until, self.screen())
        self._do("send-keys", "-l", step.typed)
        self._do("send-keys", "Enter")
        self._await(step.until, before, step.limit_s)

    def screen(self) -> str:
        """All lines so far, also those that have left the screen; one that the screen's edge broke is whole."""
        return self._do("capture-pane", "-p", "-J", "-S", "-").rstrip()

    def _await(self, until: str, before: int, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        latest, since = "", time.monotonic()
        while time.monotonic() < deadline:
            time.sleep(0.1)
            screen = self.screen()
            if screen != latest:
                latest, since = screen, time.monotonic()
            if _lines_like(until, screen) > before and time.monotonic() - since > SETTLED_S:
                return
        raise TimeoutError(f"no new line like {until!r} within {limit_s:.0f} s:\n{latest}")

    def _do(self, *arguments: str) -> str:
        return subprocess.run([*self._server, *arguments], check=True, capture_output=True, text=True).stdout


def _lines_like(pattern: str, screen: str) -> int:
    return len(re.findall(pattern, screen, re.MULTILINE))


def record(session: Session, folder: Path, home: Path, path: str) -> str:
    """What is on the screen after all steps of a session, without the prompt that then waits for a command.

    Raises: ValueError where it shows something of this machine, or the time of the day.
    """
    terminal = Terminal(session.name, folder, home, path)
    try:
        for step in session.steps:
            terminal.take(step)
        shown = terminal.screen()
    finally:
        terminal.close()
    for private in (str(folder), str(home), str(ROOT), socket.gethostname()):
        if private in shown:
            raise ValueError(f"session {session.name} shows {private}:\n{shown}")
    if re.search(r"\b[012]\d:[0-5]\d\b", shown):
        raise ValueError(f"session {session.name} shows a time of the day:\n{shown}")
    lines = [_broken(line.rstrip()) for line in shown.removesuffix("\n$").splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def _broken(line: str) -> str:
    """A long line broken between words; not a command, which may be copied."""
    return line if line.startswith(("$ ", "    windlass ")) else fill(line, COLUMNS)


def with_session(page: str, name: str, shown: str) -> str:
    """`page` with the session in its place. Raises: ValueError for a page without that place."""
    place = re.compile(rf"(<!-- session: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not place.search(page):
        raise ValueError(f"{PAGE.name} has no place for session {name}")
    return place.sub(lambda found: f"{found[1]}```console\n{shown}\n```\n{found[2]}", page)


def main(arguments: Sequence[str] | None = None) -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--here", nargs="*", metavar="NAME", help="only print, with the program of this environment")
    here = parser.parse_args(arguments).here
    names = [each.name for each in SESSIONS[1:]] if here == [] else here
    with tempfile.TemporaryDirectory(prefix="windlass-") as made:
        folder, home = Path(made) / "project", Path(made) / "home"
        folder.mkdir()
        home.mkdir()
        archive = subprocess.run(["git", "-C", ROOT, "archive", "HEAD"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive)
        first = Path(sys.executable).parent if here is not None else folder / ".venv" / "bin"
        for session in SESSIONS:
            if names is not None and session.name not in names:
                continue
            shown = record(session, folder, home, f"{first}:{os.environ['PATH']}")
            print(shown, flush=True)
            if here is None:
                PAGE.write_text(with_session(PAGE.read_text(), session.name, shown))


if __name__ == "__main__":
    main()
