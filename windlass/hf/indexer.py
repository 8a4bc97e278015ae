"""Sparse attention that picks a query's best tokens by an indexer: exact as long as it would pick all there are.

Source: DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv:2512.02556), section 2.1. Differs: the indexer does not run, and
a pass in which a query could see more tokens than it picks is refused.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError
from windlass.hf.replaced import Replaced

NAME: Final = "indexer"  # what attention modules of transformers call theirs
LIMIT: Final = "index_topk"  # how many tokens it picks


@final
class Indexer:
    """The indexer of one attention module, which picks nothing while `is_served` says that it is not asked."""

    def __init__(self, module: nn.Module, is_served: Callable[[], bool]) -> None:
        self._is_served = is_served
        self.limit: int = getattr(module, LIMIT)
        self.replaced = Replaced(module, "forward", self.forward)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The tokens that each query is to see; none are named where it sees all of them.

        `args` and `kwargs` are the module's own, passed on as they come.
        """
        if self._is_served():
            return hidden_states.new_zeros(*hidden_states.shape[:2], 0, dtype=torch.int32)
        picked: Tensor = self.replaced.original(hidden_states, *args, **kwargs)
        return picked


def indexers_of(modules: Iterable[nn.Module], is_served: Callable[[], bool]) -> list[Indexer]:
    """Those of these attention modules, each now installed."""
    found = [each for each in (getattr(module, NAME, None) for module in modules) if isinstance(each, nn.Module)]
    return [Indexer(each, is_served) for each in found if isinstance(getattr(each, LIMIT, None), int)]


def check_picks(indexers: Iterable[Indexer], cache: TextCache, tokens: int) -> None:
    """Raises: UsageError for a pass of `tokens` columns in which an indexer would have to choose."""
    limit = min((each.limit for each in indexers), default=None)
    most = tokens + max((layer.table.occupancy_bound for layer in cache.layers), default=0)
    if limit is not None and most > limit:
        raise UsageError(
            f"a query of this pass could see {most} tokens, and the model's indexer would pick {limit} of them "
            f"({LIMIT}), which a KVCache does not do; give it a budget, and read the prompt in chunks, so that both "
            f"together are {limit} at most"
        )
