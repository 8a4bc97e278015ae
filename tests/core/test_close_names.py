"""Names that errors offer: close ones alone."""

import pytest

from windlass.cache.options import MERGES, MODES, POLICIES, STORES
from windlass.core.parse import did_you_mean, use_one_of
from windlass.evals.tasks import NAMES


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("h20", "h2o"),
        ("snapk", "snapkv"),
        ("Key-Dif", "key_diff"),
        ("SnapKW(pool=7)", "snapkv"),
        ("groups", "in_groups"),
    ],
)
def test_a_close_name_is_offered(typed: str, meant: str) -> None:
    assert did_you_mean(typed, POLICIES) == f"Did you mean {meant}? "


@pytest.mark.parametrize("typed", ["nope", "none", "streaming", "window", "foo", "", "default", "xyz"])
def test_no_other_name_is_offered(typed: str) -> None:
    tables = POLICIES, STORES, MODES, MERGES, NAMES
    assert [did_you_mean(typed, names) for names in tables] == [""] * len(tables)


def test_all_names_are_listed() -> None:
    assert use_one_of("nope", ["plain", "int8"]) == "Use one of: plain, int8"
    assert use_one_of("plane", ["plain", "int8"]) == "Use one of: plain, int8 (Did you mean plain?)"
