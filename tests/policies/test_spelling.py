"""Policies as the command line spells them."""

import pytest

from tests.helpers.policies import made_by_default
from windlass.cache.options import policy_of
from windlass.policies import Pyramid, SnapKV
from windlass.policies.registry import spelled


@pytest.mark.parametrize(
    ("made", "typed"),
    [
        ("KeyDiff()", "key_diff"),
        ("SnapKV(observed_queries=32, pool=5, is_mean=False)", "snapkv"),
        ("SnapKV(observed_queries=32, pool=5)", "snapkv"),  # as results of before have it
        ("SnapKV(observed_queries=32, pool=7, is_mean=False)", "snapkv(pool=7)"),
        (
            "Pyramid(policy=SnapKV(observed_queries=8, pool=5, is_mean=False), beta=20)",
            "pyramid(snapkv(observed_queries=8))",
        ),
        ("Mine(a=3)", "Mine(a=3)"),
        ("Mine()", "Mine"),
        ("half a (name", "half a (name"),
    ],
)
def test_by_hand(made: str, typed: str) -> None:
    assert spelled(made) == typed


@pytest.mark.parametrize("name", made_by_default())
def test_what_is_spelled_makes_the_same_policy(name: str) -> None:
    policy = made_by_default()[name]
    typed = spelled(repr(policy))
    assert typed in (name, f"{name}(key_diff)")
    assert policy_of(typed) == policy


def test_arguments_are_read_back() -> None:
    policy = Pyramid(SnapKV(observed_queries=7, is_mean=True), beta=3)
    assert policy_of(spelled(repr(policy))) == policy
