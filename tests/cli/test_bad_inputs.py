"""Hundreds of bad and odd inputs to the program: one clear line, exit code 2, and no wait for weights."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import windlass
from tests.helpers import serve_bad_inputs
from tests.helpers.bad_inputs import command_lines, light_lines

ROOT = Path(windlass.__file__).parents[1]
MODEL = ROOT / "tests" / "models" / "stories260K"
LIGHT = list(dict.fromkeys(light_lines()))
LINES = [*dict.fromkeys(command_lines()), *LIGHT]
PROCESSES, QUICK_PROCESSES = 20, 3
QUICK_LIGHT = 6  # one in this many, a step that is no multiple of an option's lines


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    for name, data in {
        "text": b"Once upon a time",
        "empty": b"",
        "latin": b"caf\xe9 noir",
        "binary": b"ELF\x00\x01",
    }.items():
        (folder / name).write_bytes(data)
    (folder / "folder").mkdir()
    named = {name: str(folder / name) for name in ("text", "empty", "latin", "binary", "folder", "missing", "new")}
    return named | {"model": str(MODEL), "long": "x" * 400, "name": "no-such-folder"}


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest, places: dict[str, str]) -> dict[str, tuple[int, str, str]]:
    """Answers to each command line that is tested: one process runs those that need no torch, another the rest."""
    light = dict(LIGHT)
    params = [getattr(getattr(each, "callspec", None), "params", {}) for each in request.session.items]
    tested = list(dict.fromkeys(each["line"] for each in params if "line" in each and "says" in each))
    found: dict[str, tuple[int, str, str]] = {}
    groups = [[line for line in tested if (line in light) is is_light] for is_light in (False, True)]
    for lines, options in zip(groups, ((), ("light",)), strict=True):
        ran = subprocess.run(
            [sys.executable, serve_bad_inputs.__file__, *options],
            input="".join(json.dumps(arguments(line, places)) + "\n" for line in lines),
            capture_output=True,
            text=True,
            env=environment(),
            cwd=places["folder"],
        )
        said = [json.loads(line) for line in ran.stdout.splitlines()]
        assert len(said) == len(lines), ran.stderr
        found |= {line: tuple(answer) for line, answer in zip(lines, said, strict=True)}
    return found


def arguments(line: str, places: dict[str, str]) -> list[str]:
    return [part.format(**places) for part in shlex.split(line)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def check(code: int, out: str, err: str, says: str) -> None:
    assert (code, out) == (2, ""), err
    assert err.startswith("windlass: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert re.search(says, err), err
    assert len(err) < 1500


def test_there_are_hundreds() -> None:
    assert len(LINES) >= 300


def cases(lines: list[tuple[str, str]], step: int) -> list[Any]:
    """One in `step` is not slow."""
    return [
        pytest.param(line, says, marks=[pytest.mark.slow] * (number % step > 0), id=line)
        for number, (line, says) in enumerate(lines)
    ]


@pytest.mark.parametrize(("line", "says"), [*cases(LINES[: -len(LIGHT)], 1), *cases(LIGHT, QUICK_LIGHT)])
def test_a_bad_input_is_one_line(answers: dict[str, tuple[int, str, str]], line: str, says: str) -> None:
    check(*answers[line], says)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"), cases(LINES[:: len(LINES) // PROCESSES][:PROCESSES], PROCESSES // QUICK_PROCESSES + 1)
)
def test_a_process_says_the_same(
    answers: dict[str, tuple[int, str, str]], places: dict[str, str], line: str, says: str
) -> None:
    command = [sys.executable, "-m", "windlass.__main__", *arguments(line, places)]
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=environment(), cwd=places["folder"]
    )
    assert (ran.returncode, ran.stdout.decode(), ran.stderr.decode()) == answers[line]
    check(ran.returncode, ran.stdout.decode(), ran.stderr.decode(), says)
