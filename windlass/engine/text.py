"""Between text and tokens."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

CONTEXT = 8  # tokens before the first new one: enough for a tokenizer to place its spaces
INCOMPLETE = "\ufffd"  # what a tokenizer gives for part of a character


def encode(tokenizer: PreTrainedTokenizerBase, text: str, is_start: bool) -> list[int]:
    """Token ids of `text`, with the tokenizer's special tokens where a text starts."""
    return list(tokenizer(text, add_special_tokens=is_start)["input_ids"]) if text else []


class TextStream:
    """Turns tokens into text one at a time, never in the middle of a character."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(before[-CONTEXT:])
        self._given = self._decoded()
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything given out."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        return "" if self._decoded().endswith(INCOMPLETE) else self.end()

    def end(self) -> str:
        """Whatever is left, an incomplete character as the replacement sign."""
        text = self._decoded()
        piece = text[len(self._given) :]
        self._tokens = self._tokens[-CONTEXT:]
        self._given = self._decoded()
        self._pieces.append(piece)
        return piece

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
