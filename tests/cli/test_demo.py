"""The demo: hidden facts and their places, and rows that report the true state of the cache."""

import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL
from windlass.cli import demo
from windlass.cli import demo as demo_facts
from windlass.cli.app import main
from windlass.evals import texts
from windlass.evals.tasks import NAMES
from windlass.evals.tasks.niah import Multiturn
from windlass.hf.load import load
from windlass.policies import KeyDiff, LinearScorer

NEEDLE = " The pass key is 48213. Remember it. 48213 is the pass key."
TEXT = 'One came. "Two came!" Three?\nFour came to 3 p.m.-ish tea'


@pytest.fixture(scope="module")
def opened() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load(MODEL, "float32")


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The start of the novel, some 4,000 tokens: 16 times the budget, 8 times the trained length."""
    file = tmp_path_factory.mktemp("demo") / "short.txt"
    file.write_text(texts.novel()[:12_500])
    return file


@pytest.fixture
def _few_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight facts: the table and the evaluation are those of forty."""
    facts = NAMES["facts"]
    assert isinstance(facts, Multiturn)
    monkeypatch.setitem(NAMES, "facts", replace(facts, needles=replace(facts.needles, keys=8)))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    def go(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        code = main(("demo", "--model", "finder-3m", *arguments))
        return code, *capsys.readouterr()

    return go


def test_the_whole_novel_is_shipped():
    text = texts.novel()
    assert text.startswith("CHAPTER I.")
    assert len(text) > 350_000
    assert "Montmorency" in text[-2_000:]


@pytest.mark.parametrize(
    ("depth", "before"),
    [
        (0.0, ""),
        (0.05, " One came."),
        (0.3, ' One came. "Two came!"'),
        (0.4, ' One came. "Two came!" Three?'),
        (1.0, f" {TEXT}"),
    ],
)
def test_the_key_is_hidden_between_sentences(depth: float, before: str):
    assert texts.hide_pass_key(TEXT, "48213", depth) == texts.BEFORE + before + NEEDLE + f" {TEXT}"[len(before) :]


def test_depth_is_a_share_of_the_text():
    text = texts.novel()
    for depth in (0.1, 0.5, 0.9):
        at = texts.hide_pass_key(text, "48213", depth).index(NEEDLE)
        assert depth * len(text) <= at < depth * len(text) + 1_000


def test_numerals_in_words():
    assert texts.in_words("At 6.30, in 1889, No. 7") == "At six.three-zero, in one-eight-eight-nine, No. seven"
    assert not re.search("[0-9]", texts.in_words(texts.novel()))


def test_the_beginning_fills_its_tokens(opened: tuple[PreTrainedModel, PreTrainedTokenizerBase]):
    _, tokenizer = opened
    text = texts.novel()
    start = demo.beginning(tokenizer, text)
    assert text.startswith(start)
    tokens = len(tokenizer(texts.hide_pass_key(start, "48213", 0.5))["input_ids"])
    assert abs(tokens - demo.SHORT) <= 3
    assert demo.beginning(tokenizer, TEXT) == TEXT


@pytest.mark.slow
def test_rows_tell_what_the_library_does(
    run: Callable[..., tuple[int, str, str]],
    opened: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    short: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    model, tokenizer = opened
    monkeypatch.setattr(demo, "read_and_ask_all", Mock(return_value=FACTS_ROW))
    code, out, err = run("--text", str(short), "--seed", "3", "--depth", "0.25", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found) == ["key", "depth", "seed", "facts", "rows"]
    key = found["key"]
    assert re.fullmatch(r"\d{5}", key)
    assert (found["depth"], found["seed"]) == (0.25, 3)

    text = short.read_text()
    whole = texts.hide_pass_key(text, key, 0.25)
    part = texts.hide_pass_key(demo.beginning(tokenizer, text), key, 0.25)
    scorer = LinearScorer(f"{MODEL}/scorer.safetensors")
    caches = [
        (whole, windlass.KVCache(model, 256, windlass.policies.KeyDiff(), chunk=128, positions="compact")),
        (whole, windlass.KVCache(model, 256, scorer, chunk=128, positions="compact", shares=f"{MODEL}/shares.json")),
        (whole, windlass.KVCache(model, 256, windlass.policies.Recent(), chunk=128, positions="compact")),
        (part, windlass.KVCache(model, policy=windlass.policies.Recent(), chunk=128, positions="original")),
        (part, windlass.KVCache(model, policy=windlass.policies.Recent(), chunk=128, positions="self_extend(8, 64)")),
    ]
    assert len(found["rows"]) == len(caches)
    for row, (read, cache) in zip(found["rows"], caches, strict=True):
        ids = tokenizer(read)["input_ids"]
        windlass.prefill(model, cache, [ids])
        stream = windlass.stream(model, tokenizer, texts.ASKED, cache, max_tokens=8)
        answer = "".join(stream).strip()
        assert row["answer"] == answer
        assert row["is_found"] == (re.match(r"\d*", answer)[0] == key)  # type: ignore[index]  # any text matches
        assert row["tokens_read"] == len(ids)
        assert row["bytes_held"] == cache.bytes_held
        assert row["slots"] == min(cache.tokens_seen[0], cache.budget or cache.tokens_seen[0])
        assert row["tokens_per_s"] > 0
    # The point of the demo.
    assert [row["is_found"] for row in found["rows"]] == [True, True, False, False, True]


@pytest.mark.slow
@pytest.mark.usefixtures("_few_facts")
def test_rows_of_facts_tell_what_the_evaluation_does(
    opened: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
):
    """The texts and scores of `windlass eval --tasks facts`, and the memory of the cache itself."""
    model, tokenizer = opened
    facts = demo_facts.facts_in(tokenizer, texts.novel(), None, 3_000, 2)
    rows = [demo_facts.read_and_ask_all(model, tokenizer, each, facts) for each in demo_facts.memories(KeyDiff(), 100)]
    assert [(row.label, row.slots, row.recall) for row in rows] == [
        ("KeyDiff", 100, 0),
        ("KeyDiff, recall", 52, 48),
    ]
    for row, (budget, recall) in zip(rows, ((100, "0"), (52, "48")), strict=True):
        results = tmp_path / f"{recall}.jsonl"
        asked = ("--tasks", "facts", "--lengths", "3000", "--samples", "1", "--seed", "2", "--policies", "key_diff")
        memory = ("--budgets", str(budget), "--positions", "compact", "--recall", recall)
        assert main(("eval", MODEL, *asked, *memory, "--dtype", "float32", "-o", str(results))) == 0
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        cases = [line for line in lines if line["kind"] == "case"]
        assert (row.asked, row.found) == (len(cases), sum(case["score"] for case in cases))
        assert row.tokens_read == cases[0]["context_tokens"]
        assert min(row.reading_s, row.asking_s, row.bytes_held) > 0
    assert rows[0].recall_bytes == 0 < rows[1].recall_bytes
    # The point of the table.
    assert [row.asked for row in rows] == [8, 8]
    assert rows[1].found > 6 > 2 > rows[0].found


def test_a_short_text_has_all_facts_too(opened: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path):
    file = tmp_path / "short.txt"
    file.write_text(TEXT)
    facts = demo_facts.facts_in(opened[1], TEXT, file, None, 0)
    assert facts.asked == 40
    for words in ("One came.", "3 p.m.-ish tea"):
        assert words in facts.sample.context
    assert all(turn.expected[0] in facts.sample.context for turn in facts.sample.turns)


@pytest.mark.slow
@pytest.mark.usefixtures("_few_facts")
def test_the_table_is_plain_in_a_pipe(run: Callable[..., tuple[int, str, str]], short: Path):
    code, out, err = run("--text", str(short), "--depth", "0.5", "--budget", "128", "--policy", "SnapKV(pool=3)")
    assert code == 0
    said = err.splitlines()
    assert said[0] == f"8 numbers with names are hidden in {short} and asked for one by one, once it is read."
    key = rf"The pass key \d{{5}} is hidden at 50% of {re.escape(str(short))}. The model was trained on texts of 1,024"
    assert re.match(key, said[1])
    assert "\x1b" not in out + err
    for word in ("tokens", "slots", "bytes", "tokens/s", "answer", "found", "SnapKV(", "compact", "original", "recall"):
        assert word in out
    rows = [line for line in out.splitlines() if re.search(r"\b(yes|no)\b", line)]
    assert len(rows) == 5
    assert [" 128 " in row for row in rows] == [True, True, True, False, False]
    facts = [line.split() for line in out.splitlines() if " of 8" in line]
    assert [[number for number in line if number in ("64", "128")] for line in facts] == [["128"], ["64", "64"]]


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("66048.,", "66048"),
        ("5555555., and the", "5555555"),
        ("vering the same, and the", "vering the same"),
        ("half a\n word", "half a word…"),
        (". The", ". The…"),
        ("", "…"),
    ],
)
def test_answers_end_where_they_stop(answer: str, shown: str):
    assert demo.trimmed(answer) == shown


