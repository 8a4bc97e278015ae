"""Rotary distances of every mode, against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.core.errors import UsageError
from windlass.core.rotary_index import Reading
from windlass.positions.modes import Clamp, Compact, Original, PositionMode, SelfExtend, position_mode

HELD = torch.tensor([[[0, 1, 2, -1, 40, 17, -2, 99, 100, 101]]], dtype=torch.int32)


def read_distance(reading: Reading, query: int, slot: int, distance: int) -> int:
    """The rotary distance at which a slot is read by a query."""
    branch = reading.near if reading.far is None or distance < reading.near_window else reading.far
    return int(branch.queries[0, 0, query] - branch.keys[0, 0, slot])


def expected(mode: PositionMode, query: int, key: int, held: list[int]) -> int:
    d = query - key
    if isinstance(mode, Compact):
        return sum(key < p <= query for p in held)
    if isinstance(mode, SelfExtend):
        far = query // mode.group + mode.window - mode.window // mode.group - key // mode.group
        return d if d < mode.window else far
    return min(d, mode.limit) if isinstance(mode, Clamp) else d


@pytest.mark.parametrize(
    "mode", [Original(), Compact(), SelfExtend(4, 6), SelfExtend(7, 50), Clamp(5), Clamp(300)], ids=str
)
@pytest.mark.parametrize("queries", [[99, 100, 101], [101]])
def test_every_visible_key_is_read_at_its_distance(mode: PositionMode, queries: list[int]) -> None:
    held = [p for p in HELD.flatten().tolist() if p >= 0]
    reading = mode.read(HELD, torch.tensor([queries]))
    bound = mode.bound(102, HELD.shape[-1], len(queries))
    for branch in (reading.near, reading.far):
        if branch is not None:
            for side in (branch.queries, branch.keys):
                assert side.min() >= 0
                assert side.max() < bound
    for i, query in enumerate(queries):
        for slot, key in enumerate(HELD.flatten().tolist()):
            if 0 <= key <= query:
                assert read_distance(reading, i, slot, query - key) == expected(mode, query, key, held)


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 400), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_self_extend_reads_near_keys_as_they_are_and_never_leaves_the_table(
    group: int, window: int, start: int, tokens: int
) -> None:
    mode = SelfExtend(group, window)
    keys = torch.arange(start + tokens, dtype=torch.int32)[None, None]
    queries = torch.arange(start, start + tokens)[None]
    reading = mode.read(keys, queries)
    bound = mode.bound(start + tokens, keys.shape[-1], tokens)
    for i in range(tokens):
        for key in range(start + i + 1):
            d = start + i - key
            assert read_distance(reading, i, key, d) == expected(mode, start + i, key, [])
    for branch in (reading.near, reading.far):
        if branch is not None:
            assert max(int(branch.queries.max()), int(branch.keys.max())) < bound


def test_padding_queries_are_read_somewhere_harmless() -> None:
    queries = torch.tensor([[99, 100, -1, 101, -1]])
    for mode in (Original(), Compact(), SelfExtend(4, 6), Clamp(5)):
        reading = mode.read(HELD, queries)
        for i, query in ((0, 99), (1, 100), (3, 101)):
            held = [p for p in HELD.flatten().tolist() if p >= 0]
            assert read_distance(reading, i, 4, query - 40) == expected(mode, query, 40, held)
        assert reading.near.queries.min() >= 0


def test_heads_with_other_tokens_have_other_ranks() -> None:
    slots = torch.tensor([[[5, 0, 9], [9, 2, 0]]], dtype=torch.int32)
    reading = Compact().read(slots, torch.tensor([[9]]))
    assert reading.near.keys.tolist() == [[[1, 0, 2], [2, 1, 0]]]
    assert reading.near.queries.tolist() == [[[2], [2]]]


@pytest.mark.parametrize(
    ("spec", "mode"),
    [
        ("original", Original()),
        ("compact()", Compact()),
        (" self_extend ( 4 , 32 ) ", SelfExtend(4, 32)),
        ("self_extend(group=4, window=32)", SelfExtend(4, 32)),
        ("self_extend(window=32, group=4)", SelfExtend(4, 32)),
        ("clamp(limit=7)", Clamp(7)),
    ],
)
def test_specs(spec: str, mode: PositionMode) -> None:
    assert position_mode(spec) == mode
    assert position_mode(str(mode)) == mode


@pytest.mark.parametrize(
    "spec", ["", "rope", "clamp(2", "clamp(group=2)", "self_extend(0, 5)", "clamp(1.5)", "clamp(2, limit=3)"]
)
def test_wrong_specs_are_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        position_mode(spec)


def test_padding_after_the_text_stays_within_the_table() -> None:
    """A padding query behind all real tokens would be ranked one past them."""
    slots = torch.arange(5, dtype=torch.int32).reshape(1, 1, 5)
    queries = torch.tensor([[3, 4, -1, -1]])
    near = Compact().read(slots, queries).near
    assert near.queries.tolist() == [[[3, 4, 4, 4]]]
    assert int(near.queries.max()) < Compact().bound(5, 5, 4)
