"""Stages: lessons and contexts that change on the way, in one run that can be broken off."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.models import MODEL
from tests.helpers.novel import novel
from training.__main__ import main
from training.books import Books
from training.course import Course, Stage, course_of
from training.lessons import lessons

CONFIG = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
STAGES = [{"contexts": "48:2,64:1", "mix": "pairs=1,novel=2"}, {"contexts": "96:2", "mix": "novel=3"}]
OPTIONS = ("--batch-tokens", "192", "--warm-up", "2", "--decay", "3", "--seed", "6")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "books.txt.xz"
    path.write_bytes(lzma.compress(novel().encode()))
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path / "config.json", CONFIG)


def written(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def run(*arguments: str | Path) -> int:
    return main([str(each) for each in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoint.pt")["model"]
    assert state
    return state


def test_every_step_has_the_context_and_the_lessons_of_its_stage(tmp_path: Path):
    course = course_of(written(tmp_path / "stages.json", STAGES), 192, ["novel", "pairs"])
    first, second = {"pairs": 1.0, "novel": 2.0}, {"novel": 3.0}
    assert course == Course([Stage([48, 48, 64], first), Stage([96, 96], second)])
    assert course.contexts == [48, 48, 64, 96, 96]
    assert course.mixes == [first] * 3 + [second] * 2


@pytest.mark.parametrize(("file", "steps"), [("finder-3m", 900), ("from-random", 3300)])
def test_the_shipped_stages_name_lessons_that_there_are(file: str, steps: int):
    course = course_of(Path(f"training/{file}.json"), 4096, list(lessons(Books("."))))
    assert (max(course.contexts), len(course.contexts)) == (1024, steps)


def test_stages_with_the_same_lessons_are_as_one(books: Path, config: Path, tmp_path: Path):
    stages = written(tmp_path / "stages.json", [{**each, "mix": "pairs=1,novel=2"} for each in STAGES])
    start = ("--config", config, "--tokenizer", MODEL, *OPTIONS)
    assert run(books, tmp_path / "staged", *start, "--stages", stages) == 0
    plain = ("--contexts", "48:2,64:1,96:2", "--mix", "pairs=1,novel=2")
    assert run(books, tmp_path / "plain", *start, *plain) == 0
    one, two = weights(tmp_path / "staged"), weights(tmp_path / "plain")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_that_is_broken_off_in_any_stage_comes_to_the_same_weights(books: Path, config: Path, tmp_path: Path):
    stages = written(tmp_path / "stages.json", STAGES)
    common = ("--config", config, "--tokenizer", MODEL, *OPTIONS, "--stages", stages)
    assert run(books, tmp_path / "whole", *common) == 0
    for steps in range(1, 5):
        assert run(books, tmp_path / "parts", *common, "--minutes", "0") == 0
        assert len(torch.load(tmp_path / "parts" / "checkpoint.pt")["schedule"]) == steps
    assert run(books, tmp_path / "parts", *common) == 0
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = written(tmp_path / "stages.json", [STAGES[0], {"contexts": "96:2", "mix": "copy=3"}])
    assert run(books, tmp_path / "other", *common[:-1], other) == 0
    three = weights(tmp_path / "other")
    assert not any(torch.equal(one[name], three[name]) for name in one if "proj" in name)


def test_only_stages_to_come_may_be_changed(
    books: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = ("--config", config, "--tokenizer", MODEL, "--batch-tokens", "96", "--warm-up", "1", "--decay", "1")
    stages = [
        written(tmp_path / f"{mix}.json", [STAGES[0], {"contexts": "96:2", "mix": mix}]) for mix in ("vt=1", "copy=1")
    ]
    for _ in range(3):
        assert run(books, tmp_path / "made", *common, "--stages", stages[0], "--minutes", "0") == 0
    assert run(books, tmp_path / "made", *common, "--stages", stages[1], "--minutes", "0") == 0
    assert run(books, tmp_path / "made", *common, "--stages", stages[0]) == 2
    assert "has done 4 steps of other contexts, lessons or rates" in capsys.readouterr().err


def test_a_tokenizer_can_be_given_to_random_weights(
    books: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = ("--contexts", "96:1", "--batch-tokens", "96")
    assert run(books, tmp_path / "made", "--config", config, "--tokenizer", MODEL, *common) == 0
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "made", MODEL))
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours("The 407 keys.")["input_ids"] == theirs("The 407 keys.")["input_ids"]
    small = written(tmp_path / "small.json", {**CONFIG, "vocab_size": 2047})
    for given, said in (
        (("--config", small, "--tokenizer", MODEL), "vocab_size 2047 is less than the 2048 tokens of"),
        (("--config", config, "--tokenizer", tmp_path / "absent"), f"tokenizer {tmp_path / 'absent'} cannot be opened"),
        (("--from", tmp_path / "made", "--tokenizer", MODEL), "--tokenizer goes with --config"),
    ):
        assert run(books, tmp_path / "new", *given, *common) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[", "is not JSON: "),
        ("[]", "is not a list of stages; write [{"),
        ('{"contexts": "48:2"}', "is not a list of stages; write [{"),
        ('[{"contexts": "48:2"}]', "stage 1 is not contexts and mix, both as on the command line"),
        (
            '[{"contexts": "48:2", "mix": "novel=1"}, {"contexts": "48", "mix": "vt=1"}]',
            "stage 2: --contexts '48' is not",
        ),
        ('[{"contexts": "48:2", "mix": "poems=1"}]', "stage 1: --mix 'poems=1' is not a lesson and its share"),
        ('[{"contexts": 48, "mix": "vt=1"}]', "stage 1 is not contexts and mix, both as on the command line"),
        ('[{"contexts": "97:1", "mix": "vt=1"}]', "context 97 is beyond the 96 positions of the model"),
        ('[{"contexts": "200:1", "mix": "vt=1"}]', "stage 1: --contexts 200 is more than a batch of 192"),
    ],
)
def test_stages_that_cannot_be_are_one_clear_line(
    content: str, said: str, books: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stages = tmp_path / "stages.json"
    stages.write_text(content)
    given = ("--config", config, "--tokenizer", MODEL, "--stages", stages, *OPTIONS)
    assert run(books, tmp_path / "new", *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("training: ")
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_mix_beside_stages_is_refused(books: Path, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stages = written(tmp_path / "stages.json", STAGES)
    assert run(books, tmp_path / "new", "--config", config, "--stages", stages, "--mix", "vt=1") == 2
    assert "--mix is of no use with --stages" in capsys.readouterr().err
