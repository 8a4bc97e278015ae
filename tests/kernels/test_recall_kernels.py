"""The scan of evicted tokens: every instruction set and format against products of whole keys."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.helpers.recall_calls import FORMATS, call_of, piece, read_of, tiles_of
from tests.helpers.recalls import digests_of
from windlass import kernels
from windlass.core.inputs import BestPages, Digests, PackedStates, PageInput, ReadInput, TiledKeys, WriteInput
from windlass.core.parse import PAGE
from windlass.kernels import cpu, reference
from windlass.kernels.cpu import slots


@pytest.mark.parametrize("instructions", cpu.instruction_sets())
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("channels", "queries", "score_heads"), [(64, 1, 3), (10, 3, 1), (48, 2, 1), (128, 2, 3), (288, 1, 1), (6, 7, 3)]
)
@pytest.mark.parametrize("candidates", [0, 21, 33, 140])
def test_kernels_match_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    instructions: str,
    format: str,
    channels: int,
    queries: int,
    score_heads: int,
    candidates: int,
) -> None:
    monkeypatch.setattr(slots, "instruction_set", lambda: instructions)
    call = call_of(format, channels, queries, score_heads, candidates=candidates)
    assert slots.can_scan((*call.pieces, *slots.keys_of(call.digests)))
    ours, truth = slots.best_pages(call), reference.best_pages(call)
    # Some are worth the same but for rounding, so their order may differ.
    assert ours.pages.sort().values.equal(truth.pages.sort().values)
    assert read_of(ours).equal(read_of(truth))
    assert 0.2 < float(ours.is_read.float().mean()) < 0.9


def test_a_digest_has_the_largest_and_the_least_of_the_tokens_of_a_page() -> None:
    keys = torch.randn(2, 3, 4, PAGE, 6, generator=torch.Generator().manual_seed(7))
    is_token = torch.ones(2, 3, 4, PAGE, dtype=torch.bool)
    is_token[1, :, 2, 3:] = False
    is_token[0, :, 1, 1:] = False
    largest, least = reference.digest_of(keys, is_token)
    for row, page, tokens in ((0, 0, 8), (0, 1, 1), (0, 2, 8), (1, 1, 8), (1, 2, 3), (1, 3, 8)):
        assert largest[row, :, page].equal(keys[row, :, page, :tokens].max(1).values)
        assert least[row, :, page].equal(keys[row, :, page, :tokens].min(1).values)


@pytest.mark.parametrize("best_pages", [slots.best_pages, reference.best_pages])
def test_no_page_has_more_than_its_digest_allows(best_pages: Callable[[PageInput], BestPages]) -> None:
    """So the page of the largest product is the best one, as soon as few others are allowed more."""
    keys = torch.randn(1, 1, 1024, 12, generator=torch.Generator().manual_seed(9))
    largest, least = (torch.nn.functional.pad(each, (0, 0, 0, 64)) for each in digests_of(keys))
    queries = torch.randn(1, 5, 1, 12, generator=torch.Generator().manual_seed(10))
    held = [TiledKeys(tiles_of(each), PackedStates(each[:, :, :0])) for each in (keys, largest, least)]
    text = torch.arange(1024, dtype=torch.int32)[None], torch.full((1, 1, 1), -1.0), 1
    for query in range(5):
        asked, is_query = queries[:, query : query + 1], torch.ones(1, 1, dtype=torch.bool)
        products = (keys[0, 0] @ asked[0, 0, 0]).unflatten(0, (-1, PAGE)).amax(1)
        allowed = torch.maximum(asked[0, 0] * largest[0, 0, :128], asked[0, 0] * least[0, 0, :128]).sum(1)
        assert (allowed >= products).all()
        needed = int((allowed >= products.max()).sum())
        assert 1 <= needed < 128
        call = PageInput(asked, is_query, (held[0],), *text, (Digests(held[1], held[2]),), needed)
        assert best_pages(call).pages.tolist() == [[[int(products.argmax())]]]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_read_out_of_tiles_and_pieces(format: str) -> None:
    pieces = call_of(format, 10, 1).pieces
    index = torch.randint(1120, (2, 3, 40), generator=torch.Generator().manual_seed(5))
    for is_tiled in (True, False):
        states = tuple(each.tiles if is_tiled else each.packed().data.contiguous() for each in pieces)
        call = ReadInput(states, index, is_tiled)
        assert slots.read_tokens(call).equal(reference.read_tokens(call))


def test_an_odd_number_of_tiles_is_left_to_the_reference() -> None:
    call = call_of("bfloat16", 10, 1)
    odd = piece(48, "bfloat16", 10, 1, None)
    assert not slots.can_scan((*call.pieces, odd))


def test_a_page_with_a_poor_digest_is_not_looked_at() -> None:
    call = call_of("float32", 10, 1, candidates=20)
    of_all = reference.best_pages(replace(call, digests=()))
    assert reference.best_pages(replace(call, candidates=140)).pages.equal(of_all.pages)
    assert not reference.best_pages(call).pages.equal(of_all.pages)


def test_the_reference_by_hand() -> None:
    keys = torch.zeros(1, 1, 32, 2)
    keys[0, 0, 3], keys[0, 0, 5], keys[0, 0, 12] = torch.tensor([2.0, 1.0]), torch.tensor([9.0, 0.0]), torch.ones(2)
    keys[0, 0, 30] = torch.tensor([-1.0, 0.0])
    positions, kept = torch.arange(32, dtype=torch.int32)[None], torch.tensor([[[-1.0, 5.0]]])
    positions[0, 31] = -1
    queries = torch.tensor([[[[1.0, 3.0], [5.0, 5.0]], [[-1.0, 0.0], [0.0, 0.0]]]])
    pieces = (TiledKeys(tiles_of(keys), PackedStates(keys[:, :, :0])),)
    # Without the kept token 5: the pages' peaks are 5, 4, 0, 0 for query 0 of head 0, and 0, 0, 0, 1 for head 1.
    is_query = torch.tensor([[True, False]])
    best = reference.best_pages(PageInput(queries, is_query, pieces, positions, kept, 3))
    assert best.pages.tolist() == [[[0, 3, 1]]]
    is_read = [[True] * 5 + [False] + [True] * 2, [True] * 7 + [False], [True] * 8]
    assert best.is_read.view(3, PAGE).tolist() == is_read


@pytest.mark.parametrize("best_pages", [slots.best_pages, reference.best_pages])
def test_pages_that_are_all_but_certain_are_told_apart(best_pages: Callable[[PageInput], BestPages]) -> None:
    """Each is the only one that matters to a query: its share is 1 in float32, and the surest comes first."""
    keys, sure = torch.zeros(1, 1, 32, 4), torch.tensor([19.0, 25.0, 17.0, 23.0])
    for page in range(4):
        keys[0, 0, page * PAGE + page, page] = 1.0
    queries = (torch.eye(4) * sure[:, None])[None, None]
    assert queries[0, 0].log_softmax(-1).diagonal().unique().numel() < 4
    text = torch.arange(32, dtype=torch.int32)[None], torch.full((1, 1, 1), -1.0)
    pieces, is_query = (TiledKeys(tiles_of(keys), PackedStates(keys[:, :, :0])),), torch.ones(1, 4, dtype=torch.bool)
    assert best_pages(PageInput(queries, is_query, pieces, *text, 4)).pages.tolist() == [
        [sure.argsort(descending=True).tolist()]
    ]


@pytest.mark.parametrize("best_pages", [slots.best_pages, reference.best_pages])
def test_one_page_alone_may_be_recalled(best_pages: Callable[[PageInput], BestPages]) -> None:
    call = call_of("float32", 64, 2)
    positions = torch.full_like(call.positions, -1)
    positions[:, 803] = 5
    found = best_pages(replace(call, positions=positions, kept_index=torch.full_like(call.kept_index, -1)))
    assert found.pages[..., 0].unique().tolist() == [803 // PAGE]
    assert found.is_read.sum(-1).unique().tolist() == [1]


@pytest.mark.parametrize("format", FORMATS)
def test_the_fast_kernels_are_those_that_are_called(monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    call = call_of(format, 64, 1)
    monkeypatch.setattr(reference, "best_pages", None)
    monkeypatch.setattr(reference, "read_tokens", None)
    assert kernels.best_pages(call).pages.shape == (2, 3, 20)
    assert kernels.read_tokens(ReadInput((call.pieces[0].tiles,), torch.zeros(2, 3, 4, dtype=torch.long), True)).any()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_tiled", [True, False])
def test_rows_are_written_into_tiles_and_pieces(format: str, is_tiled: bool) -> None:
    """Runs within a piece and over its end, with gaps, single tokens, none, and other ones in each row."""
    pieces = call_of(format, 10, 1).pieces
    states = tuple(each.tiles if is_tiled else each.packed().data.contiguous() for each in pieces)
    runs = [*range(1050, 1061), -1, -1, 7, 9, *range(15, 19)]
    for other in (runs, [-1] * 19, [-1, *range(1100, 1118)], [*range(19)], [0, 1, 2, -1, *range(4, 19)]):
        index = torch.tensor([runs, other])
        source = torch.randint(1120, (2, 3, 19), generator=torch.Generator().manual_seed(5))
        rows = reference.read_tokens(ReadInput(states, source, is_tiled))
        ours, truth = (tuple(piece.clone() for piece in states) for _ in range(2))
        kernels.write_tokens(WriteInput(ours, index, rows, is_tiled))
        reference.write_tokens(WriteInput(truth, index, rows, is_tiled))
        for mine, true in zip(ours, truth, strict=True):
            assert mine.equal(true)
