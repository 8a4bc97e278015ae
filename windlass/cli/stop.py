"""Stop strings as a shell passes them: a line break cannot be typed there, so it is written as `\\n`."""

import re
from collections.abc import Sequence
from typing import Final

ESCAPES: Final = {"n": "\n", "t": "\t", "\\": "\\"}


def unescaped(typed: Sequence[str] | None) -> list[str] | None:
    """With `\\n`, `\\t` and `\\\\` as the signs that they stand for; None where nothing was typed."""
    return [re.sub(r"\\([nt\\])", lambda sign: ESCAPES[sign[1]], text) for text in typed or ()] or None
