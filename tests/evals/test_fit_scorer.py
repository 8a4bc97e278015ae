"""Scorers that are fitted to texts: ridge regression by hand, the scores of a second reading, the command, its file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.scorers import GROUP, HEAD_DIM, KV_HEADS, drawn, projected
from windlass import KVCache, PolicyError, UsageError
from windlass.cli.app import main
from windlass.evals import calibrate
from windlass.evals.calibrate import LEAST, RIDGE, SINKS, Moments, calibration_texts
from windlass.hf.load import load
from windlass.policies import KVzip, LinearScorer, linear_scorer
from windlass.policies.linear_scorer import Scorer

PROSE = "The boat went up the river, and nobody said a word. Then it rained for an hour. " * 60
WIDTH = (GROUP + 1) * HEAD_DIM


def ridged(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of one head by least squares over rows that are added for the ridge."""
    x, y = x.double(), y.double()
    mean, count = x.mean(0), len(x)
    strength = RIDGE * (x - mean).square().mean() * count
    rows = torch.cat([x - mean, strength.sqrt() * torch.eye(x.shape[1])])
    weights = torch.linalg.lstsq(rows, torch.cat([y - y.mean(), torch.zeros(x.shape[1])])[:, None]).solution[:, 0]
    return weights, y.mean() - weights @ mean


def test_moments_of_pieces_give_the_regression_of_the_whole() -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(3, 40, 7, generator=draw, dtype=torch.float64) + 2
    y = torch.randn(3, 40, generator=draw, dtype=torch.float64) - 5 + x[..., 2]
    pieces = [Moments.of(x[:, start:stop], y[:, start:stop]) for start, stop in ((0, 9), (9, 33), (33, 40))]
    weights, bias, explained = pieces[0].plus(pieces[1]).plus(pieces[2]).solved()
    for head in range(3):
        wanted, constant = ridged(x[head], y[head])
        torch.testing.assert_close(weights[head], wanted)
        assert bias[head].item() == pytest.approx(constant.item())
        left = (y[head] - x[head] @ wanted - constant).square().mean() / y[head].var(correction=0)
        assert explained[head].item() == pytest.approx(1 - left.item())


def test_weights_are_those_of_a_second_reading(attached_model: Models, text: Text) -> None:
    """From the outputs of the model's projections in the first reading, and the attention of the second one."""
    model = attached_model("llama")
    texts, told = [text(70, seed=seed)[0].tolist() for seed in (1, 2)], list[tuple[int, int]]()
    found = calibrate.fitted(model, texts, lambda *numbers: told.append(numbers), "novel.txt", "magic_single")
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert (found.texts, found.tokens, found.text, found.tasks) == (2, 140, "novel.txt", "magic_single")
    assert found.model == "LlamaForCausalLM"
    data = [[(list[Tensor](), list[Tensor]()) for _ in range(KV_HEADS)] for _ in range(2)]
    for ids in texts:
        cache = KVCache(model, policy=KVzip(64), chunk=512)
        with projected(model) as layers:
            windlass.prefill(model, cache, [ids])
        for number, (queries, keys) in enumerate(layers):
            layer = cache.layers[number]
            peaks = {
                (head, at): peak
                for head in range(KV_HEADS)
                for at, peak in zip(
                    layer.positions[0, head].tolist(), layer.table.state["peak"][0, head].tolist(), strict=True
                )
            }
            for head in range(KV_HEADS):
                own = torch.cat(
                    [queries[0][0, :, head * GROUP : (head + 1) * GROUP].flatten(1), keys[0][0, :, head]], 1
                )
                data[number][head][0].append(own[SINKS:])
                logs = [max(peaks[head, at], LEAST) for at in range(SINKS, 70)]
                data[number][head][1].append(torch.tensor(logs).log())
    for number in range(2):
        for head in range(KV_HEADS):
            x, y = (torch.cat(pieces) for pieces in data[number][head])
            weights, bias = ridged(x, y)
            torch.testing.assert_close(
                found.layers[number].weights[head].double(), weights.view(GROUP + 1, HEAD_DIM), atol=2e-4, rtol=2e-3
            )
            assert found.layers[number].bias[head].item() == pytest.approx(bias.item(), abs=2e-3)


