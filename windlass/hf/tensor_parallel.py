"""A rank's part of a model that transformers' tensor-parallel plan spreads over several processes.

Attention sees plain tensors of this rank's heads, while the config still counts the heads of the whole model. So a
rank's heads are observed in a forward pass and not computed from the config.
"""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, __version__

from windlass.cache.cache import TextCache
from windlass.cache.recall import POSITIONS, RECALL
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.errors import PromptCacheError, UnsupportedModel, UsageError
from windlass.core.launch import Launch
from windlass.core.parse import AUTO_WEIGHTS
from windlass.core.positions import EMPTY
from windlass.core.ranks import RankHeads, Ranks, is_spread, join
from windlass.hf.probe import Probe
from windlass.hf.recurrent import LayerKinds
from windlass.hf.weights import raw_bytes
from windlass.policies import Policy
from windlass.policies.expected_attention import COUNT
from windlass.stores.formats import KEY_MEANS
from windlass.stores.full_precision import TOKEN_INDEX, WRITTEN

# Ends of the names of projections whose outputs a plan splits by heads.
KV_PROJECTIONS: Final = frozenset({"k_proj", "v_proj", "qkv_proj", "query_key_value"})
QUERY_PROJECTIONS: Final = frozenset({"q_proj", "q_b_proj", "kv_b_proj"}) | KV_PROJECTIONS
SPLIT: Final = "colwise"
SLOTS_AXIS: Final = 2  # of tensors with a head axis before it. Ranks may hold different numbers of slots


def plan_of_processes(weights: str = AUTO_WEIGHTS) -> dict[str, Any]:
    """Let the processes of `torchrun` meet, and return the arguments with which `from_pretrained` loads a shared model.

    Raises: UsageError where `torchrun` did not start this process, for codes of `weights`, and for libraries that
    are missing or too old.
    """
    launch = Launch.of(os.environ)
    if weights != AUTO_WEIGHTS:
        raise UsageError(f"weights {weights!r} can't be spread over processes. Leave them out")
    if find_spec("accelerate") is None:
        raise UsageError(
            "--tensor-parallel: transformers needs accelerate for it, and it is not installed. "
            "Run: pip install 'windlass[parallel]'"
        )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise UsageError(
            f"--tensor-parallel: transformers {__version__} has no DistributedConfig. Upgrade it"
        ) from None
    join(launch)
    return {"distributed_config": DistributedConfig(tp_size=launch.size, tp_plan="auto")}


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """Return the processes that share `model`, or None if this process has all of it. Collective for a shared model.

    Raises: UnsupportedModel for a number of processes that cannot share its heads, naming numbers that can, and for a
    model that is spread by more than tensor parallelism.
    """
    size = getattr(model, "tp_size", None)
    if size is None or size == 1:
        if any(map(is_spread, model.parameters())):
            raise UnsupportedModel("is spread over processes, but not by a tensor-parallel plan of transformers")
        return None
    if size != dist.get_world_size():
        raise UnsupportedModel(
            f"has tp_size={size} among {dist.get_world_size()} processes: data, pipeline and expert parallelism are "
            "not served beside it. Start as many processes as tp_size says"
        )
    _check_heads(model, size)
    return Ranks()


