"""Which tokens to keep: one method a file, all named in `NAMES`."""

from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.h2o import H2O
from windlass.policies.key_diff import KeyDiff
from windlass.policies.key_norm import KeyNorm
from windlass.policies.random import Random
from windlass.policies.recent import Recent
from windlass.policies.snapkv import SnapKV
from windlass.policies.tova import TOVA

NAMES: dict[str, type[Policy]] = {
    "recent": Recent,
    "random": Random,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
    "key_norm": KeyNorm,
    "key_diff": KeyDiff,
}

__all__ = [
    "H2O",
    "NAMES",
    "TOVA",
    "KeyDiff",
    "KeyNorm",
    "Observation",
    "Policy",
    "Random",
    "Recent",
    "SnapKV",
    "Slots",
]
