"""The training: rows whose weights are where they should be, steps that repeat exactly, and a folder that opens."""

import json
import lzma
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models import Models, Text
from tests.helpers.novel import novel
from training.__main__ import main
from training.course import contexts_of
from training.learner import Schedule, loss_of
from training.muon import Muon, orthogonal
from windlass.hf.load import load
from windlass.testing import VOCABULARY

TINY = {
    "model_type": "llama",
    "vocab_size": 400,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}
STEPS = ("--contexts", "48:2,96:2", "--batch-tokens", "192", "--warm-up", "2", "--decay", "2")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("books") / "books.txt.xz"
    path.write_bytes(lzma.compress(novel().encode()))
    return path


@pytest.fixture(scope="module")
def started(books: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after one step from random weights."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "config.json").write_text(json.dumps(TINY))
    made = folder / "made"
    assert run(books, made, "--config", folder / "config.json", "--contexts", "96:1", "--batch-tokens", "96") == 0
    return made


def run(*arguments: str | Path) -> int:
    return main([str(each) for each in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoint.pt")["model"]
    assert state
    return state


def test_a_new_model_opens_and_its_tokenizer_keeps_digits_apart(started: Path):
    model, tokenizer = load(str(started))
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 96
    assert tokenizer.convert_ids_to_tokens(tokenizer(" The 4071")["input_ids"])[-4:] == list("4071")
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id == model.config.bos_token_id == 0
    assert tokenizer.decode(tokenizer("Is it “ï”?", add_special_tokens=False)["input_ids"]) == "Is it “ï”?"
    prompt = tokenizer("Ann saw", return_tensors="pt")["input_ids"]
    assert model(prompt).logits.shape == (1, prompt.shape[1], TINY["vocab_size"])


def test_random_weights_depend_on_the_seed_alone(books: Path, started: Path, tmp_path: Path):
    torch.manual_seed(11)
    config = started.parent / "config.json"
    assert run(books, tmp_path, "--config", config, "--contexts", "96:1", "--batch-tokens", "96") == 0
    one, two = weights(started), weights(tmp_path)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(books: Path, started: Path, tmp_path: Path):
    for name, seed in (("one", "4"), ("same", "4"), ("other", "5")):
        assert run(books, tmp_path / name, "--from", started, *STEPS, "--seed", seed) == 0
    one, same, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "same", "other"))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if "proj" in name)


def test_a_broken_run_goes_on_to_the_weights_of_an_unbroken_one(books: Path, started: Path, tmp_path: Path):
    whole = (books, tmp_path / "whole", "--from", started, *STEPS)
    parts = (books, tmp_path / "parts", "--from", started, *STEPS)
    assert run(*whole) == 0
    for _ in range(3):
        assert run(*parts, "--minutes", "0") == 0  # one step
    assert len(torch.load(tmp_path / "parts" / "checkpoint.pt")["schedule"]) == 3
    assert run(*parts) == 0
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_worker_processes_change_nothing(books: Path, started: Path, tmp_path: Path):
    for workers in ("0", "2"):
        assert run(books, tmp_path / workers, "--from", started, *STEPS, "--workers", workers) == 0
    one, two = weights(tmp_path / "0"), weights(tmp_path / "2")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_may_get_longer_before_its_rate_falls(books: Path, started: Path, tmp_path: Path):
    common = (books, tmp_path, "--from", started, "--batch-tokens", "96", "--warm-up", "1", "--decay", "1")
    assert run(*common, "--contexts", "96:5", "--mix", "vt=1,novel=1", "--minutes", "0") == 0
    assert run(*common, "--contexts", "96:2,48:1", "--mix", "vt=1,novel=1") == 0
    steps = torch.load(tmp_path / "checkpoint.pt")["schedule"]
    assert steps == [(context, {"vt": 1.0, "novel": 1.0}, 1.0) for context in (96, 96, 48)]


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.bfloat16, 2e-3), (torch.float32, 1e-6)], ids=str)
def test_the_loss_is_the_weighted_mean_over_the_tokens_that_are_predicted(
    precision: torch.dtype, tolerance: float, plain_model: Models, text: Text
):
    model = plain_model("llama")
    tokens = text(7, rows=2)
    parts = torch.tensor([[9.0, 0.0, 4.0, 0.3, 0.0, 1.0, 4.0], [9.0, 1.5, 0.0, 0.0, 0.3, 0.3, 1.0]])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision is torch.bfloat16):
        logits = model(tokens[:, :-1]).logits.detach().double()
    total = weight = 0.0
    for row in range(2):
        for place in range(6):
            scores = [math.exp(logits[row, place, each]) for each in range(VOCABULARY)]
            share = scores[tokens[row, place + 1]] / sum(scores)
            total -= float(parts[row, place + 1]) * math.log(share)
            weight += float(parts[row, place + 1])
    assert loss_of(model, tokens, parts, precision).item() == pytest.approx(total / weight, rel=tolerance)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (7, 7)], ids=str)
