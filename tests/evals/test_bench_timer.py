"""Timing of one row: batches, steps out of a graph, and when the clock is read."""

from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.tape import Tape
from windlass import kernels
from windlass.evals.speed import measure
from windlass.evals.speed.measure import Timer
from windlass.evals.speed.rows import SHAPES, random_model, rows_of
from windlass.evals.speed.workloads import BenchLists
from windlass.hf.forward import layer_shapes

GRAPHED = [
    (0, "all", "recent", "unrotated"),
    (90, "40", "h2o", "rotated"),
    (90, "40", "snapkv", "unrotated"),
    (70, "all", "recent", "unrotated"),
]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(random_model(SHAPES["tiny"], torch.bfloat16))


@pytest.mark.parametrize(
    ("depth", "budget", "storage"), [(0, None, "unrotated"), (90, 40, "rotated"), (70, None, "unrotated")]
)
def test_a_batch_stands_behind_texts_of_its_own(model: PreTrainedModel, depth: int, budget: int | None, storage: str):
    [each] = rows_of(BenchLists("0", "5", str(depth), {"budget": str(budget or "all")}, storage, batch="3"), 32)
    assert str(each.workload) == ("tg5 b3" if depth == 0 else f"tg5 b3 @ d{depth}")
    timer = Timer(model, layer_shapes(model), each)
    timer.warm_up(lambda: 0.0)
    for begun in (0, 5):
        assert timer.cache.next_positions == [depth + begun] * 3
        for layer in timer.cache.layers:
            held = (layer.positions >= 0).sum(-1)
            assert held.tolist() == [[min(depth + begun, budget or 1000)]] * 3
        timer.run(lambda: 0.0)
    each.samples_s = [0.5]
    assert each.tokens_per_s == 3 * 5 / 0.5
    [prompt] = rows_of(BenchLists("9", "0", batch="2"), 32)
    timer = Timer(model, layer_shapes(model), prompt)
    timer.warm_up(lambda: 0.0)
    timer.run(lambda: 0.0)
    assert timer.cache.next_positions == [9, 9]
    assert timer.cache.tokens is not None
    assert timer.cache.tokens[0] != timer.cache.tokens[1]


@pytest.mark.parametrize(("depth", "budget", "policy", "storage"), GRAPHED)
def test_a_graph_is_recorded_before_the_clock_is_read(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, depth: int, budget: str, policy: str, storage: str
):
    tape, replayed = Tape(), list[tuple[int, int]]()

    def clock() -> float:
        replayed.append((tape.captured, tape.replayed))
        return 0.0

    monkeypatch.setattr(measure, "graph_for", lambda _: tape)
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)  # compiled kernels would hide from the tape
    [each] = rows_of(
        BenchLists("0", "6", str(depth), {"budget": budget, "policy": policy}, storage, batch="2", graph="on"), 32
    )
    timer = Timer(model, layer_shapes(model), each)
    timer.warm_up(lambda: 0.0)
    for turn in range(3):
        assert timer.cache.next_positions == [depth] * 2
        timer.run(clock)
        assert timer.cache.next_positions == [depth + measure.RECORDED + 6] * 2
        (captured, before), (captured_then, after) = replayed[-2:]
        assert (captured_then, after - before) == (captured, 6), f"run {turn} records while it is timed"
        timer.take_back()


def test_what_cannot_be_recorded_is_not_timed_as_a_graph(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "graph_for", lambda _: Tape())
    monkeypatch.setattr(Tape, "capture", Mock(side_effect=RuntimeError("a reason")))
    [each] = rows_of(BenchLists("0", "6", graph="on"), 32)
    with pytest.raises(windlass.UsageError, match=r"--graph on: a step of .* a reason. Leave it out, or use off"):
        Timer(model, layer_shapes(model), each).warm_up(lambda: 0.0)


def test_the_clock_waits_for_the_device(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []

    def clock() -> float:
        order.append("clock")
        return 0.0

    [each] = rows_of(BenchLists("0", "3"), 512)
    timer = Timer(model, layer_shapes(model), each)
    monkeypatch.setattr(measure, "wait_for", lambda device: order.append(f"wait for {device}"))
    monkeypatch.setattr(measure, "prefill", lambda *_: order.append("step"))
    timer.run(clock)
    assert order == ["wait for cpu", "clock", "step", "step", "step", "wait for cpu", "clock"]
