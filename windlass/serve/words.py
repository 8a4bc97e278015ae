"""Between text and tokens, for threads beside the event loop: a long text takes seconds."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

from transformers import PreTrainedTokenizerBase

from windlass.engine.stop import Stops, stops_of
from windlass.engine.templates import has_template, without_start
from windlass.engine.text import INCOMPLETE, encode
from windlass.serve.errors import ApiError, BadField


class Words:
    """A tokenizer; one text is encoded at a time. `ends`: the model's end-of-text tokens; `vocabulary`: its logits."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], vocabulary: int) -> None:
        own = tokenizer.eos_token_id
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.ends = tuple(ends) or (() if own is None else (int(own),))
        self._lock = Lock()
        # The first call may change settings of the tokenizer; while others decode with it, it could not.
        encode(tokenizer, "a", True)

    def encoded(self, text: str, has_special: bool = True) -> tuple[int, ...]:
        """The token ids of a text, with those that a text begins with if `has_special`."""
        with self._lock:
            return tuple(encode(self.tokenizer, text, has_special))

    def decoded(self, tokens: Sequence[int]) -> str:
        """The text of token ids. Raises: BadField for an id outside of the vocabulary."""
        self.check("tokens", tokens)
        return str(self.tokenizer.decode(list(tokens)))

    def check(self, name: str, tokens: Sequence[int]) -> None:
        """Raises: BadField for an id outside of the vocabulary."""
        wrong = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if wrong is not None:
            raise BadField(name, f"has the token id {wrong}, but ids are from 0 to {self.vocabulary - 1}")

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """The token ids of a conversation, up to the start of the reply.

        Raises: ApiError for a model without a chat template, or messages that it refuses.
        """
        if not has_template(self.tokenizer):
            raise ApiError(
                400, "this model has no chat template; send a prompt to /v1/completions", "messages", "no_chat_template"
            )
        with self._lock:
            try:
                text = self.tokenizer.apply_chat_template(
                    [dict(each) for each in messages],
                    tools=[dict(each) for each in tools] or None,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except Exception as error:  # a template is a program of the model's authors, and raises what it likes
                gist = " ".join(str(error).split())[:200] or type(error).__name__
                raise ApiError(
                    400, f"this model's chat template fails: {gist}", "messages", "chat_template_failed"
                ) from error
            return tuple(encode(self.tokenizer, without_start(self.tokenizer, str(text)), True))

    def stops(self, strings: Sequence[str]) -> Stops:
        """What ends a text: the model's own tokens, and these strings."""
        return stops_of(list(strings) or None, self.tokenizer, self.ends, self.vocabulary)

    def shown(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text and its bytes; no bytes where it is part of a character. Never waits for a text of others."""
        text = str(self.tokenizer.decode([token]))
        return text, None if INCOMPLETE in text else list(text.encode())
