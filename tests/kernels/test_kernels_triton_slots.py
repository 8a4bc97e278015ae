"""The book-keeping of slots in Triton against the reference, in its interpreter, and on a GPU where there is one."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from windlass.core.inputs import EvictionInput
from windlass.kernels import reference
from windlass.kernels.reference import total_order
from windlass.kernels.triton import slots
from windlass.kernels.triton import slots as codes

BATCH = 2
FLOAT32_MAX = torch.finfo(torch.float32).max
SCORES = st.floats(width=32) | st.sampled_from(
    [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, FLOAT32_MAX, -FLOAT32_MAX]
)
Step = tuple[Tensor, Tensor, Tensor]
of_examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True, params=["interpreter", pytest.param("device", marks=pytest.mark.gpu)])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Device of tensors. Blocks are small, so that few slots are more than one."""
    is_device = request.param == "device"
    if not is_device and torch.cuda.is_available():
        pytest.skip("with a GPU, kernels are compiled")
    monkeypatch.setattr(slots, "BLOCK", 16)
    monkeypatch.setattr(slots, "MAX_REGISTER_SLOTS", 32)
    return torch.device("cuda" if is_device else "cpu")


@st.composite
def scored_slots(draw: st.DrawFn) -> Step:
    """Scores and positions (batch 2, score_heads 1 or 3, slots), and one past each row's newest token."""
    score_heads, count = draw(st.sampled_from([1, 3])), draw(st.integers(1, 45))
    many = BATCH * score_heads * count
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    specials = torch.tensor(draw(st.lists(SCORES, min_size=5, max_size=5)))
    score = specials[torch.randint(5, (many,), generator=generator)]
    score = torch.where(torch.rand(many, generator=generator) < 0.6, score, torch.randn(many, generator=generator))
    free = torch.tensor([0, 0, 0, -1, -2])[torch.randint(5, (many,), generator=generator)]
    free = free.reshape(BATCH, score_heads, count)
    where = torch.rand(BATCH, score_heads, count, generator=generator).argsort(-1).where(free == 0, free)
    return score.view_as(where), where.int(), where.flatten(1).amax(1).clamp(min=-1) + 1


LIMIT = st.none() | st.integers(1, 40)
LIMITS = st.tuples(st.integers(0, 9), st.integers(0, 9), LIMIT, LIMIT)
TIES = (
    torch.tensor([0.0, -0.0, 0.0] * 6 + [torch.inf, FLOAT32_MAX, torch.inf] * 5).expand(BATCH, 1, 33),
    (torch.arange(33) // 2).int().expand(BATCH, 1, 33),
    torch.tensor([17, 17]),
)
FALLING = -torch.arange(33.0).expand(BATCH, 1, 33), torch.arange(33).int().expand(BATCH, 1, 33), torch.tensor([33, 33])


@pytest.mark.slow
@given(scored_slots(), LIMITS, st.integers(0, 10**6))
@example(TIES, (2, 3, None, None), 8)
@example(TIES, (2, 3, None, 6), 19)
@example(FALLING, (0, 0, 9, None), 25)  # exactly the tokens that no later token sees
@of_examples
def test_evict_reserves_the_first_of_the_total_order(
    on: torch.device, step: Step, limits: tuple[int, int, int | None, int | None], count: int
) -> None:
    score, where, ends = (tensor.to(on) for tensor in step)
    count %= score.shape[-1] + 1
    sinks, window, sliding_window, attention_chunk = limits
    order = total_order(EvictionInput(score, where, ends, sinks, window, sliding_window, count, attention_chunk))
    ours, truth = where.clone(), where.clone()
    index, before = slots.evict(EvictionInput(score, ours, ends, sinks, window, sliding_window, count, attention_chunk))
    assert index.diff(dim=-1).gt(0).all()
    assert order.gather(-1, index).sort(-1).values.equal(order.sort(-1).values[..., :count])
    assert before.equal(reference.reserve(truth, index))
    assert ours.equal(truth)
    assert where.gather(-1, index).equal(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_evict_reads_scores_of_any_type_and_layout(on: torch.device, dtype: torch.dtype) -> None:
    score = torch.randn(BATCH, 37, 1, dtype=dtype, device=on).transpose(1, 2).expand(-1, 3, -1)
    where = torch.stack([torch.randperm(37) for _ in range(BATCH * 3)]).view(BATCH, 3, 37).int().to(on)
    call = EvictionInput(score, where, torch.tensor([37, 37], device=on), 2, 3, None, 11)
    expected = reference.lowest(call).sort(-1).values
    assert slots.evict(call)[0].equal(expected)


def test_each_row_keeps_its_own_sinks(on: torch.device) -> None:
    where = torch.stack([torch.randperm(37) for _ in range(BATCH * 3)]).view(BATCH, 3, 37).int().to(on)
    score, sinks = where.float(), torch.tensor([14, 5], device=on)  # the first tokens are worth least
    call = EvictionInput(score, where, torch.tensor([37, 37], device=on), 2, 3, None, 11, None, sinks)
    assert torch.equal(where.gather(-1, reference.lowest(call)).amin((1, 2)).long(), sinks)
    expected = reference.lowest(call).sort(-1).values
    assert slots.evict(call)[0].equal(expected)


@pytest.mark.parametrize("count", [1, 12, 36])
def test_of_tokens_that_share_a_position_and_a_score_the_lower_slots_go(on: torch.device, count: int) -> None:
    where = torch.stack([torch.randint(0, 4, (37,)) for _ in range(BATCH * 3)]).view(BATCH, 3, 37).int().to(on)
    score = torch.randint(0, 3, where.shape, device=on).float()
    call = EvictionInput(score, where, torch.tensor([9, 8], device=on), 1, 2, None, count)
    expected = reference.lowest(call).sort(-1).values
    assert slots.evict(call)[0].equal(expected)


@given(scored_slots(), st.integers(0, 10**6))
@example((torch.zeros(2, 3, 2), torch.tensor([[[-2, -1]] * 3, [[5, -2]] * 3]).int(), torch.tensor([0, 6])), 2)
@of_examples
def test_first_free_equals_the_reference(on: torch.device, step: Step, count: int) -> None:
    where, count = step[1].to(on), count % (step[1].shape[-1] + 1)
    assert slots.first_free(where, count).equal(reference.first_free(where, count))


@given(scored_slots())
@example(TIES)
@of_examples
def test_argsort_positions_equals_the_reference(on: torch.device, step: Step) -> None:
    where = step[1].to(on)
    assert slots.argsort_positions(where).equal(reference.argsort_positions(where))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 70, 229])
