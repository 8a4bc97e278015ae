"""How much a cache may keep, as a user types it. Nothing here needs torch."""

import re
from dataclasses import dataclass
from typing import Final

from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.spec import int_parser

ALL: Final = "all"


@dataclass(frozen=True)
class Budget:
    """A number of slots, a part of the text (`4x`: a quarter), or all of it."""

    asked: str
    slots: int | None = None
    divisor: float | None = None

    def of(self, context_tokens: int) -> int | None:
        """Slots for a text of so many tokens; None keeps them all."""
        return self.slots if self.divisor is None else int(context_tokens / self.divisor)


def budget_of(flag: str, part: str) -> Budget:
    """What `64`, `4x` or `all` asks for. Raises: UsageError, beginning with `flag`, for all else."""
    if part == ALL:
        return Budget(part)
    if part.endswith("x"):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?x", part) or float(part[:-1]) < 1:
            raise UsageError(f"{flag} {part!r} is not a part of the text; write 4x for a quarter of it")
        return Budget(part, divisor=float(part[:-1]))
    return Budget(part, slots=int_parser(flag, 1, MAX_NUMBER)(part))
