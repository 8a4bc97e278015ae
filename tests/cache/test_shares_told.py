"""Refusals and descriptions of a cache with shares."""

from typing import Any

import pytest

from tests.helpers.models import Models, Text, read
from tests.helpers.shares import ALIKE, APART
from windlass import KVCache, Shares, UsageError


@pytest.mark.usefixtures("any_type")
def test_what_cannot_be_honoured_is_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    with pytest.raises(UsageError, match=r"they are of 1 layers, .* has 2"):
        KVCache(model, 30, shares=Shares([[1.0, 2.0, 3.0]]))
    with pytest.raises(UsageError, match="measured on another model"):
        KVCache(model, 30, shares=Shares(APART, fingerprint="0abc"))
    for policy in ("composite(key_diff)", "pyramid(key_diff)"):
        with pytest.raises(UsageError, match="sets the budget of each layer itself"):
            KVCache(model, 30, policy, shares=Shares(APART))
    with pytest.raises(UsageError, match="has 3 kv heads here, and its shares are of 4"):
        read(model, KVCache(model, 30, shares=Shares([[1.0, 2.0, 3.0, 4.0]] * 2)), text(4), 4)
    one, other = (KVCache(model, 30, shares=Shares(layers)) for layers in (APART, ALIKE))
    read(model, other, text(4), 4)
    with pytest.raises(UsageError, match="put other heads together"):
        one.splice(other)
    wrong: list[Any] = [[[0.0]], [[-1.0]], [[float("nan")]], [[]], [None], "1", [["1"]], [[True, 2.0]]]
    for layers in wrong:
        with pytest.raises(UsageError, match=r"shares"):
            Shares(layers)
    with pytest.raises(UsageError, match="shares must be a file"):
        KVCache(model, 30, shares=[[1.0]])  # type: ignore[arg-type]


def test_a_cache_says_by_which_shares_it_keeps(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 26, "key_diff", 2, 4, shares=Shares(APART, name="turns.json"))
    read(model, cache, text(40), 9)
    assert "  shares   turns.json, heads of 2 layers apart\n" in cache.describe()
    assert "KVCache: 2 layers" in cache.describe()
    assert "shares turns.json" in repr(cache)
    assert cache.options.labels()["shares"] == "turns.json"
    plain = KVCache(model, 26, "key_diff", 2, 4)
    assert "shares" not in repr(plain) + plain.describe()
    assert plain.options.labels()["shares"] == "none"
