"""The text of each token of a text that grows."""

from collections.abc import Sequence
from typing import Final

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

CONTEXT: Final = 8  # tokens before the first new one: enough for a tokenizer to place its spaces


class TokenTexts:
    """The ids of a text so far, and where the next ones differ from them.

    Together the texts of all tokens are the text; one that only begins a character has none. Without a tokenizer, or
    with one that cannot go token by token, each token stands for itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer is not None and tokenizer.is_fast else None
        self._ids: list[int] = []
        self._stream = DecodeStream()

    @property
    def known(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def told(self, start: int, ids: Sequence[int]) -> tuple[int, list[int], list[str]]:
        """Where the text changes, when it goes on with `ids` from `start`; the ids from there on, and their texts."""
        start = min(start, len(self._ids))
        before = self._ids[start:]
        same = next((at for at, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new), None)
        at = start + (min(len(before), len(ids)) if same is None else same)
        new = list(ids[at - start :])
        if at < len(self._ids):
            del self._ids[at:]
            self._stream = DecodeStream(self._ids[-CONTEXT:]) if at else DecodeStream()
        self._ids += new
        return at, new, [self._text(each) for each in new]

    def _text(self, token: int) -> str:
        if self._backend is not None:
            return self._stream.step(self._backend, token) or ""
        return f"[{token}] " if self._tokenizer is None else str(self._tokenizer.decode([token]))
