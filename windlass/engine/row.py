"""What a row of a batch has written, and why it ended."""

from dataclasses import dataclass

from windlass.engine.result import FinishReason
from windlass.engine.text import TextStream


@dataclass(frozen=True)
class RowStep:
    """One more token of a row; None, and all as it was, once the row has ended."""

    token: int | None
    stream: TextStream
    reason: FinishReason


class WrittenRow:
    """The tokens and the text of a row. `reason` is "interrupted" while it goes on."""

    def __init__(self, stream: TextStream, max_tokens: int) -> None:
        self.tokens: list[int] = []
        self.reason: FinishReason = "interrupted"
        self._pieces: list[str] = []
        self._stream, self._max_tokens = stream, max_tokens

    @property
    def text(self) -> str:
        """Everything given out."""
        return "".join(self._pieces)

    @property
    def length(self) -> int:
        """Characters of the text, those that are held back among them."""
        return self._stream.length

    def step(self, token: int) -> RowStep:
        """What `token` makes of the row, which `taken` notes once the cache has the token."""
        if self.reason != "interrupted":
            return RowStep(None, self._stream, self.reason)
        if token in self._stream.stops.ids:
            return RowStep(token, self._stream.ended(), "stop")
        is_last = len(self.tokens) + 1 == self._max_tokens
        stream = self._stream.pushed(token, is_last)
        return RowStep(token, stream, "stop" if stream.is_stopped else "length" if is_last else "interrupted")

    def taken(self, step: RowStep) -> str:
        """Note a step; returns its piece of text."""
        if step.token is None:
            return ""
        self.tokens.append(step.token)
        self._pieces.append(step.stream.piece)
        self._stream, self.reason = step.stream, step.reason
        return step.stream.piece
