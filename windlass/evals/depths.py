"""Where in a text the answer stands, as a user types it. Nothing here needs torch."""

import re

from windlass.core.errors import UsageError


def depth_of(part: str) -> float:
    """What `0`, `0.25` or `1` asks for. Raises: UsageError, which begins with `--depth`, for all else."""
    if not re.fullmatch(r"[01](\.[0-9]{1,6})?", part) or float(part) > 1:
        raise UsageError(f"--depth {part!r} is not a part of the text; write 0 for its start, 0.5 for its middle, 1")
    return float(part)
