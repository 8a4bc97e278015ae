"""Reads of one layer in the model of a cache: attention to its lists and to the evicted tokens that it recalls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_layer import Codec, Difference, Held
from tests.helpers.cache_model_recall import DECIDING, PAGE, Memory, NotAChoice, Search
from tests.helpers.cache_model_tokens import Mode, Tokens, attention, stacked

Array = NDArray[Any]
Recalled = tuple[Array, Array, Array]  # positions (tokens,), keys and values (1, tokens, channels)


@dataclass
class Reader(Held):
    """A layer that is read. `recall_codec` says how its evicted tokens are held."""

    recall_codec: Codec | None = None
    columns: int = 1  # of the step
    mode: Mode = field(default_factory=lambda: Mode("original"))

    def remember_tokens(self, row: int, positions: Sequence[int], keys: Array, values: Array) -> None:
        """Let these tokens (kv_heads, tokens, channels) of a row be recalled once they are evicted."""
        if not self.recalls or not len(positions):
            return
        assert self.recall_codec is not None
        coded = self.recall_codec(self.index, keys[None], values[None])
        self.put(row, np.array(positions), coded[0][0], coded[1][0])

    def put(self, row: int, positions: Array, keys: Array, values: Array) -> None:
        """Let tokens of a row be recalled, as their store gives them back."""
        read = self.codec(self.index, keys[None], values[None])
        was = self.memory[row]
        parts = (keys, values, read[0][0], read[1][0])
        if was.tokens:
            parts = tuple(np.concatenate(pair, 1) for pair in zip(was[1:5], parts, strict=True))  # type: ignore[assignment]
        places = np.concatenate((was.positions, positions))
        self.memory = list(self.memory)
        self.memory[row] = Memory(places, *parts, *self.digests(was, parts[0]))

    def digests(self, was: Memory, keys: Array) -> tuple[Array, Array]:
        """Return the largest and the least number of each channel, for the pages of a row. Some get new tokens."""
        if not self.configured.has_digests:
            return was.largest, was.least
        assert self.recall_codec is not None
        first = was.tokens // PAGE
        pages = [keys[:, start : start + PAGE] for start in range(first * PAGE, keys.shape[1], PAGE)]
        found = []
        for before, numbers in (
            (was.largest, np.stack([page.max(1) for page in pages], 1)),
            (was.least, np.stack([page.min(1) for page in pages], 1)),
        ):
            coded, _ = self.recall_codec(self.index, numbers[None], numbers[None])
            found.append(np.concatenate((before[:, :first], coded[0]), 1) if first else coded[0])
        return found[0], found[1]

    def recalled(self, row: int, queries: Array, lists: Sequence[Tokens]) -> list[Recalled] | None:
        """Tokens that each head reads beside its `lists`, by queries (kv_heads, group, n, head_dim) of a step."""
        if not self.recalls or self.memory[row].tokens <= min(map(len, lists)):  # all of it is held
            return None
        kind, memory, noted = self.this_pass or self.kind, self.memory[row], self.seen
        assert kind is not None
        result: list[Recalled] = []
        for head, asked in enumerate(queries):
            held = [token.place_in_store for token in lists[head if len(lists) > 1 else 0]]
            search = Search(
                kind, asked[:, -DECIDING:], memory, head, self.configured.recall // PAGE,
                0 if noted is None else noted.candidates, self.configured.recall_store != "plain",
            )  # fmt: skip
            told = noted.recalled[row][head] if noted is not None and noted.recalled is not None else None
            try:
                choice = search.chosen(held, told)
            except NotAChoice as error:
                raise Difference(f"layer {self.index}, row {row}, head {head} {error}") from error
            self.is_doubtful |= choice.is_doubtful
            self.counts.recalls += len(choice.tokens) > 0
            self.counts.resettled += choice.is_settled
            at, own = choice.tokens, slice(head, head + 1)
            result.append((memory.positions[at], memory.read_keys[own, at], memory.read_values[own, at]))
        return result if any(len(positions) for positions, _, _ in result) else None

    def attend(
        self, queries: Array, new: Tokens, tokens: Tokens, row: int, own: slice, fullest: int,
        recalled: list[Recalled] | None,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Attention of the queries (heads, group, n, head_dim) of the `new` tokens, and the mass that `tokens` receive.

        `fullest` tokens are read by that head of the row that reads most.
        """
        keys, values = stacked(tokens, self.reader(row))
        places = [token.position for token in tokens]
        if recalled is None:
            return self.attention(queries, new, tokens, np.array(places), keys, values, own, fullest)
        pairs = []
        for number, head in enumerate(range(*own.indices(len(recalled)))):
            positions, more_keys, more_values = recalled[head]
            one = slice(number, number + 1)
            pairs.append(
                self.attention(
                    queries[one], new, tokens, np.concatenate((places, positions)),
                    np.concatenate((keys[one], more_keys), 1), np.concatenate((values[one], more_values), 1),
                    slice(head, head + 1), fullest,
                )
            )  # fmt: skip
        outs, masses = zip(*pairs, strict=True)
        return np.concatenate(outs), np.concatenate([mass[..., : len(tokens)] for mass in masses])

    def attention(
        self, queries: Array, new: Tokens, tokens: Tokens, held: Array, keys: Array, values: Array, own: slice,
        fullest: int,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Attention to `keys` and `values` at the positions `held`: first the `tokens`, then the recalled ones."""
        kind, rules = self.this_pass or self.kind, self.rules
        assert kind is not None
        asked = np.array([t.position for t in new])
        apart = asked[:, None] - held[None]
        seen = apart >= 0
        if kind.sliding_window is not None:
            seen &= apart < kind.sliding_window
        keeps_newest = rules.policy.name == "recent" and rules.merge is None and not self.is_whole_window
        if keeps_newest and rules.budget is not None and not self.recalls and (self.columns > 1 or kind.sliding_window):
            # The sinks and the newest, as if each token had come by itself and the others been evicted before it.
            is_sink = held < rules.sinks
            between = (held[None, None] > held[None, :, None]) & (held[None, None] <= asked[:, None, None]) & ~is_sink
            seen &= (between.sum(-1) <= rules.budget - rules.sinks) | is_sink[None]
        counts = sinks = None
        if rules.merge is not None and rules.merge.is_counted:
            counts = np.array([token.stands_for for token in tokens] + [1] * (len(held) - len(tokens)))
        if kind.sink_logits is not None:
            sinks = np.array(kind.sink_logits).reshape(kind.kv_heads, kind.group)[own]
        distances = self.mode.distances(asked, held, kind, rules.budget is not None, fullest - len(held))
        return attention(kind, queries, keys, values, distances, seen, counts, sinks)
