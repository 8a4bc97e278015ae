"""What models of transformers call the cache they are given: `cache` from release 5.24 on, `past_key_values` before.

An attached model takes either, in every release.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from transformers import GenerationMixin

from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError

NAMES: Final = ("cache", "past_key_values")


def cache_name(called: Callable[..., Any]) -> str:
    """What `called` names its cache; of one that takes any arguments, what this release of transformers does."""
    return _named(called) or GENERATE


def _named(called: Callable[..., Any]) -> str | None:
    taken = inspect.signature(called).parameters
    return next((name for name in NAMES if name in taken), None)


GENERATE: Final = _named(GenerationMixin.prepare_inputs_for_generation) or NAMES[-1]  # of `generate`, in this release


def our_cache(arguments: Mapping[str, Any]) -> TextCache | None:
    """The cache of ours among keyword arguments, by either name; None where there is none."""
    return next((arguments[name] for name in NAMES if isinstance(arguments.get(name), TextCache)), None)


def with_cache_as(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the cache under this name, if there is one. Raises: UsageError for one of each name."""
    [other] = {*NAMES} - {name}
    if other not in arguments:
        return arguments
    given = arguments[other]
    rest = {key: value for key, value in arguments.items() if key != other}
    if given is None:
        return rest
    if rest.get(name) is not None:
        raise UsageError(f"{name} and {other} are two names of one argument, and both were given; leave {other} out")
    return {**rest, name: given}
