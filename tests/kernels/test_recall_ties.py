"""Pages of repeated tokens: which of them are recalled is decided by their order, in a batch as alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.recall_calls import tiles_of
from windlass import kernels
from windlass.core.inputs import BestPages, Digests, PackedStates, PageInput, TiledKeys
from windlass.core.parse import PAGE
from windlass.kernels import reference

ROWS, HEADS, TOKENS, CHANNELS, COUNT = 9, 3, 640, 24, 20
BACKENDS = [reference.best_pages, kernels.best_pages]


def tiled(keys: Tensor) -> TiledKeys:
    return TiledKeys(tiles_of(keys), PackedStates(keys[:, :, :0]))


def repeated(noise: float, candidates: int) -> PageInput:
    """A text of 6 tokens, again and again: the keys of one token differ by `noise`, as rounding has them differ."""
    draw = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 6, (ROWS, TOKENS), generator=draw)
    ids[:, 200:] = ids[:, :PAGE].repeat(1, 55)  # whole pages, too
    keys = torch.randn(HEADS, 6, CHANNELS, generator=draw)[:, ids].transpose(0, 1)
    keys = (keys * (1 + noise * torch.randn(keys.shape, generator=draw))).contiguous()
    queries = 3 * torch.randn(1, 15, 5, CHANNELS, generator=draw).expand(ROWS, -1, -1, -1)
    positions = torch.arange(TOKENS, dtype=torch.int32).expand(ROWS, -1).contiguous()
    kept = torch.stack([torch.randperm(TOKENS, generator=draw)[:31] for _ in range(ROWS)])[:, None].float()
    pages = keys.unflatten(2, (-1, PAGE))
    bounds = [torch.nn.functional.pad(each, (0, 0, 0, 16)) for each in (pages.amax(3), pages.amin(3))]
    digests = (Digests(*map(tiled, bounds)),) if candidates else ()
    is_query = torch.ones(ROWS, 5, dtype=torch.bool)
    return PageInput(queries, is_query, (tiled(keys),), positions, kept, COUNT, digests, candidates)


def row_of(call: PageInput, row: int) -> PageInput:
    def own(keys: TiledKeys) -> TiledKeys:
        states = replace(keys.states, data=keys.states.data[row : row + 1])
        return TiledKeys(keys.tiles[row : row + 1].contiguous(), states)

    return replace(
        call,
        queries=call.queries[row : row + 1],
        is_query=call.is_query[row : row + 1],
        pieces=tuple(map(own, call.pieces)),
        positions=call.positions[row : row + 1],
        kept_index=call.kept_index[row : row + 1],
        digests=tuple(Digests(own(each.largest), own(each.least)) for each in call.digests),
    )


@pytest.mark.parametrize("candidates", [0, 40])
@pytest.mark.parametrize("best_pages", BACKENDS, ids=["reference", "compiled"])
def test_rounding_decides_nothing_among_pages_of_repeated_tokens(
    best_pages: Callable[[PageInput], BestPages], candidates: int
) -> None:
    """The same pages, whatever the last bits of keys and products are, and however many rows there are."""
    exact = reference.best_pages(repeated(0.0, candidates)).pages.sort(-1).values
    for noise in (0.0, 1e-7, -1e-7):
        call = repeated(noise, candidates)
        together = best_pages(call).pages.sort(-1).values
        assert together.equal(exact)
        for row in range(ROWS):
            assert best_pages(row_of(call, row)).pages.sort(-1).values.equal(exact[row : row + 1])


@pytest.mark.parametrize("best_pages", BACKENDS, ids=["reference", "compiled"])
def test_of_equal_pages_the_earlier_ones_are_recalled(best_pages: Callable[[PageInput], BestPages]) -> None:
    call = repeated(0.0, 0)
    keys = torch.ones(ROWS, HEADS, TOKENS, CHANNELS)
    alike = replace(call, pieces=(tiled(keys),), kept_index=torch.full((ROWS, 1, 1), -1.0))
    assert best_pages(alike).pages.equal(torch.arange(COUNT).expand(ROWS, HEADS, -1))
