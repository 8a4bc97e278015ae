"""Which tokens to keep: one method a file, and one file of wrappers. A line here names a policy and exports it.

`NAMES` holds those that can be made without arguments, by the names of their files, `WRAPPERS` those that go around
another one, by the names of their classes, and `FROM_FILES` those that are made of a file of `windlass calibrate`.
"""

import re
from dataclasses import MISSING, fields
from inspect import isabstract
from typing import Any

from windlass.policies.base import Budgeter as Budgeter
from windlass.policies.base import Initializer as Initializer
from windlass.policies.base import LayersAsRows as LayersAsRows
from windlass.policies.base import ModelSpecific as ModelSpecific
from windlass.policies.base import Needs as Needs
from windlass.policies.base import NewTokens as NewTokens
from windlass.policies.base import Observation as Observation
from windlass.policies.base import OneShot as OneShot
from windlass.policies.base import Policy as Policy
from windlass.policies.base import Recency as Recency
from windlass.policies.base import Slots as Slots
from windlass.policies.wrappers import Wrapper as Wrapper
from windlass.policies.wrappers import find as find

# Lists and documents have this order: the simplest first.
# isort: off
from windlass.policies.recent import Recent as Recent
from windlass.policies.random import Random as Random
from windlass.policies.h2o import H2O as H2O
from windlass.policies.tova import TOVA as TOVA
from windlass.policies.snapkv import SnapKV as SnapKV
from windlass.policies.key_norm import KeyNorm as KeyNorm
from windlass.policies.key_diff import KeyDiff as KeyDiff
from windlass.policies.lag_kv import LagKV as LagKV
from windlass.policies.leverage import Leverage as Leverage
from windlass.policies.compactor import Compactor as Compactor
from windlass.policies.r_kv import RKV as RKV
from windlass.policies.expected_attention import ExpectedAttention as ExpectedAttention
from windlass.policies.tri_attention import TriAttention as TriAttention
from windlass.policies.kvzip import KVzip as KVzip
from windlass.policies.dmc import DMC as DMC
from windlass.policies.pairs import Pairs as Pairs
from windlass.policies.linear_scorer import LinearScorer as LinearScorer
from windlass.policies.wrappers import ByValueNorm as ByValueNorm
from windlass.policies.wrappers import Smoothed as Smoothed
from windlass.policies.wrappers import InChunks as InChunks
from windlass.policies.wrappers import InGroups as InGroups
from windlass.policies.wrappers import Pyramid as Pyramid
from windlass.policies.wrappers import Composite as Composite
# isort: on


def _takes_nothing(kind: type[Any]) -> bool:
    return all(each.default is not MISSING for each in fields(kind))


_CLASSES: list[type[Any]] = [each for each in list(vars().values()) if isinstance(each, type)]
_POLICIES: list[type[Policy]] = [kind for kind in _CLASSES if issubclass(kind, Policy) and not isabstract(kind)]
_BY_FILE = {kind.__module__.rpartition(".")[2]: kind for kind in _POLICIES if not issubclass(kind, Wrapper)}

NAMES = {name: kind for name, kind in _BY_FILE.items() if _takes_nothing(kind)}
WRAPPERS: dict[str, type[Wrapper]] = {
    re.sub(r"\B(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in _POLICIES if issubclass(kind, Wrapper)
}
FROM_FILES = {name: kind for name, kind in _BY_FILE.items() if name not in NAMES}
