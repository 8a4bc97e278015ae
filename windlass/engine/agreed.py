"""One choice for all ranks."""

from collections.abc import Callable
from typing import Final

from windlass.core.errors import UsageError
from windlass.parallel.ranks import Ranks

# In the place of a token: rank 0 found none, by a fault of the request, or by one of its own.
REFUSED: Final = -1
BROKEN: Final = -2


def agreed_token(ranks: Ranks | None, choose: Callable[[], int]) -> int:
    """The token that `choose` gives on rank 0, which alone is asked; all ranks raise where it does."""
    if ranks is None:
        return choose()
    if not ranks.is_first:
        token = ranks.told_by_first(0)
        if token == REFUSED:
            raise UsageError("rank 0 found no token that the request allows")
        if token == BROKEN:
            raise RuntimeError("rank 0 failed to choose a token")
        return token
    token = BROKEN
    try:
        token = choose()
    except UsageError:
        token = REFUSED
        raise
    finally:
        ranks.told_by_first(token)
    return token
