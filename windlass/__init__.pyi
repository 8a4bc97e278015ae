"""The public names, for type checkers: those of the tables in `__init__.py`."""

from windlass import evals as evals
from windlass import policies as policies
from windlass import positions as positions
from windlass import stores as stores
from windlass import testing as testing
from windlass.cache.options import CacheOptions as CacheOptions
from windlass.cache.shares import Shares as Shares
from windlass.core.errors import PolicyError as PolicyError
from windlass.core.errors import PromptCacheError as PromptCacheError
from windlass.core.errors import UnsupportedModel as UnsupportedModel
from windlass.core.errors import UsageError as UsageError
from windlass.core.errors import WindlassError as WindlassError
from windlass.engine import chunks as chunks
from windlass.engine.generate import Stream as Stream
from windlass.engine.generate import generate as generate
from windlass.engine.generate import prefill as prefill
from windlass.engine.generate import stream as stream
from windlass.engine.sampling import Result as Result
from windlass.engine.sampling import Sampling as Sampling
from windlass.engine.speculate import DraftModel as DraftModel
from windlass.engine.templates import system_tokens as system_tokens
from windlass.hf.attach import attach as attach
from windlass.hf.attach import detach as detach
from windlass.hf.kv_cache import KVCache as KVCache
from windlass.hf.load import load as load

__version__: str
__all__: list[str]
