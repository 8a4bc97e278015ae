"""Where an evicted token's content goes: into a cell, a kept token that stands for several.

A cell stands at the position of the token that it grew from. Keys are held before rotation, so those
of different positions may be added up. A rule (`rules`) says how a cell takes tokens in, and has four
settings:

`target`: which cell takes a token, see `targets`; "nearest" has the key most like its own, "next" is the
first one after it in the text.
`frame`: "unrotated" adds keys as they are held, as if their tokens stood where the cell stands;
"rotated" turns each by its distance from the cell before, so that the cell is read as the mean (or sum)
of the keys as they stand rotated, which is what other libraries average. Where a layer does not rotate,
both are the same.
`read`: how a cell is read, see `reading`: "plain", like any token; "damped" or by "anchors".
`rare`: of the tokens that could be cells, the share that takes nothing in: those least like the mean key.
`threshold`: a token whose cosine with its cell's key is below it is let go; -1 lets none go.

Sinks and the newest tokens take nothing in.

Source: the count of a cell in its logit, Bolya et al. 2023 (arXiv:2210.09461), and for caches ZSMerge,
Liu et al. 2025 (arXiv:2503.10714).
"""

from windlass.merge.absorb import Room, absorb
from windlass.merge.base import FRAMES, Joined, Merge
from windlass.merge.readout import MERGED, READS, as_read, holds_cells
from windlass.merge.rules import D2O, MERGES, KeepKV, Mean, MeanCount, Pick, Sum, Values, Weighted
from windlass.merge.spec import checked_merge, merge_of, readable
from windlass.merge.targets import TARGETS

__all__ = [
    "D2O",
    "FRAMES",
    "Joined",
    "KeepKV",
    "MERGED",
    "MERGES",
    "Mean",
    "MeanCount",
    "Merge",
    "Pick",
    "READS",
    "Room",
    "Sum",
    "TARGETS",
    "Values",
    "Weighted",
    "absorb",
    "as_read",
    "checked_merge",
    "holds_cells",
    "merge_of",
    "readable",
]
