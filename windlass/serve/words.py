"""Between text and tokens, for threads beside the event loop: a long text takes seconds."""

import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from threading import Lock
from types import MappingProxyType
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from windlass.core.check import shown
from windlass.engine.message_ends import head_tokens, message_ends, renderer
from windlass.engine.stop import Stops, stops_of
from windlass.engine.template_forms import Form, rendered
from windlass.engine.templates import has_template, without_start
from windlass.engine.text import encode, token_bytes, token_text
from windlass.serve.echo import Echo
from windlass.serve.errors import ApiError, BadField
from windlass.serve.infill import Infill, encode_inside
from windlass.serve.messages import Chunk, Messages, chunks_of, written
from windlass.serve.thoughts import CLOSE, OPEN

LOG: Final = logging.getLogger("windlass.serve")


@dataclass(frozen=True)
class Prompt:
    """Token ids, and which of them are chunks: `spans` [start, stop).

    `has_begun_thought`: whether what follows continues a thought; None where the model is not known to think.
    """

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...] = ()
    has_begun_thought: bool | None = None
    ends: tuple[int, ...] = ()
    """See `Request`, as of `head`."""
    head: int = 0

    @classmethod
    def of(cls, texts: Sequence[tuple[int, ...]], chunks: Sequence[tuple[int, ...]]) -> "Prompt":
        """Texts with a chunk between each two."""
        ids, spans = list(texts[0]), list[tuple[int, int]]()
        for chunk, text in zip(chunks, texts[1:], strict=True):
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += [*chunk, *text]
        return cls(tuple(ids), tuple(spans))


