"""The public names, for type checkers; `__init__.py` reads them from here, so that each is written once."""

from windlass import evals as evals
from windlass import policies as policies
from windlass import testing as testing
from windlass.cache.options import CacheOptions as CacheOptions
from windlass.cache.shares import Shares as Shares
from windlass.core.errors import PolicyError as PolicyError
from windlass.core.errors import PromptCacheError as PromptCacheError
from windlass.core.errors import UnsupportedModel as UnsupportedModel
from windlass.core.errors import UsageError as UsageError
from windlass.core.errors import WindlassError as WindlassError
from windlass.engine.generate import Stream as Stream
from windlass.engine.generate import generate as generate
from windlass.engine.generate import prefill as prefill
from windlass.engine.generate import stream as stream
from windlass.engine.result import Result as Result
from windlass.engine.sampling import Sampling as Sampling
from windlass.hf import prompt_cache as prompt_cache
from windlass.hf.attach import attach as attach
from windlass.hf.attach import detach as detach
from windlass.hf.kv_cache import KVCache as KVCache
from windlass.hf.load import load as load
from windlass.policies import DMC as DMC
from windlass.policies import H2O as H2O
from windlass.policies import RKV as RKV
from windlass.policies import TOVA as TOVA
from windlass.policies import ByValueNorm as ByValueNorm
from windlass.policies import Compactor as Compactor
from windlass.policies import Composite as Composite
from windlass.policies import ExpectedAttention as ExpectedAttention
from windlass.policies import InChunks as InChunks
from windlass.policies import InGroups as InGroups
from windlass.policies import KeyDiff as KeyDiff
from windlass.policies import KeyNorm as KeyNorm
from windlass.policies import KVzip as KVzip
from windlass.policies import LagKV as LagKV
from windlass.policies import Leverage as Leverage
from windlass.policies import Needs as Needs
from windlass.policies import Pairs as Pairs
from windlass.policies import Policy as Policy
from windlass.policies import Pyramid as Pyramid
from windlass.policies import Random as Random
from windlass.policies import Recent as Recent
from windlass.policies import Slots as Slots
from windlass.policies import Smoothed as Smoothed
from windlass.policies import SnapKV as SnapKV
from windlass.policies import TriAttention as TriAttention
from windlass.positions.modes import Clamp as Clamp
from windlass.positions.modes import Compact as Compact
from windlass.positions.modes import Original as Original
from windlass.positions.modes import SelfExtend as SelfExtend
from windlass.stores.low_bit import Int4 as Int4
from windlass.stores.low_bit import Int8 as Int8
from windlass.stores.plain import Plain as Plain

__version__: str
__all__: list[str]
