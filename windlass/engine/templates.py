"""Chat templates: from the messages of a conversation to the text that a cache still lacks.

`has_template` tells whether a tokenizer brings one. An empty cache is fed `first_prompt`, a cache that ends with a
reply `next_prompt`. `user_start` and `user_end` write one message of the user in two parts, the first of which may be
kept in a prompt cache. `text_end` tells where the text of a cache ends, from its token ids. Any error of a template
becomes a UsageError of one line. All but `has_template` and `text_end` refuse a tokenizer without a template.

A text that these functions give is tokenized with the tokenizer's special tokens where the cache is empty, and
without them where it is not, as `windlass.stream` does.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product, takewhile
from types import MappingProxyType
from typing import Any, Final, Literal, final

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.core.types import shared
from windlass.engine.text import TokenizedText, encode

AnyMessage = Mapping[str, Any]
Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

AS_GIVEN, WRAPPED, AS_STRINGS, AS_TEXT = "as given", "wrapped", "as strings", "as text"  # how calls are given
SYSTEM_FIRST, FOLDED = "first", "folded"  # places of system texts that are moved
APART: Final = "\n\n"  # between texts of one message
TOOLS_TEXT: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class TemplateLayout:
    """The form in which the parts of a conversation are given to a template."""

    calls: str = AS_GIVEN
    has_results: bool = True
    """True if results of tools are messages of their own role, and not of the user."""
    has_tools: bool = True
    """True if the template takes the tools. Otherwise the system text lists them."""
    system: str = AS_GIVEN
    is_joined: bool = False
    """True if neighbouring messages of one role become one message."""

    def applied(self, messages: Messages, tools: Tools) -> tuple[Messages, Tools]:
        """The conversation in this form."""
        found = [_with_calls(each, self.calls) for each in messages]
        if not self.has_results:
            found = _results_of_user(found)
        if tools and not self.has_tools:
            found = _with_system_text(found, _tools_text(tools))
        if self.system != AS_GIVEN:
            found = _system_moved(found, self.system == FOLDED)
        return _joined(found) if self.is_joined else found, tools if self.has_tools else ()

    def told(self) -> Iterator[str]:
        """One line for each part that the template does not take as it is."""
        if not self.has_tools:
            yield "shows no tools. The system text lists them between <tools> and </tools>"
        if self.calls == AS_TEXT:
            yield "shows no earlier calls. They are text between <tool_call> and </tool_call>"
        if self.calls == WRAPPED:
            yield 'takes only objects as arguments of a call. Other arguments are {"arguments": TEXT}'
        if not self.has_results:
            yield "shows no results of tools. The user says them between <tool_response> and </tool_response>"
        if self.system == SYSTEM_FIRST:
            yield "takes one system message, the first. All are joined there"
        if self.system == FOLDED:
            yield "forbids a system message. It is folded into the first message of the user"
        if self.is_joined:
            yield "refuses neighbours of one role. They are joined"


FORMS: Final = tuple(
    TemplateLayout(calls, has_results, has_tools, system, is_joined)
    for (system, is_joined), calls, has_results, has_tools in product(
        ((AS_GIVEN, False), (SYSTEM_FIRST, False), (SYSTEM_FIRST, True), (FOLDED, False), (FOLDED, True)),
        (AS_GIVEN, WRAPPED, AS_STRINGS, AS_TEXT),
        (True, False),
        (True, False),
    )
)  # the first one that a template renders completely is used


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, TemplateLayout]:
    """The text up to the start of the reply, by the first form that the chat template shows whole, and this form.

    A template that shows no form whole is given the conversation as it is, and its error is raised.
    `variables` are of the template, beside messages and tools.
    """

    def render(given: Messages, with_tools: Tools) -> str:
        return _applied(tokenizer, given, with_tools, variables, has_prompt=True)

    sample, sample_tools, marks = _marked(messages, tools)
    tried: list[tuple[Messages, Tools]] = []
    for form in FORMS:
        attempt = form.applied(sample, sample_tools)
        if attempt in tried:
            continue
        tried.append(attempt)
        try:
            if not marks or _shows(render(*attempt), marks):
                return render(*form.applied(messages, tools)), form
        except Exception:  # a template is a program of the model's authors, and may raise anything
            continue
    return render(messages, tools), FORMS[0]


def _applied(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, variables: Mapping[str, Any], has_prompt: bool
) -> str:
    """The text of the chat template, with the start of the reply if `has_prompt`."""
    listed: Any = [dict(each) for each in tools] or None
    text = tokenizer.apply_chat_template(
        messages, tools=listed, tokenize=False, add_generation_prompt=has_prompt, **variables
    )
    return str(text)


def _shows(text: str, marks: Sequence[str]) -> bool:
    return all(mark in text for mark in marks)


def _marked(messages: Messages, tools: Tools) -> tuple[Messages, Tools, list[str]]:
    """A conversation of this shape with marks for its texts, and the marks that a template must show.

    The shape alone decides, so that neither long texts nor texts that repeat each other matter.
    """
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"zq{len(marks)}qz")
        return marks[-1]

    def call(given: Mapping[str, Any]) -> dict[str, Any]:
        is_object = isinstance(given["function"]["arguments"], Mapping)
        arguments = {"a": mark()} if is_object else mark()
        return {**given, "function": {"name": mark(), "arguments": arguments}}

    sample = []
    for each in _without_repeats(messages):
        content = each["content"] and "text"
        if each["role"] == "tool" or (each["role"] == "system" and content):
            content = mark()
        sample.append({**each, "content": content})
        if "tool_calls" in each:
            sample[-1]["tool_calls"] = [call(one) for one in each["tool_calls"]]
    named = [{**each, "function": {**each["function"], "name": mark()}} for each in tools]
    return sample, named, marks


MAX_SAMPLED: Final = 256  # messages beyond which a middle part that repeats the others is left out


def _without_repeats(messages: Messages) -> Messages:
    """The messages without a middle part, where these are many of the kinds that the others are, in the same order."""
    if len(messages) <= MAX_SAMPLED:
        return messages
    kinds, part = [*map(_kind, messages)], MAX_SAMPLED // 4
    first, last = part, len(messages) - part
    cut = next((at for at in range(first, 2 * part) if kinds[at] == kinds[last]), None)
    is_known = cut is not None and {*kinds} <= {*kinds[:cut], *kinds[last:]}
    return [*messages[:cut], *messages[last:]] if is_known else messages


def _kind(message: AnyMessage) -> tuple[Any, ...]:
    calls = (isinstance(each["function"]["arguments"], Mapping) for each in message.get("tool_calls", ()))
    return message["role"], bool(message["content"]), (*message,), (*calls,)


def _with_calls(message: dict[str, Any], how: str) -> dict[str, Any]:
    if "tool_calls" not in message or how == AS_GIVEN:
        return message
    functions = [each["function"] for each in message["tool_calls"]]
    if how == AS_TEXT:
        texts = [f"<tool_call>\n{json_text(each)}\n</tool_call>" for each in functions]
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**plain, "content": "\n".join([*filter(None, [message["content"]]), *texts])}
    argue = _wrapped if how == WRAPPED else _as_string
    calls = [
        {**each, "function": {**each["function"], "arguments": argue(each["function"]["arguments"])}}
        for each in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _wrapped(arguments: Any) -> Any:
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _as_string(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json_text(arguments)


def _results_of_user(messages: Messages) -> Messages:
    """Results that follow each other are one message."""
    found: Messages = []
    for is_result, run in groupby(messages, lambda each: each["role"] == "tool"):
        if is_result:
            texts = [f"<tool_response>\n{each['content']}\n</tool_response>" for each in run]
            found.append({"role": "user", "content": "\n".join(texts)})
        else:
            found += run
    return found


def _tools_text(tools: Tools) -> str:
    return TOOLS_TEXT.format(tools="\n".join(map(json_text, tools)))


def _with_system_text(messages: Messages, text: str) -> Messages:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": _together(messages[0]["content"], text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _system_moved(messages: Messages, is_folded: bool) -> Messages:
    """All system texts in one message at the start, or in the first message of the user."""
    text = _together(*(each["content"] for each in messages if each["role"] == "system"))
    rest = [each for each in messages if each["role"] != "system"]
    if not text:
        return rest
    if not is_folded:
        return [{"role": "system", "content": text}, *rest]
    at = next((at for at, each in enumerate(rest) if each["role"] == "user"), None)
    if at is None:
        return [{"role": "user", "content": text}, *rest]
    return [*rest[:at], {**rest[at], "content": _together(text, rest[at]["content"])}, *rest[at + 1 :]]


def _joined(messages: Messages) -> Messages:
    found: Messages = []
    for each in messages:
        last = found[-1] if found else {"role": ""}
        if last["role"] == each["role"] != "tool":
            calls = [*last.get("tool_calls", ()), *each.get("tool_calls", ())]
            found[-1] = {**last, **each, "content": _together(last["content"], each["content"])}
            found[-1] |= {"tool_calls": calls} if calls else {}
        else:
            found.append(each)
    return found


def _together(*texts: str) -> str:
    return APART.join(filter(None, texts))


def json_text(value: Any) -> str:
    """A value as JSON, with letters of all scripts as they are."""
    return json.dumps(value, ensure_ascii=False)


Message = dict[str, str]  # of `role` (system, user or assistant) and `content`
TextEnd = Literal["no_message", "user", "reply"]

REPLY = "\u2042reply\u2042"  # stands for a reply in a template, and appears in no text
TEXT = "\u2042text\u2042"  # stands for a text of the user


def message(role: str, content: str) -> Message:
    """One message, as templates take it."""
    return {"role": role, "content": content}


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the tokenizer has a chat template."""
    return bool(tokenizer.chat_template)


