"""For tests, ours and yours: a check of the policy contract, and tiny random models of many families."""

from windlass.cache.contract import check_policy
from windlass.testing.models import FAMILIES, SLIDING_WINDOW, TRAINED_LENGTH, VOCABULARY, tiny_model

__all__ = ["FAMILIES", "SLIDING_WINDOW", "TRAINED_LENGTH", "VOCABULARY", "check_policy", "tiny_model"]
