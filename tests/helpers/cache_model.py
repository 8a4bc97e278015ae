"""An independent model of a cache: plain lists of tokens, explicit masks, policies as their papers say, float64.

Written from the documents, not from the code: it has no slots and no kernels. Every step and edit makes new lists.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_recall import Memory
from tests.helpers.cache_model_rows import RowModel
from tests.helpers.cache_model_steps import LayerModel
from tests.helpers.cache_model_text import TextModel
from tests.helpers.cache_model_tokens import Kind, Token, Tokens

Array = NDArray[Any]


class CacheModel(TextModel):
    """A cache whose rows come from elsewhere, too: from other caches, and from other rows."""

    def take_over(self, states: Sequence[tuple[Array, Array]], kinds: Sequence[Kind], batch: int, tokens: int) -> None:
        """A text of `tokens` tokens from elsewhere, keys (batch, kv_heads, tokens, head_dim) and values per layer."""
        self.rows = [RowModel(tokens, tokens, tokens, tokens, None, ((0, tokens),)) for _ in range(batch)]
        for layer, kind, (keys, values) in zip(self.layers, kinds, states, strict=True):
            layer.batch = batch
            layer.start(kind)
            # A sliding layer has dropped the tokens behind its window.
            layer.has_evicted = kind.sliding_window is not None and tokens >= kind.sliding_window
            first = 0 if kind.sliding_window is None else max(0, tokens - kind.sliding_window + 1)
            coded = self.codec(layer.index, keys, values)
            for row in range(batch):
                own = [part[row][:, first:] for part in (keys, values, *coded)]
                layer.held[row] = layer.tokens(row, range(first, tokens), own[0], own[1], (own[2], own[3]))
                layer.remember_tokens(row, range(first, tokens), keys[row][:, first:], values[row][:, first:])
                layer.written[row] = tokens - first

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[at] for at in rows]
        for layer in self.layers:
            layer.batch = len(rows)
            layer.forget()
            if layer.held:
                layer.held = [layer.held[at] for at in rows]
                layer.written = [layer.written[at] for at in rows]
                layer.memory = [layer.memory[at] for at in rows] if layer.memory else []

    def copy(self, source: int, target: int) -> None:
        self.select_rows([source if at == target else at for at in range(len(self.rows))])

    def splice_is_refused(self, other: "CacheModel") -> bool:
        ours, theirs = self.options.rules.merge, other.options.rules.merge
        if theirs is not None and ours != theirs:
            return True
        if self.options.is_recalling != other.options.is_recalling or self.leaves != other.leaves:
            return True
        for mine, its in zip(self.layers, other.layers, strict=True):
            if its.is_empty:
                continue
            if mine.is_empty:
                shape = LayerModel(mine.index, mine.configured, mine.codec, mine.counts, mine.batch, its.kind)
                heads = 1 if not shape.rules.policy.per_head else its.kind.kv_heads if its.kind else 0
            else:
                heads = len(mine.held[0])
            if heads < len(its.held[0]):
                return True
        return False

    def splice(self, other: "CacheModel", source: int, row: int, is_same_store: bool) -> None:
        at = self.rows[row].end
        theirs = [[layer.held[source] if layer.held else [] for layer in other.layers]][0]
        readers = [layer.reader(source) if layer.held else None for layer in other.layers]
        added = other.rows[source]
        memories = [layer.memory[source] if layer.memory else None for layer in other.layers]
        for layer, its, lists, read, memory in zip(self.layers, other.layers, theirs, readers, memories, strict=True):
            if its.kind is None:
                continue
            if layer.is_empty:
                layer.start(its.kind)
            read_now = [
                [(token, *((token.key, token.value) if read is None else read(token))) for token in own]
                for own in lists
            ]
            layer.forget()
            layer.held, layer.written = [list(own) for own in layer.held], list(layer.written)
            start = layer.remembered(row)
            if memory is not None:
                self.join(layer, memory, row, at, other.options.rules.recall_store == self.options.rules.recall_store)
            layer.held[row] = [
                mine + self.taken(layer, read_now, number, at, layer.written[row], start, is_same_store)
                for number, mine in enumerate(layer.held[row])
            ]
            layer.written[row] += max(len(own) for own in lists)
        self.rows = [
            RowModel(
                own.end + added.end,
                own.seen + added.seen,
                own.columns + added.columns,
                0,
                None if own.ids is None or added.ids is None else own.ids + added.ids,
                own.moved(own.end + added.end).prompts,
            )
            if index == row
            else own._replace(columns=own.columns + added.columns)
            for index, own in enumerate(self.rows)
        ]

    def join(self, layer: LayerModel, memory: Memory, row: int, at: int, is_same_store: bool) -> None:
        """Let the recall store of another cache's row be recalled in one of `layer`, as text from position `at` on."""
        keys, values = memory.keys, memory.values
        if not memory.tokens:
            return
        if not is_same_store:
            assert layer.recall_codec is not None
            (keys,), (values,) = layer.recall_codec(layer.index, keys[None], values[None])
        layer.put(row, np.where(memory.positions >= 0, memory.positions + at, -1), keys, values)

    def taken(
        self, layer: LayerModel, lists: list[list[tuple[Token, Array, Array]]], number: int, at: int, written: int,
        start: int, is_same_store: bool,
    ) -> Tokens:  # fmt: skip
        """The tokens of another cache as list `number` of `layer` holds them, after position `at`."""
        assert layer.kind is not None
        is_split = len(layer.held[0]) > 1 and len(lists) == 1
        ordered = sorted(lists[0 if len(lists) == 1 else number], key=lambda each: each[0].position)
        result = []
        own = slice(number, number + 1) if is_split else slice(None)
        for place, (token, key, value) in enumerate(ordered):
            exact_key, exact_value = key[own], value[own]
            coded = (token.key[own], token.value[own])
            if not is_same_store:
                coded = layer.encoded(exact_key, exact_value, number, len(layer.held[0]))
            keeps = layer.rules.merge is not None and self.options.rules.merge is not None
            count = token.stands_for if keeps else 1
            result.append(
                Token(
                    written + place,
                    token.position + at,
                    *coded,
                    exact_key,
                    exact_value,
                    0.0,
                    count,
                    start + token.place_in_store if layer.recalls else -1,
                )
            )
        return result
