"""Habits from other programs: the version, help, completion, quiet and verbose, the environment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import windlass
from tests.helpers import cli
from tests.helpers.cli import LAST_LINE, PROMPT, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from windlass.cli import options as complete
from windlass.cli.app import app
from windlass.hf.load import device_of

run, model, tokenizer, in_library = cli.run, cli.model, cli.tokenizer, cli.in_library  # fixtures
loaded_once = cli.loaded_once
SMALL = str(Path(__file__).parents[1] / "models" / "stories260K")
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize(("policy", "rounds"), [(None, "10000"), ("active", None)])
def test_threads_spin_for_a_while_unless_the_user_decides(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, policy: str | None, rounds: str | None
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")  # is put back as it was after the test
        monkeypatch.delenv(name)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert run("--version").code == 0
    assert os.environ.get("GOMP_SPINCOUNT") == rounds


def test_few_compiled_products_are_kept_unless_the_user_decides(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "9")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")  # is put back as it was after the test
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    assert run("--version").code == 0
    assert [os.environ[name] for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")] == ["9", "64"]


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version(run: Callable[..., Ran], option: str):
    assert run(option) == Ran(0, f"windlass {windlass.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_three_ways(run: Callable[..., Ran], command: str):
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"windlass {command}" in ran.out
    assert run(command, "-h") == run("help", command) == ran


def test_help_of_all_and_of_none(run: Callable[..., Ran]):
    assert run("help") == run("-h") == run("--help")
    assert all(command in run("help").out for command in COMMANDS)
    assert_refused(run("help", "frob"), "No such command 'frob'")


def test_the_module_is_the_program_and_is_light():
    """Neither help nor completion waits for torch."""
    code = (
        "import runpy, sys\n"
        "sys.argv = ['windlass', *sys.argv[1:]]\n"
        "try:\n    runpy.run_module('windlass', run_name='__main__')\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )

    def said(*arguments: str, **environment: str) -> str:
        command = [sys.executable, "-c", code, *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout

    assert said("--version") == f"windlass {windlass.__version__}\n"
    words = {"_WINDLASS_COMPLETE": "complete_bash", "COMP_WORDS": "windlass generate --policy s", "COMP_CWORD": "3"}
    assert said(**words).split() == ["snapkv", "smoothed"]


def test_a_shell_completes_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert [device_of(name).type for name in ("auto", "cpu")] == ["cuda" if torch.cuda.is_available() else "cpu", "cpu"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "models" / "big").mkdir()
    (tmp_path / "models" / "file").touch()
    assert complete.models("mo") == ["models"]
    assert complete.models("models/") == ["models/big", "models/small"]
    assert complete.models("models/s") == ["models/small"]
    assert complete.models(f"{tmp_path}/models/b") == [f"{tmp_path}/models/big"]
    assert complete.models("gone/") == []


def test_quiet_is_the_text_alone(run: Callable[..., Ran], in_library: Callable[..., windlass.Result], tmp_path: Path):
    assert run(*generate(PROMPT, "-q")) == Ran(0, in_library().text + "\n", "")
    file = str(tmp_path / "file")
    assert run("cache", SMALL, PROMPT, "--prompt-cache", file, "--quiet") == Ran(0, "", "")
    assert run("chat", SMALL, "-q", "-n", "3", stdin=PROMPT.encode()).err == ""
    assert_refused(run(*generate("", "-q")), "the prompt is empty")
    assert_refused(run(*generate(PROMPT, "-q", "-v")), "--quiet and --verbose exclude each other")
    assert LAST_LINE.fullmatch(run(*generate(PROMPT)).err.strip()), "a quiet command leaves the next one as it is"


def test_verbose_says_what_was_chosen(run: Callable[..., Ran]):
    ran = run(*generate(PROMPT, "-v", "--budget", "12", "--policy", "recent", "--threads", "1", "--device", "cpu"))
    chosen, cache, prompt, cost, last, times, *described = ran.err.splitlines()
    assert chosen == "model: finder-3m, LlamaForCausalLM, 3.48 M parameters, float32 on cpu, 1 thread"
    assert cache.startswith("cache: budget 12, policy Recent(), sinks 4, window 2, chunk 512, ")
    assert prompt == "prompt: unchanged, as this model has no chat template"
    assert cost.startswith("windlass: note: 18 of 30 tokens are evicted")
    assert LAST_LINE.fullmatch(last)
    assert [part.split()[0] for part in times.removeprefix("times: ").split(", ")] == ["load", "prefill", "decode"]
    assert described[0].startswith("KVCache: 4 layers")


def test_json_stream_is_a_line_per_piece(run: Callable[..., Ran], in_library: Callable[..., windlass.Result]):
    *pieces, last = map(json.loads, run(*generate(PROMPT, "--json-stream")).out.splitlines())
    whole = json.loads(run(*generate(PROMPT, "--json")).out)
    assert all(set(piece) == {"text", "done"} and piece["done"] is False for piece in pieces)
    assert len(pieces) > 5
    assert "".join(piece["text"] for piece in pieces) == last["text"] == in_library().text
    assert set(last) == {*whole, "done"}
    assert last["done"] is True
    assert_refused(run(*generate(PROMPT, "--json", "--json-stream")), "exclude each other")


def test_the_environment_gives_options(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    given = {"MODEL": SMALL, "DTYPE": "float32", "MAX_TOKENS": "7", "BUDGET": "12", "POLICY": "tova", "THREADS": "1"}
    given |= {"POSITIONS": "compact", "STORE": "int8", "MERGE": "mean", "CHUNK": "5", "DEVICE": "cpu"}
    for name, value in given.items():
        monkeypatch.setenv(f"WINDLASS_{name}", value)
    found = json.loads(run("generate", PROMPT, "--json").out)
    assert (found["budget"], found["policy"], found["positions"]) == (12, "TOVA()", "compact")
    monkeypatch.delenv("WINDLASS_STORE")  # whose mean keys take a second for each model that is opened
    assert (found["store"], found["merge"], found["chunk"], len(found["tokens"])) == ("int8", "mean", 5, 7)
    found = json.loads(run("generate", PROMPT, "--json", "--budget", "16", "-n", "3", "--policy", "h2o").out)
    assert (found["budget"], found["policy"], len(found["tokens"])) == (16, "H2O()", 3)
    # A prompt cache has its own options: only typed options can contradict it.
    file = str(tmp_path / "file")
    assert run("cache", PROMPT, "--prompt-cache", file, "--budget", "20", "--policy", "h2o").code == 0
    found = json.loads(run("generate", "and", "--prompt-cache", file, "--json").out)
    assert (found["budget"], found["policy"]) == (20, "H2O()")
    assert_refused(run("generate", "and", "--prompt-cache", file, "--budget", "12"), "contradicts")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("BUDGET", "many", "(env var: 'WINDLASS_BUDGET')"),
        ("BUDGET", "-3", "got -3 (set in the environment: WINDLASS_BUDGET=-3)"),
        ("POLICY", "snapvk", "(set in the environment: WINDLASS_POLICY=snapvk)"),
        ("DEVICE", "gpu", "(set in the environment: WINDLASS_DEVICE=gpu)"),
        ("MODEL", "./gone", "model folder gone does not exist"),
    ],
)
def test_a_bad_value_names_its_variable(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
):
    monkeypatch.setenv(f"WINDLASS_{name}", value)
    words = (PROMPT,) if name == "MODEL" else (MODEL, PROMPT)
    assert_refused(run("generate", *words), says)


def test_a_typed_value_is_not_blamed_on_the_environment(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WINDLASS_POLICY", "h2o")
    ran = run(*generate(PROMPT, "--policy", "snapvk"))
    assert_refused(ran, "Did you mean snapkv?")
    assert "environment" not in ran.err


def test_every_command_with_a_model_takes_it_by_option(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result]
):
    options = ("--dtype", "float32", "-n", "12", "-q")
    assert run("generate", "-m", MODEL, PROMPT, *options).out == in_library().text + "\n"
    assert run("chat", "-m", MODEL, *options, stdin=PROMPT.encode()).out == in_library().text + "\n"
    for command in (("chat",), ("generate",), ("eval", "-o", "x.jsonl"), ("cache", "--prompt-cache", "x")):
        assert_refused(run(*command), "no model. Name one first, with -m, or in WINDLASS_MODEL")
    assert_refused(run("cache", MODEL, "text"), "no file to write. Name it with --prompt-cache FILE")