def test_many_slots_span_many_blocks(on: torch.device, count: int) -> None:
    where = torch.stack([torch.randperm(230) for _ in range(BATCH)]).view(BATCH, 1, -1).int().to(on)
    where = where.masked_fill(where % 7 == 3, -1)
    assert slots.first_free(where, count).equal(reference.first_free(where, count))
    assert slots.argsort_positions(where).equal(reference.argsort_positions(where))
    score, ends = torch.randn(BATCH, 1, 230, device=on), torch.tensor([230, 229], device=on)
    call = EvictionInput(score, where, ends, 4, 99, 200, count)
    order = total_order(call)
    index, _ = slots.evict(replace(call, positions=where.clone()))
    assert order.gather(-1, index).sort(-1).values.equal(order.sort(-1).values[..., :count])


@pytest.mark.parametrize("score_heads", [1, 3])
def test_one_call_writes_parts_of_every_type_and_width(on: torch.device, score_heads: int) -> None:
    kinds = [(3, torch.bfloat16, 8), (3, torch.uint8, 5), (3, torch.float16, 1), (3, torch.float32, 7)]
    helds = [(torch.randn(BATCH, heads, 11, width) * 50).abs().to(on, dtype) for heads, dtype, width in kinds]
    helds += [torch.full((BATCH, score_heads, 11), -1, dtype=torch.int32, device=on)]
    helds += [torch.randn(BATCH, score_heads, 11, device=on) for _ in range(2)]
    news: list[Any]
    news = [torch.randn(BATCH, 4, 3, width).transpose(1, 2).mul(50).abs().to(on, dtype) for _, dtype, width in kinds]
    news[3] = torch.randn(BATCH, 3, 4, 1, device=on, dtype=torch.float64).expand(-1, -1, -1, 7)
    news += [torch.tensor([[5, 6, -1, 7], [9, -1, -1, 10]], device=on)[:, None].expand(-1, score_heads, -1)]
    news += [torch.tensor([[901, 2, 3, 4], [5, 6, 7, 8]], device=on)[:, None].expand(-1, score_heads, -1), 0.0]
    index = torch.stack([torch.randperm(11)[:4] for _ in range(BATCH * score_heads)]).view(BATCH, score_heads, 4).to(on)
    for at in (index, index.flip(0), index.mT.contiguous().mT):
        ours, truth = ([held.clone() for held in helds] for _ in range(2))
        slots.write_all(at, list(zip(ours, news, strict=True)))
        reference.write_all(at, list(zip(truth, news, strict=True)))
        for mine, true in zip(ours, truth, strict=True):
            assert mine.equal(true)


@pytest.mark.parametrize("group", [0, 16, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_codes_and_scales_are_those_of_the_reference_bit_for_bit(
    on: torch.device, dtype: torch.dtype, group: int
) -> None:
    states = (torch.randn(BATCH, 7, 3, 10) * torch.logspace(-9, 4, 7)[:, None, None]).to(on, dtype).transpose(1, 2)
    states[0, 0, 0] = 0.0
    # Codes between two whole numbers, under scales that are no powers of two, and two extremes.
    least = -8 if group else -128
    between = torch.cat((torch.full((3, 7, 1), least), torch.randint(least, -least - 1, (3, 7, 9)) + 0.5), -1)
    states[1] = (between * torch.rand(3, 7, 1).half().float()).to(states)
    states[0, 1, :, 0], states[0, 1, :, 9] = -1e7, 1e7
    for means in (None, torch.randn(3, 10).to(on, dtype)):
        ours, truth = codes.encode(states, means, group), reference.encode(states, means, group)
        assert ours[0].dtype == truth[0].dtype
        assert ours[0].equal(truth[0])
        assert ours[1].equal(truth[1])
