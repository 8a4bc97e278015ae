"""Notes on choices of the command line: once, and only where they matter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers import cli, gguf_files
from tests.helpers.cli import Ran
from tests.helpers.models import MODEL
from windlass.cli.session import EVICTION_COST, dtype_note
from windlass.evals.texts import ASKED, hide_pass_key, novel

run = cli.run
KEY, AT = "48213", 40_000  # where the text begins, in characters of the novel
NOTE = "windlass: note: "


def notes(ran: Ran) -> list[str]:
    return [line.removeprefix(NOTE) for line in ran.err.splitlines() if line.startswith(NOTE)]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6,500 tokens or so with a pass key in the middle, and the question."""
    file = tmp_path_factory.mktemp("long") / "long.txt"
    file.write_text(hide_pass_key(novel()[AT : AT + 21_000], KEY, 0.5) + ASKED)
    return file


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--budget", "256"), ["256 of them are kept, chosen by KeyDiff()", "read as compact"]),
        pytest.param(
            (),
            ["read as self_extend(8, 128) (--positions), because this model was trained on 1,024"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_defaults_find_the_key_in_a_text_beyond_the_trained_length(
    run: Callable[..., Ran], long: Path, options: tuple[str, ...], said: list[str]
) -> None:
    ran = run("generate", MODEL, "-f", str(long), "-n", "8", "--dtype", "float32", *options)
    assert (ran.code, ran.out.strip()[:6]) == (0, f"{KEY}.")
    assert [EVICTION_COST in note for note in notes(ran)] == ([False, True] if options else [False])
    assert [part for part in said if part not in notes(ran)[0]] == [], notes(ran)[0]


@pytest.mark.slow
def test_a_full_cache_read_as_it_stands_is_told_of(run: Callable[..., Ran], long: Path) -> None:
    ran = run("generate", MODEL, "-f", str(long), "-n", "2", "--positions", "original", "--dtype", "float32")
    assert len(notes(ran)) == 1
    assert "tokens are more than the 1,024 this model was trained on. Read them with positions auto" in notes(ran)[0]


def test_nothing_is_said_of_a_short_text_nor_of_what_was_asked_for(run: Callable[..., Ran]) -> None:
    short = ("generate", MODEL, "He was sitting in the boat", "-n", "2", "--dtype", "float32")
    assert notes(run(*short)) == []
    assert notes(run(*short, "--budget", "100")) == []
    chosen = ("--budget", "12", "--policy", "recent", "--positions", "compact")
    ran = run("generate", MODEL, "one two " * 20, "-n", "2", "--dtype", "float32", *chosen)
    assert [EVICTION_COST in note for note in notes(ran)] == [True]


def test_options_of_eviction_without_a_budget_are_told_of(run: Callable[..., Ran]) -> None:
    short = ("generate", MODEL, "He was sitting in the boat", "-n", "2", "--dtype", "float32")
    assert notes(run(*short, "--policy", "h2o", "--window", "9")) == [
        "nothing is evicted without --budget, so --policy and --window changed nothing"
    ]
    assert notes(run(*short, "--policy", "h2o", "--budget", "100")) == []


def test_a_chat_says_it_once(run: Callable[..., Ran]) -> None:
    turns = "\n".join(["He was sitting in the boat, and the river was quiet."] * 3).encode()
    ran = run("chat", MODEL, "--budget", "12", "-n", "3", "--dtype", "float32", stdin=turns)
    _, chosen, cost = notes(ran)
    assert chosen.partition(":")[2] == " 12 of them are kept, chosen by KeyDiff() (--policy)"
    assert cost.endswith(EVICTION_COST)


def test_half_precision_that_nobody_asked_for_is_told_of(run: Callable[..., Ran]) -> None:
    cpu = torch.device("cpu")
    assert dtype_note("bfloat16", torch.bfloat16, cpu) is None
    assert dtype_note("auto", torch.float32, cpu) is None
    assert dtype_note("auto", torch.bfloat16, torch.device("cuda")) is None
    said = dtype_note("auto", torch.bfloat16, cpu, "Q4_K_M")
    assert said == "computed in bfloat16 from weights in Q4_K_M. --dtype float32 is more exact"
    assert notes(run("generate", MODEL, "Hello", "-n", "1")) == [
        "computed in bfloat16, as the weights are stored. --dtype float32 is more exact"
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("Q4_1", "computed in bfloat16 from weights in Q4_1. --dtype float32 is more exact"),
        ("IQ4_NL", "computed in bfloat16 from weights in a GGUF file. --dtype float32 is more exact"),
    ],
)
@pytest.mark.filterwarnings("ignore:model .* are decoded")
def test_the_weights_of_a_gguf_file_are_not_said_to_be_bfloat16(
    run: Callable[..., Ran], tmp_path: Path, kind: str, said: str
) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    gguf_files.write(file, "llama", kind)
    assert notes(run("generate", str(file), "Hello", "-n", "1")) == [said]
    assert notes(run("chat", str(file), "-n", "1", stdin=b"Hello"))[0] == said
