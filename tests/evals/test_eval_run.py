"""Runs on the shipped model: findable answers are found, others are not, and an interrupted run continues."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers import cli
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.models import MODEL
from windlass.cache.shares import Shares
from windlass.cache.shares import write as write_shares
from windlass.core.errors import UsageError
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals import Question, Sample
from windlass.evals.grid import Cell, ListOptions, SampleSpec, SizedSample, fit, grid_of
from windlass.evals.results import Case
from windlass.evals.run import STRIDE, Runner, answered, cache_of, predicted
from windlass.evals.tasks import NAMES
from windlass.evals.tasks.hidden import PassKey
from windlass.evals.tasks.niah import ABOVE, Multiturn, Needles
from windlass.evals.texts import NOVEL, novel

run, model, tokenizer = cli.run, cli.model, cli.tokenizer  # fixtures
QUICK = ("--dtype", "float32", "--lengths", "200")
# Bytes of a slot in all four layers: keys and values of two heads of 64 in float32.
SLOT = 4 * 2 * 2 * 64 * 4


@dataclass(frozen=True)
class FourQuestions(PassKey):
    turns: int = 4


def lines(path: Path) -> list[dict[str, Any]]:
    header, *cases = (json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
    assert header["kind"] == "header"
    return cases


def setting(**lists: str) -> Any:
    return grid_of(ListOptions("passkey", "500", lists)).settings[0]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_a_full_cache_finds_the_key_and_a_window_does_not(run: Callable[..., Ran], output: Path):
    budgets = ("--budgets", "all,32", "--policies", "recent", "--samples", "4")
    ran = run("eval", MODEL, *QUICK, *budgets, "-o", str(output), "--tasks", "passkey,passkey_novel")
    assert (ran.code, ran.err) == (0, "")
    header = json.loads(output.read_bytes().split(b"\n")[0])
    assert (header["model"], header["parameters"], header["trained_length"]) == ("finder-3m", 3_475_712, 1024)
    assert (header["version"], header["seed"], header["dtype"]) == (2, 0, "float32")
    found = lines(output)
    assert len(found) == 2 * 2 * 4
    full = [line for line in found if line["budget"] is None]
    assert [line["score"] for line in full] == [1.0] * 8
    assert all(line["output"].strip().startswith(line["expected"][0]) for line in full)
    far = [line for line in found if line["budget"] == 32 and line["depth"] < 0.6]
    assert len(far) >= 3
    assert [line["score"] for line in far] == [0.0] * len(far)
    for line in found:
        assert line["bytes_full"] == line["context_tokens"] * SLOT
        assert line["slots_held"] == (line["context_tokens"] if line["budget"] is None else 32)
        assert line["turn"] is None
    # 16 slots stay free. One row of positions is shared by a layer's heads. The record of the last step counts.
    slots = 48 * (SLOT + 4 * 4)
    assert all(slots < line["bytes_held"] < 1.01 * slots for line in found if line["budget"])
    # Both saw the same texts.
    texts = {(line["task"], line["sample"], line["budget"]): line["expected"] for line in found}
    assert all(texts[task, sample, None] == texts[task, sample, 32] for task, sample, _ in texts)
    assert re.search(r"passkey +recent +all +4 +[\d.]+ KiB +100.0 %", ran.out)


def test_a_stopped_run_goes_on(run: Callable[..., Ran], output: Path, monkeypatch: pytest.MonkeyPatch):
    given = ("eval", MODEL, *QUICK, "--budgets", "2x", "--policies", "recent", "--samples", "1", "-o", str(output))
    both = (*given, "--tasks", "passkey,magic_multiturn", "--positions", "compact", "--lengths", "260")
    assert run(*both).code == 0
    whole = output.read_bytes()
    assert len(lines(output)) == 1 + 5
    ask = Runner.measured
    # Nothing is run again.
    monkeypatch.setattr(Runner, "measured", Mock(side_effect=AssertionError))
    assert run(*both).code == 0
    assert output.read_bytes() == whole
    monkeypatch.setattr(Runner, "measured", ask)
    # Killed in the middle of the third question on one text.
    rows = whole.split(b"\n")
    place = next(place for place, row in enumerate(rows) if b'"turn": 2' in row)
    output.write_bytes(b"\n".join(rows[:place]) + b"\n" + rows[place][:100])
    ran = run(*both)
    assert ran.code == 0
    assert "the last line of" in ran.err
    timeless = [
        [{**json.loads(row), "seconds": 0} for row in data.split(b"\n")[1:-1]] for data in (whole, output.read_bytes())
    ]
    assert timeless[0] == timeless[1]


@pytest.mark.parametrize("mode", ["--blind", pytest.param("--aware", marks=pytest.mark.slow)])
def test_texts_side_by_side_are_answered_as_alone(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
):
    rows: list[int] = []
    read = generate.prefill

    def counted(model: PreTrainedModel, cache: windlass.KVCache, prompts: Any, progress: Any = None) -> Any:
        rows.append(len(prompts))
        return read(model, cache, prompts, progress)

    monkeypatch.setattr(generate, "prefill", counted)
    found = {}
    for batch in ("1", "3"):
        rows.clear()
        output = tmp_path / f"{batch}.jsonl"
        tasks = ("--tasks", "passkey_novel,magic_multiturn", "--budgets", "64,2x", mode, "-o", str(output))
        given = ("eval", MODEL, *QUICK, *tasks, "--policies", "key_diff", "--samples", "3", "--lengths", "220")
        assert run(*given, "--batch", batch).code == 0
        sized = ("bytes_held", "seconds")
        found[batch] = {
            (line["task"], line["asked_budget"], line["sample"], line["turn"]): {
                name: value for name, value in line.items() if name not in sized
            }
            for line in lines(output)
        }
        assert max(rows) == int(batch)
    assert len(found["1"]) == 2 * 3 * (1 + 5)
    assert found["3"] == found["1"]
    assert 0 < sum(line["score"] for line in found["1"].values()) < len(found["1"])
    assert len({line["context_tokens"] for line in found["1"].values()}) >= 2


def test_what_layers_share_is_not_shared_by_texts(run: Callable[..., Ran], output: Path):
    """`composite` gives a layer one budget for all rows of a cache, so each of its texts has a cache of its own."""
    given = ("eval", MODEL, *QUICK, "--policies", "composite(key_diff)", "--budgets", "48", "--samples", "3")
    assert run(*given, "-o", str(output), "--batch", "3").code == 0
    alone = output.with_name("alone.jsonl")
    assert run(*given, "-o", str(alone)).code == 0
    timeless = [[{**line, "seconds": 0} for line in lines(path)] for path in (output, alone)]
    assert timeless[0] == timeless[1]


def test_a_batch_is_gone_on_with(run: Callable[..., Ran], output: Path, monkeypatch: pytest.MonkeyPatch):
    given = ("eval", MODEL, *QUICK, "--budgets", "24", "--policies", "recent", "--samples", "5", "-o", str(output))
    ask, batches = Runner.measured, []

    def interrupted(runner: Runner, batch: list[Cell]) -> list[Case]:
        batches.append([cell.spec.number for cell in batch])
        if len(batches) == 2:
            raise KeyboardInterrupt
        return ask(runner, batch)

    monkeypatch.setattr(Runner, "measured", interrupted)
    ran = run(*given, "--batch", "2")
    assert ran.err == "interrupted, 2 of 5 cases are done. The same command continues from here\n"
    assert run(*given, "--batch", "4").code == 0
    assert batches == [[0, 1], [2, 3], [2, 3, 4]]
    assert [line["sample"] for line in lines(output)] == [0, 1, 2, 3, 4]


def test_an_interrupt_leaves_whole_lines(run: Callable[..., Ran], output: Path, monkeypatch: pytest.MonkeyPatch):
    ask, count = Runner.measured, []

    def interrupted(runner: Runner, batch: list[Cell]) -> list[Case]:
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return ask(runner, batch)

    monkeypatch.setattr(Runner, "measured", interrupted)
    given = ("eval", MODEL, *QUICK, "--budgets", "24", "--samples", "2", "-o", str(output))
    ran = run(*given)
    assert ran.code == 130
    assert ran.err == "interrupted, 2 of 4 cases are done. The same command continues from here\n"
    assert len(lines(output)) == 2
    assert ran.out.count("passkey") == 2
    assert run(*given).code == 0
    assert len(lines(output)) == 4


def test_the_question_is_read_with_the_text_or_after_it(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    task = Multiturn(Needles(keys=5, haystack=NOVEL, wording=ABOVE, answer_tokens=1))
    spec = SampleSpec(task, "any", 300, 0, 0)
    fitted = fit(spec, tokenizer)
    text = encode(tokenizer, fitted.sample.context, is_start=True)
    asked = [encode(tokenizer, turn.question, is_start=False) for turn in fitted.sample.turns]
    begun = [encode(tokenizer, turn.prefix, is_start=False) for turn in fitted.sample.turns]
    read = Mock(wraps=generate.prefill)
    monkeypatch.setattr(generate, "prefill", read)
    for is_aware in (False, True):
        read.reset_mock()
        cache = cache_of(model, setting(budgets="64"), 64, True)
        answered(model, tokenizer, cache, [Cell(spec, setting(budgets="64"), is_aware)], [fitted])
        fed = [call.args[2][0] for call in read.call_args_list]
        prompts = [question + prefix for question, prefix in zip(asked, begun, strict=True)]
        wanted = [text + asked[0], begun[0], *prompts[1:]] if is_aware else [text, *prompts]
        assert [list(each) for each in fed] == wanted


def test_each_question_finds_the_cache_as_the_text_left_it(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    (key,) = PassKey(NOVEL).compose(random.Random(0), 300, 90).turns
    context = PassKey(NOVEL).compose(random.Random(0), 300, 90).context
    context += " One of the special magic numbers for quiet-river is: 73519."
    asked = " What is the special magic number for quiet-river mentioned above?"
    magic = Question(asked, " The special magic number for quiet-river is:", ("73519",))
    sample = Sample(context, (key, magic, replace(key, question=" He looked at the river."), key))
    settings = setting(policies="key_diff", budgets="90", positions="compact")
    cache = cache_of(model, settings, 90, True)
    spec = SampleSpec(FourQuestions(answer_tokens=6), "any", 300, 0, 0)
    fitted = [SizedSample(sample, 90, 300, 310)]
    [cases] = answered(model, tokenizer, cache, [Cell(spec, settings)], fitted)
    assert len({case.output for case in cases}) >= 2
    assert cases[0].output == cases[3].output
    for case, turn in zip(cases, sample.turns, strict=True):
        alone = windlass.KVCache(model, 90, windlass.policies.KeyDiff(), chunk=90, positions="compact")
        generate.prefill(model, alone, [encode(tokenizer, context, is_start=True)])
        result = generate.generate(model, tokenizer, [turn.question + turn.prefix], alone, 6)[0]
        assert case.output == result.text
        assert case.expected == turn.expected
    assert [case.turn for case in cases] == [0, 1, 2, 3]


def test_a_task_with_another_number_of_questions_is_told(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    task, settings = FourQuestions(), setting(budgets="90")
    cell = Cell(SampleSpec(task, "mine", 300, 0, 0), settings)
    with pytest.raises(UsageError, match="task mine: ValueError: "):
        answered(model, tokenizer, cache_of(model, settings, 90, True), [cell], [fit(cell.spec, tokenizer)])


def test_a_text_is_predicted_as_transformers_does(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase):
    fitted = fit(SampleSpec(NAMES["perplexity"], "perplexity", 150, 0, 0), tokenizer)
    ids = encode(tokenizer, fitted.sample.context, is_start=True)
    assert len(ids) == fitted.context_tokens <= 150
    plain = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = plain(torch.tensor([ids])).logits[0, :-1].double()
    wanted = logits.log_softmax(-1)
    targets = torch.tensor(ids[1:])
    cache = cache_of(model, setting(budgets="all"), None, False)
    full = predicted(model, cache, ids, windlass.KVCache(model))
    nll = torch.nn.functional.cross_entropy(logits, targets)
    assert full.nll == pytest.approx(float(nll), rel=1e-5)
    assert full.kl == pytest.approx(0.0, abs=1e-9)
    assert cache.layers[0].table.occupancy_bound == len(ids) - 1
    # A cache of 40 slots, fed by hand, which has seen less than the full one.
    cache = cache_of(model, setting(budgets="40"), 40, False)
    small = predicted(model, cache, ids, windlass.KVCache(model))
    alone = windlass.KVCache(model, 40, windlass.policies.Recent())
    with torch.no_grad():
        pieces = torch.tensor(ids[:-1]).split(STRIDE)
        ours = torch.cat([model(piece[None], past_key_values=alone).logits[0] for piece in pieces]).double()
    ours = ours.log_softmax(-1)
    assert small.nll == pytest.approx(-float(ours[torch.arange(len(targets)), targets].mean()), rel=1e-5)
    kl = float((wanted.exp() * (wanted - ours)).sum(-1).mean())
    assert kl > 0.01
    assert small.kl == pytest.approx(kl, rel=1e-4)
    assert cache.layers[0].table.occupancy_bound == 40


def test_a_full_cache_is_read_beside_while_the_model_knows_such_lengths(run: Callable[..., Ran], output: Path):
    given = ("eval", MODEL, "--tasks", "perplexity", "--budgets", "64", "--policies", "recent", "--samples", "1")
    assert run(*given, "--dtype", "float32", "--lengths", "1000,1050", "-o", str(output)).code == 0
    short, long = lines(output)
    assert short["measures"]["kl"] > 0
    assert long["measures"]["kl"] is None
    assert long["context_tokens"] > 1024
    assert short["score"] is long["score"] is short["depth"] is None
    assert (short["expected"], short["output"]) == ([], "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--tasks", "pasky"), "task 'pasky' is unknown. Did you mean passkey?"),
        (("--policies", "keydif"), "Did you mean key_diff?"),
        (("--store", "int3"), "store='int3' is not a store"),
        (("--positions", "compcat"), "positions='compcat' is not a position mode"),
        (("--budgets", "5"), "budget (5 tokens) must be at least sinks (4) + window (1) + 1, which is 6"),
        (("--budgets", "99x"), "--budgets 99x of the 1"),
        (("--lengths", "20"), "length 20 is too short for task passkey, which takes "),
        # The first nine texts would do.
        (("--tasks", "cwe", "--lengths", "1000", "--samples", "20"), "too short for task cwe, which takes 1009 tokens"),
        (("--tasks", "passkey_novel", "--lengths", "9999999"), "length 9999999 is more than task passkey_novel can"),
        (("--tasks", "perplexity", "--aware"), "task perplexity asks nothing, so it cannot be run --aware"),
        (("--samples", "0"), "'--samples'"),
    ],
)
def test_what_is_wrong_shows_before_anything_runs(
    run: Callable[..., Ran], output: Path, options: tuple[str, ...], says: str
):
    assert_refused(run("eval", MODEL, *QUICK, "-o", str(output), *options), says)
    assert not output.exists()


def test_another_seed_is_refused(run: Callable[..., Ran], output: Path):
    given = ("eval", MODEL, *QUICK, "--budgets", "24", "--policies", "recent", "--samples", "1", "-o", str(output))
    assert run(*given).code == 0
    before = output.read_bytes()
    assert_refused(run(*given, "--seed", "1"), f"-o {output} was made with seed 0, and this run has 1. Give another")
    assert output.read_bytes() == before
    assert_refused(run("eval", MODEL), "Missing option")


POLICY = """
from dataclasses import dataclass
from windlass.policies import KeyDiff, Recent

