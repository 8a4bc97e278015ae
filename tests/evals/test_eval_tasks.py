"""Tasks: texts that fit, with the answer in them as often as it should be, and scores worked by hand."""

import random
import re
from collections import Counter

import pytest
from transformers import PreTrainedTokenizerBase

from tests.helpers import models
from windlass.evals import Question, Sample
from windlass.evals.grid import SampleSpec, fit
from windlass.evals.tasks import NAMES
from windlass.evals.tasks.hidden import PassKey, Variables
from windlass.evals.tasks.niah import Needles
from windlass.evals.tasks.words import CommonWords, FrequentWords
from windlass.evals.texts import PAIRS, SENTENCES, Noise, Novel, hide

tokenizer = models.tokenizer  # fixture

NEEDLE = re.compile(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")
TIMES = {"passkey": 2, "niah": 1, "magic": 1, "multiturn": 1, "facts": 1, "cwe": 6}  # that an answer is in the text
ASKED = [name for name in NAMES if name != "perplexity"]


def total_tokens(tokenizer: PreTrainedTokenizerBase, sample: Sample, answer_tokens: int) -> int:
    asked = [len(tokenizer.encode(each.question + each.prefix, add_special_tokens=False)) for each in sample.turns]
    return len(tokenizer.encode(sample.context)) + max([*asked, 0]) + answer_tokens


def count(text: str, word: str) -> int:
    return len(re.findall(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text))


@pytest.mark.parametrize("length", [1500, 2310])
@pytest.mark.parametrize("name", NAMES)
def test_a_text_just_fits(name: str, length: int, tokenizer: PreTrainedTokenizerBase):
    task = NAMES[name]
    fitted = fit(SampleSpec(task, name, length, 3, 5), tokenizer)
    assert fitted.context_tokens == len(tokenizer.encode(fitted.sample.context))
    assert fitted.total_tokens == total_tokens(tokenizer, fitted.sample, task.answer_tokens)
    assert length - 90 < fitted.total_tokens <= length  # a needle of uuids is the longest unit
    longer = task.compose(random.Random(f"3 {name} {length} 5"), length, fitted.units + 1)
    assert total_tokens(tokenizer, longer, task.answer_tokens) > length
    assert len(fitted.sample.turns) == (0 if name == "perplexity" else task.turns)


@pytest.mark.parametrize("name", ASKED)
def test_the_answer_is_there_as_often_as_it_should_be(name: str):
    sample = NAMES[name].compose(random.Random(7), 1500, 60)
    for turn in sample.turns:
        found = [count(sample.context, word) for word in turn.expected]
        if name == "vt":
            assert found == [2, 2, 2, 2, 1]
        elif name == "fwe":
            assert found == [9, 4, 2]  # 60 * rank**-2 / 1.6449 for ranks 2, 3, 4
        else:
            family = name if name in ("multiturn", "facts") else name.partition("_")[0]
            assert set(found) == {TIMES[family]}
        assert turn.prefix.strip()
        assert not any(count(turn.question + turn.prefix, word) for word in turn.expected)


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_the_same_each_time_and_differ_among_each_other(name: str, tokenizer: PreTrainedTokenizerBase):
    task = NAMES[name]
    first = fit(SampleSpec(task, name, 1500, 3, 0), tokenizer)
    assert fit(SampleSpec(task, name, 1500, 3, 0), tokenizer) == first
    others = [fit(SampleSpec(task, name, 1500, seed, number), tokenizer).sample for seed, number in ((3, 1), (4, 0))]
    assert len({first.sample, *others}) == 3
    # It asks for the same at any size.
    small, large = (task.compose(random.Random(2), 1500, units) for units in (60, 97))
    assert [turn.expected for turn in small.turns] == [turn.expected for turn in large.turns]
    assert len(small.context) < len(large.context)


@pytest.mark.parametrize(
    ("depth", "before", "stood"),
    [
        (0.0, "", 0.0),
        (0.12, "", 0.0),
        (0.13, " One.", 0.25),
        (0.49, " One.", 0.25),
        (0.51, ' One. Two "three."', 0.75),
        (0.87, ' One. Two "three."', 0.75),
        (0.88, ' One. Two "three." Four', 1.0),
        (1.0, ' One. Two "three." Four', 1.0),
    ],
)
def test_lines_are_hidden_between_sentences(depth: float, before: str, stood: float):
    pieces = [" One.", " Two", ' "three."', " Four"]
    text = "".join(pieces)
    assert hide(pieces, ["|"], [depth]) == (before + "|" + text[len(before) :], [stood])
    together, _ = hide(pieces, ["|a", "|b", "|c"], [depth, 1.0, depth])
    assert together.index("|a") < together.index("|c")
    assert together.replace("|a", "").replace("|b", "").replace("|c", "") == text


def test_the_pass_key_text_is_that_of_llama_cpp():
    before = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
        "about the important information there."
    )
    places = set()
    for seed in range(40):
        sample = PassKey().compose(random.Random(seed), 99, 2)
        (turn,) = sample.turns
        (key,) = turn.expected
        assert 1 <= int(key) <= 50_000
        texts = {
            place / 2: before
            + f" {SENTENCES}" * place
            + f" The pass key is {key}. Remember it. {key} is the pass key."
            + f" {SENTENCES}" * (2 - place)
            for place in range(3)
        }
        assert turn.depth is not None
        assert sample.context == texts[turn.depth]
        assert turn.question + turn.prefix == " What is the pass key? The pass key is"
        places.add(turn.depth)
    assert places == {0.0, 0.5, 1.0}
    (turn,) = NAMES["passkey_words_novel"].compose(random.Random(0), 99, 30).turns
    assert re.fullmatch(r"[A-Z][a-z]+(-[A-Z][a-z]+){2}", turn.expected[0])


