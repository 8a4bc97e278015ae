"""Forms in which families of models write thoughts and calls of functions, told from their chat templates."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

SPACE: Final = " \t\r\n"
MOST_LITERAL, MOST_NESTED = 1 << 16, 64  # characters of a literal of Python, and signs that may nest it
Schema = Mapping[str, Any]
Functions = Mapping[str, Schema]
"""The JSON schema of the arguments of each function that may be called, by the function's name."""


@dataclass(frozen=True)
class ThoughtForm:
    """The marks around a thought, which stands before the answer."""

    opening: str
    closing: str


THOUGHT_FORMS: Final = (ThoughtForm("<think>", "</think>"), ThoughtForm("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class PairForm:
    """Arguments as pairs of a key and a value. Each is written as `before`, the key, `between`, the value, `after`.

    `name` finds the name of a call, and `end` stands behind its pairs.
    """

    name: re.Pattern[str]
    end: str
    before: str
    between: str
    after: str

    def pairs(self, text: str) -> Iterator[tuple[str, str]]:
        """The pairs of a call, up to the first that is not whole. White space between marks does not matter."""
        between, after, at = self.between.split(), self.after.strip(), 0
        while (start := text.find(self.before, at)) >= 0:
            stop = text.find(between[0], start)
            begin = text.find(between[-1], stop)
            end = text.find(after, begin)
            if min(stop, begin, end) < 0:
                return
            key, value = text[start + len(self.before) : stop].strip(), text[begin + len(between[-1]) : end]
            if self.between.endswith("\n"):
                value = value.removeprefix("\n").removesuffix("\n")
            yield key, value
            at = end


@dataclass(frozen=True)
class CallForm:
    """A family's form of a call.

    `evidence` is found in the family's chat templates. A call stands between two `marks`, of which the second is empty
    where none follows. `heads` lead from the first mark to JSON arguments, with a group `outer` where both are in an
    object. `filler` may stand before the second mark and `gap` behind it. With `repeats`, further calls need no mark.
    `others` are marks without a text, and `ends` tokens that end a reply.

    A demanded call is written as `before`, its name, `between`, its arguments, `after`.
    """

    family: str
    evidence: re.Pattern[str]
    marks: tuple[tuple[str, str], ...] = ()
    heads: tuple[re.Pattern[str], ...] = ()
    before: str = ""
    between: str = ""
    after: str = ""
    pairs: PairForm | None = None
    filler: str = SPACE
    gap: str = SPACE
    repeats: bool = False
    others: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    lead: str = ""
    """Text that chat templates write between an answer and a call, which belongs to neither."""
    answer: str = ""
    """Text that leads to an answer, where a reply has channels."""

    @property
    def spelled(self) -> str:
        """All marks in one text."""
        return "".join([*map("".join, self.marks), self.before, self.between, self.after, *self.others, *self.ends])


def _deepseek(name: str) -> str:
    """A mark of DeepSeek's, whose bars and spaces are characters of their own."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_CALL, _SEPARATOR, _CALL_END = _deepseek("tool call begin"), _deepseek("tool sep"), _deepseek("tool call end")
_CALLS, _CALLS_END = _deepseek("tool calls begin"), _deepseek("tool calls end")
NAME: Final = r"\s*+(?P<name>[\w.-]++)"
OBJECT: Final = re.compile(
    r'\s*+(?P<outer>\{)\s*+(?:"(?:type|id)"\s*+:\s*+"[^"\\]*"\s*+,\s*+)*'
    r'"name"\s*+:\s*+"(?P<name>[^"\\]*)"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
)

HARMONY: Final = CallForm(
    family="gpt-oss (Harmony)",
    evidence=re.compile(r"<\|channel\|>(?s:.*)<\|message\|>"),
    before="<|channel|>commentary to=functions.",
    between=" <|constrain|>json<|message|>",
    others=("<|start|>", "<|end|>"),
    ends=("<|call|>", "<|return|>"),
    answer="<|channel|>final<|message|>",
)
DEEPSEEK_V3: Final = CallForm(
    family="DeepSeek V3 and R1",
    evidence=re.compile(rf"{_CALL}(?s:.*)```json"),
    marks=((_CALL, _CALL_END),),
    heads=(re.compile(rf"\s*+(?:function)?+{_SEPARATOR}{NAME}\s*+```json\s*+(?=\{{)"),),
    before=f"{_CALLS}{_CALL}function{_SEPARATOR}",
    between="\n```json\n",
    after=f"\n```{_CALL_END}{_CALLS_END}",
    filler=f"{SPACE}`",
    others=(_CALLS, _CALLS_END),
)
DEEPSEEK: Final = CallForm(
    family="DeepSeek V3.1",
    evidence=re.compile(_CALL),
    marks=((_CALL, _CALL_END),),
    heads=(re.compile(rf"{NAME}\s*+{_SEPARATOR}\s*+(?=\{{)"),),
    before=f"{_CALLS}{_CALL}",
    between=_SEPARATOR,
    after=f"{_CALL_END}{_CALLS_END}",
    others=(_CALLS, _CALLS_END),
)
KIMI: Final = CallForm(
    family="Kimi K2",
    evidence=re.compile(r"<\|tool_call_argument_begin\|>"),
    marks=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
    heads=(re.compile(rf"\s*+(?:functions\.)?+{NAME}(?::\d++)?+\s*+<\|tool_call_argument_begin\|>\s*+(?=\{{)"),),
    before="<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    between=":0<|tool_call_argument_begin|>",
    after="<|tool_call_end|><|tool_calls_section_end|>",
    others=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
MISTRAL: Final = CallForm(
    family="Mistral from v11 on, Magistral, Devstral",
    evidence=re.compile(r"\[TOOL_CALLS\](?s:.*)\[ARGS\]"),
    marks=(("[TOOL_CALLS]", ""),),
    heads=(
        re.compile(rf"{NAME}\s*+(?:\[CALL_ID\]\s*+[\w-]*+\s*+)?+(?:\[ARGS\])?+\s*+(?=\{{)"),
        re.compile(rf"\s*+\[?{OBJECT.pattern}"),
    ),
    before="[TOOL_CALLS]",
    between="[ARGS]",
    gap=f"{SPACE},]",
    repeats=True,
    others=("[CALL_ID]",),
)
MISTRAL_LIST: Final = CallForm(
    family="Mistral up to v7, Nemo, Ministral",
    evidence=re.compile(r"\[TOOL_CALLS\]"),
    marks=MISTRAL.marks,
    heads=MISTRAL.heads,
    before='[TOOL_CALLS][{"name": "',
    between='", "arguments": ',
    after="}]",
    gap=MISTRAL.gap,
    repeats=True,
    others=("[ARGS]", "[CALL_ID]"),
)
GRANITE: Final = CallForm(
    family="Granite 3",
    evidence=re.compile(r"<\|tool_call\|>"),
    marks=(("<|tool_call|>", ""),),
    heads=(MISTRAL.heads[1],),
    before='<|tool_call|>[{"name": "',
    between='", "arguments": ',
    after="}]",
    gap=MISTRAL.gap,
    repeats=True,
)
GLM: Final = CallForm(
    family="GLM 4.5 and later",
    evidence=re.compile("<arg_key>"),
    marks=(("<tool_call>", "</tool_call>"),),
    heads=(OBJECT,),
    before="<tool_call>",
    between="\n",
    after="</tool_call>",
    pairs=PairForm(
        re.compile(r"<tool_call>\s*+(?P<name>[^\s<]{1,256})"),
        end="</tool_call>",
        before="<arg_key>",
        between="</arg_key>\n<arg_value>",
        after="</arg_value>\n",
    ),
)
QWEN_XML: Final = CallForm(
    family="Qwen3-Coder, Qwen3.5",
    evidence=re.compile("<parameter="),
    marks=(("<tool_call>", "</tool_call>"), ("<function=", "</function>")),
    heads=(OBJECT,),
    before="<tool_call>\n<function=",
    between=">\n",
    after="</function>\n</tool_call>",
    pairs=PairForm(
        re.compile(r"<function=(?P<name>[^>\n]{1,256})>"),
        end="</function>",
        before="<parameter=",
        between=">\n",
        after="\n</parameter>\n",
    ),
)
MINIMAX: Final = CallForm(
    family="MiniMax M2",
    evidence=re.compile("<invoke name="),
    marks=(("<minimax:tool_call>", "</minimax:tool_call>"),),
    heads=(OBJECT,),
    before='<minimax:tool_call>\n<invoke name="',
    between='">\n',
    after="</invoke>\n</minimax:tool_call>",
    pairs=PairForm(
        re.compile(r'<invoke name="(?P<name>[^"\n]{1,256})">'),
        end="</invoke>",
        before='<parameter name="',
        between='">',
        after="</parameter>\n",
    ),
)
HERMES: Final = CallForm(
    family="Hermes, Qwen 2.5 and 3, and all others",
    evidence=re.compile("<tool_call>"),
    marks=(("<tool_call>", "</tool_call>"),),
    heads=(OBJECT,),
    before='<tool_call>\n{"name": "',
    between='", "arguments": ',
    after="}\n</tool_call>",
    lead="\n",
)
LLAMA: Final = CallForm(
    family="Llama 3",
    evidence=re.compile(r'<\|python_tag\|>|"parameters": dictionary'),
    marks=(("<|python_tag|>", ""),),
    heads=(OBJECT,),
    before='{"name": "',
    between='", "parameters": ',
    after="}",
    gap=f"{SPACE};,",
    repeats=True,
    ends=("<|eom_id|>",),
)
CALL_FORMS: Final = (
    *(HARMONY, DEEPSEEK_V3, DEEPSEEK, KIMI, MISTRAL, MISTRAL_LIST, GRANITE, GLM, QWEN_XML, MINIMAX, HERMES, LLAMA),
)


@dataclass(frozen=True)
class ReplyForm:
    """A model's forms of thoughts and calls. `thoughts` is None where it is not known to think."""

    calls: CallForm = HERMES
    thoughts: ThoughtForm | None = None

    @classmethod
    def of(cls, template: str) -> "ReplyForm":
        """The forms that a chat template shows."""
        calls = next((form for form in CALL_FORMS if form.evidence.search(template)), HERMES)
        return cls(calls, next((form for form in THOUGHT_FORMS if form.closing in template), None))

    @property
    def has_channels(self) -> bool:
        """Return True if thoughts, answers and calls stand in channels."""
        return self.calls is HARMONY

    def marks(self, has_calls: bool) -> str:
        """Marks that a reader needs to see, those of calls only with `has_calls`."""
        thoughts = "" if self.thoughts is None else self.thoughts.opening + self.thoughts.closing
        return thoughts + (self.calls.spelled if has_calls or self.has_channels else "")


PLAIN: Final = ReplyForm()


def typed(text: str, schema: Any) -> Any:
    """Return a value that a model wrote as `text`: a string where the schema asks for one, else JSON if it is JSON.

    Lists, objects and words may be Python's, as some templates show them in earlier calls.
    """
    kinds = {*kinds_of(schema)}
    if kinds == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _of_python(text) if kinds - {"string"} else text
    return text if "string" in kinds and isinstance(value, str | int | float) and not isinstance(value, bool) else value


def _of_python(text: str) -> Any:
    """The value of a literal of Python that JSON has too, or the text."""
    if len(text) > MOST_LITERAL or sum(map(text.count, "([{-+~")) > MOST_NESTED:  # deep ones can end the interpreter
        return text
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return text if isinstance(value, str | tuple) else value


def kinds_of(schema: Any) -> Iterator[str]:
    """The types of JSON that a schema names, those of its alternatives too."""
    if not isinstance(schema, Mapping):
        return
    kinds = schema.get("type")
    yield from (each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str))
    words = schema.get("enum")
    if kinds is None and isinstance(words, list) and all(isinstance(each, str) for each in words):
        yield "string"
    for name in ("anyOf", "oneOf"):
        for each in schema[name] if isinstance(schema.get(name), list) else ():
            yield from kinds_of(each)


def properties_of(schema: Schema) -> Schema:
    """The schemas of the arguments of a function."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}