def first_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The text to feed to an empty cache, up to the start of the reply to the last message.

    Raises: UsageError for a tokenizer without a template, or with one that fails.
    """
    return without_start(tokenizer, _rendered(tokenizer, messages))


def next_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], ended_with: str = "") -> str:
    """The text to feed to a cache that holds everything up to the latest reply, for the messages after it.

    `messages` is the whole conversation, the new messages included. The texts of its replies are not read. `ended_with`
    is the text of the last token in the cache, where that belongs to the template (an end of turn) and not to the
    reply.

    Raises: UsageError for a template that fails, or that does not show earlier replies as they were.
    """
    shown = [message("assistant", REPLY) if each["role"] == "assistant" else each for each in messages]
    _, found, rest = _rendered(tokenizer, shown).rpartition(REPLY)
    if not found:
        raise UsageError("this model's chat template leaves earlier replies out. Use `windlass generate --raw`")
    # Some templates put a space between a reply and the end of its turn, which the model does not write.
    return rest.lstrip().removeprefix(ended_with) if _goes_on(rest, ended_with) else rest


def user_start(tokenizer: PreTrainedTokenizerBase, text: str, system: str | None = None) -> str:
    """The text to feed to an empty cache for a message of the user that begins with `text` and is not at its end."""
    before = _rendered(tokenizer, [*of_system(system), message("user", TEXT)]).partition(TEXT)[0]
    return without_start(tokenizer, before) + text


def user_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text to feed after `user_start`: the rest of the message, up to the start of the reply."""
    return text + _rendered(tokenizer, [message("user", TEXT)]).rpartition(TEXT)[2]


