"""Parts of a prompt that are refused before anything is read."""

from typing import Any

import pytest

from tests.helpers.schedulers import options_of
from windlass import UsageError
from windlass.engine.chunks import check_parts
from windlass.engine.recompute import recompute_of
from windlass.engine.request import PromptParts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 60}, "up to the end of the last part there are 70 tokens, and a row keeps 60"),
        ({"budget": 90, "policy": "kvzip"}, "ranks a prompt when all of it is held"),
        ({"budget": 90, "recall": 8}, "recall=8"),
        ({"budget": 90, "merge": "mean_count"}, "merge=mean_count"),
    ],
)
def test_rows_that_take_no_parts(options: dict[str, Any], said: str) -> None:
    parts = PromptParts(((7, 30), (30, 61), (61, 70)), recompute_of("first(4)"))
    with pytest.raises(UsageError, match=f"^chunks: .*{said}"):
        check_parts(parts, 75, options_of(**options), 1)
    check_parts(PromptParts(parts.spans, recompute_of("all")), 75, options_of(**options), 0)


@pytest.mark.parametrize("spans", [(), ((0, 0),), ((5, 9), (8, 12)), ((3, 75),), ((9, 12), (2, 4))])
def test_parts_that_are_none(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(UsageError, match=r"^chunks: "):
        check_parts(PromptParts(spans, recompute_of("all")), 75, options_of(budget=90), 1)
    with pytest.raises(UsageError, match="keeps no parts"):
        check_parts(PromptParts(((0, 9),), recompute_of("none")), 75, options_of(budget=90), 0)
