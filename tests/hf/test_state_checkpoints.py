"""Checkpoints of recurrent states: a text goes back to the end of any message, and on from there."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.hybrid_caches import LIMITS, OF_CHUNKS, assert_close, assert_same, begun, each_kind, held, step
from tests.helpers.hybrids import bound
from tests.helpers.models import Models, Text
from windlass import KVCache, UsageError
from windlass.cache.describe import bytes_by_part
from windlass.cache.rows import MOST_CHECKPOINTS, RowState
from windlass.engine.generate import prefill

MESSAGES = (7, 12, 5, 10)  # ends at 7, 19, 24 and 34


def read_messages(family: str, text: Text, count: int, cache: KVCache | None = None) -> KVCache:
    """A cache that has read so many messages, with a checkpoint at the end of each."""
    cache = cache or KVCache(bound(family))
    for length, piece in zip(MESSAGES[:count], text(sum(MESSAGES)).split(MESSAGES, 1)[:count], strict=True):
        assert piece.shape[1] == length
        step(family, piece)(cache)
        cache.checkpoint()
    return cache


@each_kind
@pytest.mark.parametrize("count", range(len(MESSAGES)))
@pytest.mark.parametrize("budget", [None, 60])
def test_a_text_goes_back_to_the_end_of_each_message(family: str, count: int, budget: int | None, text: Text) -> None:
    """It is then, to the bit, a text that never had the rest."""
    cache, fresh = (
        read_messages(family, text, each, KVCache(bound(family), budget)) for each in (len(MESSAGES), count)
    )
    for seed in range(3):
        step(family, text(1, seed=seed))(cache)
    cache.rollback(sum(MESSAGES[count:]) + 3)
    assert cache.tokens_seen == [sum(MESSAGES[:count])]
    assert cache.tokens == fresh.tokens
    assert cache.checkpoints == fresh.checkpoints == [[7, 19, 24, 34][:count]]
    if count:  # else there are no tensors in a fresh cache
        assert_same(held(cache), held(fresh))
    for tokens in (6, 1, 1):
        ids = text(tokens, seed=tokens + 9)
        assert_close(step(family, ids)(cache), step(family, ids)(fresh))
    assert_same(held(cache), held(fresh))


@each_kind
def test_rows_go_back_to_ends_of_their_own(family: str, text: Text) -> None:
    """Prompts of three lengths in each of three turns. A row that is idle in a turn stands where it stood."""
    model, cache = bound(family), KVCache(bound(family), 90, chunk=8, batch=3)
    turns, at = ((9, 4, 13), (3, 11, 5), (6, 1, 2)), dict[tuple[int, int], dict[str, Tensor]]()
    for number, lengths in enumerate(turns):
        prefill(model, cache, [text(n, seed=10 * number + n).tolist()[0] for n in lengths])
        cache.checkpoint()
        at |= {(row, cache.tokens_seen[row]): held(cache.copy_of_row(row)) for row in range(3)}
    assert cache.checkpoints == [[9, 12, 18], [4, 15, 16], [13, 18, 20]]
    step(family, text(1, rows=3), torch.tensor([[1], [0], [1]]))(cache)
    copied = copy.deepcopy(cache)
    cache.rollback([1 + 6 + 3, 1, 0])  # to its first turn, to its second, and not at all
    assert cache.tokens_seen == [9, 15, 21]
    assert_same(held(cache.copy_of_row(0)), at[0, 9])
    assert_same(held(cache.copy_of_row(1)), at[1, 15])
    assert_same(held(cache.copy_of_row(2)), held(copied.copy_of_row(2)))
    assert cache.checkpoints == [[9], [4, 15], [13, 18, 20]]
    for row, tokens in ((2, 18), (0, 12), (1, 4)):
        part = copied.copy_of_row(row, tokens)
        assert_same(held(part), at[row, tokens], (row, tokens))
        assert part.checkpoints == [[each for each in copied.checkpoints[row] if each <= tokens]]
    copied.select_rows(torch.tensor([2, 0, 2]))
    copied.rollback([3, 1, 8])
    assert_same(held(copied.copy_of_row(0)), at[2, 18])
    assert_same(held(copied.copy_of_row(1)), at[0, 18])
    assert_same(held(copied.copy_of_row(2)), at[2, 13])
    copied.clear_row(1)
    assert copied.checkpoints == [[13, 18], [], [13]]
    logits = step(family, text(5, rows=3, seed=3))(copied)
    alone = KVCache(model, 90)
    assert_close(logits[1:2], step(family, text(5, rows=3, seed=3)[1:2])(alone), OF_CHUNKS)


def test_what_has_no_checkpoint_is_refused_by_name(text: Text) -> None:
    cache = read_messages("nemotron_h", text, 3)
    step("nemotron_h", text(4, seed=5))(cache)
    before = held(cache)
    message = (
        r"rollback of 5 tokens would leave 23 in row 0, and layer 0 \(linear_attention\) has copies of its state at "
        r"0, 7, 19, 24 tokens only\. Roll back to one of these"
    )
    with pytest.raises(UsageError, match=message):
        cache.rollback(5)
    with pytest.raises(UsageError, match=r"layer 0 .* has copies of its state at 0, 7, 19, 24 tokens only"):
        cache.copy_of_row(0, 20)
    assert_same(held(cache), before)
    assert cache.checkpoints == [[7, 19, 24]]


@each_kind
def test_a_cache_that_evicts_goes_back_as_far_as_its_records(family: str, text: Text) -> None:
    cache = begun(family, text)
    cache.checkpoint()
    before, line = held(cache), "copies   of states at 26 | 26 tokens"
    assert line in cache.describe()
    for seed in range(3):
        step(family, text(1, rows=2, seed=seed))(cache)
    cache.rollback([3, 3])
    assert_same(held(cache), before)
    step(family, text(20, rows=2, seed=7))(cache)
    cache.checkpoint()
    step(family, text(18, rows=2, seed=8))(cache)
    with pytest.raises(UsageError, match=r"rollback of 38 tokens is more than layer \d .* can take back"):
        cache.rollback(38)
    cache.compress(8)  # nothing before it can be rolled back
    assert cache.checkpoints == [[], []]


def test_at_most_eight_are_kept(text: Text) -> None:
    """The one goes whose loss costs the fewest tokens to read again. The newest always stays."""
    row = RowState()
    for end in (10, 20, 25, 40, 60, 80, 100, 120):
        row = row.fed(end - row.tokens_seen, 1, 0).marked(())
    for end, gone in ((140, 20), (141, 140), (200, 10), (210, 40), (320, 80)):
        before = {each.tokens for each in row.checkpoints}
        row = row.fed(end - row.tokens_seen, 1, 0).marked(())
        assert {end, *before} - {each.tokens for each in row.checkpoints} == {gone}
        assert len(row.checkpoints) == MOST_CHECKPOINTS == 8
    cache = KVCache(bound("lfm2"))
    for seed in range(11):
        step("lfm2", text(3 + seed % 2, seed=seed))(cache)
        cache.checkpoint()
        cache.checkpoint()  # the same place takes no second one
    assert len(cache.checkpoints[0]) == 8
    assert cache.checkpoints[0][-1] == cache.tokens_seen[0] == 38


@each_kind
def test_their_bytes_are_told(family: str, text: Text) -> None:
    cache = read_messages(family, text, 3, KVCache(bound(family), **LIMITS))
    step(family, text(1))(cache)
    states, parts = sum(each.nbytes for own in cache.recurrent for each in own.tensors().values()), bytes_by_part(cache)
    assert parts["checkpoints"] == 3 * states > 0
    assert cache.bytes_held == sum(parts.values())
    twin, without = copy.deepcopy(cache), bytes_by_part(cache)["rollback"]
    assert twin.rows.rows[0].checkpoints[0] is cache.rows.rows[0].checkpoints[0]  # shared, as nobody writes into them
    cache.rollback(1)
    assert bytes_by_part(cache).get("rollback", 0) <= without


@each_kind
def test_a_file_keeps_them(family: str, text: Text, tmp_path: Path) -> None:
    """The loaded text goes back to the end of a message as the saved one does, and on from there."""
    cache = KVCache(bound(family), batch=2)
    for seed, mask in enumerate(([[1] * 5, [1] * 5], [[1] * 5, [0] * 5], [[1] * 5, [1] * 5])):
        step(family, text(5, rows=2, seed=seed), torch.tensor(mask))(cache)
        cache.checkpoint()
    cache.select_rows(torch.tensor([1, 0, 1]))
    cache.save(tmp_path / "text.cache")
    loaded = KVCache.load(tmp_path / "text.cache", bound(family))
    assert loaded.checkpoints == cache.checkpoints == [[5, 10], [5, 10, 15], [5, 10]]
    for each in (cache, loaded):
        step(family, text(2, rows=3))(each)
        each.rollback([2, 12, 7])
    assert loaded.checkpoints == cache.checkpoints == [[5, 10], [5], [5]]
    assert_same(held(loaded), held(cache))
    assert_close(step(family, text(3, rows=3))(loaded), step(family, text(3, rows=3))(cache))


def test_models_without_states_need_none(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model)
    prefill(model, cache, text(9).tolist())
    cache.checkpoint()
    assert cache.checkpoints == [[]]
    assert "copies" not in cache.describe()
