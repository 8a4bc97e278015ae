"""Tokens in the model of a cache, and attention over plain lists of tokens, with explicit masks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

LONGEST = 8192  # no text of the model is longer


class Token(NamedTuple):
    """One token as one list holds it. `key` and `value` are (heads of the list, channels), as the store decodes them.

    `exact_key` and `exact_value` are the original ones, where the store keeps some tokens so. `number` counts the
    tokens written to the row, and `stands_for` those that are merged into it, with itself. `state` is the policy's.
    `place_in_store` is its number in the row's recall store, where there is one.
    """

    number: int
    position: int
    key: Array
    value: Array
    exact_key: Array
    exact_value: Array
    state: float = 0.0
    stands_for: int = 1
    place_in_store: int = -1


Tokens = list[Token]  # in the order of writing. Never changed, only replaced


@dataclass(frozen=True)
class Kind:
    """The attention of one layer of a model."""

    kv_heads: int
    group: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: tuple[float, ...] | None = None
    angles: tuple[float, ...] | None = None  # one per channel pair, of one position (None: it does not rotate)
    trained_length: int | None = None


@dataclass(frozen=True)
class Mode:
    """At which distance a key is read. `name` as the cache calls it, with its numbers."""

    name: str
    first: int = 0
    second: int = 0

    def __str__(self) -> str:
        numbers = [str(number) for number in (self.first, self.second) if number]
        return f"{self.name}({', '.join(numbers)})" if numbers else self.name

    @property
    def reads_ranks(self) -> bool:
        """Return True if a key's rank among those held may decide."""
        return self.name in ("compact", "auto")

    def distances(self, queries: Array, held: Array, kind: Kind, is_bounded: bool, fuller: int) -> Array:
        """Distances (queries, held) at which each of the newest tokens reads each held token, itself included.

        The fullest list of the row holds `fuller` more. `is_bounded` tells whether the layer has a budget.
        """
        ranks = np.empty(len(held), dtype=np.int64)
        ranks[np.argsort(held, kind="stable")] = np.arange(len(held))
        newest = len(held) - len(queries) + np.arange(len(queries))
        if self.name == "compact":
            return newest[:, None] - ranks[None]
        apart = queries[:, None] - held[None]
        if self.name == "auto" and kind.trained_length is not None and kind.sliding_window is None:
            places = (newest, ranks, fuller) if is_bounded else (queries, held, 0)
            return inside(kind.trained_length, queries, apart, *places)
        if self.name == "clamp":
            return np.minimum(apart, self.first)
        if self.name == "self_extend":
            group, window = self.first, self.second
            far = queries[:, None] // group + window - window // group - held[None] // group
            return np.where(apart < window, apart, far)
        assert self.name in ("original", "auto"), self.name
        return apart


def inside(trained: int, queries: Array, apart: Array, own: Array, places: Array, fuller: int) -> Array:
    """Distances below `trained`: as they are for queries before it, then between places, in steps where need be."""
    result, near = apart.copy(), trained // 8
    for at, (query, place) in enumerate(zip(queries, own, strict=True)):
        if query < trained:
            continue
        group = 1
        while (place + fuller) // group + near - near // group >= trained:
            group *= 2
        far = place // group + near - near // group - places // group
        result[at] = np.where(apart[at] < near, place - places, far)
    return result


@cache
def phases(angles: tuple[float, ...] | None, pairs: int) -> Array:
    """(distance, channel pair): by which each pair is turned, as a complex number."""
    if angles is None:
        return np.ones((LONGEST, pairs), dtype=np.complex128)
    return np.exp(1j * np.arange(LONGEST)[:, None] * np.array(angles)[None])


def attention(
    kind: Kind, queries: Array, keys: Array, values: Array, distances: Array, seen: Array, counts: Array | None,
    sinks: Array | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attention of queries (heads, group, n, head_dim) to keys, values (heads, held, channels): (heads, group, n, ...).

    `seen` (n, held) is the mask. Also returns the probabilities summed over each group: (heads, n, held).
    """
    pairs = queries.shape[-1] // 2
    turn = phases(kind.angles, pairs)[np.maximum(distances, 0)]
    complex_keys = keys[..., :pairs] - 1j * keys[..., pairs:]
    complex_queries = (queries[..., :pairs] + 1j * queries[..., pairs:]).transpose(0, 2, 1, 3)
    turned = complex_keys[:, None] * turn[None]  # (heads, n, held, pairs)
    logits = (complex_queries @ turned.transpose(0, 1, 3, 2)).real * kind.scale  # (heads, n, group, held)
    if kind.softcap is not None:
        logits = kind.softcap * np.tanh(logits / kind.softcap)
    if counts is not None:
        logits = logits + np.log(counts)
    logits = np.where(seen[None, :, None], logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, :, None])
    weights = np.exp(logits - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, :, None] - top)
    probabilities = weights / total
    return (probabilities @ values[:, None]).transpose(0, 2, 1, 3), probabilities.sum(2)


def stacked(tokens: Tokens, read: Callable[[Token], tuple[Array, Array]] | None) -> tuple[Array, Array]:
    """Keys and values of a list, (heads, held, channels), as `read` gives them."""
    if read is None:
        keys, values = [token.key for token in tokens], [token.value for token in tokens]
    else:
        pairs = [read(token) for token in tokens]
        keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    heads = len(keys[0])
    flat = (np.concatenate(part).reshape(len(tokens), heads, -1) for part in (keys, values))
    first, second = (part.transpose(1, 0, 2) for part in flat)
    return first, second


def part_of(token: Token, head: int) -> Token:
    """One head of a token of all heads."""
    own = slice(head, head + 1)
    exact = token.exact_key[own], token.exact_value[own]
    return Token(
        token.number, token.position, token.key[own], token.value[own], *exact, place_in_store=token.place_in_store
    )
