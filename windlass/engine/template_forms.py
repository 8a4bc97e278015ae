"""Forms of a conversation, for chat templates that refuse a part of it or leave it out.

A template is first given the conversation as it is. Where it fails, or hides a system text, a tool, a call or a result,
the part is written in a form that every template shows: tools into the system text, and calls and results as text, as
Hermes and Qwen write them. A template without a system role gets the system text in the first message of the user.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from types import MappingProxyType
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]

AS_GIVEN, WRAPPED, AS_STRINGS, AS_TEXT = "as given", "wrapped", "as strings", "as text"  # how calls are given
SYSTEM_FIRST, FOLDED = "first", "folded"  # where system texts are, if not where they were
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
class Form:
    """How the parts of a conversation are given to a template."""

    calls: str = AS_GIVEN
    has_results: bool = True
    """Whether results of tools are messages of their role, and not of the user."""
    has_tools: bool = True
    """Whether the template is given the tools; else the system text has them."""
    system: str = AS_GIVEN
    is_joined: bool = False
    """Whether neighbours of one role are one message."""

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
            yield "shows no tools; the system text lists them between <tools> and </tools>"
        if self.calls == AS_TEXT:
            yield "shows no earlier calls; they are text between <tool_call> and </tool_call>"
        if self.calls == WRAPPED:
            yield 'takes only objects as arguments of a call; other arguments are {"arguments": TEXT}'
        if not self.has_results:
            yield "shows no results of tools; the user says them between <tool_response> and </tool_response>"
        if self.system == SYSTEM_FIRST:
            yield "takes one system message, the first; all are joined there"
        if self.system == FOLDED:
            yield "forbids a system message; it is folded into the first message of the user"
        if self.is_joined:
            yield "refuses neighbours of one role; they are joined"


FORMS: Final = tuple(
    Form(calls, has_results, has_tools, system, is_joined)
    for (system, is_joined), calls, has_results, has_tools in product(
        ((AS_GIVEN, False), (SYSTEM_FIRST, False), (SYSTEM_FIRST, True), (FOLDED, False), (FOLDED, True)),
        (AS_GIVEN, WRAPPED, AS_STRINGS, AS_TEXT),
        (True, False),
        (True, False),
    )
)  # the first one that a template shows whole is taken


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools = (),
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, Form]:
    """The text up to the start of the reply, by the first form that the chat template shows whole, and this form.

    A template that shows no form whole is given the conversation as it is, and what it raises then is raised.
    `variables` are of the template, beside messages and tools.
    """

    def render(given: Messages, with_tools: Tools) -> str:
        listed: Any = [dict(each) for each in with_tools] or None
        text = tokenizer.apply_chat_template(
            given, tools=listed, tokenize=False, add_generation_prompt=True, **variables
        )
        return str(text)

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
        except Exception:  # a template is a program of the model's authors, and raises what it likes
            continue
    return render(messages, tools), FORMS[0]


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
    for each in messages:
        content = each["content"] and "text"
        if each["role"] == "tool" or (each["role"] == "system" and content):
            content = mark()
        sample.append({**each, "content": content})
        if "tool_calls" in each:
            sample[-1]["tool_calls"] = [call(one) for one in each["tool_calls"]]
    named = [{**each, "function": {**each["function"], "name": mark()}} for each in tools]
    return sample, named, marks


def _with_calls(message: dict[str, Any], how: str) -> dict[str, Any]:
    if "tool_calls" not in message or how == AS_GIVEN:
        return message
    functions = [each["function"] for each in message["tool_calls"]]
    if how == AS_TEXT:
        texts = [f"<tool_call>\n{_json(each)}\n</tool_call>" for each in functions]
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
    return arguments if isinstance(arguments, str) else _json(arguments)


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
    return TOOLS_TEXT.format(tools="\n".join(map(_json, tools)))


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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
