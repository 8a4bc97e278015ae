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


def of_completion(pieces: Pieces, words: Words, top: int) -> dict[str, Any]:
    """`logprobs` of a choice of a completion, or of a part of it; a prompt's first token has none."""
    tops: list[dict[str, float] | None] = []
    for piece in pieces:
        if not piece.logprobs:
            tops.append(None)
            continue
        own, *others = piece.logprobs
        # OpenAI shows the token that was taken among the likeliest, though it be none of them. Of two with one text,
        # the likelier is shown.
        each = [own, *(other for other in others[:top] if other.token != own.token)]
        tops.append({_name(one.token, words): max(one.value, LEAST) for one in sorted(each, key=lambda one: one.value)})
    return {
        "tokens": [_name(piece.token, words) for piece in pieces],
        "token_logprobs": [max(piece.logprobs[0].value, LEAST) if piece.logprobs else None for piece in pieces],
        "top_logprobs": tops,
        "text_offset": [piece.offset for piece in pieces],
    }


def _name(token: int, words: Words) -> str:
    """A token's text, or, of a part of a character, its bytes as OpenAI writes them, which have no other place."""
    text, codes = words.shown(token)
    if codes is None or bytes(codes) == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{code:02x}" for code in codes)
