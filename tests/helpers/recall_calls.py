"""Calls of the scan of evicted tokens: random keys, some of them kept, some outside of the text."""

import torch
from torch import Tensor

from windlass.core.inputs import TILE, BestPages, Digests, Format, PackedStates, PageInput, TiledKeys, words_of
from windlass.core.parse import PAGE
from windlass.kernels import reference

FORMATS = ["float32", "bfloat16", "float16", "int8", "int4"]
SIZES = [1056, 64]  # tokens of the pieces
DIGESTS = [96, 64]  # and pages of the digests, 20 more than the tokens have


def tiles_of(rows: Tensor) -> Tensor:
    return words_of(rows).unflatten(2, (-1, TILE)).transpose(3, 4).contiguous()


def piece(tokens: int, format: str, channels: int, seed: int, means: Tensor | None) -> TiledKeys:
    """Random keys of 2 rows and 3 heads."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 3, tokens, channels, generator=generator) * torch.rand(2, 3, tokens, 1, generator=generator)
    if format.startswith("int"):
        group = 16 if format == "int4" else 0
        codes, scales = reference.encode(keys, means, group)
        states = PackedStates(codes[:, :, :0], Format(format), scales, means, group=group)
    else:
        codes = keys.to(getattr(torch, format))
        states = PackedStates(codes[:, :, :0])
    return TiledKeys(tiles_of(codes), states)


def call_of(
    format: str, channels: int, queries: int, score_heads: int = 3, count: int = 20, candidates: int = 0
) -> PageInput:
    generator = torch.Generator().manual_seed(3)
    means = torch.randn(3, channels, generator=generator) if channels != 64 else None
    pieces = tuple(piece(size, format, channels, size, means) for size in SIZES)
    positions = torch.arange(1120, dtype=torch.int32).where(torch.rand(2, 1120, generator=generator) < 0.6, -1)
    positions[0, 100:300] = -1
    kept = torch.stack([torch.randperm(1120, generator=generator)[:31] for _ in range(2 * score_heads)]).float()
    kept[:, ::7] = -1
    is_query = torch.ones(2, queries, dtype=torch.bool)
    is_query[1, 1:2] = False
    asked = torch.randn(2, 15, queries, channels, generator=generator)
    digests = tuple(
        Digests(piece(size, format, channels, size, means), piece(size, format, channels, size + 1, means))
        for size in (DIGESTS if candidates else [])
    )
    text = positions, kept.view(2, score_heads, 31), count
    return PageInput(asked, is_query, pieces, *text, digests, candidates)


def read_of(best: BestPages) -> Tensor:
    """Keys and values read of the pages, in the order of the text."""
    order = best.pages.argsort()[..., None].expand(-1, -1, -1, PAGE)
    return best.is_read.unflatten(-1, (-1, PAGE)).gather(2, order)
