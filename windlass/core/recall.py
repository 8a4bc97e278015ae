"""What is chosen of the tokens that a layer has evicted and still remembers: pages of neighbours in the text."""

from dataclasses import dataclass

from jaxtyping import Bool
from torch import Tensor

from windlass.core.packed import PackedStates
from windlass.core.shapes import Queries


@dataclass(frozen=True)
class PageInput:
    """One call of `page_peaks`: queries, and the keys of a recall store, whose number of slots `PAGE` divides.

    `is_recallable` tells which tokens may be recalled: those that are evicted and still part of the text.
    """

    queries: Queries
    keys: PackedStates
    is_recallable: Bool[Tensor, "batch kv_heads slots"]