def test_needles_are_told_and_asked_for_in_words_of_ruler():
    sample = Needles().compose(random.Random(1), 99, 1)
    ((kind, key, value),) = NEEDLE.findall(sample.context)
    assert kind == "numbers"
    assert re.fullmatch("[1-9][0-9]{6}", value)
    intro = (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards."
    )
    needle = f"One of the special magic numbers for {key} is: {value}."
    assert sample.context in (f"{intro}\n{needle}\n{SENTENCES}", f"{intro}\n{SENTENCES}\n{needle}")
    (turn,) = sample.turns
    assert turn.question == f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert turn.prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert turn.expected == (value,)


@pytest.mark.parametrize(
    ("name", "needles", "keys", "answers"),
    [
        ("niah_multikey", 4, 4, 1),
        ("niah_multikey_2", 61, 61, 1),
        ("niah_multikey_3", 61, 61, 1),
        ("niah_multivalue", 4, 1, 4),
        ("niah_multiquery", 4, 4, 4),
        ("magic_multikey_2", 61, 61, 1),
    ],
)
def test_the_right_needles_are_asked_for(name: str, needles: int, keys: int, answers: int):
    sample = NAMES[name].compose(random.Random(5), 999, 60)
    found = NEEDLE.findall(sample.context)
    (turn,) = sample.turns
    assert len(found) == needles
    assert len({key for _, key, _ in found}) == keys
    asked = [value for _, key, value in found if f"{key}," in turn.question or f"{key} m" in turn.question]
    assert sorted(asked) == sorted(turn.expected)
    assert len(asked) == answers
    assert (turn.depth is None) == (answers > 1)
    if needles == 61:
        assert re.sub(r"\s+", "", NEEDLE.sub("", sample.context.partition("afterwards.\n")[2] or "")) == ""
    if name == "niah_multiquery":
        assert re.search(r"numbers for [\w-]+, [\w-]+, [\w-]+, and [\w-]+ mentioned", turn.question)


def test_depth_is_where_the_needle_stands():
    for seed in range(20):
        sample = NAMES["niah_single_2"].compose(random.Random(seed), 999, 3000)
        (turn,) = sample.turns
        text = sample.context.partition("\n")[2]
        before = text[: text.index("One of the special")]
        assert turn.depth == pytest.approx(len(before.split()) / 3000, abs=1e-4)
        assert turn.depth == 1.0 or re.search(r"([.!?][\"')]*|^) ?$", before), "after a sentence"


