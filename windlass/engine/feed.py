"""Passes of the model over token ids of the host."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.rotary_index import EMPTY
from windlass.core.step import Pass, Step
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache


@torch.no_grad()
def feed(model: PreTrainedModel, cache: KVCache, pieces: list[list[int]], columns: list[int], how: Pass) -> Tensor:
    """One step of the model over rows of different lengths; logits of `columns` only."""
    width = max(map(len, pieces))
    ids = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    mask = None
    if any(len(piece) < width for piece in pieces):
        mask = torch.tensor([[1] * len(piece) + [0] * (width - len(piece)) for piece in pieces], device=cache.device)
    return forward(model, ids, mask, cache, columns, how=how)


@torch.no_grad()
def feed_tokens(model: PreTrainedModel, cache: KVCache, tokens: Mapping[int, int]) -> Tensor:
    """One more token of some rows, by row, while the others idle; returns (batch, vocabulary) logits."""
    rows, device = cache.rows, cache.device
    each = [[tokens[row]] if row in tokens else [] for row in range(cache.batch_size)]
    ids = torch.tensor([own or [0] for own in each], device=device)
    is_fed = torch.tensor([bool(own) for own in each], device=device)
    starts = torch.tensor(rows.next_positions, device=device)
    step = Step(
        starts.where(is_fed, EMPTY)[:, None],
        tuple(map(len, each)),
        starts + is_fed,
        torch.tensor(rows.prompt_ends, device=device),
        max(rows.next_positions) + 1,
        ids,
        sinks=rows.sinks(device),
    )
    return forward(model, ids, None, cache, [0], Pass(step, each))[:, 0]


def end_of_text(model: PreTrainedModel) -> list[int]:
    """The tokens that end a text, as the model's generation config names them."""
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
