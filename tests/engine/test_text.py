"""The text of tokens that are parts of characters, against the bytes of the text itself."""

import codecs
import random
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from windlass.engine.text import Stops, TextStream, special_tokens, token_bytes

STORIES = Path(__file__).parents[1] / "models" / "stories260K"
SIGNS = "ab \n<é—你好。世界😀👩‍🚀\ufffd"
NONE = Stops(frozenset())
SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 8)) for seed in range(40)]


def byte_level() -> PreTrainedTokenizerBase:
    """A BPE over bytes, of one merge: the space before the first byte of a Chinese character."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {sign: at for at, sign in enumerate([*signs, "Ġä", "<|end|>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ġ", "ä")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerBase:
    """SentencePiece's: some characters, among them the replacement character, and bytes for all others."""
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(STORIES))


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = request.param()
    return made


def read(codes: bytes, is_whole: bool = False) -> str:
    """The text of `codes`, without an incomplete character at its end."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(codes, is_whole)


def written(stream: TextStream, tokens: list[int]) -> list[str]:
    """The piece of each token, the last of which ends the text."""
    pieces = []
    for at, token in enumerate(tokens, 1):
        stream = stream.pushed(token, is_last=at == len(tokens))
        pieces.append(stream.piece)
    return pieces


def codes_of(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> bytes:
    return b"".join(cast(bytes, token_bytes(tokenizer, token)) for token in tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_text_is_that_of_its_bytes_wherever_it_is_cut(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices(SIGNS, k=draw.randrange(1, 30)))
    prompt = tokenizer.encode("ab", add_special_tokens=False)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    lead = b" " if tokens and tokenizer.convert_ids_to_tokens(tokens[0]).startswith("▁") else b""  # SentencePiece's
    assert codes_of(tokenizer, tokens) == lead + text.encode()
    for end in range(1, len(tokens) + 1):
        pieces = written(TextStream.after(tokenizer, prompt, NONE), tokens[:end])
        given = "".join(pieces)
        assert given == read(codes_of(tokenizer, tokens[:end]))
        assert not given.endswith("\ufffd") or (lead.decode() + text)[: len(given)].endswith("\ufffd")
        for until in range(end):  # no piece waits that is whole
            assert "".join(pieces[: until + 1]) == read(codes_of(tokenizer, tokens[: until + 1]))


@pytest.mark.parametrize("seed", SEEDS)
def test_bytes_that_are_no_text(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    """A model may write any bytes in any order. A byte that no character has is a replacement character at once."""
    draw = random.Random(seed)
    vocabulary = tokenizer.get_vocab()
    parts = [each for each in vocabulary.values() if len(codes_of(tokenizer, [each])) == 1]
    wanted = [each for each in parts if codes_of(tokenizer, [each])[0] in b"\x0aa\xe4\xbd\xa0\xf0\x9f\x98\x80\xc3\xff"]
    tokens = draw.choices(wanted, k=24)
    prompt = tokenizer.encode("ab", add_special_tokens=False)
    assert "".join(written(TextStream.after(tokenizer, prompt, NONE), tokens)) == read(codes_of(tokenizer, tokens))


def test_a_text_may_go_on_in_the_middle_of_a_character(tokenizer: PreTrainedTokenizerBase) -> None:
    *prompt, last = tokenizer.encode("ab你", add_special_tokens=False)
    assert written(TextStream.after(tokenizer, prompt, NONE), [last]) == ["你"]


def test_an_end_in_the_middle_of_a_character_shows_nothing_of_it(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.encode("a你", add_special_tokens=False)[:-1]
    stream = TextStream.after(tokenizer, tokenizer.encode("b", add_special_tokens=False), NONE)
    for token in tokens:
        stream = stream.pushed(token)
    assert (stream.ended().piece, stream.ended().length) == ("", len(read(codes_of(tokenizer, tokens))))


def test_a_stop_string_may_follow_bytes_of_a_broken_character(tokenizer: PreTrainedTokenizerBase) -> None:
    start, stop = tokenizer.encode("a你", add_special_tokens=False), tokenizer.encode("b", add_special_tokens=False)
    tokens = [*start[:-1], *stop[-1:]]
    stream = TextStream.after(tokenizer, stop, Stops(frozenset(), ("b",)))
    for token in tokens:
        stream = stream.pushed(token)
    assert stream.is_stopped


class Closed:
    """A tokenizer of bytes that tells none of them."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")

    def convert_ids_to_tokens(self, token: int) -> str:
        return "\ufffd"

    def convert_tokens_to_ids(self, name: str) -> int:
        return -1


@pytest.mark.usefixtures("any_type")
def test_a_tokenizer_that_tells_no_bytes_is_asked_for_its_text() -> None:
    made = cast(PreTrainedTokenizerBase, Closed())
    codes = list("a你é😀b".encode())
    assert "".join(written(TextStream.after(made, [97], NONE), codes)) == "a你é😀b"
    assert token_bytes(made, codes[1]) is None
    assert written(TextStream.after(made, [97], NONE), codes[:3]) == ["a", "", ""]


def test_special_tokens_that_are_not_hidden_have_a_text(tokenizer: PreTrainedTokenizerBase) -> None:
    mark, index = [*special_tokens(tokenizer).items()][-1]
    prompt, first = tokenizer.encode("ab", add_special_tokens=False), tokenizer.encode("a你", add_special_tokens=False)
    whole, part = (read(codes_of(tokenizer, each)) for each in (first, first[:-1]))
    tokens = [index, *first, index, *first[:-1], index]
    shown = f"{mark}{whole}{mark}{part}\ufffd{mark}"
    for hidden, text in ((None, whole + part), (frozenset({index}), whole + part), (frozenset[int](), shown)):
        assert "".join(written(TextStream.after(tokenizer, prompt, NONE, hidden), tokens)) == text, hidden