def test_muon_in_float32_steps_as_torchs_own_does_in_bfloat16(shape: tuple[int, int]):
    draw = torch.Generator().manual_seed(3)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    kinds = ((ours, Muon), (theirs, torch.optim.Muon))
    pairs = [(matrix, kind([matrix], lr=0.1, momentum=0.9, weight_decay=0.3)) for matrix, kind in kinds]
    for _ in range(4):
        gradient = torch.randn(shape, generator=draw)
        for matrix, optimizer in pairs:
            matrix.grad = gradient.clone()
            optimizer.step()
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() < 0.03 * (theirs - 1).norm()
    assert not ours.equal(theirs)


def test_what_muon_adds_is_nearly_orthogonal():
    values = torch.linalg.svdvals(orthogonal(torch.randn(9, 30, generator=torch.Generator().manual_seed(4))))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_run_in_float32_repeats_and_cannot_go_on_in_bfloat16(
    books: Path, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = "--from", started, "--contexts", "48:2", "--batch-tokens", "96"
    for folder in ("a", "b"):
        assert run(books, tmp_path / folder, *common, "--precision", "float32") == 0
    ours, again = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(tensor.equal(again[name]) for name, tensor in ours.items())
    assert run(books, tmp_path / "a", *common) == 2
    assert "was made with precision float32, not bfloat16" in capsys.readouterr().err


def test_the_rate_rises_stays_and_falls():
    mixes = [{"vt": 1.0}] * 2 + [{"novel": 2.0}] * 6
    schedule = Schedule([16] * 3 + [32] * 5, mixes, warm_up=2, decay=4)
    assert [schedule.rate(step) for step in range(8)] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert schedule.until(4) == [
        (16, {"vt": 1.0}, 0.5),
        (16, {"vt": 1.0}, 1),
        (16, {"novel": 2.0}, 1),
        (32, {"novel": 2.0}, 1),
    ]
    assert Schedule([16] * 1000, mixes * 125, warm_up=0, decay=1000).rate(999) == 0.02  # never nothing


def test_contexts_are_lists_of_steps():
    assert contexts_of("128:2,64:1", 128) == [128, 128, 64]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--contexts", "128:3"], "context 128 is beyond the 96 positions of the model; raise --positions"),
        (["--contexts", "96"], "--contexts '96' is not a list"),
        (["--contexts", "96:1", "--batch-tokens", "95"], "--contexts 96 is more than a batch of 95"),
        (
            ["--mix", "vt=1,poems=2"],
            "--mix 'poems=2' is not a lesson and its share, as novel=3; the lessons are novel,",
        ),
        (["--mix", "vt=0"], "--mix 'vt=0'"),
        (["--device", "nowhere"], "--device nowhere is not there"),
        (["--from", "absent"], "model absent cannot be opened"),
        (["--attention", "none"], "model "),
        (["--check-steps", "0"], "--check-steps 0 is too small; the least is 1"),
        (["--minutes", "nan"], "--minutes nan is too small; the least is 0"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    changed: list[str], said: str, books: Path, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run(books, tmp_path / "new", "--from", started, "--contexts", "96:1", *changed) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"training: {said}")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be opened: "), (json.dumps(TINY | {"vocab_size": 258}), "vocab_size 258 is too small; the least")],
)
def test_a_config_that_cannot_be_used_is_one_clear_line(
    content: str | None, said: str, books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    assert run(books, tmp_path / "new", "--config", path, "--contexts", "96:1") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"training: config {path}")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"Too short.", "10 characters, the least is 20000"), (b"\xff" * 30_000, "utf-8")],
)
def test_books_that_cannot_be_used_are_one_clear_line(
    content: bytes | None, said: str, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "novel.txt"
    if content is not None:
        path.write_bytes(content)
    assert run(path, tmp_path / "new", "--from", started, "--contexts", "96:1") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"training: books {path} ")
    assert said in error
    assert error.count("\n") == 1


def test_a_checkpoint_of_another_run_is_refused(
    books: Path, started: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    common = (books, tmp_path, "--from", started)
    assert run(*common, *STEPS, "--minutes", "0") == 0
    for changed, said in (
        (("--seed", "9"), "was made with seed 0, not 9"),
        (("--mix", "vt=1"), "has done 1 steps of other contexts, lessons or rates"),
        (("--contexts", "96:4"), "has done 1 steps of other contexts, lessons or rates"),
        (("--warm-up", "7"), "has done 1 steps of other contexts, lessons or rates"),
    ):
        assert run(*common, *STEPS, *changed) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    assert run(*common, *STEPS) == 2
    assert "cannot be read; move it away" in capsys.readouterr().err
