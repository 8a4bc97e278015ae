"""Stop strings: where a text ends before its tokens do, and what a stream must hold back until that is decided."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from windlass.core.check import check_kind, whole_number
from windlass.core.errors import UsageError


@dataclass(frozen=True)
class Stops:
    """What ends a row: a token of `ids`, or a text of `strings` in what it has written."""

    ids: frozenset[int]
    strings: tuple[str, ...] = ()

    def held_back(self, text: str) -> int:
        """How many signs at the end of `text` may still become a stop string."""
        longest = max(map(len, self.strings), default=0)
        lengths = range(min(len(text), longest - 1), 0, -1)
        return next((n for n in lengths if any(each.startswith(text[-n:]) for each in self.strings)), 0)

    def first_in(self, text: str) -> int | None:
        """Where the stop string starts that is complete first, read sign by sign; None where there is none.

        Of two that are complete at the same sign, the longer one counts.
        """
        starts = [(text.find(each), len(each)) for each in self.strings]
        found = [(start + length, start) for start, length in starts if start >= 0]
        return min(found)[1] if found else None


def stops_of(
    stop: Sequence[str | int] | None, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], vocabulary: int
) -> Stops:
    """What `stop` asks for, where `ends` are the model's own end-of-text tokens.

    Ids take the place of these; strings stand beside them. A string that is a special token of the tokenizer, which
    texts never show, is that token.

    Raises: UsageError for what is no list of strings and token ids, or an empty string.
    """
    if stop is None:
        return Stops(frozenset(ends))
    check_kind("stop", stop, (list, tuple, set, frozenset), "a list of strings and token ids", f"write stop=[{stop!r}]")
    special = {str(token): index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    strings = [each for each in stop if isinstance(each, str)]
    if "" in strings:
        raise UsageError("stop has an empty string, which every text begins with; leave it out")
    ids = {whole_number("a token id in stop", each, 0, vocabulary - 1) for each in stop if not isinstance(each, str)}
    named = {special[each] for each in strings if each in special}
    return Stops(
        frozenset(ids or (ends if strings else ())) | named, tuple(each for each in strings if each not in special)
    )
