"""What a rank has of a model that transformers' tensor-parallel plan has spread over several processes.

Attention there sees the plain tensors of this rank's heads, while the config still tells those of the whole model. So
what a rank has is looked at in a pass, and not computed.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, __version__

from windlass.core.errors import UnsupportedModel, UsageError
from windlass.core.launch import Launch
from windlass.core.parse import AUTO_WEIGHTS
from windlass.core.ranks import RankHeads, Ranks, is_spread, join
from windlass.hf.probe import Probe
from windlass.hf.recurrent import LayerKinds
from windlass.hf.weights import raw_bytes

# Of which heads the outputs of a projection are, where a plan leaves each rank its own: the names end so.
KV_PROJECTIONS: Final = frozenset({"k_proj", "v_proj", "qkv_proj", "query_key_value"})
QUERY_PROJECTIONS: Final = frozenset({"q_proj", "q_b_proj", "kv_b_proj"}) | KV_PROJECTIONS
SPLIT: Final = "colwise"


def plan_of_processes(weights: str = AUTO_WEIGHTS) -> dict[str, Any]:
    """What `from_pretrained` takes for a model that the processes of `torchrun` load together; lets them meet.

    Raises: UsageError where `torchrun` did not start this process, for codes of `weights`, and for libraries that
    are missing or too old.
    """
    launch = Launch.of(os.environ)
    if weights != AUTO_WEIGHTS:
        raise UsageError(f"weights {weights!r} can't be spread over processes; leave them out")
    if find_spec("accelerate") is None:
        raise UsageError(
            "--tensor-parallel: transformers needs accelerate for it, and it is not installed; "
            "install windlass[parallel]"
        )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        raise UsageError(
            f"--tensor-parallel: transformers {__version__} has no DistributedConfig; upgrade it"
        ) from None
    join(launch)
    return {"distributed_config": DistributedConfig(tp_size=launch.size, tp_plan="auto")}


def ranks_of(model: PreTrainedModel) -> Ranks | None:
    """The processes that hold `model` together; None where this one has all of it. A collective call where it is not.

    Raises: UnsupportedModel for a number of processes that cannot share its heads, naming those that can, and for a
    model that is spread otherwise than by tensor parallelism alone.
    """
    size = getattr(model, "tp_size", None)
    if size is None or size == 1:
        if any(map(is_spread, model.parameters())):
            raise UnsupportedModel("is spread over processes, but not by a tensor-parallel plan of transformers")
        return None
    if size != dist.get_world_size():
        raise UnsupportedModel(
            f"has tp_size={size} among {dist.get_world_size()} processes: data, pipeline and expert parallelism are "
            "not served beside it; start as many processes as tp_size says"
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
        raise UnsupportedModel(f"has {told}, which {size} processes cannot share; start one of: {', '.join(sizes)}")


def heads_of(ranks: Ranks, probe: Probe, kinds: LayerKinds) -> RankHeads:
    """What this rank has of each layer's heads, as a pass of the model on all ranks showed. A collective call.

    Raises: UnsupportedModel where layers differ, or each rank has all queries and some keys.
    """
    own = [_seen(probe.keys, probe.queries, layer) for layer in kinds.attention]
    everywhere = ranks.gathered(own)
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
