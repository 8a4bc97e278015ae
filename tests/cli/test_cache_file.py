"""`windlass cache`: the contents of a file, shown without its model, and text appended to one, whole or not at all."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoTokenizer

from tests.helpers import cli
from tests.helpers.cli import PROMPT, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from tests.helpers.prompt_cache_files import CacheFile
from windlass.cli import session
from windlass.cli.app import main
from windlass.hf import prompt_cache
from windlass.hf.forward import forward

run, loaded_once = cli.run, cli.loaded_once  # fixtures
LIMITS = ("--budget", "12", "--policy", "key_diff", "--dtype", "float32")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> CacheFile:
    file = tmp_path_factory.mktemp("honest") / "file"
    assert main(("cache", MODEL, PROMPT, "--prompt-cache", str(file), *LIMITS, "-q")) == 0
    return CacheFile.read(file)


def saved(run: Callable[..., Ran], file: Path, text: str, *options: str) -> Ran:
    ran = run("cache", MODEL, text, "--prompt-cache", str(file), *LIMITS, *options)
    assert ran.code == 0
    return ran


def test_what_is_in_a_file(run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    saved(run, file, PROMPT)
    monkeypatch.setattr(session, "load_model", Mock(side_effect=AssertionError("a model is opened")))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(PROMPT)["input_ids"]
    assert len(ids) > 12
    found = json.loads(run("cache", str(file), "info", "--json").out)
    wanted = {"model": "LlamaForCausalLM", "dtype": "float32", "policy": "KeyDiff()", "budget": 12, "sinks": 4}
    wanted |= {"texts": 1, "tokens_seen": len(ids), "tokens_kept": 12, "next_position": len(ids)}
    wanted |= {"first_kept": 0, "last_kept": len(ids) - 1, "file_bytes": file.stat().st_size}
    assert {name: found[name] for name in wanted} == wanted
    assert "first_words" not in found
    other = run("cache", "info", str(file), "-m", MODEL, "--json")
    assert json.loads(other.out) == found | {
        "tokenizer": MODEL,
        "first_words": tokenizer.decode(ids[:12]),
        "last_words": tokenizer.decode(ids[-12:]),
    }
    ran = run("cache", str(file), "info")
    assert (ran.code, ran.err) == (0, "")
    assert f"tokens seen   {len(ids)}\n" in ran.out
    assert "tokens kept   12\n" in ran.out
    assert "name the model with -m" in ran.out


def test_a_file_that_cannot_be_told_of(run: Callable[..., Ran], tmp_path: Path):
    assert_refused(run("cache", str(tmp_path / "gone"), "info"), f"{tmp_path / 'gone'} does not exist")
    assert_refused(run("cache", "info", str(tmp_path)), "is not a regular file")
    assert_refused(run("cache", f"{MODEL}/model.safetensors", "info"), "is not a prompt cache of windlass")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("tokens.0", torch.zeros(3, 2, dtype=torch.int32)),
        ("tokens.0", torch.zeros(3)),
        ("layers.1.positions", torch.zeros(5, dtype=torch.int32)),
        ("layers.1.positions", torch.zeros(0, 4, 5, dtype=torch.int32)),
        ("layers.1.positions", torch.zeros(1, 4, 5)),
    ],
)
def test_a_file_of_a_stranger_is_told_in_one_line(
    run: Callable[..., Ran], tmp_path: Path, honest: CacheFile, name: str, tensor: torch.Tensor
):
    file = tmp_path / "file"
    file.write_bytes(CacheFile(honest.contents, {**honest.tensors, name: tensor}, honest.metadata).to_bytes())
    assert_refused(run("cache", str(file), "info", "-m", MODEL), f"{file} is damaged: tensor '{name}' is ")


def test_odd_ids_are_shown_as_they_can_be(run: Callable[..., Ran], tmp_path: Path, honest: CacheFile):
    file = tmp_path / "file"
    odd = {**honest.tensors, "tokens.0": torch.tensor([-7, 5, 2**31 - 1], dtype=torch.int32)}
    file.write_bytes(CacheFile(honest.contents, odd, honest.metadata).to_bytes())
    assert run("cache", str(file), "info", "-m", MODEL).code == 0


def test_going_on_in_a_file_is_reading_the_whole_text(run: Callable[..., Ran], tmp_path: Path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    cut = PROMPT.index(" and the")
    saved(run, whole, PROMPT, "--chunk", "1")
    saved(run, parts, PROMPT[:cut], "--chunk", "1")
    more = run("cache", MODEL, PROMPT[cut:], "--prompt-cache", str(parts), "--append", "--dtype", "float32")
    assert more.code == 0
    assert " tokens after " in more.err
    after = [run(*generate("and", "--prompt-cache", str(file), "-n", "4")).out for file in (whole, parts)]
    assert after[0] == after[1]
    told = [json.loads(run("cache", str(file), "info", "--json").out) for file in (whole, parts)]
    assert told[0] == told[1] | {"file_bytes": told[0]["file_bytes"]}


def test_a_file_that_is_not_finished_stays_as_it_was(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    append = ["cache", MODEL, "more", "--prompt-cache", str(file), "--append", "--dtype", "float32"]
    append += ["--policy", "key_diff"]
    assert_refused(run(*append), f"prompt cache {file} is not there. Make it with `windlass cache`")
    saved(run, file, PROMPT)
    before = file.read_bytes()
    assert_refused(run(*append, "--budget", "16"), "--budget 16 contradicts")
    with monkeypatch.context() as patched:
        patched.setattr("windlass.engine.prefill.forward", Mock(side_effect=KeyboardInterrupt))
        ran = run(*append)
    assert (ran.code, file.read_bytes()) == (130, before)
    assert f"{file} stays as it was" in ran.err
    with monkeypatch.context() as patched:
        patched.setattr(prompt_cache, "save_file", Mock(side_effect=OSError(28, "No space left")))
        assert_refused(run(*append), "The older file is unchanged")
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def interrupted(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Runs a command that is interrupted in its pass number `at` over a text."""

    def go(at: int, *command: str) -> Ran:
        with monkeypatch.context() as patched:
            passes = itertools.count(1)

            def one(*given: Any, **options: Any) -> torch.Tensor:
                if next(passes) == at:
                    raise KeyboardInterrupt
                return forward(*given, **options)

            patched.setattr("windlass.engine.prefill.forward", one)
            ran = run(*command)
        assert (ran.code, ran.out) == (130, "")
        return ran

    return go


