"""Bad input on the command line: one clear line that names the value and the way out, exit code 2."""

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers import cli
from tests.helpers.cli import PROMPT, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from windlass.cli import session

run = cli.run  # fixture


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "8", "--window", "4"), "budget (8 tokens) must be at least sinks (4) + window (4) + 1"),
        (("--budget", "-3"), "budget must be from 1 to 1073741824, got -3"),
        (("--budget", "1e9"), "'--budget' / '--max-kv-size'"),
        (("--budget", "1073741824", "--dtype", "float32"), "not enough memory"),
        (("--chunk", "0"), "chunk must be from 1"),
        (("--sinks", "-1"), "sinks must be from 0"),
        (("--max-tokens", "0"), "max_tokens must be from 1 to 1073741824, got 0"),
        (("--temperature", "nan"), "temperature must be from 0 to 100, got nan"),
        (("--top-p", "0"), "top_p must be above 0"),
        (("--seed", "-1"), "seed must be from 0"),
        (("--threads", "0"), "'--threads'"),
        (("--dtype", "int8"), "dtype 'int8' is unknown. Use one of: auto, float32"),
        (("--positions", "compcat"), "positions='compcat' is not a position mode"),
        (("--policy", "snapvk"), "Did you mean snapkv?"),
        (("--prompt-cache", "no.safetensors"), "prompt cache no.safetensors is not there"),
        (("--frob",), "No such option: --frob"),
    ],
)
def test_wrong_options_are_one_line(run: Callable[..., Ran], options: tuple[str, ...], says: str):
    assert_refused(run("generate", MODEL, PROMPT, *options), says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--stop", ""), "--stop is an empty text, which every text begins with. Leave it out"),
        (("--raw", "--system", "Be brief."), "--system is a message of the chat template, which --raw leaves out"),
        (("--merge", "mean"), "merge=mean needs a budget"),
        (
            ("--budget", "64", "--merge", "weighted"),
            "merge=weighted takes weights from the policy, and KeyDiff() gives n",
        ),
        (("--recall", "64"), "recall (64 tokens) needs a budget"),
        (
            ("--budget", "64", "--prompt-cache", "{file}"),
            "--budget 64 contradicts {file}, made with budget 40. Leave it o",
        ),
        (("--store", "int8", "--prompt-cache", "{file}"), "--store int8 contradicts {file}, made with store plain"),
        (("--policy", "snapkv", "--prompt-cache", "{file}"), "was made with the policy KeyDiff(), not with SnapKV("),
        (("--prompt-cache", __file__), "is not a safetensors file, or damaged"),
    ],
)
def test_options_are_checked_before_weights_are_loaded(
    run: Callable[..., Ran],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    says: str,
):
    file = tmp_path_factory.getbasetemp() / "made.cache"
    if not file.exists():
        assert run("cache", MODEL, PROMPT, "--budget", "40", "--prompt-cache", str(file)).code == 0
    monkeypatch.setattr(session, "load_model", Mock(side_effect=AssertionError("loaded")))
    arguments = [each.format(file=file) for each in options]
    assert_refused(run("generate", MODEL, PROMPT, *arguments), says.format(file=file))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "prompt file {file} cannot be read: No such file"),
        (b"", "prompt file {file} is empty"),
        (b"\n", "prompt file {file} is empty"),
        (b"caf\xe9 noir", "prompt file {file} is not UTF-8 text: byte 0xe9 at offset 3"),
        (b"ELF\x00\x01\x02", "prompt file {file} is binary: it has a zero byte at offset 3"),
    ],
)
def test_wrong_prompt_files_are_one_line(run: Callable[..., Ran], tmp_path: Path, data: bytes | None, says: str):
    file = tmp_path / "prompt.txt"
    if data is not None:
        file.write_bytes(data)
    assert_refused(run(*generate("-f", str(file))), says.format(file=file))


def test_wrong_prompts_are_one_line(run: Callable[..., Ran], tmp_path: Path):
    assert_refused(run(*generate("")), "the prompt is empty")
    assert_refused(run(*generate("-"), stdin=b"\xff"), "the prompt on stdin is not UTF-8")
    assert_refused(run(*generate("a \udcff b")), "the prompt is not UTF-8 text: byte 0xff at offset 2")
    assert_refused(run(*generate("a", "-f", "b")), "both a prompt and --file")
    assert_refused(run(*generate(str(tmp_path), "-f", str(tmp_path))), "both a prompt and --file")
    assert_refused(run(*generate("-f", str(tmp_path))), "Is a directory")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("folder", "model folder {folder} does not exist"),
        ("config.json", "model folder {folder} has no config.json"),
        ("model.safetensors", "model folder {folder} has no weights"),
        ("tokenizer.json", "model folder {folder} has no tokenizer beside tokenizer_config.json"),
        ("cut", "model {folder}: its weights are damaged"),
        ("lacking", "model {folder}: its weights lack 1 tensors, the first is model.norm.weight"),
        ("broken config", "model {folder}: config.json is not JSON"),
        ("encoder", "model {folder}: a t5 writes no text token by token"),
    ],
)
def test_broken_model_folders_are_one_line(run: Callable[..., Ran], tmp_path: Path, damage: str, says: str):
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    weights = folder / "model.safetensors"
    if damage == "folder":
        shutil.rmtree(folder)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:50_000])
    elif damage == "lacking":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif damage == "broken config":
        (folder / "config.json").write_text("{")
    elif damage == "encoder":
        (folder / "config.json").write_text('{"model_type": "t5"}')
    else:
        (folder / damage).unlink()
    assert_refused(run("generate", str(folder), "a"), says.format(folder=folder))


def test_other_wrong_models_are_one_line(run: Callable[..., Ran]):
    assert_refused(run("generate", __file__, "a"), "is a file. Give the folder")
    assert_refused(run("generate", "nobody/nothing", "a"), "model 'nobody/nothing' is no folder here")


def test_a_prompt_cache_that_cannot_be_written_is_told_before_reading(run: Callable[..., Ran], tmp_path: Path):
    nowhere = str(tmp_path / "gone" / "x")
    # Not even the model is opened.
    assert_refused(run("cache", "no model", PROMPT, "--prompt-cache", nowhere), "does not exist. Make it first")
    assert_refused(run("cache", "no model", PROMPT, "--prompt-cache", str(tmp_path)), "is a folder")
