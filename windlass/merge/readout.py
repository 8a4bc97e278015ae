"""How attention reads slots that stand for several tokens."""

from torch import Tensor

from windlass.core.shapes import Scores
from windlass.merge.base import Merge
from windlass.merge.state import MERGED


def log_counts(merge: Merge | None, state: dict[str, Tensor]) -> Scores | None:
    """What is added to each slot's logits: log(n) where it stands for n tokens. None where the rule does not count."""
    return None if merge is None or not merge.is_counted else state[MERGED].log1p()
