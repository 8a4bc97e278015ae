"""Conversion between text and tokens, and the ends of a text."""

import codecs
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, islice
from typing import Final, final

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError, check_kind, whole_number
from windlass.core.types import Tokens, shared


def partial_mark(text: str, marks: Sequence[str]) -> int:
    """The number of characters at the end of `text` that may become one of `marks`, which is not whole there."""
    longest = max(map(len, marks), default=0)
    lengths = range(min(len(text), longest - 1), 0, -1)
    return next((n for n in lengths if any(len(mark) > n and mark.startswith(text[-n:]) for mark in marks)), 0)


@dataclass(frozen=True)
class Stops:
    """Ends of a row: a token of `ids`, or a text of `strings` in its output."""

    ids: frozenset[int]
    strings: tuple[str, ...] = ()

    def held_back(self, text: str) -> int:
        """The number of characters at the end of `text` that may still become a stop string."""
        return partial_mark(text, self.strings)

    def first_in(self, text: str) -> tuple[int, str] | None:
        """The stop string that is complete first, read character by character, and its start. None: there is none.

        If two are complete at the same character, the longer one counts.
        """
        starts = [(text.find(each), each) for each in self.strings]
        found = [(start + len(each), start, each) for start, each in starts if start >= 0]
        return min(found)[1:] if found else None


def stops_of(
    stop: Sequence[str | int] | None, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], vocabulary: int
) -> Stops:
    """The ends that `stop` names, beside `ends`, the model's own end-of-text tokens.

    Ids replace the model's own, strings are added to them. A string that is a special token of the tokenizer, which
    texts never show, is that token.

    Raises: UsageError for a value that is no list of strings and token ids, or an empty string.
    """
    if stop is None:
        return Stops(frozenset(ends))
    check_kind("stop", stop, (list, tuple, set, frozenset), "a list of strings and token ids", f"Write stop=[{stop!r}]")
    special = special_tokens(tokenizer)
    strings = [each for each in stop if isinstance(each, str)]
    if "" in strings:
        raise UsageError("stop has an empty string, which every text begins with. Leave it out")
    ids = {whole_number("a token id in stop", each, 0, vocabulary - 1) for each in stop if not isinstance(each, str)}
    named = {special[each] for each in strings if each in special}
    return Stops(
        frozenset(ids or (ends if strings else ())) | named, tuple(each for each in strings if each not in special)
    )


CONTEXT: Final = 8  # tokens at least before the first new one: enough for a tokenizer to place its spaces
INCOMPLETE: Final = "\ufffd"  # a tokenizer's text for part of a character
BYTE: Final = re.compile("<0x([0-9A-F]{2})>")  # a token of SentencePiece that is one byte


def encode(tokenizer: PreTrainedTokenizerBase, text: str, is_start: bool) -> list[int]:
    """Token ids of `text`, with the tokenizer's special tokens where a text starts."""
    return list(tokenizer(text, add_special_tokens=is_start)["input_ids"]) if text else []


def token_text(tokenizer: PreTrainedTokenizerBase, token: int, has_special: bool = True) -> str:
    """A token's text behind another token, where it keeps its space. `has_special`: special tokens have a text."""
    alone, twice = (str(tokenizer.decode(ids, skip_special_tokens=not has_special)) for ids in ([token], [token] * 2))
    return twice[len(alone) :]


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int, has_special: bool = True) -> bytes | None:
    """A token's own bytes, which may be part of a character. None where the tokenizer does not tell them."""
    if INCOMPLETE not in str(tokenizer.decode([token])):
        return token_text(tokenizer, token, has_special).encode()
    name = str(tokenizer.convert_ids_to_tokens(token))
    fallback = BYTE.fullmatch(name)
    if fallback is not None:
        return bytes.fromhex(fallback[1])
    codes = _codes_of_signs()
    if all(sign in codes for sign in name):
        return bytes(codes[sign] for sign in name)
    is_text = INCOMPLETE in name and tokenizer.convert_tokens_to_ids(name) == token
    return name.encode() if is_text else None