class Words:
    """A tokenizer; one text is encoded at a time. `ends`: the model's end-of-text tokens; `vocabulary`: its logits.

    `marks_messages`: prompts tell where their messages end, so that prefixes are kept there.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], vocabulary: int, marks_messages: bool = True
    ) -> None:
        own = tokenizer.eos_token_id
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.ends = tuple(ends) or (() if own is None else (int(own),))
        self.infill, self._marks_messages = Infill.of(tokenizer), marks_messages
        self._lock, self._told = Lock(), set[str]()
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

    def chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Prompt:
        """The token ids of a conversation, up to the start of the reply, and which of them are chunks.

        `variables` are of the template, beside messages and tools.

        Raises: ApiError for a model without a chat template, messages that it refuses, or variables that it has not.
        """
        if not has_template(self.tokenizer):
            raise ApiError(
                400, "this model has no chat template; send a prompt to /v1/completions", "messages", "no_chat_template"
            )
        # A mark stands for each chunk, so that the template cannot join its tokens with those around it.
        mark, chunks = secrets.token_hex(16), chunks_of(messages)
        numbers = iter(range(len(chunks)))
        given = written(messages, lambda _: f"<{mark}-{next(numbers)}>")
        with self._lock:
            source, text, form = self._rendered(given, tools, variables)
            has_begun_thought = text.rstrip().endswith(OPEN) if CLOSE in source else None
            text = without_start(self.tokenizer, text)
            render = renderer(self.tokenizer, form, tools, variables)
            ends = () if chunks or not self._marks_messages else message_ends(self.tokenizer, render, given, text)
            head = head_tokens(self.tokenizer, render, given, text)
            texts = []
            for number in range(len(chunks)):
                before, *behind = text.split(f"<{mark}-{number}>")
                if len(behind) != 1 or mark in before:
                    raise ApiError(
                        400,
                        "this model's chat template does not show each chunk once, in its order; send them as text",
                        "messages",
                        "chat_template_failed",
                    )
                texts.append(before)
                text = behind[0]
            prompt = Prompt.of(self._pieces([*texts, text]), [self._chunk(each) for each in chunks])
            return replace(prompt, has_begun_thought=has_begun_thought, ends=ends, head=head)

    def reads(self, name: str) -> bool:
        """Whether the chat template reads a variable of this name."""
        return re.search(rf"\b{re.escape(name)}\b", str(self.tokenizer.chat_template)) is not None

    def behind(self, chunks: Sequence[Chunk], prompt: Prompt) -> Prompt:
        """A prompt that chunks stand before: behind the tokens that a text begins with, where it has them."""
        with self._lock:
            lead = self._lead()
            has_lead = bool(lead) and prompt.ids[: len(lead)] == lead
            texts: list[tuple[int, ...]] = [lead if has_lead else (), *((),) * (len(chunks) - 1)]
            rest = prompt.ids[len(lead) * has_lead :]
            return Prompt.of([*texts, rest], [self._chunk(each) for each in chunks])

    def around(self, prompt: tuple[int, ...], suffix: str) -> tuple[int, ...]:
        """A prompt with a gap behind it, and `suffix` behind the gap.

        Raises: BadField where the tokenizer marks none.
        """
        if self.infill is None:
            raise BadField(
                "suffix",
                "needs a tokenizer with tokens around a gap, such as <|fim_prefix|>; leave it out",
                "unsupported_parameter",
            )
        with self._lock:
            lead = self._lead()
            before = prompt[len(lead) :] if prompt[: len(lead)] == lead else prompt
            return (*lead, *self.infill.prompt(before, encode_inside(self.tokenizer, suffix)))

    def echo(self, text: str | None, tokens: tuple[int, ...]) -> Echo:
        """A prompt as an answer begins with it; `text` is None where it came as token ids."""
        with self._lock:
            return Echo.of(self.tokenizer, text, tokens, self._lead())

    def _lead(self) -> tuple[int, ...]:
        """The tokens that a text begins with, whatever it is."""
        bare, start = encode(self.tokenizer, "a", False), encode(self.tokenizer, "a", True)
        return tuple(start[: len(start) - len(bare)] if start[-len(bare) :] == bare else ())

    def _pieces(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(encode(self.tokenizer, text, is_start=not at)) for at, text in enumerate(texts)]

    def _chunk(self, chunk: Chunk) -> tuple[int, ...]:
        ids = tuple(encode(self.tokenizer, chunk.text, False))
        if not ids:
            raise BadField("chunks", f"must have tokens, and {shown(chunk.text)} has none")
        return ids

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> tuple[str, str, Form]:
        """The template, what it makes of a conversation, and in which form it was given that."""
        given: Any = [dict(each) for each in tools] or None
        try:
            source = self.tokenizer.get_chat_template(tools=given)
            _check_variables(variables, source)
            text, form = rendered(self.tokenizer, messages, tools, variables)
        except BadField:
            raise
        except Exception as error:  # a template is a program of the model's authors, and raises what it likes
            gist = " ".join(str(error).split())[:200] or type(error).__name__
            raise ApiError(
                400, f"this model's chat template fails: {gist}", "messages", "chat_template_failed"
            ) from error
        for line in form.told():
            if line not in self._told:
                self._told.add(line)
                LOG.warning("this model's chat template %s", line)
        return source, text, form

    def stops(self, strings: Sequence[str]) -> Stops:
        """What ends a text: the model's own tokens, and these strings."""
        return stops_of(list(strings) or None, self.tokenizer, self.ends, self.vocabulary)

    def shown(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text and its own bytes, of which the text of a part of a character shows nothing.

        Never waits for a text of others.
        """
        codes = token_bytes(self.tokenizer, token)
        return token_text(self.tokenizer, token), None if codes is None else list(codes)


def _check_variables(variables: Mapping[str, Any], template: str) -> None:
    """Raises: BadField for a name that the template does not read, or that is the tokenizer's own."""
    own = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
    for name in variables:
        if name in own or re.search(rf"\b{re.escape(name)}\b", template) is None:
            raise BadField(f"chat_template_kwargs.{name}", "is nothing that this model's chat template reads")
