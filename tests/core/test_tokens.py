"""Ids of a text: as a tuple of the same ids, with memory that texts share."""

import random
import sys

import pytest

from windlass.core.types import BLOCK, Tokens, bounds_of, shared

SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]


def ids_of(size: int, seed: int = 0) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.choice((-1, 0, 7, 2**31 - 1)) for _ in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_ids_are_those_of_a_tuple(size: int) -> None:
    ids, draw = ids_of(size), random.Random(size)
    ours = Tokens.of(ids)
    assert (*ours,) == ids
    assert len(ours) == size
    assert bool(ours) == bool(ids)
    assert Tokens.of_bytes(bytes(ours)) == ours
    for at in (-size, -1, 0, size // 2, size - 1):
        if -size <= at < size:
            assert ours[at] == ids[at]
    for at in (-size - 1, size):
        with pytest.raises(IndexError):
            ours[at]
    edges = [0, 1, size // 2, BLOCK - 1, BLOCK, BLOCK + 1, size, size + 9, -1, -size, None]
    for _ in range(200):
        cut = slice(draw.choice(edges), draw.choice(edges), draw.choice((None, 1, 2, -1)))
        assert (*ours[cut],) == ids[cut]
        assert ours[cut] == Tokens.of(ids[cut])
        assert hash(ours[cut]) == hash(Tokens.of(ids[cut]))
    if ids:
        assert bounds_of(ours) == bounds_of(ids) == (min(ids), max(ids))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("more", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_a_longer_text_begins_with_the_shorter_one(size: int, more: int) -> None:
    ids, added = ids_of(size), ids_of(more, seed=1)
    ours = Tokens.of(ids)
    for longer in (ours + added, ours + Tokens.of(added)):
        assert (*longer,) == ids + added
        assert longer.starts_with(ours)
        assert ours.starts_with(longer) == (not more)
        assert ours.shared(longer) == longer.shared(ours) == size
        assert (longer == ours) == (longer.digest == ours.digest) == (not more)
    assert (*ours,) == ids  # nothing was changed


@pytest.mark.parametrize("differs", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
def test_texts_share_their_tokens_up_to_the_first_that_differs(differs: int) -> None:
    ids = ids_of(2 * BLOCK + 9)
    other = (*ids[:differs], 5, *ids[differs + 1 :])
    assert Tokens.of(ids).shared(Tokens.of(other)) == shared(ids, other) == differs
    assert not Tokens.of(ids).starts_with(Tokens.of(other))
    assert Tokens.of(ids).starts_with(Tokens.of(other)[:differs])
    assert Tokens.of(ids).digest != Tokens.of(other).digest


def test_texts_that_begin_alike_share_memory() -> None:
    """Also those that nobody made of one another."""
    ids = ids_of(3 * BLOCK)
    one, other = Tokens.of(ids), Tokens.of([*ids, 3])
    assert all(map(lambda a, b: a is b, one._blocks, other._blocks))
    kept = [one[: 2 * BLOCK + at] for at in range(100)]
    assert sum(sys.getsizeof(each._blocks) + sys.getsizeof(each._rest) for each in kept) < 100 * (8 * BLOCK)
    assert all(each._blocks[0] is one._blocks[0] for each in kept)
