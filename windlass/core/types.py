"""Tensor shapes of the package, and a model as the rooms below `hf` know it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

TokenIds = Int[Tensor, "batch tokens"]
TokenMask = Bool[Tensor, "batch tokens"]
RowCounts = Int[Tensor, " batch"]
PinnedRanges = Int[Tensor, "batch ranges 2"]

Queries = Float[Tensor, "batch heads tokens head_dim"]
NewKeys = Float[Tensor, "batch kv_heads tokens head_dim"]
NewValues = Float[Tensor, "batch kv_heads tokens value_dim"]
Attended = Float[Tensor, "batch heads tokens value_dim"]
QueryPositions = Int[Tensor, "batch tokens"]
ObservedColumns = Int[Tensor, "batch observed"]

SlotKeys = Float[Tensor, "batch kv_heads slots head_dim"]
SlotValues = Float[Tensor, "batch kv_heads slots value_dim"]
KeyMeans = Float[Tensor, "kv_heads head_dim"]
Scales = Float[Tensor, "batch kv_heads slots scales"]
IndexKeys = Float[Tensor, "batch slots index_channels"]
PickedSlots = Bool[Tensor, "batch tokens slots"]
SlotPositions = Int[Tensor, "batch score_heads slots"]
SlotIndex = Int[Tensor, "batch score_heads chosen"]
ListedSlots = Int[Tensor, "_ _ _"]  # as SlotIndex, one of a list whose lengths differ
PerSlot = Float[Tensor, "batch kv_heads slots"]
Scores = Float[Tensor, "batch score_heads slots"]

LinearInputs = Float[Tensor, "*rows in_features"]
LinearOutputs = Float[Tensor, "*rows out_features"]
LinearWeights = Num[Tensor, "out_features in_features"]
CodeScales = Float[Tensor, " out_features"]
PackedCodes = Num[Tensor, "*experts padded_features packed_in_features"]
GroupPairs = Num[Tensor, "*experts groups padded_features columns"]
SuperPairs = Num[Tensor, "*experts super_groups padded_features columns"]
Bias = Float[Tensor, " out_features"]
NormWeights = Float[Tensor, " normed"]
Hidden = Float[Tensor, "batch tokens hidden"]
AttendedTokens = Float[Tensor, "batch tokens heads value_dim"]

RotaryQueries = Int[Tensor, "batch score_heads tokens"]
RotaryKeys = Int[Tensor, "batch score_heads slots"]
RotaryTable = Float[Tensor, "length half_rotary_dim"]


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a model that decide if a policy can serve it.

    `name` is the name of its class. `fingerprint` hashes its architecture and a sample of every parameter: it
    reads the weights, so call it only where the answer depends on it. `layers` counts attention layers.
    """

    name: str
    fingerprint: Callable[[], str]
    dtype: torch.dtype
    layers: int


Turn = tuple[Tensor, Tensor]  # cos and sin (batch, tokens or slots, rotary_pairs)


class Picker(ABC):
    """The indexer of one layer, asked about the queries of some columns of a step."""

    limit: int
    """Number of slots to pick for each query."""

    keys: Tensor
    """(batch, tokens, channels): the step's own index keys, un-rotated."""

    @abstractmethod
    def picked(self, keys: IndexKeys, seen: PickedSlots, keys_turn: Turn | None, queries_turn: Turn | None) -> Tensor:
        """The `limit` slots that score best among those each query sees. Names of unseen slots do not matter.

        `keys` are those of all slots, un-rotated. The turns are those of the layer's keys and queries (None: no
        rotation). Which of equal scores are picked is left to `torch.topk`, as in the model itself.
        """

    @abstractmethod
    def columns(self, start: int, stop: int) -> "Picker":
        """The same for some of these columns."""