def _check_heads(model: PreTrainedModel, size: int) -> None:
    config = model.config.get_text_config()
    split = {name.rpartition(".")[2] for name, style in (model.tp_plan or {}).items() if style == SPLIT}
    heads = config.num_attention_heads
    counts = {"num_attention_heads": heads} if split & QUERY_PROJECTIONS else {}
    if split & KV_PROJECTIONS:
        counts["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or heads
        further = getattr(config, "num_global_key_value_heads", None)
        counts |= {"num_global_key_value_heads": further} if further else {}
    wrong = {name: count for name, count in counts.items() if count % size}
    if wrong:
        largest = math.gcd(*counts.values())
        sizes = [str(each) for each in range(1, largest + 1) if largest % each == 0]
        told = ", ".join(f"{name}={count}" for name, count in wrong.items())
        raise UnsupportedModel(f"has {told}, which {size} processes cannot share. Start one of: {', '.join(sizes)}")


def heads_of(ranks: Ranks, probe: Probe, kinds: LayerKinds) -> RankHeads:
    """Return this rank's heads in each layer, as a pass of the model on all ranks showed. A collective call.

    Raises: UnsupportedModel where layers differ, or each rank has all queries and some keys.
    """
    own = [_seen(probe.keys, probe.queries, layer) for layer in kinds.attention]
    everywhere = ranks.all_gather(own)
    found = {
        (any(keys[0] != each[0] for each in others), all(keys[1] == each[1] for each in others))
        for keys, *others in zip(*everywhere, strict=True)
    }
    if len(found) > 1 or (True, True) in found:
        raise UnsupportedModel("has layers whose heads its tensor-parallel plan splits in different ways")
    is_split, has_all_queries = found.pop()
    return RankHeads(ranks, tuple(probe.keys[layer].shape[1] for layer in kinds.attention), is_split, has_all_queries)


def _seen(keys: Mapping[int, Tensor], queries: Mapping[int, Tensor], layer: int) -> tuple[str, str]:
    """Hashes of the keys and the queries of a layer: equal ones are of the same heads."""
    keys_hash, queries_hash = (hashlib.sha256(raw_bytes(each[layer])).hexdigest() for each in (keys, queries))
    return keys_hash, queries_hash


def gather_heads(cache: TextCache, layers: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Gather each layer's tensors, by name, with the heads of all ranks. The result is meaningful on rank 0 only.

    A collective call. One tensor of one layer is sent at a time.

    Raises: UsageError for statistics of a third-party policy, whose division among heads is unknown.
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
            pieces = [tensor] if axis is None else heads.ranks.gather(tensor.cpu().contiguous())
            found[index][name] = _joined(pieces, axis, EMPTY if name == POSITIONS else 0) if pieces else tensor
    return found


def any_evicted(cache: TextCache) -> list[bool]:
    """Per layer, whether any rank has evicted in it. A collective call where there are several."""
    own = [layer.history.has_evicted for layer in cache.layers]
    if cache.heads is None:
        return own
    return [any(each) for each in zip(*cache.heads.ranks.all_gather(own), strict=True)]


def check_statistics(cache: TextCache, is_ours: bool) -> None:
    """Raises: UsageError where a policy that `is_ours` or not keeps numbers that nobody can tell apart by heads."""
    if cache.heads is not None and cache.heads.is_split and cache.policy.needs.statistics and not is_ours:
        raise UsageError(
            f"{cache.policy!r} keeps statistics, and only it knows which of them are of which head, so that the caches "
            f"of {cache.heads.ranks.size} ranks cannot become one file. Save it from a single process"
        )


def own_heads(heads: RankHeads | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
    """Let rank 0 write, and wait on all ranks until it has. Raises: rank 0's PromptCacheError, on all ranks."""
    if heads is None:
        write()
        return
    said = ""
    if heads.ranks.is_first:
        try:
            write()
        except PromptCacheError as error:
            said = str(error)
    if said := heads.ranks.broadcast_object(said):
        raise PromptCacheError(said)


def _is_alike(positions: Tensor, policy: Policy) -> bool:
    """Return True if all heads of a layer hold the same tokens, with one row of positions for all of them."""
    return positions.shape[1] == 1 and not policy.needs.per_head


def _head_axis(name: str, is_alike: bool) -> int | None:
    """Return the heads axis of a layer's tensor, or None if the tensor is the same on all ranks.

    `is_alike`: True if the layer's heads share positions, and so the policy's state of each slot.
    """
    if name.endswith(KEY_MEANS):
        return 0
    if name in (TOKEN_INDEX, WRITTEN, RECALL + POSITIONS, STATISTICS + COUNT):
        return None
    if is_alike and (name == POSITIONS or name.startswith(STATE)):
        return None
    return 1


def _joined(pieces: Sequence[Tensor], axis: int | None, free: int) -> Tensor:
    """Concatenate the pieces of all ranks along an axis. Missing slots of shorter pieces are `free`."""
    if axis is None:
        return pieces[0]
    if axis != 0 and pieces[0].ndim > SLOTS_AXIS:
        most = max(piece.shape[SLOTS_AXIS] for piece in pieces)
        behind = [0, 0] * (pieces[0].ndim - SLOTS_AXIS - 1)
        pieces = [pad(piece, (*behind, 0, most - piece.shape[SLOTS_AXIS]), value=free) for piece in pieces]
    return torch.cat(list(pieces), axis)
