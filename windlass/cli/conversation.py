"""A conversation as messages, and the text of it that a model has not read yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine import templates
from windlass.engine.text import encode


@dataclass(frozen=True)
class Turn:
    """A message of the user and the reply to it, as text and as the token ids that were fed.

    `prompt` holds what was fed before the reply, `tokens` the reply itself. `ended_with` is the text of the reply's
    last token where it ended by itself, which is no part of `reply`.
    """

    line: str
    reply: str
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended_with: str = ""


class Conversation:
    """Turns on one text, and what each of them adds to it.

    With a chat template, that is the template from the end of the last reply up to the start of the next; without
    one, the message itself, begun on a new line. `start` are the ids of a text that came before the first turn; where
    it ends within a message, the first turn goes on with that.

    Raises: UsageError as `tell` does.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, start: Sequence[int] = (), system: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.start, self.turns = list(start), list[Turn]()
        self.system: str | None = None
        if system is not None:
            self.tell(system)

    @property
    def has_template(self) -> bool:
        """Whether the model was made for chat."""
        return templates.has_template(self._tokenizer)

    @property
    def ids(self) -> list[int]:
        """Of the whole text: what came before, and every turn."""
        return [*self.start, *(token for turn in self.turns for token in (*turn.prompt, *turn.tokens))]

    def tell(self, system: str | None) -> None:
        """Change what the model is told before the first message, and the ids of all prompts with it; None: nothing.

        Raises: UsageError where the model's template has no place for it, or fails; nothing is then changed.
        """
        if system is not None:
            if self.start:
                raise UsageError("a system text stands at the start, and this conversation goes on from a prompt cache")
            first = [*templates.of_system(system), templates.message("user", "?")]
            if system.strip() not in templates.opening(self._tokenizer, first):
                raise UsageError("this model's chat template leaves the system text out; put it in a message")
        before, self.system = self.system, system
        try:
            self.encode_again()
        except UsageError:
            self.system = before
            raise

    def encoded(self, line: str) -> tuple[str, list[int]]:
        """The text to feed for `line`, and its ids. Raises: UsageError as `missing` does."""
        text = self.missing(line)
        return text, encode(self._tokenizer, text, is_start=not self.ids)

    def missing(self, line: str, after: int | None = None) -> str:
        """The text to feed for `line` after the first `after` turns, by default all; nothing is changed.

        Raises: UsageError for a chat template that fails, or does not show earlier replies as they were.
        """
        earlier = self.turns[:after]
        if not self.has_template:
            return f"\n{line}" if earlier else line
        messages = templates.of_system(self.system)
        for turn in earlier:
            messages += [templates.message("user", turn.line), templates.message("assistant", turn.reply)]
        messages.append(templates.message("user", line))
        if earlier:
            return templates.following(self._tokenizer, messages, earlier[-1].ended_with)
        if not self.start:
            return templates.opening(self._tokenizer, messages)
        standing, ended_with = templates.standing(self._tokenizer, self.start)
        if standing == "user":  # the start is a text that this message ends
            return templates.rest(self._tokenizer, line)
        if standing == "reply":
            before = [templates.message("user", ""), templates.message("assistant", "")]
            return templates.following(self._tokenizer, [*before, *messages], ended_with)
        return templates.opening(self._tokenizer, messages)

    def encode_again(self) -> None:
        """Make the ids of all prompts anew; replies keep theirs, where they have any.

        Raises: UsageError as `missing` does; nothing is then changed.
        """
        texts = [self.missing(turn.line, after) for after, turn in enumerate(self.turns)]
        for at, (turn, text) in enumerate(zip(self.turns, texts, strict=True)):
            prompt = encode(self._tokenizer, text, is_start=at == 0 and not self.start)
            tokens = turn.tokens or encode(self._tokenizer, turn.reply + turn.ended_with, is_start=False)
            self.turns[at] = replace(turn, prompt=prompt, tokens=tokens)
