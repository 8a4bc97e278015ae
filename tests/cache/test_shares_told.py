"""Refusals and descriptions of a cache with shares."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import Models, Text, read
from tests.helpers.shares import ALIKE, APART
from windlass import KVCache, Shares, UsageError
from windlass.cache.shares import SHIPPED, shipped, write
from windlass.cache.shares import read as read_shares
from windlass.hf.forward import model_info


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


def test_shares_that_come_with_windlass_are_found_by_the_weights(attached_model: Models, tmp_path: Path) -> None:
    model, other = attached_model("llama"), attached_model("qwen2")
    own = Shares(APART, model=type(model).__name__, fingerprint=model_info(model).fingerprint())
    write(replace(own, fingerprint="0abc"), tmp_path / "a.json")
    assert shipped(model_info(model), tmp_path) is None
    write(own, tmp_path / "b.json")
    assert shipped(model_info(model), tmp_path) == replace(own, name="b.json")
    assert shipped(model_info(other), tmp_path) is None
    assert KVCache(model, 30, shares="auto").options.shares is None
    fingerprints = [read_shares(file).fingerprint for file in SHIPPED.glob("*.json")]
    assert fingerprints
    assert all(fingerprints)


def test_auto_takes_the_shares_of_the_weights(
    attached_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attached_model("llama")
    own = Shares(APART, model=type(model).__name__, fingerprint=model_info(model).fingerprint())
    write(own, tmp_path / "own.json")
    monkeypatch.setattr(shipped, "__defaults__", (tmp_path,))
    assert KVCache(model, 30, shares="auto").options.labels()["shares"] == "own.json"
    assert KVCache(model, shares="auto").options.shares is None
