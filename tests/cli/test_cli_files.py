"""Devices, pipes and folders in place of files, closed outputs, and files that are meant to hurt: one line each."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.cli import PROMPT, START, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from tests.helpers.results import HEADER, case, write
from windlass.cli.app import main
from windlass.core import files
from windlass.policies import pairs

run = cli.run  # fixture
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A named pipe that nobody writes to or reads from."""
    monkeypatch.setattr(files, "WRITER_SECONDS", 0.05)
    os.mkfifo(tmp_path / "pipe")
    return str(tmp_path / "pipe")


def test_a_prompt_comes_from_a_file_or_a_pipe(run: Callable[..., Ran], pipe: str):
    assert_refused(run(*generate("-f", "/dev/zero")), "prompt file /dev/zero is not a regular file, nor a pipe")
    assert_refused(run(*generate("-f", pipe)), f"prompt file {pipe} is empty")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", MODEL, "-f", "{file}", "--record", "{file}", "--budget", "32"),
        ("cache", MODEL, "-f", "{file}", "--prompt-cache", "{file}", "--budget", "32"),
        ("calibrate", MODEL, "{file}", "-o", "{file}", "--tokens", "20"),
        ("calibrate", MODEL, "{file}", "-o", "{file}", "--shares"),
    ],
)
def test_no_file_that_is_read_is_replaced(run: Callable[..., Ran], tmp_path: Path, arguments: tuple[str, ...]):
    file = tmp_path / "text.txt"
    file.write_text(PROMPT)
    ran = run(*(each.format(file=file) for each in arguments))
    assert_refused(ran, f"{file} is also a file that is read")
    assert file.read_text() == PROMPT


def test_a_prompt_has_a_limit(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "MAX_BYTES", 10)
    assert_refused(run(*generate("-"), stdin=b"a" * 11), "the prompt on stdin has more than 10 bytes")


def test_a_closed_stdin_is_no_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(generate()) == 2
    assert capsys.readouterr().err.startswith("windlass: error: no prompt. Give it as an argument")


@pytest.mark.parametrize("place", ["/dev/zero", "{pipe}", "{folder}"])
def test_a_prompt_cache_is_a_regular_file(run: Callable[..., Ran], pipe: str, place: str):
    name = place.format(pipe=pipe, folder=Path(pipe).parent)
    says = f"prompt cache {name} is not a regular file. Give the name of a file"
    assert_refused(run(*generate(PROMPT, "--prompt-cache", name)), says)


def test_code_comes_from_a_file_or_a_pipe(run: Callable[..., Ran], pipe: str):
    says = "policy file /dev/zero is not a regular file, nor a pipe"
    assert_refused(run(*generate(PROMPT, "--policy", "/dev/zero:Mine")), says)
    assert_refused(run(*generate(PROMPT, "--policy", f"{pipe}:Mine")), "has no class 'Mine'")


def test_code_that_is_nested_too_deep_is_told(run: Callable[..., Ran], tmp_path: Path):
    file = tmp_path / "policy.py"
    file.write_text("x = " + "-" * 100_000 + "1")
    assert_refused(run(*generate(PROMPT, "--policy", f"{file}:Mine")), "is not Python: ")


@pytest.mark.parametrize("place", ["/dev/full", "/dev/null", "{pipe}"])
def test_results_go_to_a_regular_file(run: Callable[..., Ran], pipe: str, place: str):
    name = place.format(pipe=pipe)
    says = f"-o {name} is not a regular file. Give the name of a file"
    assert_refused(run("eval", MODEL, "-o", name, "--samples", "1", "--lengths", "200"), says)
    assert_refused(run("bench", MODEL, "-o", name), says)
    assert_refused(run("calibrate", MODEL, __file__, "-o", name), says)


