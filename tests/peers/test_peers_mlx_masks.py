"""The masks of mlx-lm's cache tests: which tokens a query sees, read off the outputs of attention.

A ring of `max_size` holds as many at rest as our budget. Ours is read by a query beside that query itself. The other
behaviours, and those that are shown elsewhere, are in `test_peers_mlx`.
"""

import pytest
import torch

from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.core.positions import EMPTY
from windlass.core.step import AttentionCall, Limits, Step
from windlass.policies import Recent
from windlass.positions.modes import Original
from windlass.stores.formats import Plain

LONGEST = 48  # tokens of a watched row


class Watched:
    """A layer that reports which tokens its queries see: keys are alike, and each value names its own position."""

    def __init__(self, budget: int | None, sinks: int = 0, sliding_window: int | None = None, rows: int = 1) -> None:
        limits = Limits(budget, sinks, window=1, chunk=1, rollback=0)
        self.layer = SlotLayer(0, limits, Recent(), None, Plain())
        self._call = AttentionCall(1.0, sliding_window)
        self.ends = [0] * rows

    def append(self, *lengths: int) -> list[list[list[int]]]:
        """Write so many tokens per row. Returns per row and new token the positions that it sees."""
        columns = torch.arange(max(lengths))
        positions = torch.stack(
            [(columns + e).where(columns < n, EMPTY) for e, n in zip(self.ends, lengths, strict=True)]
        )
        self.ends = [e + n for e, n in zip(self.ends, lengths, strict=True)]
        ends = torch.tensor(self.ends)
        values = torch.eye(LONGEST)[positions][:, None]
        step = Step(positions, lengths, ends, ends, max(self.ends))
        out = self.layer.step(LayerCall(values, torch.ones_like(values), values, step, Original(), self._call))
        return [[row.nonzero()[:, 0].tolist() for row in rows[0, :n]] for rows, n in zip(out, lengths, strict=True)]

    def held(self, row: int = 0) -> list[int]:
        """Positions at rest."""
        return sorted(p for p in self.layer.positions[row, 0].tolist() if p >= 0)


def newest(first: int, last: int, most: int, sinks: int = 0) -> list[list[int]]:
    """Tokens seen by the tokens `first` up to `last`: the sinks, and their newest `most`."""
    return [sorted({*range(min(sinks, q + 1)), *range(max(q + 1 - most, 0), q + 1)}) for q in range(first, last)]


@pytest.mark.parametrize("seen", [0, 16])
def test_masks_without_a_budget(seen: int) -> None:
    """test_make_mask_with_cache, test_window_mask_with_full_kv_cache, test_mask_with_window: one token sees all. 4 see
    causally, as within a window of 4. A window of 3 is explicit, row sums 1, 2, 3, 3, 3.
    """
    for window in (None, 4, 3):
        watched = Watched(None, sliding_window=window)
        if seen:
            watched.append(seen)
        assert watched.append(4) == [newest(seen, seen + 4, window or LONGEST)]
        assert watched.append(1) == [newest(seen + 4, seen + 5, window or LONGEST)]
    assert [len(row) for row in Watched(None, sliding_window=3).append(5)[0]] == [1, 2, 3, 3, 3]


def test_a_ring_under_a_smaller_window() -> None:
    """test_rotating_cache_mask: with a window of 5 under a budget of 8 each query sees exactly 5 or, at the start, all.

    As 3 tokens after 10, and decoding around the ring. Every one of them sees itself.
    """
    watched = Watched(8, sliding_window=5)
    assert watched.append(10) == [newest(0, 10, 5)]
    assert watched.append(3) == [newest(10, 13, 5)]
    for at in range(13, 30):
        assert watched.append(1) == [[list(range(at - 4, at + 1))]]


def test_a_ring_takes_steps_of_any_size() -> None:
    """test_rotating_cache_updates: 10 at once, three singles, 3 at once in a ring of 8, always the newest 8."""
    watched = Watched(8)
    at = 0
    for tokens in (10, 1, 1, 1, 3):
        assert watched.append(tokens) == [newest(at, at + tokens, 8 + 1)]
        at += tokens
        assert watched.held() == list(range(at - 8, at))


def test_a_ring_in_chat_mode_ends_with_the_newest() -> None:
    """test_rotating_kv_cache_chat_mode: turns of 8, 1, 2, 3, 6 and 2 tokens in a ring of 18."""
    watched = Watched(18)
    at = 0
    for tokens in (8, 1, 2, 3, 6, 2):
        assert watched.append(tokens) == [newest(at, at + tokens, 18 + 1)]
        at += tokens
        assert watched.held() == list(range(max(at - 18, 0), at))
    assert at == 22


def test_sinks_are_seen_by_every_token_of_a_chunk() -> None:
    """Ring of 8 with keep=4, appends of 8, 4, 4 and six singles: where theirs hides sinks from all but the first query
    of a chunk, every query of ours sees all four. At rest 0-3 and the newest four.
    """
    watched = Watched(8, sinks=4)
    for tokens, at in ((8, 8), (4, 12), (4, 16), *((1, at) for at in range(17, 23))):
        assert watched.append(tokens) == [newest(at - tokens, at, 8 - 4 + 1, sinks=4)]
        assert watched.held() == [0, 1, 2, 3, *range(at - 4, at)]


def test_masks_of_ragged_rows_in_a_ring() -> None:
    """test_batch_rotating_kv_cache: the literal masks over prefill, decode, filter and another prefill, ring of 4."""
    watched = Watched(4, rows=3)
    assert watched.append(2, 6, 3) == [newest(0, 2, 5), newest(0, 6, 5), newest(0, 3, 5)]
    assert [watched.held(row) for row in range(3)] == [[0, 1], [2, 3, 4, 5], [0, 1, 2]]
    assert watched.append(1, 1, 1) == [[[0, 1, 2]], [[2, 3, 4, 5, 6]], [[0, 1, 2, 3]]]
    watched.layer.select_rows(torch.tensor([2, 1]))
    watched.ends = [4, 7]
    assert watched.append(3, 1) == [[[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]], [[3, 4, 5, 6, 7]]]
    assert [watched.held(row) for row in range(2)] == [[3, 4, 5, 6], [4, 5, 6, 7]]