def of_system(system: str | None) -> list[Message]:
    """The first messages of a conversation under this system prompt."""
    return [] if system is None else [message("system", system)]


def text_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[TextEnd, str]:
    """The place where a text of these token ids ends, and the `ended_with` for `next_prompt`.

    `user`: within a message of the user (see `user_start`). `reply`: in or after a reply. `no_message`: it has none.
    """
    if not has_template(tokenizer):
        return "no_message", ""
    turns = [message("user", TEXT), message("assistant", REPLY), message("user", TEXT)]
    first, after = _rendered(tokenizer, turns[:1]), next_prompt(tokenizer, turns)
    head, end = map(_bare, (first.partition(TEXT)[0], first.rpartition(TEXT)[2]))
    between = _bare(after.partition(TEXT)[0])
    shared = next((at for at in range(len(head)) if between.endswith(head[at:])), len(head))
    held = _bare(str(tokenizer.decode(list(ids), skip_special_tokens=False)))
    _, found, since = held.rpartition(head[shared:])
    if not (found and head[shared:]):
        return "no_message", ""
    if end not in since:
        return "user", ""
    last = str(tokenizer.decode(list(ids[-1:]), skip_special_tokens=False))
    return "reply", last if _goes_on(after, last) else ""


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> str:
    """The conversation up to the start of the next reply."""
    if not has_template(tokenizer):
        raise UsageError("this model has no chat template. Leave --system out, or choose a model made for chat")
    try:
        return rendered(tokenizer, [dict(each) for each in messages])[0]
    except Exception as error:  # a template is a program of the model's authors, and may raise anything
        raise UsageError(f"{template_problem(error)}. `windlass generate --raw` leaves the template out") from error


