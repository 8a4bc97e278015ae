"""What a model thinks before it answers: the text between `<think>` and `</think>`, which is not the answer's."""

from enum import Enum, auto
from typing import Final, NamedTuple

from windlass.serve.pieces import begun

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class Said(NamedTuple):
    """A part of what a model wrote: of its answer, and of the thought before it."""

    text: str = ""
    thought: str = ""

    def then(self, after: "Said") -> "Said":
        """This part and the one that follows it."""
        return Said(self.text + after.text, self.thought + after.thought)


class _At(Enum):
    START = auto()
    THOUGHT = auto()
    GAP = auto()  # between a thought and the answer
    ANSWER = auto()


class ThoughtReader:
    """Parts a text that comes in pieces. White space around a thought belongs to neither of the two.

    Args:
        is_open: whether the prompt has begun a thought. Else the text begins one with `<think>`, or has none.
    """

    def __init__(self, is_open: bool) -> None:
        self._is_open, self._at = is_open, _At.START
        self._held, self._has_thought = "", False

    @property
    def is_over(self) -> bool:
        """Whether what comes now is the answer, or the white space before it."""
        return self._at in (_At.GAP, _At.ANSWER)

    def feed(self, piece: str) -> Said:
        """What is certain now that `piece` came; what may belong to a mark is held back."""
        self._held += piece
        thought = ""
        if self._at is _At.START:
            self._start()
        if self._at is _At.THOUGHT:
            thought = self._thought()
        if self._at is _At.GAP:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.GAP
        text = ""
        if self._at is _At.ANSWER:
            text, self._held = self._held, ""
        return Said(text, thought)

    def end(self) -> Said:
        """What was held back. A thought that was cut off is no answer."""
        held, self._held = self._held, ""
        is_thought = self._at is _At.THOUGHT or (self._at is _At.START and self._is_open)
        return Said(thought=held.rstrip()) if is_thought else Said(held)

    def _start(self) -> None:
        given = self._held.lstrip()
        if given.startswith(OPEN):
            self._at, self._held = _At.THOUGHT, given[len(OPEN) :]
        elif not OPEN.startswith(given):
            self._at = _At.THOUGHT if self._is_open else _At.ANSWER

    def _thought(self) -> str:
        if not self._has_thought:
            self._held = self._held.lstrip()
        stop = self._held.find(CLOSE)
        if stop >= 0:
            given, self._held = self._held[:stop].rstrip(), self._held[stop + len(CLOSE) :]
            self._at = _At.GAP
            return given
        given = self._held[: len(self._held) - begun(self._held, CLOSE)].rstrip()
        self._held = self._held[len(given) :]
        self._has_thought = self._has_thought or bool(given)
        return given
