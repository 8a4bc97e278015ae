"""What a model asks its attention mask to be. A cache decides by positions what is visible: no matrix is made."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import UsageError


@dataclass(frozen=True)
class Mask:
    """What our mask function hands to our attention function: a rule, not a matrix."""

    window: int | None
    is_seen: Callable[..., Tensor]  # of (batch, head, query, key) indices

    def is_sliding_window(self) -> bool:
        """Whether a query sees the newest `window` keys (None: all) up to its own, and no others."""
        query = 1000 if self.window is None else 2 * self.window
        oldest = 0 if self.window is None else query - self.window + 1
        keys = torch.tensor([max(oldest - 1, 0), oldest, query - 1, query, query + 1])
        zero = torch.tensor(0)
        return torch.equal(self.is_seen(zero, zero, torch.tensor(query), keys), (keys >= oldest) & (keys <= query))


def mask(
    *,
    mask_function: Callable[..., Tensor],
    allow_is_causal_skip: bool,
    local_size: int | None = None,
    **kwargs: object,  # noqa: ARG001  # what a matrix would need
) -> Mask:
    """The mask function registered with transformers: visibility is decided by position, by the cache."""
    if not allow_is_causal_skip:
        raise UsageError(
            "this model asks for a mask that is not causal (for images, perhaps); a KVCache reads text only"
        )
    return Mask(local_size, mask_function)
