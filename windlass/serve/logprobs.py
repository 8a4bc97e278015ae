"""Log probabilities as OpenAI's two routes have them."""

from collections.abc import Sequence
from typing import Any, Final

from windlass.engine.request import Piece
from windlass.serve.words import Words

LEAST: Final = -9999.0  # OpenAI's for what cannot be; JSON has no infinity

Pieces = Sequence[Piece]


def of_chat(pieces: Pieces, words: Words, top: int) -> dict[str, Any]:
    """`logprobs` of a choice of a chat, or of a part of it."""

    def one(token: int, value: float) -> dict[str, Any]:
        text, codes = words.shown(token)
        return {"token": text, "logprob": max(value, LEAST), "bytes": codes}

    return {
        "content": [
            one(own.token, own.value) | {"top_logprobs": [one(each.token, each.value) for each in others[:top]]}
            for own, *others in (piece.logprobs for piece in pieces if piece.logprobs)
        ],
        "refusal": None,
    }


def of_completion(pieces: Pieces, words: Words, top: int, offset: int) -> dict[str, Any]:
    """`logprobs` of a choice of a completion, or of a part of it that begins at `offset` characters."""
    texts, values, tops, offsets = [], [], [], []
    for own, *others in (piece.logprobs for piece in pieces if piece.logprobs):
        text = words.shown(own.token)[0]
        texts.append(text)
        values.append(max(own.value, LEAST))
        # OpenAI shows the token that was taken among the likeliest, though it be none of them.
        tops.append({words.shown(each.token)[0]: max(each.value, LEAST) for each in (*others[:top], own)})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
