"""A pass of an attached model from its first module to its last: the head, too, belongs to it."""

import inspect
from threading import get_ident
from typing import Any, final

from torch import nn

from windlass.cache.cache import TextCache
from windlass.hf.cache_argument import cache_name, with_cache_as
from windlass.hf.guards import note_drafts
from windlass.hf.replaced import Replaced
from windlass.hf.running_pass import RunningPass, not_compiled


@final
class WholePass:
    """Stands in for the `forward` of a model, whose head comes after its decoder.

    A pass with a cache of ours that fails in the head, or is interrupted there, leaves no trace either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._passes: dict[int, list[RunningPass]] = {}  # per thread in which one runs, those of the decoder in it
        self.__signature__ = inspect.signature(model.forward)  # which transformers' `generate` looks at
        self._cache_name = cache_name(model.forward)
        self.replaced = Replaced(model, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; the arguments are its own."""
        kwargs = with_cache_as(self._cache_name, kwargs)
        cache = kwargs.get(self._cache_name)
        if not isinstance(cache, TextCache):
            return self.replaced.original(*args, **kwargs)
        return self._with_cache(cache, args, kwargs)

    def _with_cache(self, cache: TextCache, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        complete: list[RunningPass] = []
        try:
            note_drafts(cache, kwargs.get("logits_to_keep"))
            self._enter(complete)
            output = self.replaced.original(*args, **kwargs)
            self.leave()
            return output
        except BaseException:
            self.leave()
            if len(complete) == 1 and complete[0].before is not None:
                complete[0].cache.take_back(complete[0].before)
            raise

    @property
    def is_served(self) -> bool:
        """Whether a pass with a cache of ours runs in this thread."""
        return get_ident() in self._passes

    @not_compiled
    def begin(self, decoder: RunningPass) -> None:
        """A pass of the decoder begins, in one of the whole model or alone."""
        decoder.is_alone = not self.is_served
        if decoder.is_alone:
            self._enter([])

    @not_compiled
    def end(self, decoder: RunningPass, is_complete: bool) -> None:
        """It ends."""
        if decoder.is_alone:
            self.leave()
        elif is_complete:
            self._passes[get_ident()].append(decoder)

    @not_compiled
    def leave(self) -> None:
        """No pass with a cache of ours runs in this thread."""
        self._passes.pop(get_ident(), None)

    @not_compiled
    def _enter(self, complete: list[RunningPass]) -> None:
        self._passes[get_ident()] = complete
