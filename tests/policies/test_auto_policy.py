"""The policy of a cache for which nobody chose one."""

import pytest

from tests.helpers.models import Models, Text, read
from windlass import KVCache, PolicyError
from windlass.cache.options import CacheOptions, policy_of
from windlass.policies import KeyDiff, Recent


def test_auto_is_key_diff_with_a_budget() -> None:
    for given in (CacheOptions(20), CacheOptions(20, "auto"), CacheOptions(20, None)):
        assert given.policy == KeyDiff()
        assert given.labels()["policy"] == "KeyDiff()"


def test_without_a_budget_heads_share_their_positions() -> None:
    for given in (CacheOptions(), CacheOptions(policy="auto")):
        assert given.policy == Recent()
    assert policy_of(" Auto ") == KeyDiff()
    assert CacheOptions(20, Recent()).policy == Recent()


def test_another_word_is_refused_with_the_way_out() -> None:
    with pytest.raises(PolicyError, match=r"policy 'best' is unknown\. The names are recent"):
        CacheOptions(20, "best")


def test_it_keeps_no_numbers_of_tokens(attached_model: Models, text: Text) -> None:
    ours, recent = KVCache(attached_model("llama")), KVCache(attached_model("llama"), policy=Recent())
    for cache in (ours, recent):
        read(attached_model("llama"), cache, text(30), 30)
    for mine, theirs in zip(ours.layers, recent.layers, strict=True):
        assert {*mine.tensors()} == {*theirs.tensors()} == {"keys", "values", "positions"}
