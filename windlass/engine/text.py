"""Between text and tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from transformers import PreTrainedTokenizerBase

from windlass.engine.stop import Stops

CONTEXT: Final = 8  # tokens before the first new one: enough for a tokenizer to place its spaces
INCOMPLETE: Final = "\ufffd"  # what a tokenizer gives for part of a character


def encode(tokenizer: PreTrainedTokenizerBase, text: str, is_start: bool) -> list[int]:
    """Token ids of `text`, with the tokenizer's special tokens where a text starts."""
    return list(tokenizer(text, add_special_tokens=is_start)["input_ids"]) if text else []


@dataclass(frozen=True)
class TextStream:
    """The text of a row whose tokens come one at a time; each token makes another `TextStream`.

    `piece` is the text that the latest token has given out: never part of a character, nor what may still become a
    stop string. `is_stopped` once there was one.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: Stops
    tokens: tuple[int, ...]  # the latest, for the tokenizer to begin with
    decoded: str  # the text of `tokens` but for characters that are incomplete
    piece: str = ""
    held: str = ""  # what was not given out, because it may become a stop string
    is_stopped: bool = False

    @classmethod
    def after(cls, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], stops: Stops) -> "TextStream":
        """Nothing written yet, after `prompt`."""
        tokens = tuple(prompt[-CONTEXT:])
        return cls(tokenizer, stops, tokens, _decoded(tokenizer, tokens))

    def pushed(self, token: int, is_last: bool = False) -> "TextStream":
        """After `token`. Of the last one nothing is held back: an incomplete character is the replacement sign."""
        tokens = (*self.tokens, token)
        text = _decoded(self.tokenizer, tokens)
        if text.endswith(INCOMPLETE) and not is_last:
            return replace(self, tokens=tokens, piece="")
        return self._given(tokens, text, is_last)

    def ended(self) -> "TextStream":
        """After the last token, which is no part of the text: with whatever is left."""
        return self._given(self.tokens, _decoded(self.tokenizer, self.tokens), is_last=True)

    def _given(self, tokens: tuple[int, ...], text: str, is_last: bool) -> "TextStream":
        new = self.held + text[len(self.decoded) :]
        stop = self.stops.first_in(new)
        given = new[:stop] if stop is not None or is_last else new[: len(new) - self.stops.held_back(new)]
        return replace(
            self,
            tokens=tokens[-CONTEXT:],
            decoded=_decoded(self.tokenizer, tokens[-CONTEXT:]),
            piece=given,
            held=new[len(given) :] if stop is None else "",
            is_stopped=stop is not None,
        )


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
