"""The benchmark on a real model, on a small one: its measures, its page, and that it goes on where it was stopped."""

import copy
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quality import real_model, real_page, real_tasks
from quality.real_model import Cell
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import windlass
from tests.helpers.chats import with_template
from tests.helpers.models import MODEL
from windlass import CacheOptions
from windlass.evals.texts import NOUNS, novel

SHARED = {"kind": "smollm2", "chunk": 64, "part": 0, "cpu": "a CPU", "threads": 1, "cores": 2, "torch": "2"}
SHARED |= {"date": "2026-01-02", "tokens": 1536}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> real_tasks.Material:
    files = [tmp_path_factory.mktemp("novels") / name for name in ("one.txt", "two.txt")]
    for file, half in zip(files, (novel()[:60_000], novel()[60_000:120_000]), strict=True):
        file.write_text(half)
    model, _ = windlass.load(MODEL, "float32")
    return real_tasks.Material.of(model, with_template(), files)


def test_losses_are_those_of_the_plain_model(material: real_tasks.Material, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_tasks, "BLOCK", 32)
    found: dict[str, Any] = real_tasks.streamed(material, CacheOptions(chunk=16), 64, 0, has_twin=True)
    plain = windlass.detach(windlass.load(MODEL, "float32")[0])
    assert len(found["blocks"]) == real_tasks.STREAM_ROWS
    for ids, blocks in zip(material.spans(real_tasks.STREAM_ROWS, 65, 0), found["blocks"], strict=True):
        text = torch.tensor([ids])
        with torch.no_grad():
            losses = cross_entropy(plain(text[:, :-1]).logits[0], text[0, 1:], reduction="none")
        assert blocks == pytest.approx([float(losses[:32].mean()), float(losses[32:].mean())], abs=1e-3)
    assert found["kl"] == pytest.approx(0, abs=1e-5)
    assert found["same"] == 1
    assert found["n"] == real_tasks.STREAM_ROWS * 32


def test_a_small_budget_diverges(material: real_tasks.Material) -> None:
    found: dict[str, Any] = real_tasks.streamed(material, CacheOptions(budget=16, chunk=8), 64, 0, has_twin=True)
    assert found["kl"] > 0.01
    assert found["same"] < 1


def test_each_text_holds_its_fact_and_only_its_head_is_pinned(
    material: real_tasks.Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[list[int]]] = []
    sinks: list[int | str] = []
    prefill = windlass.prefill

    def noted(model: PreTrainedModel, cache: windlass.KVCache, prompts: list[list[int]]) -> object:
        read.append(prompts)
        sinks.append(cache.options.sinks)
        return prefill(model, cache, prompts)

    monkeypatch.setattr(real_tasks, "FACT_ROWS", 4)
    monkeypatch.setattr(real_tasks, "prefill", noted)
    for is_pinned in (False, True):
        found = real_tasks.facts(material, CacheOptions(budget=160, chunk=64), 240, 0, is_pinned)
        assert found["n"] == 4
    assert read[0] == read[1]
    assert {len(prompt) for prompt in read[0]} == {240}
    texts = [str(material.tokenizer.decode(prompt)) for prompt in read[0]]
    assert all(
        " is " in text and f"The magic {'number' if row % 2 else 'word'}" in text for row, text in enumerate(texts)
    )
    assert any(noun in texts[0] for noun in NOUNS)
    head = str(material.tokenizer.decode(read[0][0][: int(sinks[1])]))
    assert sinks[0] == 4
    assert real_tasks.INTRO.strip() in head
    assert "magic" not in head


def test_a_chat_counts_every_reply(material: real_tasks.Material, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_tasks, "TURNS", 2)
    monkeypatch.setattr(real_tasks, "CHATS", 2)
    monkeypatch.setattr(real_tasks, "RULE", "Say {word}.")
    for sinks in (4, "system"):
        found: dict[str, Any] = real_tasks.chats(material, CacheOptions(budget=128, sinks=sinks, chunk=64), 0)
        assert (found["n"], found["late_n"]) == (4, 2)
        assert 0 <= found["late"] <= found["found"] <= 4
        assert found["tokens_seen"] > 128