@cache
def _codes_of_signs() -> dict[str, int]:
    """The byte that each sign in a token of a byte-level BPE stands for.

    Source: `bytes_to_unicode` of GPT-2's encoder.
    """
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [code for code in range(256) if code not in printed]
    return {chr(code): code for code in printed} | {chr(256 + at): code for at, code in enumerate(others)}


@dataclass(frozen=True)
class TextStream:
    """The text of a row whose tokens come one at a time. Each token makes another `TextStream`.

    `piece` is the text that the latest token has given out: never part of a character, nor text that may still become
    a stop string. `stopped_by`: the one that came. Bytes of a character that the text ends in are never given out.
    Special tokens of `hidden` have no text. None: all of them.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: Stops
    tokens: tuple[int, ...]  # the latest tokens, as context for the tokenizer
    decoded: str  # the text of `tokens`, as the tokenizer gives it
    unfinished: bytes = b""  # of a character whose other bytes are missing
    piece: str = ""
    held: str = ""  # text that may become a stop string, so it is not yet given out
    length: int = 0  # characters given out or held
    stopped_by: str | None = None
    hidden: frozenset[int] | None = None

    @classmethod
    def after(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Sequence[int],
        stops: Stops,
        hidden: frozenset[int] | None = None,
    ) -> "TextStream":
        """The stream after `prompt`, of which nothing is written yet."""
        tokens = tuple(prompt[-CONTEXT:])
        stream = cls(tokenizer, stops, tokens, _decoded(tokenizer, tokens, hidden), hidden=hidden)
        if not stream.decoded.endswith(INCOMPLETE):
            return stream
        known = [stream._own_bytes(token) or b"" for token in tokens]
        return replace(stream, unfinished=_parted(b"".join(known))[1])

    @property
    def is_stopped(self) -> bool:
        """Return True if there was a stop string."""
        return self.stopped_by is not None

    def pushed(self, token: int, is_last: bool = False) -> "TextStream":
        """The stream after `token`. After the last one, no held text can become a stop string any more."""
        tokens = (*self.tokens, token)
        text = _decoded(self.tokenizer, tokens, self.hidden)
        new, unfinished = text[len(self.decoded) :], b""
        if self.unfinished or INCOMPLETE in new:
            own = self._own_bytes(token)
            if own is not None:
                new, unfinished = _parted(self.unfinished + own)
            elif new.endswith(INCOMPLETE):  # it may be part of a character, and tells no bytes
                given = self._given("", is_last)
                return given if is_last else replace(given, tokens=tokens)
        if len(tokens) < 2 * CONTEXT:
            return self._given(new, is_last, tokens, text, unfinished)
        latest = tokens[-CONTEXT:]
        return self._given(new, is_last, latest, _decoded(self.tokenizer, latest, self.hidden), unfinished)

    def ended(self) -> "TextStream":
        """The stream after the last token, which is no part of the text. It gives out all held text."""
        return self._given("", is_last=True)

    def _own_bytes(self, token: int) -> bytes | None:
        """A token's own bytes, none for a hidden one. None where the tokenizer does not tell them."""
        is_shown = self.hidden is not None and token not in self.hidden
        return token_bytes(self.tokenizer, token, has_special=is_shown)

    def _given(
        self,
        text: str,
        is_last: bool,
        tokens: tuple[int, ...] | None = None,
        decoded: str | None = None,
        unfinished: bytes | None = None,
    ) -> "TextStream":
        """The stream after more text, with these fields (None: its own)."""
        new = self.held + text
        found = self.stops.first_in(new)
        stop, by = (None, None) if found is None else found
        given = new[:stop] if stop is not None or is_last else new[: len(new) - self.stops.held_back(new)]
        return TextStream(  # `replace` is slower
            self.tokenizer,
            self.stops,
            self.tokens if tokens is None else tokens,
            self.decoded if decoded is None else decoded,
            self.unfinished if unfinished is None else unfinished,
            piece=given,
            held=new[len(given) :] if stop is None else "",
            length=self.length + len(text),
            stopped_by=by,
            hidden=self.hidden,
        )