@dataclass(frozen=True, slots=True)
class Mine({}):
    '''As the class above. Source: none. Differs: nothing.'''
"""


@pytest.mark.parametrize("name", ["task", "task at a depth", "policy", "shares"])
def test_a_file_that_changed_is_not_gone_on_with(
    name: str, run: Callable[..., Ran], output: Path, tmp_path: Path
) -> None:
    """A text, code or shares under the same name, under which the results of both would be mixed."""
    text, code, shares = (tmp_path / each for each in ("text.txt", "mine.py", "shares.json"))

    def share(first: float) -> None:
        layers = [[first, 2 - first]] * 4
        write_shares(Shares(layers, model="LlamaForCausalLM"), shares)

    novels = novel()
    text.write_text(novels[:20_000])
    code.write_text(POLICY.format("Recent"))
    share(1.5)
    given = {
        "task": ("--tasks", f"perplexity({text})", "--policies", "recent"),
        "task at a depth": ("--tasks", f"passkey_novel({text})", "--depth", "0.5", "--policies", "recent"),
        "policy": ("--tasks", "passkey", "--policies", f"{code}:Mine"),
        "shares": ("--tasks", "passkey", "--policies", "recent", "--shares", str(shares)),
    }[name]
    options = ("eval", MODEL, *QUICK, "--budgets", "32", "-o", str(output), *given)
    assert run(*options, "--samples", "1").code == 0
    assert run(*options, "--samples", "2").code == 0
    before, field = output.read_bytes(), name.partition(" ")[0]
    assert [[*line["files"]] for line in lines(output)] == [[field]] * 2
    text.write_text(novels[20_000:40_000])
    code.write_text(POLICY.format("KeyDiff"))
    share(0.5)
    assert_refused(run(*options, "--samples", "3"), "whose file has changed since. Give another file, or put the old")
    assert output.read_bytes() == before
