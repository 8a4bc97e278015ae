"""Rotary distances of every mode, against their definitions."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.core.errors import UsageError
from windlass.core.positions import RotaryBranch, RotaryIndex
from windlass.core.types import QueryPositions, SlotPositions
from windlass.positions.modes import MODES, Clamp, Compact, Original, PositionMode, SelfExtend, position_mode

HELD = torch.tensor([[[0, 1, 2, -1, 40, 17, -2, 99, 100, 101]]], dtype=torch.int32)


def read_distance(index: RotaryIndex, query: int, slot: int, distance: int) -> int:
    """The rotary distance at which a slot is read by a query."""
    branch = index.near if index.far is None or distance < index.near_window else index.far
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
    index = mode.rotary_index(HELD, torch.tensor([queries]))
    bound = mode.bound(102, HELD.shape[-1], len(queries))
    for branch in (index.near, index.far):
        if branch is not None:
            for side in (branch.queries, branch.keys):
                assert side.min() >= 0
                assert side.max() < bound
    for i, query in enumerate(queries):
        for slot, key in enumerate(HELD.flatten().tolist()):
            if 0 <= key <= query:
                assert read_distance(index, i, slot, query - key) == expected(mode, query, key, held)


@given(st.integers(1, 9), st.integers(1, 70), st.integers(0, 400), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_self_extend_reads_near_keys_as_they_are_and_never_leaves_the_table(
    group: int, window: int, start: int, tokens: int
) -> None:
    mode = SelfExtend(group, window)
    keys = torch.arange(start + tokens, dtype=torch.int32)[None, None]
    queries = torch.arange(start, start + tokens)[None]
    index = mode.rotary_index(keys, queries)
    bound = mode.bound(start + tokens, keys.shape[-1], tokens)
    for i in range(tokens):
        for key in range(start + i + 1):
            d = start + i - key
            assert read_distance(index, i, key, d) == expected(mode, start + i, key, [])
    for branch in (index.near, index.far):
        if branch is not None:
            assert max(int(branch.queries.max()), int(branch.keys.max())) < bound


def test_padding_queries_are_read_somewhere_harmless() -> None:
    queries = torch.tensor([[99, 100, -1, 101, -1]])
    for mode in (Original(), Compact(), SelfExtend(4, 6), Clamp(5)):
        index = mode.rotary_index(HELD, queries)
        for i, query in ((0, 99), (1, 100), (3, 101)):
            held = [p for p in HELD.flatten().tolist() if p >= 0]
            assert read_distance(index, i, 4, query - 40) == expected(mode, query, 40, held)
        assert index.near.queries.min() >= 0


def test_heads_with_other_tokens_have_other_ranks() -> None:
    slots = torch.tensor([[[5, 0, 9], [9, 2, 0]]], dtype=torch.int32)
    index = Compact().rotary_index(slots, torch.tensor([[9]]))
    assert index.near.keys.tolist() == [[[1, 0, 2], [2, 1, 0]]]
    assert index.near.queries.tolist() == [[[2], [2]]]


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
    near = Compact().rotary_index(slots, queries).near
    assert near.queries.tolist() == [[[3, 4, 4, 4]]]
    assert int(near.queries.max()) < Compact().bound(5, 5, 4)


def test_a_mode_of_ones_own_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Stretched(PositionMode):
        """A key at distance d is read at d times `by`."""

        by: int = 2
        name = "stretched"

        def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
            return RotaryIndex(RotaryBranch(self.by * queries.clamp(min=0)[:, None], self.by * slots.clamp(min=0)))

        def bound(self, end: int, occupancy: int, tokens: int) -> int:
            return self.by * end

    monkeypatch.setitem(MODES, "stretched", Stretched)
    assert position_mode("stretched(by=3)") == Stretched(3)
    assert position_mode(str(Stretched(5))) == Stretched(5)
    assert str(Stretched()) == "stretched(2)"
    shown = [str(mode) for mode in (Original(), SelfExtend(4, 32), Clamp(7))]
    assert shown == ["original", "self_extend(4, 32)", "clamp(7)"]
    forms = r"auto, original, compact, self_extend\(group, window\), clamp\(limit\), stretched\(by\)"
    with pytest.raises(UsageError, match=rf"Use one of: {forms} \(Did you mean stretched\?\)$"):
        position_mode("stretch")
    reading = position_mode("stretched(3)").rotary_index(HELD, torch.tensor([[101]]))
    assert read_distance(reading, 0, 4, 61) == 3 * 61
