"""The number of threads of decode steps: which is chosen, and that no bit depends on it."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import windlass
from windlass import KVCache, kernels
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

from windlass.kernels.cpu.decode import PAUSES, TRIAL, ThreadChoice


def chosen(choice: ThreadChoice, steps: int, most: int, seconds: Callable[[int], float]) -> list[int]:
    """The threads of so many steps, of which each takes so many seconds by its threads."""
    found = []
    for _ in range(steps):
        found.append(choice.of(most))
        choice.took(seconds(found[-1]))
    return found


def test_more_threads_stay_where_they_are_faster() -> None:
    choice = ThreadChoice()
    found = chosen(choice, 2 * TRIAL + 2 * PAUSES[0], 8, lambda threads: 1 / threads)
    assert found[: 2 * TRIAL] == [8, 4] * TRIAL
    assert set(found[2 * TRIAL :]) == {8}
    assert chosen(choice, 2 * TRIAL, 8, lambda threads: 1 / threads) == [8, 4] * TRIAL


def test_fewer_threads_are_taken_as_long_as_they_are_faster() -> None:
    choice = ThreadChoice()
    seconds = {6: 5.0, 3: 4.0, 1: 3.0}
    found = chosen(choice, 4 * TRIAL + PAUSES[0], 6, seconds.__getitem__)
    assert found == [6, 3] * TRIAL + [3, 1] * TRIAL + [1] * PAUSES[0]
    assert choice.of(6) == 6  # another trial


def test_a_neighbour_that_comes_or_goes_is_seen_in_a_later_trial() -> None:
    choice = ThreadChoice()
    alone, beside = {2: 1.0, 1: 1.8}, {2: 2.5, 1: 2.0}
    assert chosen(choice, 200, 2, alone.__getitem__)[-1] == 2
    assert chosen(choice, PAUSES[1] + 2 * TRIAL, 2, beside.__getitem__)[-1] == 1
    assert chosen(choice, PAUSES[1] + 2 * TRIAL, 2, alone.__getitem__)[-1] == 2


def test_one_step_decides_where_threads_wait_for_each_other() -> None:
    assert chosen(ThreadChoice(), 5, 2, {2: 5000.0, 1: 25.0}.__getitem__) == [2, 1, 1, 1, 1]


def test_a_slow_step_decides_nothing_by_itself() -> None:
    choice = ThreadChoice()
    times = iter([1.0, 1.8, 2.9, 1.8, *[1.0, 1.8] * (TRIAL - 2)])
    assert chosen(choice, 2 * TRIAL, 2, lambda _: next(times)) == [2, 1] * TRIAL
    assert choice.of(2) == 2


def test_another_limit_begins_anew() -> None:
    choice = ThreadChoice()
    assert chosen(choice, 100, 2, {2: 1.0, 1: 0.5}.__getitem__)[-1] == 1
    assert choice.of(4) == 4
    assert chosen(choice, 50, 1, {1: 1.0}.__getitem__) == [1] * 50


@pytest.mark.parametrize("options", [{}, {"budget": 24}, {"budget": 24, "recall": 16, "store": "int4"}], ids=str)
def test_no_bit_depends_on_the_threads_of_a_step(options: dict[str, Any]) -> None:
    model, before = tiny_model("llama"), torch.get_num_threads()
    windlass.attach(model.bfloat16())
    ids = torch.randint(0, 90, (1, 70), generator=torch.Generator().manual_seed(3))
    read = []
    for threads in (1, 2, 3):
        torch.set_num_threads(1)
        cache = KVCache(model, chunk=8, **options)
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            torch.set_num_threads(threads)
            steps = [model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(40, 70)]
        read.append(torch.cat(steps))
    torch.set_num_threads(before)
    assert torch.equal(read[0], read[1])
    assert torch.equal(read[0], read[2])


POOLS = """
import os, sys, threading
import torch
import windlass
from tests.helpers.schedulers import options_of
from windlass.engine.scheduler import Scheduler
from windlass.kernels import cpu
from windlass.testing import tiny_model

def threads():
    return len(os.listdir("/proc/self/task"))

def work():
    torch.set_num_threads(3)
    before = threads()
    torch.zeros(1 << 20).exp()
    found = [threads() - before]
    if sys.argv[1] == "pool":
        cpu.end_pool()
    elif sys.argv[1] == "attach":
        windlass.attach(tiny_model("llama"))
    else:
        windlass.attach(model := tiny_model("llama"))
        scheduler = Scheduler(model, None, [(2, options_of())])
        torch.zeros(1 << 20).exp()
        scheduler.start()
        found.append(scheduler._thread.is_alive())
    found.append(threads() - before)
    print(found)

worker = threading.Thread(target=work)
worker.start()
worker.join()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads by /proc")
@pytest.mark.parametrize(("way", "found"), [("pool", [2, 0]), ("attach", [2, 0]), ("engine", [2, True, 1])])
def test_a_pool_is_ended_before_another_thread_computes(way: str, found: list[Any]) -> None:
    """Threads of this pool that were left would let those of the other sleep at each barrier."""
    ended = subprocess.run([sys.executable, "-u", "-c", POOLS, way], capture_output=True, text=True, timeout=120)
    assert ended.stdout.strip() == str(found), ended.stderr
