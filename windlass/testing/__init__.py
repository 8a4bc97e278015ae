"""For tests, ours and yours: a check of the policy contract, and tiny random models of many families."""

from windlass.cache.contract import check_policy
from windlass.testing.models import (
    FAMILIES,
    HYBRIDS,
    SLIDING_WINDOW,
    TRAINED_LENGTH,
    VOCABULARY,
    check_on_models,
    tiny_hybrid,
    tiny_model,
)

__all__ = [
    "FAMILIES",
    "HYBRIDS",
    "SLIDING_WINDOW",
    "TRAINED_LENGTH",
    "VOCABULARY",
    "check_on_models",
    "check_policy",
    "tiny_hybrid",
    "tiny_model",
]
