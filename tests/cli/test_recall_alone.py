"""`--recall` without a number, and the note on the cost of eviction."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from pydantic import ValidationError

import windlass
from tests.helpers import cli
from tests.helpers.cli import PROMPT, Ran, assert_refused, generate
from tests.helpers.models import MODEL
from windlass.cache.options import CacheOptions
from windlass.cli.session import EVICTION_COST, Choices, eviction_cost, kinds_of
from windlass.core.errors import UsageError
from windlass.serve.schema import CacheFields

run = cli.run  # a fixture

BUDGET = ("--budget", "40")
LONG = PROMPT * 8


def test_recall_alone_is_half_of_the_budget_in_whole_pages() -> None:
    assert [CacheOptions(budget=each, recall="half").recall for each in (16, 40, 47, 48, 512)] == [8, 16, 16, 24, 256]
    with pytest.raises(UsageError, match=r"half of the budget, and there is none\. Give a budget"):
        CacheOptions(recall="half")
    with pytest.raises(
        UsageError, match=r"\(15 tokens\) is less than a page \(8 tokens\). Raise budget to at least 16"
    ):
        CacheOptions(budget=15, recall="half")
    with pytest.raises(UsageError, match="recall must be a whole number from 0, or 'half', got 'most'"):
        CacheOptions(budget=40, recall="most")


@pytest.mark.parametrize(
    ("arguments", "recall"),
    [
        ((*BUDGET, "--recall", PROMPT), 16),
        ((PROMPT, *BUDGET, "--recall"), 16),
        (("--recall", *BUDGET, PROMPT), 16),
        ((*BUDGET, "--recall", "--", PROMPT), 16),
        ((*BUDGET, "--recall", "half", PROMPT), 16),
        ((*BUDGET, "--recall", "8", PROMPT), 8),
    ],
)
def test_the_command_line_takes_recall_alone(run: Callable[..., Ran], arguments: tuple[str, ...], recall: int) -> None:
    *head, prompt = arguments
    ran = run("generate", MODEL, "--json", "-n", "1", *head, prompt)
    assert (ran.code, json.loads(ran.out)["recall"]) == (0, recall)


def test_what_recall_alone_cannot_be(run: Callable[..., Ran]) -> None:
    assert_refused(run(*generate(PROMPT, "--recall")), "recall='half' is half of the budget, and there is none")
    assert_refused(run(*generate(PROMPT, *BUDGET, "--recall", "-8")), "recall must be from 0")
    assert_refused(run(*generate(PROMPT, *BUDGET, "--recall", "8x")), "neither a whole number nor 'half'")


def test_a_prompt_cache_made_so_is_taken_up_so(run: Callable[..., Ran], tmp_path: Path) -> None:
    file = str(tmp_path / "recalled")
    assert run("cache", MODEL, PROMPT, *BUDGET, "--recall", "--dtype", "float32", "--prompt-cache", file).code == 0
    assert run(*generate("and", "--prompt-cache", file, "--recall")).code == 0
    other = str(tmp_path / "other")
    assert run("cache", MODEL, PROMPT, *BUDGET, "--dtype", "float32", "--prompt-cache", other).code == 0
    said = f"--recall 16 contradicts {other}, made with recall 0. Leave it out"
    assert_refused(run(*generate("and", "--prompt-cache", other, "--recall")), said)


def test_rows_the_environment_and_requests_take_the_word(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    [(rows, options)] = kinds_of(["rows=2,budget=64,recall=half"], {"budget": 40})
    assert (rows, options.budget, options.recall) == (2, 64, 32)
    [(_, inherited)] = kinds_of(["rows=2,budget=64"], {"budget": 40, "recall": "half"})
    assert inherited.recall == 32
    assert CacheFields.model_validate({"recall": "half"}).cache_options == {"recall": "half"}
    assert CacheFields.model_validate({"recall": 16}).cache_options == {"recall": 16}
    for wrong in ("most", -8, True, 1 << 17):
        with pytest.raises(ValidationError):
            CacheFields.model_validate({"recall": wrong})
    monkeypatch.setenv("WINDLASS_RECALL", "half")
    assert json.loads(run(*generate(PROMPT, *BUDGET, "--json")).out)["recall"] == 16


@pytest.mark.parametrize("options", [(), ("--policy", "recent")])
def test_a_budget_that_evicts_most_tells_its_cost_once(run: Callable[..., Ran], options: tuple[str, ...]) -> None:
    ran = run(*generate(LONG, *BUDGET, *options))
    assert ran.err.count(EVICTION_COST) == 1
    assert EVICTION_COST not in ran.out
    assert "--recall" in EVICTION_COST


@pytest.mark.parametrize("options", [(*BUDGET, "-q"), (*BUDGET, "--recall"), ("--budget", "4096"), ()])
def test_no_cost_where_quiet_recalled_or_within(run: Callable[..., Ran], options: tuple[str, ...]) -> None:
    assert EVICTION_COST not in run(*generate(LONG, *options)).err


@pytest.mark.parametrize(("tokens", "said"), [(80, None), (81, "41 of 81 tokens are evicted")])
def test_more_than_half(tokens: int, said: str | None) -> None:
    cache = Mock(spec=windlass.KVCache, tokens_seen=[3, tokens], budget=40, options=CacheOptions(budget=40))
    line = eviction_cost(cache)
    assert line is None if said is None else line is not None and line.startswith(said)
    cache.options = CacheOptions(budget=40, shares=windlass.Shares([[1.5], [0.5]]))
    assert eviction_cost(cache) is None


def test_a_chat_that_grows_tells_once_when_it_is_more_than_half(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windlass.cli.session.chosen", Mock(return_value=None))
    cache = Mock(spec=windlass.KVCache, tokens_seen=[60], budget=40, options=CacheOptions(budget=40))
    choices, counts = Choices(cache, ()), []
    for tokens in (60, 90, 120):
        cache.tokens_seen = [tokens]
        choices.tell()
        counts.append(capsys.readouterr().err.count(EVICTION_COST))
    assert counts == [0, 1, 0]
