"""A prompt cache of several ranks: one file for the heads of all of them, of which each takes its own.

So a file does not tell how many ranks wrote it, and any number that can share the model's heads may read it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.cache.cache import TextCache
from windlass.cache.recall_memory import RECALL
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.errors import PromptCacheError, UsageError
from windlass.core.rotary_index import EMPTY
from windlass.hf.layer_shapes import LayerShape
from windlass.hf.prompt_cache_layout import POSITIONS
from windlass.parallel.heads import RankHeads
from windlass.policies import Policy
from windlass.policies.query_means import COUNT
from windlass.stores.full_precision import TOKEN_INDEX, WRITTEN
from windlass.stores.low_bit import KEY_MEANS

SLOTS_AXIS = 2  # of tensors with a head axis before it; ranks may hold different numbers of slots


def in_all(heads: RankHeads | None, shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes of layers with the heads of all ranks, of those that this rank has."""
    if heads is None:
        return list(shapes)
    return [shape.of_heads(heads.in_all(shape.kv_heads)) for shape in shapes]


def gathered(cache: TextCache, layers: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """The tensors of each layer, by their names, with the heads of all ranks; on other ranks than 0 anything.

    A collective call; no more than one tensor of a layer travels at once.

    Raises: UsageError for statistics of a policy from elsewhere, of which nobody knows which numbers are of which head.
    """
    heads = cache.heads
    if heads is None or not heads.is_split:
        return {index: dict(own) for index, own in layers.items()}
    found: dict[int, dict[str, Tensor]] = {}
    for index, own in sorted(layers.items()):
        is_alike = POSITIONS in own and _is_alike(own[POSITIONS], cache.layers[index].policy)
        found[index] = {}
        for name, tensor in sorted(own.items()):
            axis = _head_axis(name, is_alike)
            pieces = [tensor] if axis is None else heads.ranks.gathered_by_first(tensor.cpu().contiguous())
            found[index][name] = _joined(pieces, axis, EMPTY if name == POSITIONS else 0) if pieces else tensor
    return found


def any_evicted(cache: TextCache) -> list[bool]:
    """Per layer, whether any rank has evicted in it. A collective call where there are several."""
    own = [layer.history.has_evicted for layer in cache.layers]
    if cache.heads is None:
        return own
    return [any(each) for each in zip(*cache.heads.ranks.gathered(own), strict=True)]


def check_statistics(cache: TextCache, is_ours: bool) -> None:
    """Raises: UsageError where a policy that `is_ours` or not keeps numbers that nobody can tell apart by heads."""
    if cache.heads is not None and cache.heads.is_split and cache.policy.needs.statistics and not is_ours:
        raise UsageError(
            f"{cache.policy!r} keeps statistics, and only it knows which of them are of which head, so that the caches "
            f"of {cache.heads.ranks.size} ranks cannot become one file; save it from a single process"
        )


def cut(heads: RankHeads | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file with the heads of this rank alone, by the same names."""
    if heads is None or not heads.is_split:
        return dict(tensors)
    found = dict(tensors)
    for name, tensor in tensors.items():
        room, index, inner = [*name.split(".", 2), "", ""][:3]
        if room != "layers":
            continue
        positions = tensors.get(f"layers.{index}.{POSITIONS}")
        axis = _head_axis(inner, positions is not None and positions.shape[1] == 1)
        if axis is not None:
            count = tensor.shape[axis] // heads.ranks.size
            found[name] = tensor.narrow(axis, heads.ranks.number * count, count).contiguous()
    return found


def written_by_first(heads: RankHeads | None, write: Callable[[], None]) -> None:
    """Let rank 0 write; all ranks return once it has. Raises: on all of them what it raised, as PromptCacheError."""
    if heads is None:
        write()
        return
    said = ""
    if heads.ranks.is_first:
        try:
            write()
        except PromptCacheError as error:
            said = str(error)
    if said := heads.ranks.told_by_first(said):
        raise PromptCacheError(said)


def _is_alike(positions: Tensor, policy: Policy) -> bool:
    """Whether all heads of a layer hold the same tokens, with one row of positions for all of them."""
    return positions.shape[1] == 1 and not policy.needs.per_head


def _head_axis(name: str, is_alike: bool) -> int | None:
    """Which axis of a layer's tensor counts heads; None where the tensor is the same on all ranks.

    `is_alike`: whether its heads share positions, and so what is kept of each slot.
    """
    if name.endswith(KEY_MEANS):
        return 0
    if name in (TOKEN_INDEX, WRITTEN, RECALL + POSITIONS, STATISTICS + COUNT):
        return None
    if is_alike and (name == POSITIONS or name.startswith(STATE)):
        return None
    return 1


def _joined(pieces: Sequence[Tensor], axis: int | None, free: int) -> Tensor:
    """The pieces of all ranks as one tensor; where one has fewer slots, the missing ones are `free`."""
    if axis is None:
        return pieces[0]
    if axis != 0 and pieces[0].ndim > SLOTS_AXIS:
        most = max(piece.shape[SLOTS_AXIS] for piece in pieces)
        behind = [0, 0] * (pieces[0].ndim - SLOTS_AXIS - 1)
        pieces = [pad(piece, (*behind, 0, most - piece.shape[SLOTS_AXIS]), value=free) for piece in pieces]
    return torch.cat(list(pieces), axis)
