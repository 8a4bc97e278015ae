"""Where an evicted token's content goes: into a kept slot, its target, which then stands for several tokens.

A slot keeps its position when tokens are merged into it. Keys are stored before RoPE, so keys of different positions
may be averaged. A rule (`rules`) says how keys and values are combined. Every rule has two settings:

`target`: which kept slot takes a token (`targets`). "nearest": the one whose key has the largest cosine with the
token's own. "next": the first one after the token in the text.
`threshold`: a token is dropped where its key's cosine with its target's is below this; -1 drops none.

Sinks, and the tokens in the window, are no targets.

A policy with the state `ACCUMULATES` has tokens join the one before them as they come, also without a budget, by rules
that take means: the newest keeps its position, and the settings are of no account there.
"""

from windlass.merge.absorb import LayerView, MergePlan, plan_merge
from windlass.merge.base import Merge, MergeBatch
from windlass.merge.readout import log_counts
from windlass.merge.rules import MERGES, Mean, MeanCount, Pick, Sum, Weighted
from windlass.merge.spec import checked_merge, merge_of
from windlass.merge.state import MERGED, holds_merged_tokens
from windlass.merge.targets import TARGETS

__all__ = [
    "LayerView",
    "MERGED",
    "MERGES",
    "Mean",
    "MeanCount",
    "Merge",
    "MergeBatch",
    "MergePlan",
    "Pick",
    "Sum",
    "TARGETS",
    "Weighted",
    "checked_merge",
    "holds_merged_tokens",
    "log_counts",
    "merge_of",
    "plan_merge",
]
