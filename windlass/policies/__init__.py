"""Which tokens to keep: one method a file, all named in `NAMES`; and what goes around one, in `WRAPPERS`."""

from windlass.policies.allotments import Composite, Pyramid
from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.compactor import Compactor
from windlass.policies.dmc import DMC
from windlass.policies.expected_attention import ExpectedAttention
from windlass.policies.h2o import H2O
from windlass.policies.in_groups import InGroups
from windlass.policies.key_diff import KeyDiff
from windlass.policies.key_norm import KeyNorm
from windlass.policies.kvzip import KVzip
from windlass.policies.lag_kv import LagKV
from windlass.policies.leverage import Leverage
from windlass.policies.pairs import Pairs
from windlass.policies.r_kv import RKV
from windlass.policies.random import Random
from windlass.policies.recent import Recent
from windlass.policies.snapkv import SnapKV
from windlass.policies.tova import TOVA
from windlass.policies.tri_attention import TriAttention
from windlass.policies.wrappers import ByValueNorm, InChunks, Smoothed, Wrapper

NAMES: dict[str, type[Policy]] = {
    "recent": Recent,
    "random": Random,
    "h2o": H2O,
    "tova": TOVA,
    "snapkv": SnapKV,
    "key_norm": KeyNorm,
    "key_diff": KeyDiff,
    "lag_kv": LagKV,
    "leverage": Leverage,
    "compactor": Compactor,
    "r_kv": RKV,
    "expected_attention": ExpectedAttention,
    "tri_attention": TriAttention,
    "kvzip": KVzip,
    "dmc": DMC,
}

WRAPPERS: dict[str, type[Wrapper]] = {
    "by_value_norm": ByValueNorm,
    "smoothed": Smoothed,
    "in_chunks": InChunks,
    "in_groups": InGroups,
    "pyramid": Pyramid,
    "composite": Composite,
}

__all__ = [
    "DMC",
    "H2O",
    "NAMES",
    "RKV",
    "TOVA",
    "WRAPPERS",
    "ByValueNorm",
    "Compactor",
    "Composite",
    "ExpectedAttention",
    "InChunks",
    "InGroups",
    "KeyDiff",
    "KVzip",
    "KeyNorm",
    "LagKV",
    "Leverage",
    "Observation",
    "Pairs",
    "Policy",
    "Pyramid",
    "Random",
    "Recent",
    "SnapKV",
    "Slots",
    "Smoothed",
    "TriAttention",
    "Wrapper",
]
