"""The command line: the same texts as the library, one clear line for all that is wrong, and clean ends."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import windlass
from tests.helpers import cli
from tests.helpers.cli import LAST_LINE, PROMPT, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from windlass.engine.speculate import Drafter
from windlass.policies import FROM_FILES, NAMES, WRAPPERS, KeyDiff

run, model, tokenizer, in_library = cli.run, cli.model, cli.tokenizer, cli.in_library  # fixtures


def test_generate_writes_what_the_library_does(run: Callable[..., Ran], in_library: Callable[..., windlass.Result]):
    ran = run(*generate(PROMPT))
    assert (ran.code, ran.out) == (0, in_library().text + "\n")
    assert LAST_LINE.fullmatch(ran.err.strip())


@pytest.mark.parametrize("way", ["file", "dash", "pipe", "file dash"])
def test_prompts_come_from_a_file_or_a_pipe(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result], tmp_path: Path, way: str
):
    file = tmp_path / "prompt.txt"
    # A byte-order mark and the line end that editors add are no part of the text.
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode() + b"\r\n")
    options = {"file": ("-f", str(file)), "dash": ("-",), "pipe": (), "file dash": ("--file", "-")}[way]
    ran = run(*generate(*options), stdin=file.read_bytes())
    assert (ran.code, ran.out) == (0, in_library().text + "\n")


def test_json_is_one_object_with_the_result(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result], model: PreTrainedModel
):
    options = ("--max-kv-size", "12", "--sinks", "2", "--window", "3", "--chunk", "5")
    policy = windlass.policies.SnapKV(observed_queries=4, pool=3)
    ran = run(
        *generate(PROMPT, *options, "--policy", repr(policy), "--positions", "clamp(7)", "--store", "int8", "--json")
    )
    found = json.loads(ran.out)
    cache = windlass.KVCache(model, 12, policy, sinks=2, window=3, chunk=5, positions="clamp(7)", store="int8")
    wanted = asdict(in_library(cache=cache))
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        assert found[name] > 0
        wanted[name] = found[name]
    assert found == wanted | {
        "tokens_seen": cache.tokens_seen[0],
        "budget": 12,
        "sinks": 2,
        "window": 3,
        "chunk": 5,
        "policy": repr(policy),
        "positions": "clamp(7)",
        "store": "int8",
        "merge": "none",
        "recall": 0,
        "recall_store": "none",
        "shares": "none",
    }


def test_json_says_by_which_rule_tokens_were_merged(run: Callable[..., Ran], tmp_path: Path):
    options = ("--budget", "12", "--merge", "mean_count(next)", "--json")
    assert json.loads(run(*generate(PROMPT, *options)).out)["merge"] == "mean_count(next)"
    file = str(tmp_path / "merged")
    saved = run("cache", MODEL, PROMPT, *options, "--dtype", "float32", "--prompt-cache", file)
    assert json.loads(saved.out)["merge"] == "mean_count(next)"
    ran = run(*generate("and", "--prompt-cache", file, "--merge", "mean_count"))
    assert_refused(ran, f"--merge mean_count contradicts {file}, made with merge mean_count(next). Leave it out")
    assert run(*generate("and", "--prompt-cache", file, "--merge", "mean_count( next )")).code == 0


def test_evicted_tokens_are_recalled(run: Callable[..., Ran], tmp_path: Path):
    options = ("--budget", "12", "--recall", "16", "--recall-store", "int4", "--json")
    found = json.loads(run(*generate(PROMPT, *options, "--recall-folder", str(tmp_path))).out)
    assert (found["recall"], found["recall_store"]) == (16, "int4")
    whole = run(*generate(PROMPT, "--budget", "12", "--recall", "512", "--recall-store", "plain"))
    assert whole.out == run(*generate(PROMPT)).out
    file = str(tmp_path / "recalled")
    assert run("cache", MODEL, PROMPT, *options, "--dtype", "float32", "--prompt-cache", file).code == 0
    assert run(*generate("and", "--prompt-cache", file, "--recall-folder", str(tmp_path))).code == 0
    shown = run("cache", file, "info").out
    assert "recall        16\n" in shown
    assert "recall_store  int4\n" in shown
    assert run(*generate("and", "--prompt-cache", file, "--recall-store", "int4")).code == 0
    told = f"--recall-store int8 contradicts {file}, made with recall-store int4. Leave it out"
    assert_refused(run(*generate("and", "--prompt-cache", file, "--recall-store", "int8")), told)
    said = f"--recall 8 contradicts {file}, made with recall 16. Leave it out"
    assert_refused(run(*generate("and", "--prompt-cache", file, "--recall", "8")), said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--recall", "16"),
            "recall (16 tokens) needs a budget: without one nothing is evicted that could be recalled",
        ),
        (("--budget", "12", "--recall-store", "int8"), "recall is 0. Give recall, or leave it out"),
        (("--budget", "12", "--recall", "9"), "recall (9 tokens) must be a multiple of 8"),
        (("--budget", "12", "--recall", "8", "--recall-store", "int5"), "is not a store"),
        (("--budget", "12", "--recall", "8", "--recall-folder", "/nowhere/at/all"), "is no folder. Make it first"),
    ],
)
def test_what_cannot_be_recalled(run: Callable[..., Ran], options: tuple[str, ...], said: str):
    ran = run(*generate(PROMPT, *options))
    assert ran.code == 2
    assert said in ran.err.replace("\n", " ")


def test_numbers_are_checked_against_the_file_not_the_defaults(run: Callable[..., Ran], tmp_path: Path):
    """A budget of 5 has no room for the default sinks, but for those of the file."""
    file = str(tmp_path / "small")
    small = ("--budget", "5", "--sinks", "1", "--window", "2")
    assert run("cache", MODEL, PROMPT, *small, "--dtype", "float32", "--prompt-cache", file).code == 0
    assert run(*generate("and", "--prompt-cache", file, "--budget", "5")).code == 0


def test_sampling_options_reach_the_sampler(run: Callable[..., Ran], in_library: Callable[..., windlass.Result]):
    sampling = windlass.Sampling(0.9, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.3, seed=7)
    options = ["--temperature", "0.9", "--top-k", "40", "--top-p", "0.8", "--min-p", "0.02"]
    options += ["--repetition-penalty", "1.3", "--seed"]
    assert run(*generate(PROMPT, *options, "7")).out == in_library(sampling=sampling).text + "\n"
    assert run(*generate(PROMPT, *options, "8")).out != in_library(sampling=sampling).text + "\n"


def test_drafts_change_no_text(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    said, drafted = "The sea was calm. " * 6, list[int]()
    draft = Drafter.draft

    def counted(own: Drafter, most: int) -> list[int]:
        drafts = draft(own, most)
        drafted.append(len(drafts))
        return drafts

    monkeypatch.setattr(Drafter, "draft", counted)
    for command, prompt, drafts in (
        ("generate", (said,), "lookup"),
        ("chat", (), "lookup"),
        ("generate", (said,), MODEL),
    ):
        plain = run(command, MODEL, *prompt, "-n", "30", stdin=said.encode())
        assert not drafted
        found = run(command, MODEL, *prompt, "-n", "30", "--speculate", drafts, stdin=said.encode())
        assert (found.code, found.out) == (0, plain.out)
        assert sum(drafted) > (3 if drafts == "lookup" else 0)  # one of its own size hardly pays
        drafted.clear()
    refused = run("generate", MODEL, said, "--speculate", "lookpu")
    assert_refused(
        refused, "--speculate lookpu is neither 'lookup' nor 'off', and no folder, file or hub name (owner/name)"
    )


def test_a_prompt_cache_goes_on_as_if_never_stopped(run: Callable[..., Ran], tmp_path: Path):
    file = tmp_path / "half.safetensors"
    # The pieces part at the end of a token.
    limits = ("--budget", "8", "--chunk", "1", "--policy", "key_diff")
    made = run("cache", MODEL, PROMPT[:51], *limits, "--dtype", "float32", "--prompt-cache", str(file), "--json")
    assert made.code == 0
    numbers = json.loads(made.out)
    assert (numbers["path"], numbers["file_bytes"]) == (str(file), file.stat().st_size)
    assert numbers["tokens_seen"] == numbers["prompt_tokens"] > 8, "nothing was evicted: the test is too easy"
    before = file.read_bytes()
    whole = run(*generate(PROMPT, *limits))
    rest = run(*generate(PROMPT[51:], "--prompt-cache", str(file), "--budget", "8"))
    assert (rest.code, rest.out) == (0, whole.out)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "20"), "--budget 20 contradicts {file}, made with budget 16"),
        (("--sinks", "1"), "--sinks 1 contradicts {file}, made with sinks 4"),
        (("--window", "5"), "--window 5 contradicts {file}, made with window 3"),
        (("--chunk", "9"), "--chunk 9 contradicts {file}, made with chunk 512"),
        (("--policy", "h2o"), "made with the policy TOVA(), not with H2O()"),
        (("--dtype", "bfloat16"), "made in float32, this model is in bfloat16"),
    ],
)
def test_what_contradicts_a_prompt_cache_is_refused(
    run: Callable[..., Ran], tmp_path: Path, options: tuple[str, ...], says: str
):
    file = tmp_path / "some.safetensors"
    made = ("--budget", "16", "--policy", "tova", "--prompt-cache", str(file), "--dtype", "float32")
    assert run("cache", MODEL, PROMPT, *made).code == 0
    ran = run("generate", MODEL, "and", "--prompt-cache", str(file), "--dtype", "float32", *options)
    assert_refused(ran, says.format(file=file))


def test_policies_lists_every_policy(run: Callable[..., Ran]):
    ran = run("policies")
    entries = json.loads(run("policies", "--json").out)["policies"]
    all_policies = [(name, repr(kind()), kind) for name, kind in NAMES.items()]
    all_policies += [(name, repr(kind(KeyDiff())), kind) for name, kind in WRAPPERS.items()]
    all_policies += [(name, f"{kind.__name__}(FILE)", kind) for name, kind in FROM_FILES.items()]
    assert [entry["name"] for entry in entries] == [name for name, *_ in all_policies]
    for entry, (name, label, policy) in zip(entries, all_policies, strict=True):
        assert entry["made"] == label
        first, source = f"{name:20}{label}\n{'':20}{entry['keeps']}\n", f"{'':20}Source: {entry['source']}\n"
        assert first + source in ran.out
        doc = " ".join((policy.__doc__ or "").split())
        assert doc.startswith(entry["keeps"])
        assert f"Source: {entry['source']} Differs:" in doc
        assert entry["source"]
