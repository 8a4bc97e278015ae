"""A decode step with a recall store in one call, against plain PyTorch, with every instruction set."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.stores import packed_as
from windlass.core.inputs import (
    TILE,
    DecodeInput,
    DecodeSlots,
    Digests,
    PackedStates,
    Ranking,
    RecallPiece,
    RecallSlots,
    Retention,
    TiledKeys,
    Visibility,
    words_of,
)
from windlass.core.parse import PAGE
from windlass.core.positions import EMPTY
from windlass.kernels import cpu
from windlass.kernels import reference as reference_decode
from windlass.kernels.cpu.decode import Decode
from windlass.kernels.cpu.slots import keys_of

BATCH, KV_HEADS, GROUP, SLOTS, HELD, HEAD_DIM, VALUE_DIM, PAIRS = 2, 3, 5, 71, 19, 36, 20, 7
LENGTHS = (141, 118)  # tokens of the rows. The second row's next one is padding
PIECES = (96, 64)  # tokens that the pieces have room for
DIGESTS = (32, 32)  # pages
PAGES = 4
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}
STORES = ["plain", "int8", "int4"]


class Draw:
    """The same random slots and store each time."""

    def __init__(
        self,
        store: str,
        dtype: torch.dtype,
        score_heads: int,
        has_means: bool,
        candidates: int | None = None,
        slots: str = "plain",
    ) -> None:
        self.draw = torch.Generator().manual_seed(score_heads)
        self.dtype, self.store = dtype, store
        means = self.normal(KV_HEADS, HEAD_DIM) if has_means else None
        pieces = tuple(self.piece(size, means) for size in PIECES)
        digests = tuple(
            Digests(self.piece(size, means).keys, self.piece(size, means).keys)
            for size in (DIGESTS if candidates is not None else ())
        )
        remembered = torch.arange(sum(PIECES), dtype=torch.int32).expand(BATCH, -1).clone()
        for row, length in enumerate(LENGTHS):
            remembered[row, length:] = EMPTY
        remembered[0, 40:61] = EMPTY
        angles = torch.rand(200, PAIRS, generator=self.draw) * 6
        turn = angles[128].cos(), angles[128].sin()
        self.positions = torch.full((BATCH, score_heads, SLOTS), EMPTY, dtype=torch.int32)
        numbers = torch.rand(self.positions.shape, generator=self.draw)
        for row, head in product(range(BATCH), range(score_heads)):
            at = torch.randperm(SLOTS, generator=self.draw)[:HELD]
            self.positions[row, head, at] = torch.randperm(LENGTHS[row], generator=self.draw)[:HELD].int()
            numbers[row, head, at] = self.positions[row, head, at].float()
        self.state = torch.rand(numbers.shape, generator=self.draw), numbers
        self.fixed = DecodeSlots(
            self.held(slots, SLOTS, HEAD_DIM, means, 16),
            self.held(slots, SLOTS, VALUE_DIM, None, 16),
            score_heads,
            (angles.cos(), angles.sin()),
            0.3,
            Visibility(),
            retention=Retention(Ranking("sum", "state"), HELD, 1, 2) if score_heads > 1 else None,
            recall=RecallSlots(pieces, remembered, self.none_recalled(), PAGES, turn, 1, digests, candidates or 0),
        )

    def none_recalled(self) -> Tensor:
        """As it is before the first step: numbers that no position is."""
        return torch.full((BATCH, KV_HEADS, PAGES * PAGE), -77, dtype=torch.int32)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw)

    def held(self, store: str, tokens: int, width: int, means: Tensor | None, group: int) -> PackedStates:
        return packed_as(store, self.normal(BATCH, KV_HEADS, tokens, width).to(self.dtype), means, group)

    def piece(self, tokens: int, means: Tensor | None) -> RecallPiece:
        keys = self.held(self.store, tokens, HEAD_DIM, means, 16)
        values = self.held(self.store, tokens, VALUE_DIM, None, 16)
        tiles = words_of(keys.data).unflatten(2, (-1, TILE)).transpose(3, 4).contiguous()
        none = replace(keys, data=keys.data[:, :, :0])
        return RecallPiece(TiledKeys(tiles, none), values)

    def new(self, is_recalling: bool) -> DecodeInput:
        widths = (KV_HEADS * GROUP, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)
        queries, keys, values = (self.normal(BATCH, 1, *width).to(self.dtype).transpose(1, 2) for width in widths)
        positions = torch.tensor([[LENGTHS[0]], [EMPTY]])
        ends, lengths = torch.tensor([LENGTHS[0] + 1, LENGTHS[1]]), torch.tensor(LENGTHS)
        asked = self.positions, self.state, ends, True, True
        return DecodeInput(
            2 * queries, keys, values, positions, *asked, remembered=lengths, is_recalling=is_recalling
        )  # fmt: skip

    def store_tensors(self) -> list[Tensor]:
        assert self.fixed.recall is not None
        held = [(piece.keys.tiles, piece.keys.states.scales) for piece in self.fixed.recall.pieces]
        held += [(piece.values.data, piece.values.scales) for piece in self.fixed.recall.pieces]
        held += [(each.tiles, each.states.scales) for each in keys_of(self.fixed.recall.digests)]
        return [tensor for pair in held for tensor in pair if tensor is not None]


@pytest.mark.parametrize("instruction_set", cpu.instruction_sets())
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("slots", STORES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("score_heads", "has_means"), [(1, True), (KV_HEADS, False)])
@pytest.mark.parametrize("is_recalling", [True, False])
@pytest.mark.parametrize("candidates", [11, 0, None])
def test_a_step_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    instruction_set: str,
    store: str,
    slots: str,
    dtype: torch.dtype,
    score_heads: int,
    has_means: bool,
    is_recalling: bool,
    candidates: int | None,
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: instruction_set)
    ours, truth = (Draw(store, dtype, score_heads, has_means, candidates, slots) for _ in range(2))
    before = [tensor.clone() for tensor in truth.store_tensors()]
    new, same = ours.new(is_recalling), truth.new(is_recalling)
    done, wanted = Decode(ours.fixed, new.queries)(new), reference_decode.decode(truth.fixed, same)
    assert done.written.equal(wanted.written)
    assert done.slot_positions.equal(wanted.slot_positions)
    assert all(its.equal(one) for its, one in zip(ours.store_tensors(), truth.store_tensors(), strict=True))
    assert not all(map(torch.equal, before, truth.store_tensors()))
    close: dict[str, Any] = {"atol": TOLERANCE[dtype] * 10, "rtol": TOLERANCE[dtype]}
    for its, one in ((ours.fixed.keys, truth.fixed.keys), (ours.fixed.values, truth.fixed.values)):
        torch.testing.assert_close(its.floats(), one.floats(), **close)
    torch.testing.assert_close(done.out[:1], wanted.out[:1], **close)
    assert done.mass is not None
    assert wanted.mass is not None
    torch.testing.assert_close(done.mass.rows, wanted.mass.rows, atol=1e-2 * TOLERANCE[dtype] ** 0.5, rtol=1e-2)
    assert done.state[1].equal(wanted.state[1])
    assert ours.fixed.recall is not None
    assert truth.fixed.recall is not None
    recalled = ours.fixed.recall.last_recalled
    assert recalled.equal(truth.fixed.recall.last_recalled)
    assert is_recalling == bool((recalled >= 0).any())
    assert is_recalling or bool((recalled == -77).all()), "left as it was"
    kept = float(done.mass.rows[0].sum()) / (KV_HEADS * GROUP)  # recalled tokens got the rest
    assert kept < 0.9 if is_recalling else kept > 0.99


def test_what_is_recalled_is_read() -> None:
    """A token that is in no slot, and has all that a query asks for, gives its value."""
    case = Draw("plain", torch.float32, KV_HEADS, False)
    assert case.fixed.recall is not None
    piece, at = case.fixed.recall.pieces[1], 104 - PIECES[0]  # a token of the first row
    keys, values = torch.full((HEAD_DIM,), 30.0), torch.arange(float(VALUE_DIM))
    piece.keys.tiles[0, :, at // TILE, :, at % TILE] = words_of(keys[None, None, None])[0, 0, 0]
    piece.values.data[0, :, at] = values
    case.positions[0][case.positions[0] == 104] = EMPTY
    fixed = DecodeSlots(**{**vars(case.fixed), "tables": None})
    new = case.new(is_recalling=True)
    new.queries.fill_(1.0)
    held = case.fixed.recall
    still = RecallSlots(held.pieces, held.positions, held.last_recalled, PAGES, None, 1)
    done = Decode(DecodeSlots(**{**vars(fixed), "recall": still}), new.queries)(new)
    torch.testing.assert_close(done.out[0], values.expand_as(done.out[0]))
    assert bool((held.last_recalled[0] == 104).any(-1).all()), "every head says so"