def test_a_model_without_a_template_reads_the_text_alone(
    material: real_tasks.Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def noted(*given: Any) -> list[SimpleNamespace]:
        asked.append(given[2])
        return [SimpleNamespace(text="")] * len(given[2])

    tokenizer = copy.deepcopy(material.tokenizer)
    tokenizer.chat_template = None
    monkeypatch.setattr(real_tasks, "FACT_ROWS", 2)
    monkeypatch.setattr(real_tasks, "generate", noted)
    own = replace(material, tokenizer=tokenizer)
    assert real_tasks.facts(own, CacheOptions(budget=160, chunk=64), 240, 0, False)["found"] == 0
    assert all(each.startswith("\n\nThe magic ") for each in asked[0])


def test_every_cell_has_options_and_every_table_its_controls() -> None:
    cells = real_model.cells()
    assert len({cell.key for cell in cells}) == len(cells)
    for cell in cells:
        options = cell.made()
        assert (options.budget or 0) + options.recall == (cell.budget or 0)
        beside = {other.row for other in cells if (other.table, other.tokens) == (cell.table, cell.tokens)}
        assert beside >= {real_page.FULL, *real_page.CONTROLS}


def test_a_finished_cell_is_not_measured_again(
    material: real_tasks.Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def noted(cell: Cell, _: real_tasks.Material) -> dict[str, object]:
        measured.append(cell.row)
        return {"found": 1, "n": 2}

    monkeypatch.setattr(Cell, "measured", noted)
    wanted = [Cell("facts", row, 100, 50) for row in ("KeyDiff", "Recent")]
    results = tmp_path / "lines.jsonl"
    real_model.run(material, "smollm2", wanted[:1], results, 1)
    real_model.run(material, "smollm2", wanted, results, 1)
    real_model.run(material, "smollm2", [Cell("facts", "Random", 100, 50)], results, -1)
    assert measured == ["KeyDiff", "Recent"]
    assert [line["row"] for line in real_model.lines_of(results)] == measured


def stream_line(row: str, budget: int | None, blocks: list[list[float]]) -> dict[str, Any]:
    """A line of the table of streaming."""
    return {**SHARED, "table": "stream", "row": row, "budget": budget, "blocks": blocks}


def test_losses_are_paired_by_blocks_past_the_budget() -> None:
    """Differences of 1, 3, 1 and 3 in the blocks that begin at token 512 or later."""
    full = stream_line("full cache", None, [[9, 9, 1, 5], [9, 9, 2, 7]])
    ours = stream_line("KeyDiff", 256, [[0, 0, 2, 8], [0, 0, 3, 10]])
    mean, half, count = real_page.above(ours, full)
    assert (mean, count) == (2, 4)
    assert half == pytest.approx(1.96 * math.sqrt(4 / 3) / 2)
    full, ours = (
        line | {"tokens": 8193, "blocks": [[at, at] * 16 + [last]]} for line, at, last in ((full, 1, 2), (ours, 3, 7))
    )
    assert real_page.above(ours, full) == (5, math.inf, 1)  # the block behind 8,192 tokens alone


def test_the_page_counts_its_parts_and_says_what_is_missing() -> None:
    facts = {**SHARED, "table": "facts", "tokens": 1000, "chunk": 64}
    lines = [
        stream_line("full cache", None, [[0, 0, 1.0, 1.0]]),
        stream_line("KeyDiff", 256, [[0, 0, 1.5, 1.5]]),
        stream_line("KeyDiff, mean_count", 256, [[0, 0, 2.5, 2.5]]),
        {**facts, "row": "full cache", "budget": None, "found": 20, "n": 24},
        {**facts, "row": "Recent", "budget": 250, "found": 3, "n": 24},
        {**facts, "row": "Recent", "budget": 250, "part": 1, "found": 2, "n": 24},
        {**facts, "row": "KeyDiff", "budget": 500, "found": 12, "n": 24},
    ]
    text = real_page.page(lines, 140, ["A", "B"])
    assert "7 of 140 cells" in text
    assert "| Recent | not run | 5 of 48 [5, 22] |" in text
    assert "- `mean_count` minus dropped: +1.000 [+1.000, +1.000]" in text
    assert "| KeyDiff | +0.500 [+0.500, +0.500] |" in text
    assert "a CPU, 1 thread of 2 cores" in text
    assert text.partition("## Chats")[2].count("Not run yet.") == 3
    assert all(len(line) < 121 or line.startswith("|") for line in text.splitlines())
