"""Rows to learn from: their facts, their questions, and the weights of their tokens."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers.models import MODEL
from tests.helpers.novel import novel
from training.books import Books, open_books
from training.course import mix_of
from training.false_numbers import with_false_numbers
from training.learner import check
from training.lessons import ANSWER, GUESS, HAYSTACK, PROSE, QUESTION, lessons
from training.options import MIX
from training.rows import Batches, Row, Rows
from windlass.evals.tasks import hidden
from windlass.hf.load import load

NEEDLE = re.compile(r"One of the special magic \w+ for ([\w-]+) is: ([\w-]+)\.")


def decoded(rows: Rows, tokens: list[int]) -> str:
    return str(rows.tokenizer.decode(tokens))


@pytest.fixture(scope="module")
def rows() -> Rows:
    taught = lessons(Books(novel()))
    return Rows(AutoTokenizer.from_pretrained(MODEL), taught, dict.fromkeys(taught, 1.0), 5)


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
        told = dict(NEEDLE.findall(decoded(rows, row.tokens[:first])))
        for start, end in row.answers:
            before = decoded(rows, row.tokens[:start])
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
        values = [value for _, value in NEEDLE.findall(decoded(rows, row.tokens[:start]))]
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
        texts = (rows.row(f"{number}", 300, name) for number in range(60))
        row = next(made for made in texts if made.answers[0][1] == 300 and made.weights[1] == haystack)
        ((start, end),) = row.answers
        key = re.search(r"The pass key is ([\w-]+)\. Remember it\. \1 is the pass key\.", str(decode(row.tokens)))
        assert key is not None
        assert decode(row.tokens[start:end]) == f" {key[1]}."
        question = len(rows.tokenizer(" What is the pass key? The pass key is", add_special_tokens=False)["input_ids"])
        assert set(row.weights[1 : start - question]) <= {haystack, GUESS}
        assert row.weights[start - question :] == [QUESTION] * question + [ANSWER] * (end - start)


def test_false_numbers_weigh_nothing_and_are_none_in_a_third_of_the_texts(rows: Rows):
    counts, like = [], 0
    for number in range(60):
        row = rows.row(f"{number}", 600, "passkey")
        start = row.answers[0][0]
        spans, place = [], 1
        while place < start:
            end = next(at for at in range(place, start + 1) if at == start or row.weights[at] != row.weights[place])
            if row.weights[place] == GUESS:
                spans.append(decoded(rows, row.tokens[place:end]))
            place = end
        key = decoded(rows, row.tokens[slice(*row.answers[0])])[1:-1]
        assert all(re.search(r"\d", span) for span in spans)
        assert (
            decoded(rows, row.tokens[:start]).count(f" The pass key is {key}. Remember it. {key} is the pass key.") == 1
        )
        found = [each for span in spans for each in re.findall(r"\d+", span)]
        like += sum(len(each) == len(key) == 5 and sum(map(str.__ne__, each, key)) == 1 for each in found)
        counts.append(len(spans))
    assert 10 <= counts.count(0) <= 30
    assert max(counts) in range(12, 21)
    assert like > 5


def test_false_numbers_stand_between_the_words_of_other_sentences():
    text = (
        ' Ann saw it. The pass key is 41. Remember it. 41 is the pass key.\nHe said: "No!" Then Mr. Lee left for Rome.'
    )
    told = " The pass key is 41. Remember it. 41 is the pass key."
    places = set()
    for seed in range(200):
        parts = with_false_numbers(random.Random(seed), text, ["41"], 3)
        assert "".join(part for part, is_false in parts if not is_false) == text
        false = [part for part, is_false in parts if is_false]
        assert len(false) == 3
        assert all(re.fullmatch(r"\s?.*\d.*", part) and "41" not in re.findall(r"\d+", part)[:1] for part in false)
        whole = "".join(part for part, _ in parts)
        assert told in whole
        places |= {"".join(part for part, is_false in parts[:place] if not is_false) for place in (1, 3, 5)}
    assert len(places) == 12  # before each word of the others
    assert [each for each, _ in with_false_numbers(random.Random(1), told, ["41"], 3)] == [told]


def test_a_mixed_text_asks_for_all_that_it_tells(rows: Rows):
    kinds = set()
    for number in range(8):
        row = rows.row(f"{number}", 600, "mixed")
        first = row.answers[0][0]
        text = decoded(rows, row.tokens[:first])
        told = dict(NEEDLE.findall(text)) | {"": re.findall(r" (\d+) is the pass key\.", text)[0]}
        asked = set()
        for start, end in row.answers:
            before = decoded(rows, row.tokens[:start])
            (name,) = re.findall(r"(?: for ([\w-]+) is:| The pass key is)$", before)
            assert rows.tokenizer.decode(row.tokens[start:end]) == f" {told[name]}."
            kinds.add(told[name].isdigit())
            asked.add(name)
        assert asked == set(told)
    assert kinds == {True, False}


def test_a_chain_is_followed_by_all_its_names(rows: Rows):
    row = rows.row("0", 500, "vt")
    said = decoded(rows, row.tokens)
    assert said.count(hidden.CHAIN_BEFORE) == 1
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
    alone = replace(rows, mix={"novel": 1.0})
    batches = Batches([rows, alone, rows], [50, 50, 120], batch_tokens=240)
    tokens, parts = batches[2]
    assert tokens.shape == parts.shape == (2, 121)
    assert batches[1][0].shape == (4, 51)
    assert torch.equal(batches[1][1], torch.tensor([[0.0] + [PROSE] * 50] * 4))
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


@pytest.mark.slow
def test_a_check_counts_the_answers_that_are_right_in_every_token(rows: Rows):
    model, _ = load(MODEL, "float32")
    known = replace(rows, mix=dict.fromkeys(("novel", "passkey_noise", "uuids"), 1.0))
    shares = check(model, known, 200, torch.bfloat16)
    assert shares.keys() == {"passkey_noise"}  # no questions, or no room for them
    assert shares["passkey_noise"] > 0.6  # false numbers mislead a model that knows none


def test_a_row_that_is_cut_keeps_whole_answers_only():
    row = Row("x", [0, 1, 2, 3, 4, 5], answers=[(1, 3), (4, 6)])
    row.cut(5)
    assert (row.tokens, row.weights, row.answers) == ([0, 1, 2, 3, 4], [0.0] * 5, [(1, 3)])
