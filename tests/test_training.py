"""The training: rows whose weights are where they should be, steps that repeat exactly, and a folder that opens."""

import json
import lzma
import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedModel

import windlass
from training.__main__ import main
from training.books import Books, open_books
from training.learner import Schedule, check, loss_of
from training.lessons import ANSWER, GUESS, HAYSTACK, PROSE, QUESTION, lessons
from training.options import MIX, contexts_of, mix_of
from training.rows import Batches, Row, Rows
from windlass.evals.tasks import vt
from windlass.open_model import open_model
from windlass.testing import VOCABULARY

MODEL = str(Path(windlass.__file__).parent / "assets" / "passkey-3m")
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
NEEDLE = re.compile(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.")
STEPS = ("--contexts", "48:2,96:2", "--batch-tokens", "192", "--warm-up", "2", "--decay", "2")


def novel() -> str:
    draw = random.Random(3)
    names, verbs, things = ("Ann", "Tom", "The old man"), ("sold", "saw", "lost 7 of"), ("the boats", "his hats")
    parts = (names, verbs, things)
    return " ".join(" ".join(draw.choice(words) for words in parts) + "." for _ in range(1200)) + "\n"


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


@pytest.fixture(scope="module")
def rows() -> Rows:
    taught = lessons(Books(novel()))
    return Rows(AutoTokenizer.from_pretrained(MODEL), taught, dict.fromkeys(taught, 1.0), 5)


def run(*arguments: str | Path) -> int:
    return main([str(each) for each in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoint.pt")["model"]
    assert state
    return state


def test_a_new_model_opens_and_its_tokenizer_keeps_digits_apart(started: Path):
    model, tokenizer = open_model(str(started))
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
    assert run(*common, "--contexts", "96:5", "--minutes", "0") == 0
    assert run(*common, "--contexts", "96:2,48:1") == 0
    assert torch.load(tmp_path / "checkpoint.pt")["schedule"] == [[96, 1.0], [96, 1.0], [48, 1.0]]


def test_the_loss_is_the_weighted_mean_over_the_tokens_that_are_predicted(
    plain_model: Callable[[str], PreTrainedModel], text: Callable[..., torch.Tensor]
):
    model = plain_model("llama")
    tokens = text(7, rows=2)
    parts = torch.tensor([[9.0, 0.0, 4.0, 0.3, 0.0, 1.0, 4.0], [9.0, 1.5, 0.0, 0.0, 0.3, 0.3, 1.0]])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1]).logits.detach().double()
    total = weight = 0.0
    for row in range(2):
        for place in range(6):
            scores = [math.exp(logits[row, place, each]) for each in range(VOCABULARY)]
            share = scores[tokens[row, place + 1]] / sum(scores)
            total -= float(parts[row, place + 1]) * math.log(share)
            weight += float(parts[row, place + 1])
    assert loss_of(model, tokens, parts).item() == pytest.approx(total / weight, rel=2e-3)


def test_the_rate_rises_stays_and_falls():
    schedule = Schedule([16] * 3 + [32] * 5, warm_up=2, decay=4)
    assert [schedule.rate(step) for step in range(8)] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert schedule.until(4) == [[16, 0.5], [16, 1], [16, 1], [32, 1]]
    assert Schedule([16] * 1000, warm_up=0, decay=1000).rate(999) == 0.02  # never nothing


@pytest.mark.parametrize("length", [257, 700, 1100])
@pytest.mark.parametrize("name", list(lessons(Books("."))))
def test_answers_are_what_weighs_most(name: str, length: int, rows: Rows):
    made = [rows.row(f"{number}", length, name) for number in range(6)]
    for row in made:
        assert len(row.tokens) == len(row.weights) == length
        assert row.tokens[0] == rows.tokenizer.bos_token_id
        inside = {place for first, end in row.answers for place in range(first, end)}
        heavy = {place for place, weight in enumerate(row.weights) if weight == ANSWER}
        assert inside == heavy
        assert row.weights[0] == 0
    is_asked = name not in ("novel", "copy") and (name not in ("uuids", "cwe", "fwe", "vt_example") or length > 1000)
    assert any(row.answers for row in made) or not is_asked


@pytest.mark.parametrize("name", ["magic", "among", "ruler", "ruler_among", "word_values", "again"])
def test_the_answer_is_the_value_that_the_text_tells_of_the_key(name: str, rows: Rows):
    asked = 0
    for number in range(8):
        row = rows.row(f"{number}", 600, name)
        first = row.answers[0][0] if row.answers else 0
        told = dict(NEEDLE.findall(rows.tokenizer.decode(row.tokens[:first])))
        for start, end in row.answers:
            before = rows.tokenizer.decode(row.tokens[:start])
            key = re.findall(r" for ([\w-]+)(?: mentioned in the provided text)? is:?$", before)[-1]
            assert rows.tokenizer.decode(row.tokens[start:end]) == f" {told[key]}."
            assert row.weights[start - 1] == QUESTION
            asked += 1
    assert asked >= 16


def test_several_answers_are_listed_in_the_order_of_the_text(rows: Rows):
    lengths = []
    for number in range(12):
        row = rows.row(f"{number}", 600, "several")
        ((start, end),) = row.answers
        values = [value for _, value in NEEDLE.findall(rows.tokenizer.decode(row.tokens[:start]))]
        assert rows.tokenizer.decode(row.tokens[start:end]) == f" {', '.join(values)}."
        lengths.append(len(values))
    assert {2, 3, 4} == set(lengths)


def test_pairs_come_again_in_another_order(rows: Rows):
    kinds = set()
    for number in range(40):
        told, *again = rows.lessons["pairs"].pieces(random.Random(number), 999, 11)
        pairs = [(key.text, value.text) for key, value in zip(again[::2], again[1::2], strict=True)]
        assert len(pairs) == len({key for key, _ in pairs}) == 13
        assert sorted(map("".join, pairs)) == sorted(re.findall(r".*?\d+\.", told.text))
        assert {piece.is_answer for piece in again[1::2]} == {True}
        kinds.add((len(pairs[0][1]), "-" in pairs[0][0], pairs[0][0][-1]))
    assert len(kinds) > 10


def test_a_pass_key_is_asked_with_its_weights(rows: Rows):
    decode = rows.tokenizer.decode
    for name, haystack in (("passkey", HAYSTACK), ("words", GUESS)):
        row = next(
            made for made in (rows.row(f"{number}", 300, name) for number in range(20)) if made.answers[0][1] == 300
        )
        ((start, end),) = row.answers
        key = re.search(r"The pass key is ([\w-]+)\. Remember it\. \1 is the pass key\.", decode(row.tokens))
        assert key is not None
        assert decode(row.tokens[start:end]) == f" {key[1]}."
        question = len(rows.tokenizer(" What is the pass key? The pass key is", add_special_tokens=False)["input_ids"])
        assert row.weights == [0.0] + [haystack] * (start - question - 1) + [QUESTION] * question + [ANSWER] * (
            end - start
        )


def test_a_chain_is_followed_by_all_its_names(rows: Rows):
    row = rows.row("0", 500, "vt")
    said = rows.tokenizer.decode(row.tokens)
    assert said.count(vt.BEFORE) == 1
    ((start, end),) = row.answers
    names = re.findall(r"VAR (\w{5}) = ", said)
    assert rows.tokenizer.decode(row.tokens[start:end]) == f" {' '.join(names)}\n"
    shown = rows.row("0", 1000, "vt_example")
    assert len(shown.answers) == 2
    assert shown.weights[shown.answers[0][0] - 1] == GUESS


def test_what_a_text_leaves_free_is_prose(rows: Rows):
    for number in range(40):
        row = rows.row(f"{number}", 200, "passkey_noise")
        end = row.answers[0][1]
        assert row.weights[end:] == [PROSE] * (200 - end)


def test_a_row_depends_on_its_place_alone(rows: Rows):
    batches = Batches(rows, [50, 50, 120], batch_tokens=240)
    tokens, parts = batches[2]
    assert tokens.shape == parts.shape == (2, 121)
    assert batches[0][0].shape == (4, 51)
    assert torch.equal(batches[2][0], tokens)
    assert rows.row("2 1", 121).tokens == tokens[1].tolist()
    assert len({tuple(row) for step in (0, 1) for row in batches[step][0].tolist()}) == 8


def test_lessons_are_drawn_as_often_as_the_mix_says(rows: Rows):
    mixed = Rows(rows.tokenizer, rows.lessons, {"passkey_noise": 1, "novel": 3}, 1)
    drawn = [mixed.row(f"{number}", 128).lesson for number in range(200)]
    assert set(drawn) == {"passkey_noise", "novel"}
    assert 130 <= drawn.count("novel") <= 170
    assert mix_of("vt=2,novel=0.5", ["novel", "vt"]) == {"vt": 2.0, "novel": 0.5}
    assert set(mix_of(MIX, list(rows.lessons))) <= set(rows.lessons)


def test_a_lesson_that_is_too_long_is_left_out(rows: Rows):
    mixed = Rows(rows.tokenizer, rows.lessons, {"cwe": 5, "passkey_noise": 1}, 2)
    made = [mixed.row(f"{number}", 200) for number in range(40)]
    assert {row.lesson for row in made} == {"cwe", "passkey_noise"}
    for row in made:
        assert row.answers or row.weights[1:] == [PROSE] * 199


def test_the_books_are_read_from_a_sentence_on_and_round():
    text = "\nOne two. Three four! Five six?\n"
    words = text.split()
    for seed in range(30):
        pieces = Books(text).pieces(random.Random(seed), 9)
        assert [len(piece.split()) for piece in pieces] == [1] * 9
        first = words.index(pieces[0].strip())
        assert first % 2 == 0
        assert [piece.strip() for piece in pieces] == (words * 3)[first : first + 9]
        assert Books(text).pieces(random.Random(seed), 4) == pieces[:4]


def test_books_get_plain_quotes(tmp_path: Path):
    path = tmp_path / "novel.txt"
    path.write_bytes("\u201cIt\u2019s so\u201d\u2014he said.\r\n".encode() * 1200)
    assert open_books(path).text.startswith('\n"It\'s so"-he said.\n"It\'s so"')


def test_a_check_counts_the_answers_that_are_right_in_every_token(rows: Rows):
    model, _ = open_model(MODEL, "float32")
    known = Rows(rows.tokenizer, {name: rows.lessons[name] for name in ("novel", "passkey_noise", "uuids")}, {}, 5)
    known.lessons["novel"] = rows.lessons["novel"]
    shares = check(model, known, 200)
    assert shares.keys() == {"passkey_noise"}  # no questions, or no room for them
    assert shares["passkey_noise"] > 0.8


def test_a_row_that_is_cut_keeps_whole_answers_only():
    row = Row("x", [0, 1, 2, 3, 4, 5], answers=[(1, 3), (4, 6)])
    row.cut(5)
    assert (row.tokens, row.weights, row.answers) == ([0, 1, 2, 3, 4], [0.0] * 5, [(1, 3)])


def test_contexts_are_lists_of_steps():
    assert contexts_of("128:2,64:1", 128) == [128, 128, 64]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--contexts", "128:3"], "--contexts 128 is beyond the 96 positions of the model; raise --positions"),
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
        (("--mix", "vt=1"), "was made with mix"),
        (("--contexts", "96:4"), "has done 1 steps of other contexts or rates"),
        (("--warm-up", "7"), "has done 1 steps of other contexts or rates"),
    ):
        assert run(*common, *STEPS, *changed) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    assert run(*common, *STEPS) == 2
    assert "cannot be read; move it away" in capsys.readouterr().err
