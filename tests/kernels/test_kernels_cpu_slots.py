"""The compiled book-keeping of slots against the reference: which are free, which go, and writing to them."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.inputs import EvictionInput
from windlass.kernels import cpu, reference
from windlass.kernels.cpu import slots
from windlass.kernels.reference import total_order

# Every test here runs compiled code, of which there is none where no compiler was found at installation.
if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

FLOAT32_MAX = torch.finfo(torch.float32).max
SLOTS = st.integers(1, 33)
SCORES = st.floats(width=32) | st.sampled_from(
    [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, FLOAT32_MAX, -FLOAT32_MAX]
)


@st.composite
def scored_slots(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and positions (batch 2, score_heads 3, slots), and one past each row's newest token."""
    slots = draw(SLOTS)
    many: dict[str, Any] = {"min_size": 6 * slots, "max_size": 6 * slots}
    score = torch.tensor(draw(st.lists(SCORES, **many)))
    where = torch.tensor(draw(st.permutations(range(6 * slots)))) if slots < 5 else torch.randperm(6 * slots)
    free = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 0, -1, -2]), **many)))
    where = where.where(free == 0, free).reshape(2, 3, slots)
    return score.reshape(2, 3, slots), where.int(), where.flatten(1).amax(1).clamp(min=-1) + 1


NUMBERS, LIMITS = st.integers(0, 9), st.none() | st.integers(1, 40)


@given(scored_slots(), NUMBERS, NUMBERS, LIMITS, LIMITS, st.integers(0, 10**6))
@settings(max_examples=300, deadline=None)
def test_lowest_takes_the_first_of_the_total_order(
    step: tuple[Tensor, Tensor, Tensor],
    sinks: int,
    window: int,
    sliding_window: int | None,
    attention_chunk: int | None,
    count: int,
) -> None:
    count %= step[0].shape[-1] + 1
    call = EvictionInput(*step, sinks, window, sliding_window, count, attention_chunk)
    order, chosen = total_order(call), slots.lowest(call)
    assert chosen.sort(-1).values.diff(dim=-1).ne(0).all()
    assert order.gather(-1, chosen).sort(-1).values.equal(order.sort(-1).values[..., :count])


def test_what_no_later_token_sees_goes_first() -> None:
    """The next token, at 23, sees from 20 on: the rest of its chunk of 10. At 30 it would see nothing of all this."""
    where = torch.tensor([[[22, 3, 20, 19, -1, 21, 18]], [[29, 27, 0, -1, 25, 24, 28]]]).int()
    score = torch.tensor([[[1.0, 9.0, 2.0, 8.0, 0.0, 3.0, 7.0]], [[1.0, 9.0, 2.0, 8.0, 0.0, 3.0, 7.0]]])
    for lowest in (slots.lowest, reference.lowest):
        found = lowest(EvictionInput(score, where, torch.tensor([23, 30]), 4, 2, None, 5, 10))
        assert found.sort(-1).values.tolist() == [[[1, 2, 3, 4, 6]], [[1, 2, 3, 4, 5]]]


@pytest.mark.parametrize("count", [3, 5, 9, 40, 69])
def test_of_tokens_that_share_a_position_and_a_score_the_lower_slots_go(count: int) -> None:
    """Few of many are found by a heap, more of them by a selection."""
    where = torch.stack([torch.randint(0, 4, (71,)) for _ in range(6)]).view(2, 3, 71).int()
    score = torch.randint(0, 3, where.shape).float()
    call = EvictionInput(score, where, torch.tensor([9, 8]), 1, 2, None, count)
    scores = score.masked_fill(where < 1, 9.0).flatten(0, 1).tolist()  # position 0 is a sink
    rows = [sorted(zip(*row, range(71), strict=True)) for row in zip(scores, where.flatten(0, 1).tolist(), strict=True)]
    truth = torch.tensor([[slot for *_, slot in row[:count]] for row in rows]).view(2, 3, count)
    for lowest in (slots.lowest, reference.lowest):
        assert lowest(call).sort(-1).values.equal(truth.sort(-1).values)


@given(scored_slots(), st.integers(0, 10**6))
@example((torch.zeros(2, 3, 2), torch.tensor([[[-2, -1]] * 3, [[5, -2]] * 3]).int(), torch.tensor([0, 6])), 2)
@settings(max_examples=200, deadline=None)
def test_first_free_and_argsort_positions_equal_the_reference(step: tuple[Tensor, Tensor, Tensor], count: int) -> None:
    where, count = step[1], count % (step[1].shape[-1] + 1)
    assert slots.first_free(where, count).equal(reference.first_free(where, count))
    ours, truth = (
        where.clamp(min=-1).gather(-1, kernel(where))
        for kernel in (slots.argsort_positions, reference.argsort_positions)
    )
    assert ours.equal(truth)
    assert slots.argsort_positions(where).sort(-1).values.equal(torch.arange(where.shape[-1]).expand_as(where))


@pytest.mark.parametrize("score_heads", [1, 3])
@pytest.mark.parametrize("part", [(torch.float32, 7), (torch.bfloat16, 8), (torch.uint8, 5), (torch.half, 1)], ids=str)
def test_write_equals_the_reference(score_heads: int, part: tuple[torch.dtype, int]) -> None:
    dtype, width = part
    ours = (torch.randn(2, 3, 11, width) * 50).to(dtype)
    truth = ours.clone()
    index = torch.stack([torch.randperm(11)[:4] for _ in range(2 * score_heads)]).reshape(2, score_heads, 4)
    for new in (torch.randn(2, 4, 3, width).transpose(1, 2) * 50, torch.ones(2, 3, 4, 1).expand(2, 3, 4, width)):
        new = new.to(dtype) if dtype == torch.uint8 else new
        slots.write(ours, index.flip(0), new)
        reference.write(truth, index.flip(0), new)
        assert ours.equal(truth)
