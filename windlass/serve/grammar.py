"""Grammars by llguidance: which tokens a text may go on with, so that it is JSON of a schema, or a call of a tool."""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import Any, Final, cast

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from windlass.core.errors import UsageError, shown
from windlass.engine.request import Grammar
from windlass.serve.errors import BadField
from windlass.serve.forms import PLAIN, CallForm, Functions, PairForm, Schema, kinds_of, properties_of
from windlass.serve.prompts import PromptTokenizer

# Spaces as models write them, and no more: with any number allowed, a model may write nothing else to the end.
FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_KEPT: Final = 64
NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
LENGTHS: Final = ("pattern", "minLength", "maxLength")  # of a string that no JSON quotes
BRANCHES: Final = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties")


class JsonGrammar(Grammar):
    """The tokens that llguidance allows. An end-of-text token is allowed where the JSON is complete."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Tensor:
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(mask, bitorder="little")[: self._vocabulary]
        return torch.from_numpy(bits.astype(bool))

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = _gist(self._matcher.get_error())
            raise UsageError(f"the grammar of this request allows no further token: {problem}. Give a simpler schema")


class Grammars:
    """Compiled grammars by schema, of which the latest are cached.

    Compiling takes up to a second, so `of` is called in a thread and never in the event loop.
    """

    def __init__(self, tokenizer: PromptTokenizer, most_bytes: int, most_depth: int) -> None:
        self._tokenizer, self._most_bytes, self._most_depth = tokenizer, most_bytes, most_depth
        self._lock, self._kept = Lock(), OrderedDict[str, LLMatcher]()
        self._grammar_tokenizer: LLTokenizer | None = None

    def of(self, name: str, schema: Schema, count: int) -> list[Grammar]:
        """As many grammars of `schema`, each for one text.

        Raises: BadField, for the field `name`, where it is too large, or no schema that can be honoured.
        """
        return self.of_answer(name, schema, count, PLAIN.calls, {})

    def of_answer(self, name: str, schema: Schema, count: int, form: CallForm, functions: Functions) -> list[Grammar]:
        """As many grammars of an answer of `schema`, or of a call of one of `functions` in its place.

        Raises: BadField as `of` and `of_call` do.
        """
        self._check(name, schema)
        answer = f"{literal(form.answer, self._tokenizer.marks(form.answer))} {_json_rule(schema)}"
        if not functions:
            return self._copies(name, f"start: {answer}", count)
        self._check("tools", functions)
        calls = call_grammar(form, functions, self._tokenizer.marks(form.spelled), start="one_call")
        return self._copies(name, f"start: answer | one_call\nanswer: {answer}\n{calls}", count)

    def of_call(self, form: CallForm, functions: Functions, choice: str, count: int) -> list[Grammar]:
        """As many grammars of a call of one of `functions`, or of the one that `choice` names as `=name`.

        Raises: BadField where that is none of them, and where the form of this model's calls cannot hold a schema.
        """
        if choice != "required" and choice[1:] not in functions:
            raise BadField("tool_choice", f"names {shown(choice[1:])}, which is not in tools")
        chosen = {name: each for name, each in functions.items() if choice in ("required", f"={name}")}
        self._check("tools", chosen)
        return self._copies("tools", call_grammar(form, chosen, self._tokenizer.marks(form.spelled)), count)

    def _copies(self, name: str, source: str, count: int) -> list[Grammar]:
        with self._lock:
            matcher = self._kept.pop(source, None) or self._compiled(name, source)
            self._kept[source] = matcher
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return [JsonGrammar(matcher.deep_copy(), self._tokenizer.vocabulary) for _ in range(count)]

    def _check(self, name: str, schema: Schema) -> None:
        size = len(json.dumps(schema).encode())
        if size > self._most_bytes:
            raise BadField(name, f"must have at most {self._most_bytes} bytes, got {size}")
        if _depth(schema) > self._most_depth:
            raise BadField(name, f"must be nested at most {self._most_depth} deep")
        for text in _forced(schema):
            if mark := next(iter(self._tokenizer.marks(text)), None):
                message = f"forces {shown(mark)}, the text of a special token, which no grammar spells. Leave it out"
                raise BadField(name, message, "invalid_schema")

    def _compiled(self, name: str, source: str) -> LLMatcher:
        # Limits of a schema's cost. A schema above them is refused.
        limits = LLParserLimits(
            initial_lexer_fuel=2_000_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
        )
        try:
            if self._grammar_tokenizer is None:
                ours, theirs = self._tokenizer, cast(Any, self._tokenizer.tokenizer)
                self._grammar_tokenizer = from_tokenizer(theirs, ours.vocabulary, list(ours.ends) or None)
            matcher = LLMatcher(
                self._grammar_tokenizer, LLMatcher.grammar_from_lark(source), log_level=0, limits=limits
            )
        except ValueError as error:
            raise BadField(name, f"cannot be honoured: {_gist(str(error))}", "invalid_schema") from error
        if matcher.is_error():
            raise BadField(name, f"cannot be honoured: {_gist(matcher.get_error())}", "invalid_schema")
        return matcher


def call_grammar(form: CallForm, functions: Functions, marks: Mapping[str, int], start: str = "start") -> str:
    """The grammar of a call in a family's form, with the ids of those of its marks that are special tokens.

    `start` names its first rule.

    Raises: BadField for a schema that the form cannot hold.
    """
    before, between, after = (literal(text, marks) for text in (form.before, form.between, form.after))
    rules = [f"{start}: {before} ({' | '.join(f'call_{at}' for at in range(len(functions)))}) {after}"]
    for at, (name, schema) in enumerate(functions.items()):
        if form.pairs is None:
            arguments = _json_rule(_of_object(name, schema) if schema else NO_ARGUMENTS)
        else:
            pairs = dict(_pairs(form.pairs, name, schema, marks))
            rules += [f"pair_{at}_{key}: {pair}" for key, (pair, _) in enumerate(pairs.values())]
            arguments = " ".join(f"pair_{at}_{key}{'' if each[1] else '?'}" for key, each in enumerate(pairs.values()))
        rules.append(f"call_{at}: {literal(name, marks)} {between} {arguments}")
    if form.pairs is not None:
        rules.append(_text_before(form.pairs.after, marks))
    return "\n".join(rules)


def _of_object(name: str, schema: Schema) -> Schema:
    """The same schema, of objects alone."""
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = f"has parameters of {name} of type {json.dumps(kinds)}. Arguments are an object: give type object"
        raise BadField("tools", message, "invalid_schema")
    return {**schema, "type": "object"}


def _pairs(
    form: PairForm, name: str, schema: Schema, marks: Mapping[str, int]
) -> Iterator[tuple[str, tuple[str, bool]]]:
    """The grammar of each argument, and whether it must be there."""
    if wrong := next((word for word in BRANCHES if word in schema), None):
        raise _not_held(f"has {wrong} in the parameters of {name}")
    wanted, properties = schema.get("required"), properties_of(schema)
    required = [each for each in wanted if isinstance(each, str)] if isinstance(wanted, list) else []
    for key, value in [*properties.items(), *((each, {}) for each in required if each not in properties)]:
        before = literal(f"{form.before}{key}{form.between}", marks)
        held = _value(form, f"in {key} of {name}", value if isinstance(value, Mapping) else {}, schema, marks)
        yield key, (f"{before} {held}", key in required)


def _value(form: PairForm, where: str, value: Schema, schema: Schema, marks: Mapping[str, int]) -> str:
    words = value["enum"] if "enum" in value else [value["const"]] if "const" in value else None
    after = literal(form.after, marks)
    if isinstance(words, list) and all(isinstance(word, str) for word in words):
        return f"({' | '.join(literal(word, marks) for word in words)}) {after}"
    kinds = {*kinds_of(value)}
    if "string" in kinds or not {*value} & {"type", "enum", "const", *BRANCHES}:
        if wrong := next((word for word in LENGTHS if word in value), None):
            raise _not_held(f"has {wrong} {where}")
        return "text"
    rule = _json_rule({**value, **{name: schema[name] for name in ("$defs", "definitions") if name in schema}})
    return f"{rule} {after}"


def _not_held(problem: str) -> BadField:
    message = "to which calls in this model's form cannot be held. Leave it out, or give tool_choice auto"
    return BadField("tools", f"{problem}, {message}", "invalid_schema")


def _text_before(after: str, marks: Mapping[str, int]) -> str:
    """The rule of any text up to the mark behind it, and of that mark."""
    first = next((mark for mark in marks if after.lstrip().startswith(mark)), None)
    if first is not None:
        return f"text: /(?s:.*)/ {literal(after, marks)}"
    spelled = "".join({"\n": r"\n", "/": r"\/"}.get(sign, re.escape(sign)) for sign in after)
    return f"text[lazy]: /(?s:.*){spelled}/"


def literal(text: str, marks: Mapping[str, int]) -> str:
    """The grammar of this very text, in which special tokens are tokens."""
    longest = sorted(marks, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest))})", text) if marks else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False) for part in parts if part
    )


def _json_rule(schema: Schema) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': FORM})}"


def _forced(schema: Any) -> Iterator[str]:
    """The texts that a schema may force: constants, and names of properties."""
    if isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in ("const", "enum"):
                yield json.dumps(value, ensure_ascii=False)
            elif key == "properties" and isinstance(value, Mapping):
                yield from map(str, value)
            yield from _forced(value)
    elif isinstance(schema, list):
        for each in schema:
            yield from _forced(each)


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _gist(message: str) -> str:
    return " ".join(message.split())[:200]
