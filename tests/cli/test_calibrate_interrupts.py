"""`windlass calibrate` after Ctrl-C: results so far are written, and replace no older file."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers import cli
from tests.helpers.cli import Ran
from tests.helpers.models import MODEL
from windlass.cache.shares import shares_of
from windlass.cli.terminal import Bar
from windlass.evals.texts import novel
from windlass.policies import linear_scorer, pairs

run = cli.run  # a fixture
SHARES, SCORER = ("--shares", "--texts", "3", "--length", "200"), ("--scorer", "--texts", "4", "--length", "600")
TEXTS_READ: dict[tuple[str, ...], Callable[[Path], int]] = {
    SHARES: lambda file: shares_of(file).texts,
    SCORER: lambda file: linear_scorer.read(file).texts,
    ("--tokens", "369"): lambda file: pairs.read(file).tokens // 123,
}


@pytest.mark.parametrize("has_older", [False, True])
@pytest.mark.parametrize("kind", TEXTS_READ, ids=lambda kind: kind[0])
def test_what_was_measured_is_written(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, ...], has_older: bool
):
    text, file = tmp_path / "text", tmp_path / "file"
    text.write_text(novel()[:20_000])
    if has_older:
        file.write_text("old")
    monkeypatch.setattr(Bar, "__call__", Mock(side_effect=[None, None, KeyboardInterrupt]))
    monkeypatch.setattr(Bar, "is_whole", False)
    ran = run("calibrate", MODEL, str(text), "-o", str(file), "--dtype", "float32", *kind)
    assert ran.code == 130, ran.err
    written = Path(f"{file}.part") if has_older else file
    assert f"written to {written}. The same command measures all of them again" in ran.err
    assert TEXTS_READ[kind](written) == 2
    assert not has_older or file.read_text() == "old"


def test_an_interrupt_before_anything_is_measured_leaves_nothing(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text, file = tmp_path / "text", tmp_path / "file"
    text.write_text(novel()[:20_000])
    monkeypatch.setattr(Bar, "__call__", Mock(side_effect=KeyboardInterrupt))
    ran = run("calibrate", MODEL, str(text), "-o", str(file), "--dtype", "float32", *SHARES)
    assert ran.code == 130
    assert "interrupted, 0 of 3 texts" in ran.err
    assert not file.exists()
