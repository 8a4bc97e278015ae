"""Prompts that an answer begins with."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from windlass.engine.request import Event, Logprob, Piece, PromptLogprobs
from windlass.engine.text import token_bytes, token_text


@dataclass(frozen=True)
class Echo:
    """The text of a prompt and its tokens, with how many characters of the text stand before each."""

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str | None, tokens: tuple[int, ...], lead: tuple[int, ...]
    ) -> "Echo":
        """That of a prompt whose first tokens, `lead`, no text shows; `text` is None for a prompt of token ids."""
        decoder, read, offsets = codecs.getincrementaldecoder("utf-8")("replace"), "", []
        before = lead if tokens[: len(lead)] == lead else ()
        for token in tokens[len(before) :]:
            offsets.append(len(read))
            codes = token_bytes(tokenizer, token)
            read += decoder.decode(token_text(tokenizer, token).encode() if codes is None else codes)
        shown = (read if text is None else text).removeprefix(_added_space(tokenizer, tokens[len(before) :], text))
        moved = len(read) - len(shown)
        return cls(shown, tokens, (0,) * len(before) + tuple(max(each - moved, 0) for each in offsets))

    @property
    def piece(self) -> Piece:
        """The prompt as if its first token had given out all of its text."""
        return Piece(self.tokens[0], self.text)

    def scored(self, logprobs: Sequence[tuple[Logprob, ...]]) -> list[Event]:
        """The prompt as if it were written, token by token; the first one has no log probabilities."""
        rest = zip(self.tokens[1:], logprobs, self.offsets[1:], strict=True)
        return [self.piece, *(Piece(token, "", each, offset) for token, each, offset in rest)]

    def before(self, event: Event) -> list[Event]:
        """An event of the engine as that of a text which the prompt begins."""
        if isinstance(event, PromptLogprobs):
            return self.scored(event.logprobs)
        if isinstance(event, Piece):
            return [replace(event, offset=event.offset + len(self.text))]
        return [event]


def _added_space(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], text: str | None) -> str:
    """The space that a tokenizer puts before a text, which is not the text's, if there is one."""
    if not tokens or text is not None:
        return ""
    alone = str(tokenizer.decode([tokens[0]]))
    return " " if token_text(tokenizer, tokens[0]) == f" {alone}" else ""
