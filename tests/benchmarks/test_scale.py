"""The simulation takes the scheduler's turns; its tables are those of its results."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from scale import arrivals, simulate, tables
from scale.arrivals import Arrival, Pattern
from scale.simulate import Costs, Memory, simulated
from transformers import AutoTokenizer

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import events_of, options_of, request_of
from windlass.engine.prefill import Reader
from windlass.engine.scheduler import Scheduler, StepInput
from windlass.engine.sequence import Lane

FREE = Costs(0.0, 0.0, 0.0, 0.0)


def test_the_simulation_takes_the_turns_of_the_scheduler(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [(5, 7), (40, 3), (13, 1), (27, 9), (1, 4), (14, 6), (60, 2), (8, 11)]
    turns: list[tuple[int, int]] = []
    step, read, turn = Lane.step, Reader.read, Scheduler._turn

    def counted_turn(scheduler: Scheduler, begun: StepInput) -> None:
        turns.append((0, 0))
        turn(scheduler, begun)

    def counted_step(lane: Lane, tokens: dict[int, int]) -> Any:
        turns[-1] = len(tokens), turns[-1][1]
        return step(lane, tokens)

    def counted_read(reader: Reader) -> None:
        before = reader.done
        read(reader)
        turns[-1] = turns[-1][0], reader.done - before

    monkeypatch.setattr(Scheduler, "_turn", counted_turn)
    monkeypatch.setattr(Lane, "step", counted_step)
    monkeypatch.setattr(Reader, "read", counted_read)
    options = options_of()
    scheduler = Scheduler(attached_model("llama"), AutoTokenizer.from_pretrained(MODEL), [(3, options)])
    ids = text(200)[0].tolist()
    tickets = [scheduler.submit(request_of(ids[:prompt], written)) for prompt, written in lengths]
    scheduler.start()
    for ticket in tickets:
        events_of(ticket)
    scheduler.stop()
    said = simulated([Arrival(0.0, *each) for each in lengths], FREE, Memory(3, 17), options.chunk)
    assert said.turns == [each for each in turns if each != (0, 0)]
    assert said.written == sum(written for _, written in lengths)


def test_times_of_one_request_by_hand() -> None:
    costs = Costs(step=1.0, row=0.25, chunk=3.0, token=0.5, held=0.125)
    [arrival] = [Arrival(2.0, 7, 3)]
    said = simulated([arrival], costs, Memory(2, 6), chunk=5)
    # Chunks of 5 and 2 tokens, and the first token; then two steps over 6 held tokens, the budget.
    first = 3.0 + 2.5 + 3.0 + 1.0
    assert said.first == [first]
    assert said.whole == [first + 2 * (1.0 + 0.25 + 0.125 * 6)]
    assert said.turns == [(0, 5), (0, 2), (1, 0), (1, 0)]
    whole = simulated([arrival], costs, Memory(2, None, 64), chunk=5)
    assert whole.whole == [first + 2 * 1.25 + 0.125 * (7 + 8)]


def test_a_text_is_sent_back_where_pages_run_out_and_loses_nothing() -> None:
    come = [Arrival(0.0, 20, 40), Arrival(0.0, 20, 40)]
    told = simulated(come, replace(FREE, step=1.0), Memory(4, None, 96), chunk=32)
    assert told.sent_back == 1
    assert told.written == 80
    assert sum(tokens for _, tokens in told.turns) > 2 * 20
    assert simulated(come, FREE, Memory(4, None, 128), chunk=32).sent_back == 0
    # What can never be held is refused, and so is what comes to a full queue.
    assert simulated(come, FREE, Memory(4, None, 48), chunk=32).refused == 2
    assert simulated([Arrival(0.0, 5, 5)] * 9, FREE, Memory(2, 8), queue=3).refused == 6


def test_drawn_requests_have_the_rate_and_the_lengths_of_their_pattern() -> None:
    pattern = Pattern("any", 2.0, [10.0 * each for each in range(101)], [5.0] * 101, 1.0)
    drawn = pattern.draw(20_000, 4.0, 0)
    between = [after.at - before.at for before, after in pairwise(drawn)]
    mean = sum(between) / len(between)
    deviation = (sum((each - mean) ** 2 for each in between) / len(between)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation / mean == pytest.approx(2.0, rel=0.1)
    assert sum(each.prompt for each in drawn) / len(drawn) == pytest.approx(500, rel=0.02)
    assert {each.written for each in drawn} == {5}
    assert max(each.prompt for each in pattern.draw(1000, 4.0, 0, shrink=10)) <= 100


def test_the_tables_of_the_page_are_those_of_the_results() -> None:
    """After new results: PYTHONPATH=benchmarks python -m scale.tables."""
    page = tables.PAGE.read_text()
    assert tables.written(page) == page
    assert {each["name"] for each in arrivals.lines("arrivals.jsonl")} == {"azure_conv", "azure_code"}
    assert simulate.READING == 2
