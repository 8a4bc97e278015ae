"""Chat templates: from the messages of a conversation to the text that a cache still lacks.

`has_template` tells whether a tokenizer brings one. An empty cache is fed `opening`, a cache that ends with a reply
`following`; `begun` and `rest` write one message of the user in two parts, the first of which may be kept in a prompt
cache. `standing` tells where the text of a cache ends, out of its token ids. Whatever a template raises is a UsageError
of one line; a tokenizer without a template is refused by all but `has_template` and `standing`.

A text that these functions give is tokenized with the tokenizer's special tokens where the cache is empty, and
without them where it is not, as `windlass.stream` does.
"""

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.template_forms import rendered

Message = dict[str, str]  # of `role` (system, user or assistant) and `content`
Standing = Literal["bare", "user", "reply"]

REPLY = "\u2042reply\u2042"  # stands for a reply in a template; no text has it
TEXT = "\u2042text\u2042"  # stands for a text of the user


def message(role: str, content: str) -> Message:
    """One message, as templates take it."""
    return {"role": role, "content": content}


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer brings a chat template."""
    return bool(tokenizer.chat_template)


def opening(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The text to feed to an empty cache, up to the start of the reply to the last message.

    Raises: UsageError for a tokenizer without a template, or with one that fails.
    """
    return without_start(tokenizer, _rendered(tokenizer, messages))


def following(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ended_with: str = "") -> str:
    """The text to feed to a cache that holds everything up to the latest reply, for the messages after it.

    `messages` is the whole conversation, the new messages included; what its replies say is not read. `ended_with`
    is the text of the last token in the cache, where that belongs to the template (an end of turn) and not to the
    reply.

    Raises: UsageError for a template that fails, or that does not show earlier replies as they were.
    """
    shown = [message("assistant", REPLY) if each["role"] == "assistant" else each for each in messages]
    _, found, rest = _rendered(tokenizer, shown).rpartition(REPLY)
    if not found:
        raise UsageError("this model's chat template leaves earlier replies out; use `windlass generate --raw`")
    # Some templates put a space between a reply and the end of its turn, which the model does not write.
    return rest.lstrip().removeprefix(ended_with) if _goes_on(rest, ended_with) else rest


def begun(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None = None) -> str:
    """The text to feed to an empty cache for a message of the user that begins with `text` and is not at its end."""
    before = _rendered(tokenizer, [*of_system(system), message("user", TEXT)]).partition(TEXT)[0]
    return without_start(tokenizer, before) + text


def rest(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text to feed after `begun`: the rest of the message, up to the start of the reply."""
    return text + _rendered(tokenizer, [message("user", TEXT)]).rpartition(TEXT)[2]


def of_system(system: str | None) -> list[Message]:
    """The messages that a conversation under this system prompt begins with."""
    return [] if system is None else [message("system", system)]


def standing(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[Standing, str]:
    """Where a text of these token ids ends, and what `following` calls `ended_with`.

    `user`: within a message of the user (see `begun`); `reply`: in or after a reply; `bare`: it has no message.
    """
    if not has_template(tokenizer):
        return "bare", ""
    turns = [message("user", TEXT), message("assistant", REPLY), message("user", TEXT)]
    first, after = _rendered(tokenizer, turns[:1]), following(tokenizer, turns)
    head, end = map(_bare, (first.partition(TEXT)[0], first.rpartition(TEXT)[2]))
    between = _bare(after.partition(TEXT)[0])
    shared = next((at for at in range(len(head)) if between.endswith(head[at:])), len(head))
    held = _bare(str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    _, found, since = held.rpartition(head[shared:])
    if not (found and head[shared:]):
        return "bare", ""
    if end not in since:
        return "user", ""
    last = str(tokenizer.decode(list(ids[-1:]), skip_special_tokens=False))
    return "reply", last if _goes_on(after, last) else ""


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The conversation up to the start of the next reply."""
    if not has_template(tokenizer):
        raise UsageError("this model has no chat template; leave --system out, or choose a model made for chat")
    try:
        return rendered(tokenizer, [dict(each) for each in messages])[0]
    except Exception as error:  # a template is a program of the model's authors, and raises what it likes
        gist = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"this model's chat template fails: {gist}; `windlass generate --raw` leaves the template out"
        ) from error


def without_start(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Without the first special token, where the tokenizer adds it by itself."""
    start = tokenizer.bos_token
    if start and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return text.removeprefix(str(start))
    return text


def _goes_on(text: str, ended_with: str) -> bool:
    """Whether `text` begins with what is in the cache already."""
    return bool(ended_with.strip()) and text.lstrip().startswith(ended_with)


def _bare(text: str) -> str:
    """Without white space, which some tokenizers put around special tokens when they decode."""
    return "".join(text.split())
