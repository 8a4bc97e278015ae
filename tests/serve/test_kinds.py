"""Several kinds of rows: as they are typed, and which of them a request gets."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.helpers.cli import Ran, loaded_once, run
from tests.helpers.models import MODEL, Models
from windlass.cache.options import CacheOptions
from windlass.cli.serve import ServeArguments, options_of
from windlass.cli.session import kinds_of
from windlass.core.errors import UsageError
from windlass.engine.scheduler import Scheduler
from windlass.serve import requests

__all__ = ["loaded_once", "run"]


def test_what_is_typed_is_what_is_served() -> None:
    typed = ["rows=2,budget=4096,policy=SnapKV(pool=7, observed_queries=3)", " rows = 1 , store=int8,chunk=64"]
    arguments = ServeArguments(rows=3, kinds=typed, max_seconds=90.0)
    made = options_of(MODEL, {"budget": 256, "sinks": 2}, arguments)
    first = CacheOptions(budget=256, sinks=2)
    wide = CacheOptions(budget=4096, sinks=2, policy="SnapKV(pool=7, observed_queries=3)")
    small = CacheOptions(budget=256, sinks=2, store="int8", chunk=64)
    assert [(rows, each.labels()) for rows, each in made.all_rows] == [
        (3, first.labels()),
        (2, wide.labels()),
        (1, small.labels()),
    ]
    assert made.limits.seconds == 90.0


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("budget=64", "gives no number of rows"),
        ("rows=2,speed=3", "'speed=3' is not one of rows, budget"),
        ("rows=2,rows=3", "each once"),
        ("rows=2,budget", "with a value"),
        ("rows=0", "rows '0' is not a whole number from 1"),
        ("rows=2,budget=-4", "budget '-4' is not a whole number"),
        ("rows=2,,budget=4", "has an empty value"),
        ("rows=2,budget=3", "rows=2,budget=3'"),
        ("rows=2,policy=nobody", "nobody"),
    ],
)
def test_what_cannot_be_typed(typed: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kinds_of([typed], {"budget": 64})


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("rows=2", "two kinds of rows are alike"),
        ("rows=2,policy=composite(h2o)", "Give it one row"),
    ],
)
def test_rows_that_cannot_be_are_refused_before_the_model_is_loaded(
    run: Callable[..., Ran], kind: str, said: str
) -> None:
    ran = run("serve", "no/such-model", "--budget", "64", "--kind", kind)
    assert ran.code == 2
    assert said in ran.err


def test_a_request_gets_the_smallest_rows_that_are_as_it_asks(attached_model: Models) -> None:
    """By the bytes of a row. The first kind without a wish, and a cache of its own where no kind fits."""
    first = CacheOptions(budget=100, policy="h2o")
    wide, small, wider = (
        CacheOptions(budget=300, policy="snapkv"),
        CacheOptions(budget=300, policy="snapkv", store="int8"),
        CacheOptions(budget=400, policy="snapkv", store="int8"),
    )
    engine = Scheduler(
        attached_model("llama"),
        AutoTokenizer.from_pretrained(MODEL),
        [(1, first), (2, wider), (1, wide), (1, small)],
    )

    def given(**own: Any) -> dict[str, int | str | None]:
        return requests.options_of(own, engine.options, engine.kinds).labels()

    assert given() == first.labels()
    assert given(policy="snapkv") == small.labels()
    assert given(budget=300) == small.labels()
    assert given(budget=300, store="plain") == wide.labels()
    assert given(budget=400) == wider.labels()
    assert given(store="plain") == first.labels()
    assert given(budget=200) == CacheOptions(budget=200, policy="h2o").labels()
    assert given(budget=300, policy="h2o") == CacheOptions(budget=300, policy="h2o").labels()
