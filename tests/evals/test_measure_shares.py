"""Shares that are measured on texts: one ranking by hand, the best groups, and the command and its file."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import windlass
from tests.helpers.models import MODEL, Models, Text
from windlass import CacheOptions, KVCache, Shares, UsageError
from windlass.cache import shares as shares_file
from windlass.cli.app import main
from windlass.evals import calibrate
from windlass.evals.calibrate import calibration_texts
from windlass.evals.task import budget_of
from windlass.hf.load import load
from windlass.policies import Leverage
from windlass.policies.calls import scores_of

PROSE = "The boat went up the river, and nobody said a word. Then it rained for an hour. " * 60
TEXTS = [60, 47]  # tokens


@pytest.mark.parametrize("is_by_head", [True, False])
def test_one_ranking_over_all_heads_says_what_each_keeps(attached_model: Models, text: Text, is_by_head: bool) -> None:
    """Lists of (score, layer, head) in place of tensors."""
    model, ids = attached_model("llama"), text(50)[0].tolist()
    policy = windlass.policies.KeyDiff()
    ours = calibrate.kept_shares(model, ids, policy, budget_of("", "20"), is_by_head)
    cache = KVCache(model, policy=policy, chunk=50)
    windlass.prefill(model, cache, [ids])
    here = cache.rows.standstill(cache.device)
    free = 20 - 4 - 4  # sinks, and a quarter of the rest
    assert CacheOptions(20).limits.window == 4
    entries = []
    for layer in cache.layers:
        heads = scores_of(policy, layer.index, layer.slots_at(here))[0].double()
        for head, scores in enumerate(heads.tolist()):
            places = layer.positions[0, head].tolist()
            entries += [(-score, layer.index, head) for at, score in zip(places, scores, strict=True) if 4 <= at < 46]
    if is_by_head:
        kept = sorted(entries)[: free * 6]
        expected = [[sum(own[1:] == (layer, head) for own in kept) / free for head in range(3)] for layer in range(2)]
    else:
        ranked = [[sorted(own[0] for own in entries if own[1:] == (layer, head)) for head in range(3)]
                  for layer in range(2)]  # fmt: skip
        means = [(sum(own) / 3, layer) for layer in range(2) for own in zip(*ranked[layer], strict=True)]
        best = sorted(means)[: free * 2]
        expected = [[sum(own[1] == layer for own in best) / free] * 3 for layer in range(2)]
    assert len({share for own in expected for share in own}) > 1
    for own, wanted in zip(ours, expected, strict=True):
        assert own is not None
        assert own.tolist() == pytest.approx(wanted)


def test_shares_are_means_over_texts_in_multiples_of_the_mean(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    texts = [text(tokens, seed=tokens)[0].tolist() for tokens in TEXTS]
    told: list[tuple[int, int]] = []
    shares = calibrate.measure_shares(
        model, texts, windlass.policies.KeyDiff(), budget_of("", "3x"), 3, lambda *numbers: told.append(numbers)
    )
    each = [calibrate.kept_shares(model, ids, windlass.policies.KeyDiff(), budget_of("", "3x"), True) for ids in texts]
    for layer, own in enumerate(shares.layers):
        assert own == pytest.approx(((each[0][layer] + each[1][layer]) / 2).tolist(), abs=1e-3)
    assert sum(share for own in shares.layers for share in own or ()) == pytest.approx(6, abs=0.01)
    assert (shares.texts, shares.budget, shares.policy) == (2, "3x", "KeyDiff()")
    assert told == [(0, 2), (1, 2), (2, 2)]
    shares.check(windlass.hf.forward.model_info(model))


def test_a_layer_with_its_own_window_takes_no_part(attached_model: Models, text: Text) -> None:
    model = attached_model("gemma3")
    ids = [text(60)[0].tolist()]
    shares = calibrate.measure_shares(model, ids, windlass.policies.KeyDiff(), budget_of("", "3x"), 3, lambda *_: None)
    assert [own is None for own in shares.layers] == [True, False, True, False]
    with pytest.raises(UsageError, match="fits into a budget of 60"):
        calibrate.measure_shares(model, ids, windlass.policies.KeyDiff(), budget_of("", "60"), 3, lambda *_: None)
    with pytest.raises(UsageError, match="nothing to share"):
        calibrate.kept_shares(attached_model("mistral"), ids[0], windlass.policies.KeyDiff(), budget_of("", "3x"), True)


@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_groups_of_heads_differ_least(groups: int) -> None:
    """Against every way of putting seven heads into groups."""

    def spread(labels: tuple[int, ...], shares: list[float]) -> float:
        total = 0.0
        for label in set(labels):
            own = [share for share, each in zip(shares, labels, strict=True) if each == label]
            total += sum((share - sum(own) / len(own)) ** 2 for share in own)
        return total

    draw = torch.Generator().manual_seed(groups)
    shares = (torch.rand(7, generator=draw) * 3).tolist()
    found = calibrate.clustered(shares, groups)
    sizes = sorted(set(found))
    assert len(sizes) <= groups
    assert sum(found) == pytest.approx(sum(shares), abs=0.01)
    labels = tuple(map(sizes.index, found))
    count = min(groups, 7)
    best = 0.0 if count == 7 else min(spread(own, shares) for own in itertools.product(range(count), repeat=7))
    assert spread(labels, shares) == pytest.approx(best, abs=1e-9)


def test_a_file_of_shares_comes_back(tmp_path: Path) -> None:
    shares = Shares([[1.5, 0.25], None, [1.0, 1.0]], "a.json", "Model", "0abc", "KeyDiff()", "4x", 7)
    shares_file.write(shares, tmp_path / "a.json")
    assert shares_file.read(tmp_path / "a.json") == shares
    assert CacheOptions(shares=tmp_path / "a.json").shares == shares
    document = CacheOptions(shares=shares).document()
    assert CacheOptions.from_document(json.loads(json.dumps(document)), windlass.policies.KeyDiff()).shares == shares


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[:-9], "no file of shares, or a damaged one"),
        (lambda _: "[1, 2]", "no file of shares"),
        (lambda _: '{"kind": "other"}', "no file of shares"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has format version 2, this windlass reads 1"),
        (lambda text: text.replace('"texts": 7', '"texts": "7"'), "is damaged: shares: the fields"),
        (lambda text: text.replace('"texts": 7', '"tests": 7'), "is damaged: shares: the fields"),
        (lambda text: text.replace("0.25", "-0.25"), "is damaged: shares: shares of layer 0"),
        (lambda text: text.replace("0.25", "NaN"), "is damaged: shares: shares of layer 0"),
        (lambda text: text.replace("0.25", "[]"), "is damaged: shares: shares of layer 0"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[[str], str], says: str) -> None:
    file = tmp_path / "a.json"
    shares_file.write(Shares([[1.5, 0.25], None], texts=7), file)
    file.write_text(change(file.read_text()))
    with pytest.raises(UsageError, match=says):
        CacheOptions(shares=file)


def test_texts_are_stretches_or_of_tasks(tmp_path: Path) -> None:
    _, tokenizer = load(MODEL, "float32")
    file = tmp_path / "text.txt"
    file.write_text(PROSE)
    whole = list(tokenizer(PROSE)["input_ids"])
    texts = calibration_texts(tokenizer, file, None, 4, 100, 3)
    assert [len(ids) for ids in texts] == [100] * 4
    joined = ",".join(map(str, whole))
    start = len(whole) - len(tokenizer(PROSE, add_special_tokens=False)["input_ids"])
    assert all(",".join(map(str, ids[start:])) in joined for ids in texts)
    assert texts == calibration_texts(tokenizer, file, None, 4, 100, 3)
    assert len(calibration_texts(tokenizer, file, None, 10_000, 100, 3)) == (len(whole) - start) // (100 - start)
    with pytest.raises(UsageError, match="Lower --length"):
        calibration_texts(tokenizer, file, None, 4, 100_000, 3)
    mixed = calibration_texts(tokenizer, file, "magic_single,magic_multikey_2", 4, 200, 3)
    said = [tokenizer.decode(ids) for ids in mixed]
    assert ["river" in each for each in said] == [True, False, True, False]
    assert all("special magic numbers" in each for each in said)
    assert not any("What is" in each for each in said)


def test_the_command_measures_what_the_library_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "text.txt", tmp_path / "shares.json"
    file.write_text(PROSE)
    command = ["calibrate", MODEL, str(file), "--shares", "-o", str(output), "--dtype", "float32", "--device", "cpu"]
    options = [
        "--texts",
        "3",
        "--length",
        "90",
        "--budget",
        "3x",
        "--policy",
        "leverage",
        "--groups",
        "1",
        "--seed",
        "5",
    ]
    assert main([*command, *options]) == 0
    told = capsys.readouterr().out
    assert f"{output}: of 3 texts, by Leverage(sketch=48, ridge=0.01) at 3x" in told
    model, tokenizer = load(MODEL, "float32", "cpu")
    texts = calibration_texts(tokenizer, file, None, 3, 90, 5)
    expected = calibrate.measure_shares(model, texts, Leverage(), budget_of("", "3x"), 1, lambda *_: None)
    read = shares_file.read(output)
    assert (read.layers, read.fingerprint) == (expected.layers, expected.fingerprint)
    results = tmp_path / "results.jsonl"
    asked = [
        "--tasks",
        "magic_single",
        "--policies",
        "key_diff",
        "--budgets",
        "4x",
        "--lengths",
        "200",
        "--samples",
        "1",
    ]
    shared = ["--dtype", "float32", "--shares", f"none,{output}", "-o", str(results)]
    assert main(["eval", MODEL, *asked, *shared]) == 0
    cases = [json.loads(line) for line in results.read_text().splitlines()][1:]
    assert [case.get("shares") for case in cases] == [None, "shares.json"]
    assert "shares.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--texts", "3"], "--texts goes with --shares"),
        (["--shares", "--tokens", "3"], "--tokens is for pairs"),
        (["--shares", "--budget", "no"], "--budget"),
        (["--shares", "--policy", "nobody"], "nobody"),
        (["--shares", "--tasks", "nothing"], "nothing"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(PROSE)
    assert main(["calibrate", MODEL, str(tmp_path / "text.txt"), "-o", str(tmp_path / "out"), *options]) == 2
    assert says in capsys.readouterr().err


def test_a_prompt_cache_goes_on_with_its_shares_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = load(MODEL, "float32", "cpu")
    layers = len(KVCache(model).layers)
    ours, others = tmp_path / "shares.json", tmp_path / "other" / "shares.json"
    others.parent.mkdir()
    shares_file.write(Shares([[1.5, 0.5]] * layers), ours)
    shares_file.write(Shares([[0.5, 1.5]] * layers), others)
    fixed = ["--dtype", "float32", "--device", "cpu", "--prompt-cache", str(tmp_path / "file")]
    assert main(["cache", MODEL, "One two three four.", "--budget", "12", "--shares", str(ours), *fixed]) == 0
    assert main(["generate", MODEL, " and", "-n", "3", "--json", "--shares", str(ours), *fixed]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["shares"] == "shares.json"
    assert main(["generate", MODEL, " and", "-n", "3", "--shares", str(others), *fixed]) == 2
    assert "differs from the shares of" in capsys.readouterr().err
    assert main(["generate", MODEL, " and", "--budget", "12", "--shares", str(tmp_path / "none")]) == 2
    assert "No such file or directory. Make it with `windlass calibrate MODEL TEXT --shares" in capsys.readouterr().err