def test_a_layer_with_its_own_window_has_no_weights(attached_model: Models, text: Text) -> None:
    found = calibrate.fitted(attached_model("gemma3"), [text(70)[0].tolist()], lambda *_: None)
    assert sorted(found.layers) == [1, 3]
    with pytest.raises(UsageError, match=r"all layers of this model attend to a window of their own"):
        calibrate.fitted(attached_model("mistral"), [text(70)[0].tolist()], lambda *_: None)


def test_what_cannot_be_fitted_is_refused(attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = attached_model("llama"), text(WIDTH + SINKS)[0].tolist()
    with pytest.raises(
        UsageError, match=r"scorer: 48 tokens are too few to fit 48 weights in each head\. Raise --texts"
    ):
        calibrate.fitted(model, [ids], lambda *_: None)
    monkeypatch.setattr(calibrate, "MAX_FEATURES", 40)
    with pytest.raises(UsageError, match="a kv head of layer 0 has 48 numbers a token, in its queries and key, and at"):
        calibrate.fitted(model, [ids], lambda *_: None)


def test_a_file_of_a_scorer_comes_back(tmp_path: Path) -> None:
    ours = drawn((0, 4))
    linear_scorer.write(ours, tmp_path / "scorer")
    again = linear_scorer.read(tmp_path / "scorer")
    assert {**vars(again), "layers": None} == {**vars(ours), "layers": None}
    for layer, own in ours.layers.items():
        assert torch.equal(again.layers[layer].weights, own.weights)
        assert torch.equal(again.layers[layer].bias, own.bias)
        assert torch.equal(again.layers[layer].of((2, 0)).weights, own.weights[[2, 0]])


def changed(data: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose document was changed."""
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    document = json.loads(header["__metadata__"]["windlass"])
    change(document)
    header["__metadata__"]["windlass"] = json.dumps(document)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: b"", "no file of a scorer, or a damaged one"),
        (lambda _: b"{}" * 40, "no file of a scorer, or a damaged one"),
        (lambda data: data[:-5], "is cut short or damaged"),
        (lambda data: changed(data, lambda own: own.update(kind="other")), "no file of a scorer"),
        (lambda data: changed(data, lambda own: own.update(version=2)), "has format version 2, this windlass reads 1"),
        (lambda data: changed(data, lambda own: own.update(texts="7")), "is damaged: its fields"),
        (lambda data: changed(data, lambda own: own.pop("model")), "is damaged: its fields"),
        (lambda data: changed(data, lambda own: own.pop("explained")), "is damaged: its fields"),
        (lambda data: changed(data, lambda own: own["explained"].pop("1")), "is damaged: its fields"),
        (lambda data: changed(data, lambda own: own["explained"].update({"1": [0.5]})), "is damaged: its fields"),
        (lambda data: changed(data, lambda own: own["explained"].update({"1": [float("nan")] * 3})), "is damaged"),
        (lambda data: data[:-4] + struct.pack("<f", float("nan")), "is damaged: its fields"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], says: str) -> None:
    file = tmp_path / "scorer"
    linear_scorer.write(drawn(), file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        UsageError, match=f"^scorer {file}.*{says}.*. Make it with `windlass calibrate MODEL TEXT --sco"
    ):
        linear_scorer.read(file)
    with pytest.raises(PolicyError, match=says):
        LinearScorer(str(file))


def command(folder: Path, *options: str) -> list[str]:
    (folder / "text.txt").write_text(PROSE)
    return ["calibrate", MODEL, str(folder / "text.txt"), "--dtype", "float32", "--device", "cpu", *options]


def test_the_command_fits_what_the_library_does_and_the_file_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, shares = tmp_path / "scorer.safetensors", tmp_path / "shares.json"
    options = ["--scorer", "--texts", "3", "--length", "90", "--seed", "5", "-o", str(output)]
    assert main(command(tmp_path, *options)) == 0
    ran = capsys.readouterr()
    assert f"{output}: fitted to 3 texts, 270 tokens. Explained share of the variance" in ran.out
    assert ran.out.count("  layer ") == 4
    assert "warning: a scorer works on texts similar to its own. Fitted to plain prose, it keeps no facts" in ran.err
    model, tokenizer = load(MODEL, "float32", "cpu")
    texts = calibration_texts(tokenizer, tmp_path / "text.txt", None, 3, 90, 5)
    expected: Scorer = calibrate.fitted(model, texts, lambda *_: None, "text.txt")
    read = linear_scorer.read(output)
    assert {**vars(read), "layers": None} == {**vars(expected), "layers": None}
    assert all(torch.equal(own.weights, expected.layers[layer].weights) for layer, own in read.layers.items())
    spec = f"LinearScorer({output})"
    by_it = ["--shares", "--texts", "2", "--length", "90", "--budget", "3x", "--policy", spec, "-o", str(shares)]
    assert main(command(tmp_path, *by_it)) == 0
    results, asked = tmp_path / "results.jsonl", ["--lengths", "200", "--samples", "1", "--dtype", "float32"]
    cached = ["--policies", f"{spec},smoothed({spec})", "--budgets", "4x", "--shares", str(shares)]
    assert main(["eval", MODEL, "--tasks", "magic_single", *asked, *cached, "-o", str(results)]) == 0
    cases = [json.loads(line) for line in results.read_text().splitlines()][1:]
    name = f"LinearScorer(file='{output}')"
    assert [case["policy"] for case in cases] == [name, f"Smoothed(policy={name}, share=0.1)"] or len(cases) == 2
    said = ["generate", MODEL, "One two three four five six seven.", "-n", "3", "--budget", "16", "--policy", spec]
    assert main([*said, "--dtype", "float32"]) == 0
    capsys.readouterr()
    assert main([*said, "--dtype", "bfloat16"]) == 2
    assert "was fitted to another LlamaForCausalLM. Fit one to this model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--length", "3"], "--length goes with --shares or --scorer. Leave it out"),
        (["--budget", "3x"], "--budget goes with --shares. Leave it out"),
        (["--scorer", "--shares"], "both --shares and --scorer were given"),
        (["--scorer", "--tokens", "3"], "--tokens is for pairs, and --scorer was given. Use --texts and --length"),
        (["--scorer", "--budget", "3x"], "--budget goes with --shares, and --scorer was given"),
        (["--scorer", "--policy", "key_diff"], "--policy goes with --shares, and --scorer was given"),
        (["--scorer", "--groups", "2"], "--groups goes with --shares, and --scorer was given"),
        (["--scorer", "--tasks", "nothing"], "nothing"),
        (["--scorer", "--texts", "1", "--length", "60"], "56 tokens are too few to fit 192 weights in each head"),
        (["--scorer", "--length", "9000"], "Lower --length"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(tmp_path, "-o", str(tmp_path / "out"), *options)) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spec", ["linear_scorer({0})", "LinearScorer(file={0})", "smoothed(LinearScorer({0}))"])
def test_a_file_that_is_missing_or_another_is_refused(
    tmp_path: Path, spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, says in (
        ("none", "No such file or directory. Make it with `windlass calibrate"),
        ("text", "is no file of a scorer"),
    ):
        (tmp_path / "text").write_text("Just a text.")
        asked = spec.format(tmp_path / name)
        assert main(["generate", MODEL, "One.", "-n", "1", "--budget", "12", "--policy", asked]) == 2
        told = capsys.readouterr().err
        assert says in told
        assert "Traceback" not in told
