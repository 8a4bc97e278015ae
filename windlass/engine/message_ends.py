"""Where the messages of a conversation end in the token ids of its prompt, and which tokens its head has.

Both come from the chat template, rendered with the first messages alone: where that is how the whole conversation
begins, the end of its text is the end of a message. A template that renders first messages otherwise has no such end.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.template_forms import Form, rendered
from windlass.engine.templates import TEXT, has_template, without_start
from windlass.engine.text import encode

MOST: Final = 256  # ends of a prompt: each takes a rendering of its messages
HEAD: Final = ("system", "developer", "tool")  # roles of messages that belong to the head, before all others

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message]], str]
"""A conversation as the template has it, without the start of a reply; may raise anything."""


def renderer(
    tokenizer: PreTrainedTokenizerBase, form: Form, tools: Sequence[Message] = (), variables: Message | None = None
) -> Render:
    """Renders conversations in the `form` that the template shows, with these tools, and variables of the template."""

    def render(messages: Sequence[Message]) -> str:
        given, listed = form.applied([dict(each) for each in messages], [dict(each) for each in tools])
        asked: Any = listed or None
        text = tokenizer.apply_chat_template(
            given, tools=asked, tokenize=False, add_generation_prompt=False, **(variables or {})
        )
        return without_start(tokenizer, str(text))

    return render


def message_ends(
    tokenizer: PreTrainedTokenizerBase, render: Render, messages: Sequence[Message], text: str
) -> tuple[int, ...]:
    """How many tokens of `text`, the prompt of a conversation, stand before the end of each of its first messages.

    A message that ends within a token is left out, as is one whose end the template does not tell. A tokenizer without
    offsets tells none.
    """
    if not tokenizer.is_fast:
        return ()
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    starts = [*accumulate((start for start, _ in offsets), max)]
    found = list[int]()
    for count in range(1, min(len(messages), MOST) + 1):
        begins = _begins(render, messages[:count], text)
        if begins is None:
            continue
        tokens = bisect_left(starts, begins)
        if tokens > max(found, default=0) and max(end for _, end in offsets[:tokens]) <= begins:
            found.append(tokens)
    return tuple(found)


def head_tokens(
    tokenizer: PreTrainedTokenizerBase, render: Render, messages: Sequence[Message], text: str | None = None
) -> int:
    """The tokens of a conversation's head: of the template, its tools, and the system messages that come first.

    `text` is the prompt of the whole conversation; a template that begins it otherwise than its head has no head: 0.
    """
    count = next((at for at, each in enumerate(messages) if each["role"] not in HEAD), len(messages))
    asked = [*messages[:count], {"role": "user", "content": TEXT}]
    try:
        head, found, _ = render(asked).partition(TEXT)
    except Exception:  # a template is a program of the model's authors, and raises what it likes
        return 0
    if not found or (text is not None and not text.startswith(head)):
        return 0
    return len(encode(tokenizer, head, is_start=True))


def system_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> int:
    """The tokens that a conversation begins with before the first message of a user: what the chat template puts there,
    its `tools`, and system messages. A cache with `sinks="system"` is told them by its `set_sinks`.

    Raises: UsageError for a tokenizer without a chat template, or with one that fails.
    """
    if not has_template(tokenizer):
        raise UsageError("this model has no chat template, so no message is a system text; give sinks a number")
    asked: list[dict[str, Any]] = [*map(dict, messages), {"role": "user", "content": TEXT}]
    try:
        _, form = rendered(tokenizer, asked, tools or ())
    except Exception as error:  # as above
        gist = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"this model's chat template fails: {gist}; give sinks a number") from error
    return head_tokens(tokenizer, renderer(tokenizer, form, tools or ()), messages)


def _begins(render: Render, messages: Sequence[Message], text: str) -> int | None:
    """The length of what these messages are rendered to, where `text` begins with it; None where it does not."""
    try:
        rendered = render(messages)
    except Exception:  # as above: many templates refuse a conversation that no user began
        return None
    return len(rendered) if text.startswith(rendered) else None
