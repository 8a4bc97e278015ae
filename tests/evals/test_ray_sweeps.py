"""Evaluations over workers: the lines of one process, and nothing finished is lost when a worker or the driver dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.helpers import cli, deadly
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.models import MODEL
from tests.helpers.processes import descendants, is_alive
from tests.helpers.serving import soon
from windlass.cli import measure_options
from windlass.core.errors import UsageError
from windlass.evals.grid import ListOptions
from windlass.evals.run import EvalOptions, Sweep
from windlass.evals.tune import TuneOptions, Tuning

run = cli.run  # a fixture
LENGTH = 260
CACHE = {"policies": "key_diff", "budgets": "40"}
on_ray = pytest.mark.usefixtures("ray")


def options(output: Path, tasks: str, samples: int, batch: int = 1, threads: int | None = 1) -> EvalOptions:
    lists = ListOptions(tasks, str(LENGTH), CACHE)
    return EvalOptions(MODEL, lists, samples, 0, False, output, "float32", threads, batch=batch)


def spread(asked: Any, workers: int, note: Callable[[str], None]) -> Any:
    from windlass.evals.ray import RayExecutor

    return RayExecutor(asked, workers, note)


def lines(path: Path) -> list[dict[str, Any]]:
    """Lines of cases, in an order of their own, without their times."""
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert rows[0].pop("kind") == "header"
    return sorted(
        ({name: value for name, value in row.items() if name != "seconds"} for row in rows[1:]), key=json.dumps
    )


def quiet(*_: object) -> None:
    """A callback that ignores its messages."""


def alone(asked: EvalOptions) -> list[dict[str, Any]]:
    """The lines of one process."""
    assert Sweep(asked, quiet).run(quiet)
    return lines(asked.output)


def key_of(rows: list[dict[str, Any]], sample: int) -> str:
    return str(next(row["expected"][0] for row in rows if row["sample"] == sample and row["task"].startswith("/")))


@pytest.mark.slow
@on_ray
def test_two_workers_write_the_lines_of_one_process_though_some_die(tmp_path: Path) -> None:
    file = deadly.written_to(tmp_path)
    asked = [options(tmp_path / name, f"{file}:Dies,magic_multiturn,perplexity", 3) for name in "ab"]
    wanted = alone(asked[0])
    (tmp_path / "once").write_text(key_of(wanted, 0))
    (tmp_path / "always").write_text(key_of(wanted, 2))
    told: list[str] = []
    done: list[tuple[int, int]] = []
    sweep = Sweep(asked[1], quiet, spread(asked[1], 2, told.append))
    assert sweep.run(lambda count, total, _: done.append((count, total)))
    assert (tmp_path / "died").exists()
    assert lines(asked[1].output) == [row for row in wanted if "Dies" not in row["task"] or row["sample"] != 2]
    assert sweep.counts == (8, 9)
    assert done[0] == (0, 9)
    assert done == sorted(done)
    [error] = [line for line in told if line.startswith("windlass: error: ")]
    assert error.startswith("windlass: error: 2 workers died over this cell, which is left out: ")
    assert error.endswith("Dies, length 260, text 2, policy=KeyDiff(), asked_budget=40, positions=original")
    assert len(told) == 3
    identities = [[case.identity for case in each.cases] for each in (Sweep(asked[0], quiet), sweep)]
    assert [each for each in identities[0] if each in identities[1]] == identities[1]
    assert len(identities[1]) == 2 + 3 * 5 + 3


@on_ray
@pytest.mark.slow
def test_an_interrupted_tuning_keeps_what_is_finished(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The boat passed lock number {n}, and then a bridge. " for n in range(150)))
    file = deadly.written_to(tmp_path)
    lists = {"policies": "recent,key_diff"}
    asked = [
        TuneOptions(
            model=MODEL,
            text=text,
            size=400_000,
            lists=ListOptions(f"{file}:Waits", "", lists),
            samples=2,
            length=LENGTH,
            seed=0,
            is_aware=False,
            output=tmp_path / name,
            dtype="float32",
            threads=1,
        )
        for name in "ab"
    ]
    wanted = Tuning(asked[0], quiet)
    assert wanted.run(quiet)
    rows = lines(tmp_path / "a")
    (tmp_path / "held").write_text(key_of(rows, 1))
    tuning = Tuning(asked[1], quiet, spread(asked[1], 1, quiet))

    def interrupt() -> None:
        if soon((tmp_path / "waiting").exists, 60):
            os.kill(os.getpid(), signal.SIGINT)

    thread = Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        thread.start()
        assert not tuning.run(quiet)
    finally:
        signal.signal(signal.SIGINT, before)
        thread.join()
    assert lines(tmp_path / "b") == [row for row in rows if row["sample"] == 0]
    (tmp_path / "held").write_text("")
    again = Tuning(asked[1], quiet)
    assert again.run(quiet)
    assert lines(tmp_path / "b") == rows
    assert [each.name for each in again.ranking] == [each.name for each in wanted.ranking]


@on_ray
@pytest.mark.slow
def test_the_driver_dies_and_the_run_is_gone_on_with(tmp_path: Path) -> None:
    file = deadly.written_to(tmp_path)
    asked = [options(tmp_path / name, f"{file}:Waits", 3) for name in "ab"]
    wanted = alone(asked[0])
    (tmp_path / "held").write_text(key_of(wanted, 2))
    command = [sys.executable, "-m", "windlass", "eval", MODEL, "--dtype", "float32", "--lengths", str(LENGTH)]
    command += ["--policies", CACHE["policies"], "--budgets", CACHE["budgets"], "--tasks", f"{file}:Waits"]
    command += ["--samples", "3", "-o", str(asked[1].output), "--workers", "1", "--ray"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (tmp_path / "said").open("w") as said:
        driver = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        try:
            assert soon(lambda: (tmp_path / "waiting").exists() or driver.poll() is not None, 120)
            assert driver.poll() is None, (tmp_path / "said").read_text()
            assert soon(lambda: asked[1].output.read_text().count("\n") == 3)
            started = descendants(driver.pid)
            workers = [each for each in started if Path(f"/proc/{each}/cmdline").read_text().startswith("ray::Worker")]
            assert len(workers) == 1
        finally:
            driver.kill()
            driver.wait()
    # Two helpers of Ray's take a minute to see that it has gone. Workers do not.
    assert soon(lambda: not is_alive(workers[0]), 60)
    for each in started:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    assert len(lines(asked[1].output)) == 2
    (tmp_path / "held").write_text("")
    assert alone(asked[1]) == wanted


@on_ray
@pytest.mark.slow
def test_what_fails_in_a_worker_is_told_as_here(tmp_path: Path) -> None:
    asked = options(tmp_path / "a", "cwe", 1)
    with pytest.raises(UsageError, match="length 260 is too short for task cwe, which takes"):
        Sweep(asked, quiet, spread(asked, 1, quiet))
    assert not asked.output.exists()


@on_ray
@pytest.mark.slow
def test_more_workers_than_there_is_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--workers 2 with --threads 2 do not fit: this Ray has 3 processors, room for 1"
    ):
        spread(options(tmp_path / "a", "passkey", 1, threads=2), 2, quiet)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("--workers", "2"), "--workers 2 goes with --ray. Give that, too"),
        (("--ray", "finder-3m"), "--ray finder-3m is no address. Write HOST:PORT, or auto, or put --ray last"),
    ],
)
def test_options_that_do_not_go_together(run: Callable[..., Ran], tmp_path: Path, given: tuple[str, ...], says: str):
    assert_refused(run("eval", MODEL, "-o", str(tmp_path / "a"), *given), says)
    text = tmp_path / "text"
    text.write_text("A boat.")
    assert_refused(run("tune", MODEL, "-f", str(text), "--bytes", "1MiB", *given), says)


def test_an_address_may_be_left_out(run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_options, "find_spec", lambda _: None)
    for given in (("--ray",), ("--ray", "--workers", "2"), ("--ray", "auto"), ("--ray", "10.0.0.1:6379")):
        ran = run("eval", MODEL, "-o", str(tmp_path / "a"), *given)
        assert_refused(ran, "--ray needs Ray. Run: pip install 'windlass[ray]'")
