"""Parts that cannot be encoded, joined or read again are refused by name, and nothing has changed."""

from collections.abc import Callable
from typing import Any

import pytest

import windlass
from tests.helpers import models
from tests.helpers.contents import content, is_same
from tests.helpers.joined import SIZES, joined, texts
from tests.helpers.models import Models
from windlass import CacheOptions, KVCache, UsageError, chunks
from windlass.engine.chunks import First, Recompute
from windlass.engine.recompute import recompute_of
from windlass.testing import tiny_hybrid

one_layer = models.one_layer  # fixture


def test_names_of_modes() -> None:
    for name in ("none", "first(4)", "divergent(0.2)", "all"):
        assert str(recompute_of(name)) == name
    assert recompute_of(First(3)) == recompute_of(" first( 3 )")
    assert str(recompute_of("divergent")) == "divergent(0.16)"


@pytest.mark.parametrize(
    "name",
    [
        "some",
        "first",
        "first(0)",
        "first(1.5)",
        "first(-1)",
        "first(1, 2)",
        "all(3)",
        "divergent(0)",
        "divergent(1.1)",
        "divergent(nan)",
        "first(tokens=3)",
        "",
        "none(",
    ],
)
def test_other_modes(name: str) -> None:
    with pytest.raises(UsageError, match=r"recompute=|first's tokens|divergent's share"):
        recompute_of(name)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 30, "merge": "mean_count"}, "merge=mean_count"),
        ({"budget": 30, "recall": 8}, "recall=8"),
        ({"store": "int4(sinks=2, newest=5)"}, "Use int4"),
        ({"positions": "compact"}, 'positions="compact" reads tokens at other places'),
        ({"positions": "self_extend(4, 8)"}, "Set cache.positions"),
        ({"positions": "clamp(9)"}, "Set cache.positions"),
    ],
)
def test_caches_that_read_nothing_again(attached_model: Models, options: dict[str, Any], said: str) -> None:
    """They can be joined all the same."""
    model, (start, *own) = attached_model("llama"), texts(30)
    given = CacheOptions(**options)
    parts = [chunks.encode(model, each, given) for each in own]
    cache = KVCache.from_options(model, given)
    windlass.prefill(model, cache, [start])
    before = content(cache)
    for mode in ("first(2)", "divergent(0.5)", "all"):
        with pytest.raises(UsageError, match=said.replace("(", r"\(")):
            chunks.join(model, cache, parts, mode)
        assert is_same(content(cache), before)
    assert chunks.join(model, cache, parts).recomputed == ()


def test_beyond_the_trained_length_auto_reads_elsewhere(attached_model: Models) -> None:
    model, own = attached_model("llama_yarn"), texts(31, (300, 290))
    parts = [chunks.encode(model, each) for each in own]
    with pytest.raises(UsageError, match=r'positions="auto" beyond position 512 .* continues to 590'):
        joined(model, parts, "first(2)")
    assert joined(model, parts, "first(2)", CacheOptions(positions="original"))[1].recomputed == (300, 301)


def test_recurrent_layers() -> None:
    model = windlass.attach(tiny_hybrid("qwen3_next"))
    with pytest.raises(UsageError, match=r"chunks.encode: layer 0 \(linear_attention\)"):
        chunks.encode(model, [1, 2, 3])


def test_one_attention_layer_has_no_second(one_layer: Any) -> None:
    _, model = one_layer
    parts = [chunks.encode(model, each) for each in texts(32)]
    with pytest.raises(UsageError, match="second attention layer"):
        joined(model, parts, "divergent(0.2)")
    assert joined(model, parts, "none")[0].tokens_seen == [sum(SIZES)]


@pytest.mark.usefixtures("any_type")
def test_parts_of_another_kind(attached_model: Models) -> None:
    model, own = attached_model("llama"), texts(33)
    part, cache = chunks.encode(model, own[0]), KVCache(model)
    other = chunks.encode(attached_model("qwen3"), own[1])
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: chunks.join(model, cache, [part, other]), "another model"),
        (lambda: chunks.join(model, cache, [part, part.cache]), "part 1 must be a Part"),  # type: ignore[list-item]
        (lambda: chunks.join(model, cache, [part], at=1), "at must be from 0 to 0"),
        (lambda: chunks.join(model, cache, [part], row=1), "row must be from 0 to 0"),
        (lambda: chunks.encode(model, []), "empty"),
        (lambda: chunks.encode(model, [97]), "outside the model's vocabulary"),
        (lambda: chunks.encode(model, [1], prefix=[98]), "outside the model's vocabulary"),
    ]
    before = content(cache)
    for call, said in cases:
        with pytest.raises(UsageError, match=said):
            call()
        assert is_same(content(cache), before)


def test_a_join_that_fails_leaves_nothing(attached_model: Models) -> None:
    model, (start, *own) = attached_model("llama"), texts(34)

    class Failing(Recompute):
        def chosen(self, *_: Any) -> set[int]:
            raise KeyboardInterrupt

    for at in (None, 7):
        cache = KVCache(model)
        windlass.prefill(model, cache, [start])
        before = content(cache)
        with pytest.raises(KeyboardInterrupt):
            chunks.join(model, cache, [chunks.encode(model, each) for each in own], Failing(), at=at)
        assert is_same(content(cache), before)
        assert cache.tokens == [start]
