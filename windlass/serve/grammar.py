"""Grammars by llguidance: which tokens a text may go on with, so that it is JSON of a schema."""

import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any, Final, cast

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.engine.request import Grammar
from windlass.serve.errors import BadField
from windlass.serve.prompts import PromptTokenizer

# Spaces as models write them, and no more: with any number allowed, a model may write nothing else to the end.
FORM: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_KEPT: Final = 64
Schema = Mapping[str, Any]


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
            raise UsageError("the grammar of this request became too complex. Give a simpler schema")


class Grammars:
    """Compiled grammars by schema, of which the latest are cached.

    Compiling takes up to a second, so `of` is called in a thread and never in the event loop.
    """

    def __init__(self, words: PromptTokenizer, most_bytes: int, most_depth: int) -> None:
        self._words, self._most_bytes, self._most_depth = words, most_bytes, most_depth
        self._lock, self._kept = Lock(), OrderedDict[bytes, LLMatcher]()
        self._tokenizer: LLTokenizer | None = None

    def of(self, name: str, schema: Schema, count: int) -> list[Grammar]:
        """As many grammars of `schema`, each for one text.

        Raises: BadField, for the field `name`, where it is too large, or no schema that can be honoured.
        """
        source = self._source(name, schema)
        with self._lock:
            matcher = self._kept.pop(source, None) or self._compiled(name, source)
            self._kept[source] = matcher
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return [JsonGrammar(matcher.deep_copy(), self._words.vocabulary) for _ in range(count)]

    def _source(self, name: str, schema: Schema) -> bytes:
        source = json.dumps(schema).encode()
        if len(source) > self._most_bytes:
            raise BadField(name, f"must have at most {self._most_bytes} bytes, got {len(source)}")
        if _depth(schema) > self._most_depth:
            raise BadField(name, f"must be nested at most {self._most_depth} deep")
        return source

    def _compiled(self, name: str, source: bytes) -> LLMatcher:
        # Limits of a schema's cost. A schema above them is refused.
        limits = LLParserLimits(
            initial_lexer_fuel=2_000_000, max_grammar_size=100_000, max_lexer_states=50_000, verbose_errors=False
        )
        try:
            if self._tokenizer is None:
                words, tokenizer = self._words, cast(Any, self._words.tokenizer)
                self._tokenizer = from_tokenizer(tokenizer, words.vocabulary, list(words.ends) or None)
            grammar = LLMatcher.grammar_from_json_schema(source.decode(), overrides=FORM)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise BadField(name, f"cannot be honoured: {_gist(str(error))}", "invalid_schema") from error
        if matcher.is_error():
            raise BadField(name, f"cannot be honoured: {_gist(matcher.get_error())}", "invalid_schema")
        return matcher


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _gist(message: str) -> str:
    return " ".join(message.split())[:200]