def test_a_report_reads_files(run: Callable[..., Ran], tmp_path: Path, pipe: str):
    output = str(tmp_path / "report.html")
    for name in ("/dev/zero", "/dev/full"):
        assert_refused(run("report", name, "-o", output), f"results file {name} is not a regular file, nor a pipe")
    assert_refused(run("report", pipe, "-o", output), "is not a results file")


HUGE = {"score": 10**400, "bytes_held": 10**400, "depth": 1e300, "seconds": -(10**400), "length": 2**64}


@pytest.mark.parametrize("field", HUGE)
def test_huge_numbers_in_results_are_told(run: Callable[..., Ran], tmp_path: Path, field: str):
    file = write(tmp_path / "r.jsonl", case(), case(sample=1, **{field: HUGE[field]}))
    ran = run("report", str(file), "-o", str(tmp_path / "r.html"))
    assert_refused(ran, f"line 3: {field} must be ")
    assert len(ran.err) < 400


def test_huge_losses_in_results_are_told(run: Callable[..., Ran], tmp_path: Path):
    lines = [case(sample=sample, score=None, measures={"nll": 1e308, "kl": 0.0}) for sample in range(3)]
    file = write(tmp_path / "r.jsonl", *lines)
    assert_refused(run("report", str(file), "-o", str(tmp_path / "r.html")), "line 2: nll must be a number of at most")


def test_deep_results_are_told(run: Callable[..., Ran], tmp_path: Path):
    file, page = tmp_path / "r.jsonl", str(tmp_path / "r.html")
    file.write_text(DEEP + "\n")
    assert_refused(run("report", str(file), "-o", page), "is not a results file")
    file.write_text("\n".join((json.dumps(HEADER), DEEP, json.dumps(case()))) + "\n")
    assert_refused(run("report", str(file), "-o", page), "line 2: it is no object of JSON")
    assert_refused(run("eval", MODEL, "-o", str(file), "--samples", "1", "--lengths", "200"), str(file))
    lines = write(file, case()).read_text().replace('"score": 1.0', f'"score": {DEEP}')
    file.write_text(lines)
    assert_refused(run("report", str(file), "-o", page), str(file))


def test_a_deep_or_huge_table_of_pairs_is_told(run: Callable[..., Ran], tmp_path: Path):
    file = tmp_path / "pairs.json"
    head = {"kind": pairs.KIND, "version": 1, "model": "m", "fingerprint": "f", "merge": "mean", "tokens": 1}
    file.write_text(DEEP)
    assert_refused(run(*generate(PROMPT, "--policy", f"Pairs({file})")), "is not a file of `windlass calibrate`")
    file.write_text(json.dumps({**head, "seed": 0, "pairs": [[1, 2, 3, 10**400]]}))
    assert_refused(run(*generate(PROMPT, "--policy", f"Pairs({file})")), "is damaged: no good pairs")


def test_a_closed_stdout_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(generate(PROMPT)) == 2
    assert capsys.readouterr().err == (
        "windlass: error: the output is closed. Send it somewhere, to /dev/null if it is not wanted\n"
    )


def test_closed_outputs_in_a_process():
    """As a shell closes them, with `>&-` and `2>&-`. Nothing is imported for the first."""
    command = " ".join(f"'{part}'" for part in (*START, *generate(PROMPT)))
    ran = subprocess.run(["sh", "-c", f"{command} >&-"], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr.startswith(b"windlass: error: the output is closed.")
    assert ran.stderr.count(b"\n") == 1
    ran = subprocess.run(["sh", "-c", f"{command} --frob 2>&-"], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, b"", b"")


def test_a_model_with_code_of_its_own_is_refused_and_not_run(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def never(*_: object) -> str:
        raise AssertionError("the user was asked")

    monkeypatch.setattr("builtins.input", never)
    folder, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(MODEL, folder)
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(code + "class OwnConfig: ...\nclass OwnModel: ...\n")
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    says = f"model {folder} can only be loaded by Python code that comes with it, which windlass does not run"
    assert_refused(run("generate", str(folder), PROMPT), says)
    assert not mark.exists()