ROW = demo.DemoRow("any", 1, 1, 1, 1.0, "[bold]48213", True)
FACTS_ROW = demo_facts.FactsRow("[bold]any", 1, 1, 8, 1, 1, 1.0, 1.0, 3, 40)


def test_seeds_draw_key_and_depth(
    run: Callable[..., tuple[int, str, str]], short: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "read_and_ask", Mock(return_value=ROW))
    read_all = Mock(return_value=FACTS_ROW)
    monkeypatch.setattr(demo, "read_and_ask_all", read_all)
    drawn = [json.loads(run("--text", str(short), "--json", "--seed", seed)[1]) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1]
    assert drawn[0]["key"] != drawn[2]["key"]
    assert drawn[0]["depth"] != drawn[2]["depth"]
    first, _, again, _, other, _ = (call.args[3].sample for call in read_all.call_args_list)
    assert first == again != other


def test_the_length_of_the_facts(
    run: Callable[..., tuple[int, str, str]], short: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(demo, "read_and_ask", Mock(return_value=ROW))
    read_all = Mock(return_value=FACTS_ROW)
    monkeypatch.setattr(demo, "read_and_ask_all", read_all)
    assert run("--length", "2000", "--json")[0] == run("--text", str(short), "--json")[0] == 0
    chosen, _, whole, _ = (call.args[3].sample.context for call in read_all.call_args_list)
    assert len(chosen) < 8_000
    assert len(short.read_text()) < len(whole) < 20_000
    code, out, err = run("--text", str(short), "--length", "9000")
    assert (code, out) == (2, "")
    assert re.search(r"length \(9,000 tokens\) is more than the 3,\d{3} of the text. Lower --length", err)


@pytest.mark.parametrize(
    ("facts", "keys", "shown"),
    [
        ([FACTS_ROW, FACTS_ROW], [ROW, ROW, KeyboardInterrupt], {"3 of 40": 2, "yes": 2, "[bold]48213": 2}),
        ([FACTS_ROW, FACTS_ROW], [KeyboardInterrupt], {"3 of 40": 2, "yes": 0, "pass key": 0}),
        ([FACTS_ROW, KeyboardInterrupt], [ROW], {"3 of 40": 1, "[bold]any": 1, "yes": 0}),
        ([KeyboardInterrupt], [ROW], {"3 of 40": 0, "found": 0}),
    ],
)
def test_an_interrupt_shows_the_rows_that_are_done(
    facts: list[object],
    keys: list[object],
    shown: dict[str, int],
    run: Callable[..., tuple[int, str, str]],
    short: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(demo, "read_and_ask", Mock(side_effect=keys))
    monkeypatch.setattr(demo, "read_and_ask_all", Mock(side_effect=facts))
    code, out, err = run("--text", str(short))
    assert code == 130
    assert err.endswith("interrupted. These rows are done\n")
    # A label and an answer are shown unchanged, markup included.
    assert {words: out.count(words) for words in shown} == shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "5"), "budget (5 tokens) must be at least"),
        (("--budget", "15"), "budget (15 tokens) must be at least 16"),
        (("--policy", "keydif"), "Did you mean key_diff?"),
        (("--depth", "1.5"), "'--depth'"),
        (("--text", "not there"), "text file not there cannot be read: No such file or directory"),
    ],
)
def test_wrong_options_are_one_line(run: Callable[..., tuple[int, str, str]], options: tuple[str, ...], says: str):
    code, out, err = run(*options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