@pytest.mark.parametrize("has_older", [False, True])
def test_what_was_read_before_an_interrupt_is_kept_and_gone_on_from(
    run: Callable[..., Ran], interrupted: Callable[..., Ran], tmp_path: Path, has_older: bool
):
    whole, file = tmp_path / "whole", tmp_path / "file"
    saved(run, whole, PROMPT, "--chunk", "4")
    if has_older:
        file.write_bytes(b"old")
    part = Path(f"{file}.part")
    command = ("cache", MODEL, PROMPT, "--prompt-cache", str(file), *LIMITS, "--chunk", "4")
    assert f"{part} holds the first 8 of 18 tokens. The same command continues" in interrupted(3, *command).err
    assert json.loads(run("cache", str(part), "info", "--json").out)["tokens_seen"] == 8
    assert f"{part} holds the first 12 of 18 tokens. The same command continues" in interrupted(2, *command).err
    assert file.read_bytes() == b"old" if has_older else not file.exists()
    ran = run(*command)
    assert ran.code == 0
    assert f"{part} holds the first 12 of 18 tokens. Continuing from there" in ran.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "whole"]
    assert CacheFile.read(file).contents == CacheFile.read(whole).contents
    assert_same(CacheFile.read(file), CacheFile.read(whole))


def test_an_interrupted_append_is_gone_on_from(
    run: Callable[..., Ran], interrupted: Callable[..., Ran], tmp_path: Path
):
    whole, file = tmp_path / "whole", tmp_path / "file"
    more = ("cache", MODEL, PROMPT, "--append", "--dtype", "float32", "--policy", "key_diff", "--prompt-cache")
    for each in (whole, file):
        saved(run, each, "He was sitting", "--chunk", "4")
    assert run(*more, str(whole)).code == 0
    before = file.read_bytes()
    assert f"{file}.part holds the first 8 of " in interrupted(3, *more, str(file)).err
    assert file.read_bytes() == before
    assert run(*more, str(file)).code == 0
    assert_same(CacheFile.read(file), CacheFile.read(whole))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "whole"]


def test_another_text_or_other_options_are_read_anew(
    run: Callable[..., Ran], interrupted: Callable[..., Ran], tmp_path: Path
):
    file = tmp_path / "file"
    command = ("cache", MODEL, PROMPT, "--prompt-cache", str(file), "--dtype", "float32", "--chunk", "4")
    interrupted(3, *command, "--budget", "12")
    assert "going on" not in run("cache", MODEL, f"But {PROMPT}", *command[3:], "--budget", "12").err
    file.unlink()
    interrupted(3, *command, "--budget", "12")
    assert "going on" not in run(*command, "--budget", "13").err


def test_a_policy_that_chooses_at_the_end_reads_all_again(
    run: Callable[..., Ran], interrupted: Callable[..., Ran], tmp_path: Path
):
    file = tmp_path / "file"
    command = ("cache", MODEL, PROMPT, "--prompt-cache", str(file), "--dtype", "float32", "--chunk", "4")
    limits = ("--budget", "12", "--policy", "kvzip")
    assert "The same command reads all again, because KVzip" in interrupted(3, *command, *limits).err
    assert "going on" not in run(*command, *limits).err


def assert_same(ours: CacheFile, theirs: CacheFile) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, tensor in ours.tensors.items():
        assert torch.equal(tensor, theirs.tensors[name]), name