def template_problem(error: Exception, most: int | None = None) -> str:
    """The message for a chat template that raises `error`, with at most so many characters of its text."""
    return f"this model's chat template fails: {' '.join(str(error).split())[:most] or type(error).__name__}"


def without_start(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The text without the first special token, where the tokenizer adds it by itself."""
    start = tokenizer.bos_token
    if start and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]:
        return text.removeprefix(str(start))
    return text


def _goes_on(text: str, ended_with: str) -> bool:
    """Return True if `text` begins with the cached text."""
    return bool(ended_with.strip()) and text.lstrip().startswith(ended_with)


def _bare(text: str) -> str:
    """The text without white space, which some tokenizers put around special tokens when they decode."""
    return "".join(text.split())


MAX_RENDERED_ENDS: Final = 256  # ends of a prompt that each take a rendering of all messages before it
NEAR: Final = 16  # messages before any other end that are rendered
PROMPTS: Final = 8  # whose ends are known
HEAD: Final = ("system", "developer", "tool")  # roles of messages that belong to the head, before all others
Render = Callable[[Sequence[AnyMessage]], str]
"""Render a conversation by the template, without the start of a reply. May raise anything."""


def renderer(
    tokenizer: PreTrainedTokenizerBase,
    form: TemplateLayout,
    tools: Sequence[AnyMessage] = (),
    variables: AnyMessage | None = None,
) -> Render:
    """Renders conversations in the `form` that the template shows, with these tools, and variables of the template."""

    def render(messages: Sequence[AnyMessage]) -> str:
        given, listed = form.applied([dict(each) for each in messages], [dict(each) for each in tools])
        text = _applied(tokenizer, given, listed, variables or {}, has_prompt=False)
        return without_start(tokenizer, text)

    return render


@dataclass(frozen=True)
class RenderedMessages:
    """Messages of a prompt, and the characters of its text before the end of each of them, where known."""

    messages: Sequence[AnyMessage]
    text: str
    ends: tuple[int | None, ...] = ()

    def ends_in(self, messages: Sequence[AnyMessage], text: str) -> tuple[int | None, ...]:
        """The ends that another prompt has too, up to the first message that differs."""
        pairs = enumerate(zip(self.messages, messages, strict=False))
        same = next((at for at, (own, other) in pairs if own != other), min(len(self.messages), len(messages)))
        most = shared(self.text, text)
        return tuple(takewhile(lambda end: end is None or end <= most, self.ends[:same]))


@final
class MessageEnds:
    """The ends of messages in prompts. Those that one of the latest prompts began with are not searched again."""

    def __init__(self) -> None:
        self._held: dict[str, list[RenderedMessages]] = {}

    def of(self, render: Render, key: str, messages: Sequence[AnyMessage], text: str) -> tuple[int | None, ...]:
        """The characters of `text`, the prompt of a conversation, before the end of each of its messages.

        None: the template does not tell it. `key`: everything else that `render` depends on.
        """
        known = self._held.pop(key, [])
        found = [each.ends_in(messages, text) for each in known]
        base = max(range(len(found)), key=lambda at: len(found[at]), default=None)
        ends = [] if base is None else [*found[base]]
        while len(ends) < len(messages):
            ends.append(_end_of(render, messages, ends, text))
        is_longer = base is not None and len(found[base]) == len(known[base].messages)
        rest = [each for at, each in enumerate(known) if at != base or not is_longer]
        self._held[key] = [*rest, RenderedMessages(tuple(messages), text, tuple(ends))][-PROMPTS:]
        while len(self._held) > PROMPTS:
            del self._held[next(iter(self._held))]
        return tuple(ends)


def _end_of(render: Render, messages: Sequence[AnyMessage], ends: Sequence[int | None], text: str) -> int | None:
    """The end of the message behind those with these `ends`. Behind many, it follows from the messages near it."""
    count = len(ends) + 1
    if count <= MAX_RENDERED_ENDS:
        return _begins(render, messages[:count], text)
    before = next((at for at in range(count - 1, count - NEAR, -1) if ends[at - 1] is not None), None)
    users = (at for at in range(count - 2, count - NEAR, -1) if messages[at]["role"] == "user")
    first = None if before is None else next((at for at in users if at < before), None)
    if before is None or first is None:
        return None
    head = [*takewhile(lambda each: each["role"] in HEAD, messages)]
    try:
        shorter, longer = (render([*head, *messages[first:end]]) for end in (before, count))
    except Exception:  # a template is a program of the model's authors, and may raise anything
        return None
    end = ends[before - 1]
    if end is None or not longer.startswith(shorter) or not text.startswith(longer[len(shorter) :], end):
        return None
    return end + len(longer) - len(shorter)


def message_ends(
    tokenizer: PreTrainedTokenizerBase, text: TokenizedText, characters: Sequence[int | None]
) -> tuple[int, ...]:
    """The number of tokens before the end of each message, from the number of characters before it, where known.

    A message that ends within a token is left out. A tokenizer without offsets tells none.
    """
    found = list[int]()
    for each in characters if tokenizer.is_fast else ():
        tokens = None if each is None else text.tokens_before(each)
        if tokens is not None and tokens > max(found[-1:], default=0):
            found.append(tokens)
    return tuple(found)


def head_tokens(
    tokenizer: PreTrainedTokenizerBase, render: Render, messages: Sequence[AnyMessage], text: str | None = None
) -> int:
    """The tokens of a conversation's head: of the template, its tools, and the system messages that come first.

    `text` is the prompt of the whole conversation. Returns 0 where that does not begin with the head, and where the
    template fails.
    """
    count = next((at for at, each in enumerate(messages) if each["role"] not in HEAD), len(messages))
    asked = [*messages[:count], {"role": "user", "content": TEXT}]
    try:
        head, found, _ = render(asked).partition(TEXT)
    except Exception:  # a template is a program of the model's authors, and may raise anything
        return 0
    if not found or (text is not None and not text.startswith(head)):
        return 0
    return len(encode(tokenizer, head, is_start=True))


def tokens_until(
    tokenizer: PreTrainedTokenizerBase, render: Render, messages: Sequence[AnyMessage], text: str
) -> int | None:
    """The tokens of `text`, the prompt of a conversation, up to the end of these first messages of it.

    Returns None where the template does not tell it.
    """
    begins = _begins(render, messages, text)
    return None if begins is None else len(encode(tokenizer, text[:begins], is_start=True))


def system_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[AnyMessage], tools: Sequence[AnyMessage] | None = None
) -> int:
    """The number of tokens before a user's first message: those of the chat template, the `tools` and the system
    messages. Give it to `set_sinks` of a cache with `sinks="system"`.

    Raises: UsageError for a tokenizer without a chat template, or with one that fails.
    """
    if not has_template(tokenizer):
        raise UsageError("this model has no chat template, so no message is a system text. Give sinks a number")
    asked: list[dict[str, Any]] = [*map(dict, messages), {"role": "user", "content": TEXT}]
    try:
        _, form = rendered(tokenizer, asked, tools or ())
    except Exception as error:  # as above
        raise UsageError(f"{template_problem(error)}. Give sinks a number") from error
    return head_tokens(tokenizer, renderer(tokenizer, form, tools or ()), messages)


def _begins(render: Render, messages: Sequence[AnyMessage], text: str) -> int | None:
    """The length of the text that these messages are rendered to. None where `text` does not begin with it."""
    try:
        rendered = render(messages)
    except Exception:  # as above: many templates refuse a conversation that no user began
        return None
    return len(rendered) if text.startswith(rendered) else None
