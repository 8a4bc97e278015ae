"""`benchmarks/families`: the page is that of the results, the tiny models are whole, and the checks find faults."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from families import checks, run
from families.checks import SHORT, examine
from families.page import page
from families.passes import narrowed, one_shot, text
from families.run import Child, finish
from families.tiny import WINDOW, WORDS, Family, families, tiny
from transformers import CONFIG_MAPPING

import windlass
from tests.helpers.models import masked
from windlass import KVCache

PAGE = Path(__file__).parents[2] / "docs" / "results" / "models.md"
LINES = run.read(run.RESULTS)
LLAMA = Family("causal LM", "llama", "LlamaForCausalLM")
GEMMA = Family("causal LM", "gemma3_text", "Gemma3ForCausalLM")


def test_the_page_is_that_of_the_results() -> None:
    """After a sweep: PYTHONPATH=benchmarks python -m families.run --write docs/results/models.md."""
    assert PAGE.read_text() == page(LINES, run.read(run.CLIENTS))


def test_the_results_name_every_class_once() -> None:
    seen = [(line["mapping"], line["model_type"], line["class_name"], line["variant"]) for line in LINES]
    assert len(set(seen)) == len(seen)
    if {line["transformers"] for line in LINES} == {transformers.__version__}:
        assert set(seen) == {(each.mapping, each.model_type, each.class_name, each.variant) for each in families()}


def test_no_class_is_wrong_in_silence_or_raises_after_attach() -> None:
    assert [line["model_type"] for line in LINES if line["outcome"] in ("wrong", "raises")] == []


@pytest.mark.parametrize("model_type", ["gemma3_text", "deepseek_v4", "qwen3_next"])
def test_every_layer_type_of_the_default_config_is_kept(model_type: str) -> None:
    family = next(each for each in families() if each.model_type == model_type)
    kinds = tiny(family).config.layer_types
    assert set(kinds) == set(CONFIG_MAPPING[model_type]().layer_types)
    assert 4 <= len(kinds) <= 6


def test_a_tiny_model_is_the_same_twice_and_reacts() -> None:
    model, ids = tiny(GEMMA), text(SHORT, 1)
    logits = one_shot(model, ids)
    assert torch.equal(one_shot(tiny(GEMMA), ids), logits)
    ids[0, 0] = (ids[0, 0] + 3) % WORDS
    assert (one_shot(model, ids) - logits)[0, -1].abs().max() > 0.01 * logits.std()


def test_a_narrowed_mask_is_the_explicit_one() -> None:
    model, ids = tiny(LLAMA), text(SHORT, 1)
    at = torch.arange(SHORT)
    with torch.no_grad(), narrowed(lambda _batch, _head, query, key: (key < 3) | (query - key <= 5)) as uses:
        ours = one_shot(model, ids)
    distance = at[:, None] - at
    theirs = masked(model, ids, (distance >= 0) & ((at < 3) | (distance <= 5)))
    assert uses
    assert torch.allclose(ours, theirs, atol=1e-5)
    with torch.no_grad():
        assert not torch.allclose(one_shot(model, ids), ours, atol=1e-2), "the rule is gone, or changed nothing"


def test_a_sliding_window_stays_under_a_narrowed_mask() -> None:
    model, ids = tiny(GEMMA), text(SHORT, 1)
    with torch.no_grad(), narrowed(lambda _batch, _head, query, key: query >= key):
        ours = one_shot(model, ids)
    with torch.no_grad():
        assert torch.equal(ours, one_shot(model, ids))
    assert model.config.sliding_window == WINDOW


def test_a_right_class_is_equal() -> None:
    found = examine(GEMMA)
    assert (found.outcome, found.reason, found.notes) == ("equal", "", [])
    assert len(found.errors) == 10
    assert all(error > 0 for error in found.errors.values()), "compared with itself?"


def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of one layer that is a hundredth too steep, once attached."""
    own = KVCache.attend

    def steep(cache: KVCache, layer: int, queries: torch.Tensor, *others: object) -> object:
        return own(cache, layer, queries * 1.01 if layer == 1 else queries, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCache, "attend", steep)
    monkeypatch.setattr(checks, "CHECKS", {"chunks of": checks.CHECKS["chunks of"]})
    found = examine(LLAMA)
    assert found.outcome == "wrong"
    assert "of a standard deviation off" in found.reason


def test_a_pass_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(KVCache, "attend", broken)
    found = examine(LLAMA)
    assert (found.outcome, found.reason) == ("raises", "chunks of: ValueError: no such token")


def test_a_config_whose_layers_differ_is_attached() -> None:
    """It raises where it is asked for an attribute that varies by layer, and not an AttributeError."""
    windlass.attach(tiny(Family("causal LM", "dots3_note_text", "Dots3NoteForCausalLM")))


@pytest.mark.parametrize(("seconds", "reason"), [(3, "the process died with code -11"), (99, "not done within 50 s")])
def test_a_process_that_says_nothing_is_a_result(seconds: int, reason: str) -> None:
    silent = SimpleNamespace(poll=lambda: False)
    process = SimpleNamespace(exitcode=-11, join=lambda *_: None, kill=lambda: None)
    line = finish(Child(LLAMA, process, silent, time.monotonic() - seconds), limit=50.0)  # type: ignore[arg-type]
    assert (line["outcome"], line["reason"]) == ("raises", reason)
    assert line["model_type"] == "llama"
