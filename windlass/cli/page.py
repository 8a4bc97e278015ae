"""Text as it is written: a terminal gets whole words at the screen's edge, a pipe the text as it is."""

import re
from collections.abc import Callable
from typing import Final

from prompt_toolkit.utils import get_cwidth

# Chinese and its neighbours are written without spaces: a line may end after each character.
ALONE: Final = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
PART: Final = re.compile(rf"[\s{ALONE}]|[^\s{ALONE}]+")


class Page:
    """Shows pieces of a text through `say`.

    A word waits until it is whole, and goes to the next line where it does not fit in the `width()` columns.
    """

    def __init__(self, say: Callable[[str], None], width: Callable[[], int]) -> None:
        self._say, self._width = say, width
        self._column, self._word = 0, ""

    def push(self, piece: str) -> None:
        """Show a piece, but for the word at its end, which may go on."""
        *parts, last = PART.findall(self._word + piece) or [""]
        self._word = ""
        if re.match(rf"[\s{ALONE}]", last) or len(last) >= self._width():
            parts.append(last)
        else:
            self._word = last
        shown = "".join(map(self._placed, parts))
        if shown:
            self._say(shown)

    def cut(self) -> None:
        """Show no more, and end the line: the word that waits is left out."""
        self._word = ""
        self.end()

    def end(self) -> None:
        """Show what is left, and end the line."""
        self._say(self._placed(self._word) + ("\n" if self._column else ""))
        self._column, self._word = 0, ""

    def _placed(self, part: str) -> str:
        """`part` with the line end that it needs before it, or instead of it."""
        if part == "\n":
            self._column = 0
            return part
        width, columns = self._width(), 8 - self._column % 8 if part == "\t" else get_cwidth(part)
        if self._column + columns <= width:
            self._column += columns
            return part
        if part.isspace():
            self._column = 0
            return "\n"
        # Longer than a line: the terminal itself breaks it.
        before = "\n" if self._column else ""
        self._column = columns % width
        return before + part
