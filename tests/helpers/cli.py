"""The command line run in this process, its output, and the library's result for the same."""

import io
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from windlass.cli import session
from windlass.cli.app import main
from windlass.hf.load import load

PROMPT = "He was sitting in the boat, and the river was quiet. She said"
ROOT = Path(__file__).parents[2]
START = [sys.executable, "-m", "windlass.__main__"]
LAST_LINE = re.compile(
    r"(interrupted, )?prefill [\d,]+( of [\d,]+)? tokens at [\d,.]+ tokens/s, "
    r"decode [\d,]+ tokens at [\d,.]+ tokens/s, [\d.]+ ([KMG]i)?B held"
)


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs the command line in this process, with `stdin` as a pipe. Commands share models that no test writes."""
    if vars(session)["load_model"] is load:
        monkeypatch.setattr(session, "load_model", _shared)

    def go(*arguments: str, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main(arguments)
        return Ran(code, *capsys.readouterr())

    return go


@cache
def _loaded(
    name: str, dtype: str, device: str, weights: str, is_parallel: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(name, dtype, device, weights, is_parallel)


def _shared(
    name: str, dtype: str, device: str, weights: str, is_parallel: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    is_ours = ROOT in Path(name).resolve().parents
    return (_loaded if is_ours else load)(name, dtype, device, weights, is_parallel)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import it: commands share all their models, for it takes seconds to load one."""
    monkeypatch.setattr(session, "load_model", _loaded)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return _loaded(MODEL, "float32", "cpu", "auto", False)[0]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return _loaded(MODEL, "float32", "cpu", "auto", False)[1]


@pytest.fixture
def in_library(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Callable[..., windlass.Result]:
    """The library's text for the same: the oracle of every text here."""

    def go(
        prompt: str = PROMPT,
        cache: windlass.KVCache | None = None,
        sampling: windlass.Sampling | None = None,
        max_tokens: int = 12,
    ) -> windlass.Result:
        stream = windlass.stream(model, tokenizer, prompt, cache or windlass.KVCache(model), max_tokens, sampling)
        assert "".join(stream) == stream.result.text
        return stream.result

    return go


def generate(*options: str) -> tuple[str, ...]:
    return ("generate", MODEL, *options, "--dtype", "float32", "--max-tokens", "12")


def assert_refused(ran: Ran, says: str) -> None:
    """Exit code 2, nothing on stdout, and one line that contains `says`."""
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert ran.err.startswith("windlass: error: ")
    assert ran.err.count("\n") == 1


def rest_of(terminal: int) -> bytes:
    """The unread rest of a terminal whose other end has been closed. Closes it."""
    shown = b""
    try:
        while piece := os.read(terminal, 65536):
            shown += piece
    except OSError:  # how Linux tells that the other end is closed
        pass
    os.close(terminal)
    return shown
