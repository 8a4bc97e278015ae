"""The scan of what was evicted, in plain PyTorch: what every other backend must match."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.limits import PAGE
from windlass.core.packed import Format
from windlass.core.recall import TILE, BestPages, PageInput, ReadInput, tokens_of


def best_pages(call: PageInput) -> BestPages:
    """The pages that matter most to the queries of each kv head, and what may be read of them.

    A page counts to a query by its largest product with a token that may be recalled; its worth is its share in the
    softmax over these, and to a kv head the largest that it has for one of its queries. Of equal ones the earlier is
    the better. Where keys are codes, queries are rounded to multiples of 1 / 127 of their largest number, which changes
    products less than codes do.
    """
    keys = torch.cat([piece.packed().floats().float() for piece in call.pieces], 2)
    kv_heads, remembered = keys.shape[1:3]
    is_recallable = _is_recallable(call, kv_heads)
    queries = call.queries.float()
    if call.pieces[0].states.format is not Format.FLOAT:
        steps = (queries.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        queries = (queries / steps).round() * steps
    grouped = queries.unflatten(1, (kv_heads, -1))
    products = (grouped @ keys[:, :, None].transpose(-1, -2)).masked_fill(~is_recallable[:, :, None, None], -torch.inf)
    peaks: Tensor = products.unflatten(-1, (remembered // PAGE, PAGE)).amax(-1)
    shares = peaks.log_softmax(-1).nan_to_num(nan=-torch.inf)
    worth = shares.masked_fill(~call.is_query[:, None, None, :, None], -torch.inf).flatten(2, 3).amax(2)
    pages = worth.sort(dim=-1, descending=True, stable=True).indices[..., : call.count]
    return BestPages(pages, is_recallable.gather(-1, tokens_of(pages)))


def read_tokens(call: ReadInput) -> Tensor:
    """(batch, kv_heads, tokens, width): a copy of the rows at `index`."""
    rows = torch.cat([each.transpose(3, 4).flatten(2, 3) if call.is_tiled else each for each in call.pieces], 2)
    return rows.gather(2, call.index[..., None].expand(-1, -1, -1, rows.shape[3]))


def _is_recallable(call: PageInput, kv_heads: int) -> Tensor:
    """(batch, kv_heads, remembered): whether a token is part of the text, and in no slot of its head."""
    kept = call.kept_index.long().expand(-1, kv_heads, -1)
    remembered = call.is_text.shape[1]
    is_text = pad(call.is_text, (0, TILE))[:, None].expand(-1, kv_heads, -1)  # a place for what is in no slot
    return is_text.scatter(-1, kept.where(kept >= 0, remembered), False)[..., :remembered]
