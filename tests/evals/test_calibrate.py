"""The cost of merging a pair, against a pair that is merged by hand. The table in a file. The command."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.models import MODEL, Models, Text
from windlass import KVCache, UsageError
from windlass.cli.app import main
from windlass.evals import calibrate
from windlass.hf.load import load
from windlass.policies import pairs
from windlass.policies.pairs import PairTable

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 40
TABLE = PairTable("LlamaForCausalLM", "0abc", "mean_count(next)", 12, 3, [(5, 2**31 - 1, 2, 0.0), (7, 7, 1, 0.25)])


def by_hand(model: PreTrainedModel, ids: Tensor, first: int) -> float:
    """The cost in a cache that merges nothing: both of the pair become two equal tokens at the place of the second."""
    end = calibrate.CONTEXT + 1
    following = []
    for is_merged in (False, True):
        cache = KVCache(model)
        model(ids[:, :end], past_key_values=cache)
        for layer in cache.layers if is_merged else []:
            slots = [int((layer.positions[0, 0] == at).nonzero()) for at in (first, first + 1)]
            for states in (layer.store.keys(), layer.store.values()):
                states[:, :, slots] = states[:, :, slots].mean(2, keepdim=True)
            layer.positions[:, :, slots[0]] = first + 1
        following.append(model(ids[:, end:], past_key_values=cache).logits[0].double())
    cost = 0.0
    for full, merged in zip(*(logits.softmax(-1) for logits in following), strict=True):
        cost += sum(float(p) * float((p / q).log()) for p, q in zip(full, merged, strict=True))
    return cost / len(following[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
@torch.no_grad()
def test_the_cost_of_a_pair_is_that_of_merging_it_by_hand(
    attached_model: Models, text: Text, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CONTEXT", 40)
    monkeypatch.setattr(calibrate, "ROWS", 3)
    model, ids = attached_model(family), text(48)
    costs = calibrate.pair_costs(model, ids[0].tolist(), range(31, 38))
    expected = [by_hand(model, ids, first) for first in range(31, 38)]
    assert min(expected) > 1e-5
    assert costs == pytest.approx(expected, rel=2e-3)


def test_a_table_is_the_mean_over_all_that_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(MODEL, "float32")
    met: list[tuple[tuple[int, int], float]] = []

    def costs(_: PreTrainedModel, stretch: list[int], firsts: range) -> list[float]:
        found = [((stretch[at], stretch[at + 1]), stretch[at] + len(met) / 1000) for at in firsts]
        met.extend(found)
        return [cost for _, cost in found]

    monkeypatch.setattr(calibrate, "pair_costs", costs)
    steps: list[tuple[int, int]] = []
    table = calibrate.measure_pair_costs(model, tokenizer, TEXT, 300, 5, lambda *step: steps.append(step))
    assert len(met) == table.tokens == 123 * 3
    assert steps[0][0] == 0
    assert steps[-1] == (369, 369)
    truth = {pair: [cost for other, cost in met if other == pair] for pair, _ in met}
    assert {(a, b): (n, cost) for a, b, n, cost in table.pairs} == {
        pair: (len(found), pytest.approx(sum(found) / len(found))) for pair, found in truth.items()
    }
    assert [pair[3] for pair in table.pairs] == sorted(pair[3] for pair in table.pairs)
    assert (table.model, table.merge, table.seed) == ("LlamaForCausalLM", "mean_count(next)", 5)
    one = [pair for pair, _ in met]
    met.clear()
    calibrate.measure_pair_costs(model, tokenizer, TEXT, 300, 5, lambda *_: None)
    assert [pair for pair, _ in met] == one
    with pytest.raises(UsageError, match=r"the text has 5 tokens\. Give one of at least 160"):
        calibrate.measure_pair_costs(model, tokenizer, "A short text.", 300, 5, lambda *_: None)


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text("an older file")
    pairs.write(TABLE, path)
    assert pairs.read(path) == TABLE
    assert json.loads(path.read_text())["version"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["pairs.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-9], "is cut short or damaged. Make it again with `windlass calibrate`"),
        (lambda text: text[: len(text) // 2], "is cut short or damaged"),
        (lambda _: "", "is not a file of `windlass calibrate`"),
        (lambda _: "[1, 2]", "is not a file of `windlass calibrate`"),
        (lambda _: '{"kind": "other"}', "is not a file of `windlass calibrate`"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has format version 2, this windlass reads 1"),
        (lambda text: text.replace('"tokens"', '"token"'), "is damaged: no good tokens in it"),
        (lambda text: text.replace("[7, 7,", "[7, -7,"), "is damaged: no good pairs in it"),
        (lambda text: text.replace("0.25", "NaN"), "is damaged: no good pairs in it"),
        (lambda text: text.replace("7, 7,", "7,"), "is damaged: no good pairs in it"),
    ],
)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, change: Callable[[str], str], words: str) -> None:
    path = tmp_path / "pairs.json"
    pairs.write(TABLE, path)
    path.write_text(change(path.read_text()))
    with pytest.raises(UsageError, match=words) as caught:
        pairs.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a file of `windlass calibrate`"):
        pairs.read(path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        pairs.read(tmp_path / "nothing.json")


def test_what_cannot_be_written_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pairs.json"
    pairs.write(TABLE, path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UsageError, match=r"pairs\.json cannot be written: No space left on device. Give another name"):
        pairs.write(replace(TABLE, tokens=9), path)
    assert pairs.read(path) == TABLE
    assert [each.name for each in tmp_path.iterdir()] == ["pairs.json"]


def test_the_command_writes_a_table_that_the_policy_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, table = tmp_path / "text.txt", tmp_path / "pairs.json"
    text.write_text(TEXT[:640])
    command = ["calibrate", MODEL, str(text), "-o", str(table), "--tokens", "200", "--seed", "3", "--dtype", "float32"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert "pairs of 123 tokens. Of those met more than once the cheapest" in shown.out
    assert "nats" in shown.out
    assert "note: the text has room for 123 tokens only" in shown.err
    assert pairs.read(table).seed == 3
    ask = ["generate", MODEL, TEXT[:640], "--budget", "90", "--merge", "mean_count(next)", "--max-tokens", "2"]
    assert main([*ask, "--policy", f"Pairs({table})", "--dtype", "float32"]) == 0
    capsys.readouterr()
    assert main([*ask, "--policy", f"Pairs({table})", "--dtype", "bfloat16"]) == 2
    assert "was measured on another LlamaForCausalLM. Make one for this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "output", "words"),
    [
        ("long", "missing/pairs.json", "-o {}/missing/pairs.json: the folder {}/missing does not exist"),
        ("long", ".", "-o {} is a folder. Give the name of a file"),
        ("none", "pairs.json", "text {}/none cannot be read: No such file or directory"),
        ("empty", "pairs.json", "text {}/empty is empty"),
        ("short", "pairs.json", "the text has 5 tokens. Give one of at least 160"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, output: str, words: str
) -> None:
    (tmp_path / "long").write_text(TEXT)
    (tmp_path / "short").write_text("A short text.")
    (tmp_path / "empty").write_text("")
    assert main(["calibrate", MODEL, str(tmp_path / text), "-o", f"{tmp_path}/{output}"]) == 2
    shown = capsys.readouterr()
    assert words.replace("{}", str(tmp_path)) in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "pairs.json").exists()
