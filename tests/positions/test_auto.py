"""The mode `auto`: as the model reads up to its trained length, within it afterwards, against a model with a mask."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import Text, read
from windlass import KVCache
from windlass.core.step import Step
from windlass.policies import H2O, KeyDiff, Policy, Recent
from windlass.positions.modes import Auto, Original, Windowed
from windlass.testing import tiny_model

TRAINED, NEAR = 40, 5
TOKENS = 131  # beyond 40 by groups of 1 (with a budget), 2 and 4


@pytest.fixture(scope="module")
def short() -> PreTrainedModel:
    """A model whose config says that it was trained on 40 tokens."""
    config = tiny_model("llama").config
    config.max_position_embeddings = TRAINED
    torch.manual_seed(7)
    return windlass.attach(AutoModelForCausalLM.from_config(config).eval())


def group_of(place: int) -> int:
    group = 1
    while place // group + NEAR - NEAR // group >= TRAINED:
        group *= 2
    return group


def distance(query: int, key: int, place: int, key_place: int) -> int:
    """By the definition, for one query and one key."""
    if query < TRAINED:
        return query - key
    group = group_of(place)
    if query - key < NEAR:
        return place - key_place
    return place // group + NEAR - NEAR // group - key_place // group


def distances(mode: Windowed, slots: Tensor, queries: Sequence[int]) -> list[list[int]]:
    """Distances of the held keys that each query of one row and head sees under `mode`, by position."""
    at = torch.tensor([list(queries)])
    end = max(queries) + 1
    step = Step(at, (len(queries),), torch.tensor([end]), torch.tensor([0]), end)
    found: dict[int, list[int]] = {}
    for reading in mode.readings(slots, step, int((slots >= 0).sum())):
        width = reading.index.near.queries.shape[-1]
        for column in range(width):
            if reading.is_read is not None and not reading.is_read[0, column]:
                continue
            query = queries[reading.start + column]
            assert query not in found, "a query in two readings"
            row = []
            for slot, key in sorted(enumerate(slots.flatten().tolist()), key=lambda pair: pair[1]):
                if 0 <= key <= query:
                    is_far = reading.index.far is not None and query - key >= reading.index.near_window
                    branch = reading.index.far if is_far else reading.index.near
                    assert branch is not None
                    q, k = int(branch.queries[0, 0, column]), int(branch.keys[0, 0, slot])
                    assert 0 <= k < reading.bound
                    assert 0 <= q < reading.bound
                    row.append(q - k)
            found[query] = row
    return [found[query] for query in queries]


@pytest.mark.parametrize("is_bounded", [False, True])
@pytest.mark.parametrize("first", [20, 36, 39, 40, 41, 70, 75, 120])
@pytest.mark.parametrize("columns", [1, 2, 11])
def test_distances_are_those_of_the_definition(is_bounded: bool, first: int, columns: int) -> None:
    gaps = {4, 5, 9, 17, 30, 31, 32, 33}
    held = [p for p in range(first + columns) if not is_bounded or p >= first or p not in gaps]
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(3))
    slots = torch.tensor([*held, -1, -2], dtype=torch.int32)[
        torch.cat((order, torch.tensor([len(held), len(held) + 1])))
    ]
    queries = range(first, first + columns)
    for query, row in zip(queries, distances(Windowed(TRAINED, is_bounded), slots[None, None], queries), strict=True):
        place = held.index(query) if is_bounded else query
        keys = [key for key in held if key <= query]
        places = [held.index(key) if is_bounded else key for key in keys]
        assert row == [distance(query, key, place, own) for key, own in zip(keys, places, strict=True)]
        assert max(row) < TRAINED


def test_the_mode_changes_at_the_first_token_beyond_the_trained_length() -> None:
    slots = torch.tensor([[[0, 1, 2, 30, 38, 39, 40]]], dtype=torch.int32)
    mode = Windowed(TRAINED, is_bounded=True)
    assert distances(mode, slots, [39, 40]) == [[39, 38, 37, 9, 1, 0], [6, 5, 4, 3, 2, 1, 0]]
    full = torch.arange(41, dtype=torch.int32)[None, None]
    last, beyond = distances(Windowed(TRAINED, is_bounded=False), full, [39, 40])
    assert last == list(range(39, -1, -1))
    assert beyond == [23 - key // 2 for key in range(36)] + [4, 3, 2, 1, 0]


def test_groups_grow_when_the_text_needs_it() -> None:
    mode = Windowed(512, is_bounded=False)
    assert [mode.label(end, end) for end in (512, 513, 960, 961, 1856, 1857)] == [
        "original", "self_extend(2, 64)", "self_extend(2, 64)", "self_extend(4, 64)", "self_extend(4, 64)",
        "self_extend(8, 64)",
    ]  # fmt: skip
    bounded = Windowed(512, is_bounded=True)
    assert [bounded.label(9000, held) for held in (512, 513)] == ["compact", "self_extend(2, 64)"]


@pytest.mark.parametrize("trained", [1, 2, 7, 8])
def test_a_trained_length_of_few_tokens_is_kept_too(trained: int) -> None:
    held = torch.arange(30, dtype=torch.int32)[None, None]
    for row in distances(Windowed(trained, is_bounded=False), held, range(24, 30)):
        assert max(row) < trained
        assert row[-1] == 0


def test_without_a_trained_length_all_is_read_as_it_stands() -> None:
    assert Auto().within(None, True) == Original()
    assert Auto().within(9, True) == Windowed(9, True)
    assert Original().within(9, True) == Original()


def reads(model: PreTrainedModel, ids: Tensor, chunk: int, mode: str, budget: int | None, policy: Policy) -> Tensor:
    cache = KVCache(model, budget, policy, sinks=2, window=3, positions=mode)
    return read(model, cache, ids, chunk)


@pytest.mark.parametrize("chunk", [1, 3, 37, 131])
def test_a_full_cache_reads_the_same_in_any_chunks(short: PreTrainedModel, text: Text, chunk: int) -> None:
    ids = text(TOKENS)
    logits = reads(short, ids, chunk, "auto", None, Recent())
    torch.testing.assert_close(logits, reads(short, ids, 16, "auto", None, Recent()), atol=2e-5, rtol=0)
    inside = reads(short, ids[:, :TRAINED], chunk, "original", None, Recent())
    torch.testing.assert_close(logits[:, :TRAINED], inside, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("budget", "mode"), [(12, "compact"), (None, f"self_extend(2, {NEAR})")])
def test_each_token_is_read_as_by_the_explicit_modes(
    short: PreTrainedModel, text: Text, budget: int | None, mode: str
) -> None:
    """Token by token, a cache whose mode is exchanged by hand at the first token beyond the trained length."""
    ids = text(70)
    ours = KVCache(short, budget, KeyDiff(), sinks=2, window=3)
    truth = KVCache(short, budget, KeyDiff(), sinks=2, window=3, positions="original")
    for at in range(70):
        if at == TRAINED:
            truth.positions = mode
        own, other = (read(short, cache, ids[:, at : at + 1], 1) for cache in (ours, truth))
        assert torch.equal(own, other), at
    assert ("now compact" if budget else f"now {mode}") in ours.describe()


@pytest.mark.parametrize("policy", [KeyDiff(), H2O()], ids=str)
@pytest.mark.parametrize("budget", [None, 12, 60])
def test_rows_on_both_sides_are_read_as_alone(
    short: PreTrainedModel, text: Text, policy: Policy, budget: int | None
) -> None:
    ids = text(90, rows=3)
    lengths = (9, 36, 85)
    mask = torch.tensor([[1] * n + [0] * (85 - n) for n in lengths])
    cache = KVCache(short, budget, policy, sinks=2, window=3, batch=3)
    with torch.no_grad():
        prompt = short(torch.where(mask > 0, ids[:, :85], 0), attention_mask=mask, past_key_values=cache).logits
        after = torch.cat([short(ids[:, at : at + 1], past_key_values=cache).logits for at in range(80, 88)], 1)
    for row, length in enumerate(lengths):
        alone = KVCache(short, budget, policy, sinks=2, window=3)
        whole = read(short, alone, ids[row : row + 1, :length], 99)
        torch.testing.assert_close(prompt[row, :length], whole[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(after[row], read(short, alone, ids[row : row + 1, 80:88], 1)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("budget", [None, 12])
@pytest.mark.parametrize("back", [1, 3, 6])
def test_what_is_rolled_back_across_the_change_is_read_again_alike(
    short: PreTrainedModel, text: Text, budget: int | None, back: int
) -> None:
    ids = text(60)
    cache = KVCache(short, budget, KeyDiff(), sinks=2, window=3)
    truth = read(short, cache, ids[:, :43], 1)[:, 43 - back :]
    cache.rollback(back)
    torch.testing.assert_close(read(short, cache, ids[:, 43 - back : 43], 1), truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [None, 12])
def test_a_file_and_a_copy_go_on_across_the_change(
    short: PreTrainedModel, text: Text, tmp_path: Path, budget: int | None
) -> None:
    ids = text(60)
    cache = KVCache(short, budget, KeyDiff(), sinks=2, window=3)
    read(short, cache, ids[:, :38], 1)
    cache.save(tmp_path / "a.st")
    loaded, twin = KVCache.load(tmp_path / "a.st", short), copy.deepcopy(cache)
    assert loaded.positions == Auto()
    truth = read(short, cache, ids[:, 38:], 1)
    torch.testing.assert_close(read(short, loaded, ids[:, 38:], 1), truth, atol=1e-5, rtol=0)
    assert torch.equal(read(short, twin, ids[:, 38:], 1), truth)


def test_a_text_that_is_cut_back_is_inside_again(short: PreTrainedModel, text: Text) -> None:
    ids = text(60)
    cache = KVCache(short)
    read(short, cache, ids, 7)
    cache.drop(30, 60)
    truth = KVCache(short, positions="original")
    read(short, truth, ids[:, :30], 7)
    ours, theirs = (read(short, each, ids[:, 40:50], 5) for each in (cache, truth))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_an_export_beyond_the_trained_length_is_compact(short: PreTrainedModel, text: Text) -> None:
    cache = KVCache(short, 12, Recent(), sinks=2, window=3)
    read(short, cache, text(50), 1)
    ours = cache.to_rotated()
    cache.positions = "compact"
    for mine, theirs in zip(ours.layers, cache.to_rotated().layers, strict=True):
        assert mine.keys is not None
        assert theirs.keys is not None
        assert torch.equal(mine.keys, theirs.keys)


def test_layers_with_a_sliding_window_are_untouched(text: Text) -> None:
    config = tiny_model("mistral").config
    config.max_position_embeddings = TRAINED
    torch.manual_seed(8)
    model = windlass.attach(AutoModelForCausalLM.from_config(config).eval())
    ids = text(80)
    assert torch.equal(reads(model, ids, 7, "auto", None, Recent()), reads(model, ids, 7, "original", None, Recent()))


def test_describe_says_when_a_full_cache_reads_beyond(short: PreTrainedModel, text: Text) -> None:
    cache = KVCache(short, positions="original")
    read(short, cache, text(TRAINED), 9)
    assert "trained" not in cache.describe()
    read(short, cache, text(1), 1)
    assert "41 tokens are more than the 40 this model was trained on" in cache.describe()
