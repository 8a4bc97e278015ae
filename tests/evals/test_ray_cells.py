"""Cells sent to each worker, by hand. Cells of a batch are read together as one process reads them."""

import json
from pathlib import Path

from tests.helpers.models import MODEL
from windlass.evals.grid import Cell, ListOptions
from windlass.evals.ray_cluster import Batch, BatchQueue
from windlass.evals.run import EvalOptions, Sweep


def options(budgets: str, samples: int, batch: int, tasks: str = "passkey", output: str = "a") -> EvalOptions:
    lists = ListOptions(tasks, "200", {"policies": "recent", "budgets": budgets})
    return EvalOptions(MODEL, lists, samples, 0, False, Path(output), "float32", 1, batch=batch)


def planned(budgets: str, samples: int, tasks: str = "passkey") -> list[Cell]:
    return options(budgets, samples, 1, tasks).grid().cells


def shown(batch: Batch | None) -> tuple[str, list[int]] | None:
    """Its budget, and its texts."""
    return None if batch is None else (batch.cells[0].settings.budget.asked, [each.spec.number for each in batch.cells])


def test_a_worker_stays_with_its_text_and_helps_another_at_the_end() -> None:
    queue = BatchQueue.of(planned("20,30,40", 2), 1)
    assert [shown(queue.next_of(worker)) for worker in "abaab"] == [
        ("20", [0]), ("20", [1]), ("30", [0]), ("40", [0]), ("30", [1]),
    ]  # fmt: skip
    around = queue.is_empty, shown(queue.next_of("a")), queue.is_empty
    assert around == (False, ("40", [1]), True)
    assert queue.next_of("b") is None


def test_what_a_dead_worker_leaves_is_run_by_others() -> None:
    queue = BatchQueue.of(planned("20,30", 2), 1)
    first = queue.next_of("a")
    assert first is not None
    assert shown(queue.next_of("b")) == ("20", [1])
    assert queue.died("a", first)
    # The lost cell comes first, then the rest of b's text, and then of its own.
    assert queue.next_of("b") is first
    assert not queue.died("b", first)
    left = [shown(queue.next_of(worker)) for worker in "cdce"]
    assert sorted(each for each in left if each is not None) == [("30", [0]), ("30", [1])]
    assert queue.is_empty


def test_a_batch_is_sent_by_setting_and_read_as_by_one_process(tmp_path: Path) -> None:
    assert [shown(each) for text in BatchQueue.of(planned("20,4x", 3), 2).texts for each in text] == [
        ("20", [0, 1, 2]), ("4x", [0, 1, 2]),
    ]  # fmt: skip
    assert len(BatchQueue.of(planned("20", 40), 2).texts) == 3  # of 16 texts

    asked = options("40,4x", 3, 2, "passkey", str(tmp_path / "a"))
    assert Sweep(asked, lambda _: None).run(lambda *_: None)
    wanted = [json.loads(line) for line in asked.output.read_text().splitlines()[1:]]
    runner = asked.runner()
    sent = [batch.cells for text in BatchQueue.of(planned("40,4x", 3), 2).texts for batch in text]
    found = [
        case.model_dump() for each in sent for _, cases in runner.measure(each, 2, lambda _: None) for case in cases
    ]
    for row in (*wanted, *found):
        del row["seconds"]
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, wanted))
