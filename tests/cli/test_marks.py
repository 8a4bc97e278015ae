"""A byte order mark, with which some editors begin a text: it is no part of the text, wherever that comes from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.cli import PROMPT, Ran, generate
from tests.helpers.models import MODEL
from windlass.cache.shares import shares_of

run = cli.run  # a fixture
MARK = "\ufeff"


def test_a_mark_in_a_piped_chat_does_not_reach_the_model(run: Callable[..., Ran]):
    chat = ("chat", MODEL, "--dtype", "float32", "-n", "4")
    plain = run(*chat, stdin=f"{PROMPT}\n{PROMPT}\n/tokens\n".encode())
    marked = run(*chat, stdin=f"{MARK}{PROMPT}\r\n{MARK}{PROMPT}\n{MARK}/tokens\n".encode())
    assert (marked.code, marked.out) == (plain.code, plain.out)
    assert "seen" in marked.out


@pytest.mark.parametrize("way", ["file", "stdin", "argument"])
def test_a_mark_before_a_prompt_does_not_reach_the_model(run: Callable[..., Ran], tmp_path: Path, way: str):
    file = tmp_path / "prompt.txt"
    file.write_text(MARK + PROMPT)
    given = {"file": ("-f", str(file)), "stdin": ("-",), "argument": (MARK + PROMPT,)}[way]
    marked = run(*generate(*given, "--json"), stdin=file.read_bytes())
    tokens = [json.loads(ran.out)["prompt_tokens"] for ran in (marked, run(*generate(PROMPT, "--json")))]
    assert tokens[0] == tokens[1]


def test_a_mark_in_a_file_of_json_is_left_out(tmp_path: Path):
    file = tmp_path / "shares.json"
    shipped = Path(MODEL) / "shares.json"
    file.write_bytes(MARK.encode() + shipped.read_bytes())
    assert shares_of(file) == shares_of(shipped)