def test_the_chain_leads_to_the_value():
    sample = Variables().compose(random.Random(3), 999, 12)
    (turn,) = sample.turns
    example, text = sample.context.split("\n\nMemorize")
    assert text.count(SENTENCES) == 12
    value = re.search("assigned the value ([0-9]{5})", turn.question)
    assert value is not None
    told = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text)
    assert told == list(zip(turn.expected, (value[1], *turn.expected), strict=False))
    holds: dict[str, str] = {}
    for name, source in told:
        holds[name] = holds.get(source, source)
    assert holds == dict.fromkeys(turn.expected, value[1])
    assert len(holds) == 5
    assert f"5 variables are assigned the value {value[1]}, they are:" in turn.prefix
    solved = re.search(r"they are: ([A-Z ]+)$", example)
    assert solved is not None
    assert solved[1].split() == re.findall(r"VAR (\w+) =", example)


@pytest.mark.parametrize(("length", "often", "seldom", "size"), [(1500, 6, 1, 20), (4096, 30, 3, 40)])
def test_common_words_are_common(length: int, often: int, seldom: int, size: int):
    sample = CommonWords().compose(random.Random(3), length, 13)
    (turn,) = sample.turns
    example, text = (part.partition("\n")[2] for part in sample.context.split("Below is a numbered list")[1:])
    words = re.findall(r"(\d+)\. (\w+)", text)
    assert [int(number) for number, _ in words] == list(range(1, len(words) + 1))
    counts = Counter(word for _, word in words)
    assert {counts[word] for word in turn.expected} == {often}
    assert sorted(counts.values()) == [seldom] * 13 + [often] * 10
    listed, _, solved = example.partition("\nQuestion")
    shown = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert len(shown) == size
    assert {word for word, _ in shown.most_common(10)} == set(re.findall(r"\d+\. (\w+)", solved))
    assert not shown.keys() & counts.keys()


@pytest.mark.parametrize("units", [53, 60, 79, 400, 1777])
def test_frequent_words_are_the_three_most_frequent(units: int):
    sample = FrequentWords().compose(random.Random(3), 1500, units)
    (turn,) = sample.turns
    counts = Counter(sample.context.partition("coded words. ")[2].split())
    (dots, most), *rest = counts.most_common()
    assert dots == "..."
    assert most == int(units * 6 / 9.8696044)
    assert tuple(word for word, _ in rest[:3]) == turn.expected
    assert rest[2][1] > (rest[3][1] if len(rest) > 3 else 0)


@pytest.mark.parametrize(
    ("name", "expected", "output", "score"),
    [
        ("passkey", ("48213",), " 48213. Remember it.", 1.0),
        ("passkey", ("48213",), " the key, 48213", 1.0),
        ("passkey", ("48213",), " 482130", 0.0),
        ("passkey", ("48213",), " 1. 48213", 0.0),
        ("passkey", ("48213",), "", 0.0),
        ("passkey_words", ("Chewy-Tiger-Amazon",), " chewy-tiger-amazon.", 1.0),
        ("passkey_words", ("Chewy-Tiger-Amazon",), " Chewy-Tiger", 0.0),
        ("niah_multivalue", ("12", "34", "56", "78"), " 12, 78 and 99", 0.5),
        ("vt", ("ABCDE", "FGHIJ", "KLMNO", "PQRST", "UVWXY"), " ABCDE fghij KLMNO PQRST UVWX", 0.8),
        ("niah_single", ("7",), " the same again", 0.0),
    ],
)
def test_scores_worked_by_hand(name: str, expected: tuple[str, ...], output: str, score: float):
    assert NAMES[name].score(Question("?", " A", expected), output) == score


def test_fillers_are_what_they_say():
    draw = random.Random(0)
    assert Noise("\n").pieces(draw, 3) == [f"\n{SENTENCES}"] * 3
    assert Noise().most is None
    short, long = (Novel().pieces(random.Random(4), units) for units in (50, 800))
    assert long[:50] == short
    assert len(long) == 800
    assert not re.search("[0-9]", "".join(Novel().pieces(draw, Novel().most)))
    assert re.search("[0-9]", "".join(Novel(has_numerals=True).pieces(draw, Novel().most)))
    assert NAMES["niah_multikey_2"].most_units == PAIRS - 1