def _parted(codes: bytes) -> tuple[str, bytes]:
    """The text of `codes`, and the bytes at their end that begin a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(codes), decoder.getstate()[0]


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], hidden: frozenset[int] | None) -> str:
    if hidden is None:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    return str(tokenizer.decode([token for token in tokens if token not in hidden], skip_special_tokens=False))


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The ids of special tokens by their text."""
    return {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


REMEMBERED: Final = 8  # texts
LEAST: Final = 4096  # characters of a text that is worth it
NEAR: Final = 256  # characters behind a special token that might make it a part of a longer one


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens. `starts` and `ends`: of each token, the characters before the last that has begun, and
    before the last that has ended. `cuts`: tokens that no text before them changes, nor the text behind them."""

    text: str
    ids: Tokens = field(default_factory=Tokens)
    starts: "array[int]" = field(default_factory=lambda: array("i"))
    ends: "array[int]" = field(default_factory=lambda: array("i"))
    cuts: "array[int]" = field(default_factory=lambda: array("i"))

    def tokens_before(self, characters: int) -> int | None:
        """The number of tokens of the first so many characters. None: one of them goes on behind these."""
        tokens = bisect_left(self.starts, characters)
        return tokens if not tokens or self.ends[tokens - 1] <= characters else None


@final
class PromptEncoder:
    """Tokenizes prompts. A long one that begins as one of the latest did is tokenized from its end on. The
    latest one, asked for again, is not tokenized.

    Tokenizers cut a text at special tokens first, and read the texts between them one by one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._held = tokenizer, list[TokenizedText]()  # least recently used first
        self._latest: TokenizedText | None = None  # however short
        with_start, without = encode(tokenizer, "a", True), encode(tokenizer, "a", False)
        is_open = with_start[len(with_start) - len(without) :] == without  # nothing is put behind a text
        added = tokenizer.added_tokens_decoder.items() if is_open and tokenizer.is_fast else ()
        self._special = {number for number, each in added if each.special and not (each.single_word or each.normalized)}

    def tokenized(self, text: str) -> TokenizedText:
        """A text as a prompt begins with it."""
        if not text:
            return TokenizedText(text)
        found = self._latest  # another thread may ask for another text meanwhile
        if found is None or found.text != text:
            found = self._latest = self._found(text)
        return found

    def _found(self, text: str) -> TokenizedText:
        known = [(shared(each.text, text), each) for each in self._held] if len(text) >= LEAST else []
        same, base = max(known, key=lambda pair: pair[0], default=(0, None))
        found = None if base is None else base if base.text == text else self._after(base, same, text)
        if found is None:
            found = self._joined(TokenizedText(text), text, 0)
        if len(text) >= LEAST:
            self._held = [each for each in self._held if each is not base or same < len(each.text)][-REMEMBERED + 1 :]
            self._held.append(found)
        return found

    def _after(self, base: TokenizedText, same: int, text: str) -> TokenizedText | None:
        """A text that has its first `same` characters in common with `base`. None: they have no cut."""
        at = bisect_right(base.cuts, same - NEAR, key=lambda cut: base.ends[cut]) - 1
        if at < 0:
            return None
        cut = base.cuts[at]
        before = TokenizedText(text, base.ids[:cut], base.starts[:cut], base.ends[:cut], base.cuts[:at])
        found = self._joined(before, text, base.starts[cut])
        return found if found.ids[cut] == base.ids[cut] else None

    def _joined(self, before: TokenizedText, text: str, start: int) -> TokenizedText:
        """The tokens `before`, and those of the text from `start` on."""
        is_fast, done = self._tokenizer.is_fast, len(before.ids)
        rest = self._tokenizer(text[start:], add_special_tokens=not done, return_offsets_mapping=is_fast)
        ids = rest["input_ids"]
        spans = [(first + start, end + start) for first, end in rest["offset_mapping"]] if is_fast else []
        cuts = (at + done for at, each in enumerate(ids) if each in self._special and spans)
        return TokenizedText(
            text,
            before.ids + ids,
            before.starts + _reached(before.starts, (first for first, _ in spans)),
            before.ends + _reached(before.ends, (end for _, end in spans)),
            before.cuts + array("i", cuts),
        )


def _reached(before: "array[int]", then: Iterable[int]) -> "array[int]":
    """The largest number up to each of `then`."""
    return array("i", islice(accumulate(then, max, initial=before[-1] if before else 0), 1, None))
