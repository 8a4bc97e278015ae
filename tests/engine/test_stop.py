"""Stop strings against a reading of the text sign by sign, whatever the tokens are."""

import random
import re
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from windlass import KVCache, UsageError
from windlass.engine.text import Stops, TextStream, stops_of

MODEL = Path(__file__).parents[1] / "models" / "stories260K"
PROMPT = "Once upon a time"
PROMPTS = [PROMPT, "Lily and her big brother went to the", "One day"]


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return windlass.load(MODEL, "float32")


@pytest.fixture(scope="module")
def model(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> PreTrainedModel:
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> PreTrainedTokenizerBase:
    return loaded[1]


class Pieces:
    """A tokenizer of the given pieces of text, whose ids are their indices."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.pieces[token] for token in ids)


def cut(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The text before the stop string that is complete first, and up to where it had to be read."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], end
    return None


def open_end(text: str, stops: list[str]) -> int:
    """Signs at the end of `text` that begin a stop string."""
    return max(n for n in range(len(text) + 1) if any(stop.startswith(text[len(text) - n :]) for stop in stops))


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize("seed", range(150))
def test_a_text_is_cut_as_if_read_sign_by_sign(seed: int) -> None:
    draw = random.Random(seed)
    signs = "ab" if seed % 3 else "ab\n"
    pieces = ["".join(draw.choices(signs, k=draw.randrange(4))) for _ in range(12)]
    stops = ["".join(draw.choices(signs, k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 4))]
    made = cast(PreTrainedTokenizerBase, Pieces(["", *pieces]))
    stream = TextStream.after(made, [0], Stops(frozenset(), tuple(stops)))
    expected, text, given = cut("".join(pieces), stops), "", ""
    for token, piece in enumerate(pieces, 1):
        text += piece
        stream = stream.pushed(token, is_last=token == len(pieces))
        given += stream.piece
        assert stream.is_stopped == (expected is not None and len(text) >= expected[1])
        if expected is not None and stream.is_stopped:
            assert stream.stopped_by == text[len(expected[0]) : expected[1]]
            break
        held = 0 if token == len(pieces) else open_end(text, stops)
        assert given == text[: len(text) - held], "held back: what may become a stop string, and no more"
    assert given == (expected[0] if expected is not None else text)


def test_a_stop_string_ends_the_text_wherever_tokens_begin(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (free,) = windlass.generate(model, tokenizer, [PROMPT], max_tokens=18)
    ends = [len(tokenizer.decode(free.tokens[:n])) for n in range(19)]
    spanning = 0
    for start in range(0, len(free.text) - 6, len(free.text) // 4):
        stop = free.text[start : start + 5]
        at = free.text.find(stop)
        spanning += any(at < end < at + 5 for end in ends)
        cache = KVCache(model)
        stream = windlass.stream(model, tokenizer, PROMPT, cache, 18, stop=["never written", stop])
        given = ""
        for piece in stream:
            given += piece
            assert free.text[:at].startswith(given)
        result = stream.result
        assert (given, result.text, result.finish_reason) == (free.text[:at], free.text[:at], "stop")
        needed = next(n for n, end in enumerate(ends) if end >= at + 5)
        assert result.tokens == free.tokens[:needed]
        assert cache.tokens == [tokenizer(PROMPT)["input_ids"] + result.tokens]
    assert spanning > 1


def test_rows_stop_by_themselves_and_go_on_from_all_their_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    stop: list[str | int] = ["he ", ", and"]
    cache = KVCache(model, batch=3)
    turns = [windlass.generate(model, tokenizer, texts, cache, 14, stop=stop) for texts in (PROMPTS, [" But"] * 3)]
    assert {result.finish_reason for turn in turns for result in turn} >= {"stop"}
    assert len({len(result.tokens) for result in turns[0]}) > 1
    for row, prompt in enumerate(PROMPTS):
        alone = KVCache(model)
        ids: list[int] = []
        for turn, text in zip(turns, (prompt, " But"), strict=True):
            ids += tokenizer(text, add_special_tokens=not ids)["input_ids"]
            logits = windlass.prefill(model, KVCache(model), [ids])
            assert int(logits.argmax()) == turn[row].tokens[0], "the turn went on from what the cache holds"
            (result,) = windlass.generate(model, tokenizer, [text], alone, 14, stop=stop)
            assert (result.text, result.tokens) == (turn[row].text, turn[row].tokens)
            assert not any(each in result.text for each in ("he ", ", and"))
            ids += result.tokens
        assert cache.tokens is not None
        assert cache.tokens[row] == ids


def test_an_interrupted_stream_has_fed_what_it_held_back(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (free,) = windlass.generate(model, tokenizer, [PROMPT], max_tokens=12)
    cache = KVCache(model)
    stream = windlass.stream(model, tokenizer, PROMPT, cache, 12, stop=[free.text[4:] + " and never this"])
    given = next(stream)
    assert given == stream.result.text == free.text[: len(given)]
    assert len(given) <= 4
    assert "".join([given, *stream]) == free.text, "it did not become the stop string"
    assert cache.tokens == [tokenizer(PROMPT)["input_ids"] + free.tokens]


@pytest.mark.usefixtures("any_type")
def test_what_stop_asks_for(tokenizer: PreTrainedTokenizerBase) -> None:
    """Strings stand beside the model's own ends, ids in their place. A special token is never in a text."""
    for stop, expected in (
        (None, Stops(frozenset({1, 9}))),
        ([], Stops(frozenset())),
        (["x", "ab"], Stops(frozenset({1, 9}), ("x", "ab"))),
        (("x", 5), Stops(frozenset({5}), ("x",))),
        (["<unk>", "x"], Stops(frozenset({0, 1, 9}), ("x",))),
        ({np.int64(7)}, Stops(frozenset({7}))),
    ):
        assert stops_of(stop, tokenizer, [1, 9], 512) == expected  # type: ignore[arg-type]


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("END", "stop must be a list of strings and token ids, got 'END'. Write stop=['END']"),
        (5, "stop must be a list of strings and token ids, got 5. Write stop=[5]"),
        (["a", ""], "stop has an empty string, which every text begins with. Leave it out"),
        ([512], "a token id in stop must be from 0 to 511, got 512"),
        ([1.5], "a token id in stop must be a whole number from 0 to 511, got 1.5"),
        ([["a"]], "a token id in stop must be a whole number from 0 to 511, got ['a']"),
    ],
    ids=str,
)
def test_what_cannot_stop_a_text_is_refused(
    stop: list[int], says: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    cache = KVCache(model)
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        windlass.stream(model, tokenizer, PROMPT, cache, stop=stop)
    assert cache.tokens_seen == [0]
