"""An independent model of a cache: plain lists of tokens, explicit masks, policies as their papers say, float64.

Written from the documents, not from the code: it has no slots and no kernels. Every step and edit makes new lists.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from tests.helpers.cache_model_layer import Codec, Counts
from tests.helpers.cache_model_rows import Options, RowModel
from tests.helpers.cache_model_steps import LayerModel
from tests.helpers.cache_model_tokens import Kind, Mode, Token, Tokens

Array = NDArray[Any]


class CacheModel:
    """The layers and rows of a cache. Methods that end in `_is_refused` say whether an edit must raise."""

    def __init__(self, options: Options, layers: int, batch: int, codec: Codec, mode: Mode) -> None:
        self.options, self.mode, self.codec, self.counts = options, mode, codec, Counts()
        self.rows = [RowModel() for _ in range(batch)]
        self.layers: list[LayerModel] = []
        self.number_of_layers = layers
        self.reset()

    def reset(self) -> None:
        batch = len(self.rows)
        self.rows = [RowModel() for _ in range(batch)]
        rules = self.options.layer_rules
        self.layers = [LayerModel(at, rules, self.codec, self.counts, batch) for at in range(self.number_of_layers)]

    @property
    def ends(self) -> list[int]:
        return [row.end for row in self.rows]

    @property
    def prompt_ends(self) -> list[int]:
        return [row.prompt_end for row in self.rows]

    @property
    def has_ties(self) -> bool:
        """Whether two tokens of a list share a position."""
        lists = ([t.position for t in own] for layer in self.layers for lists in layer.held for own in lists)
        return any(len(set(own)) < len(own) for own in lists)

    def positions(self, mask: Sequence[Sequence[bool]]) -> list[list[int]]:
        """Of the next columns; -1 for padding."""
        result = []
        for row, columns in zip(self.rows, mask, strict=True):
            places, end = [], row.end
            for is_token in columns:
                places.append(end if is_token else -1)
                end += is_token
            result.append(places)
        return result

    def pass_of(
        self, mask: Sequence[Sequence[bool]], ids: Sequence[Sequence[int]] | None, kinds: Sequence[Kind],
        states: Sequence[tuple[Array, Array, Array]],
    ) -> list[Array]:  # fmt: skip
        """One pass of the model, whose queries, keys and values of each layer are `states`: what each layer reads."""
        places = self.positions(mask)
        rows = []
        for at, (row, own) in enumerate(zip(self.rows, places, strict=True)):
            tokens, columns = sum(p >= 0 for p in own), len(own)
            spans = row.prompts
            if columns > 1 and tokens:
                spans = (*spans, (row.end, row.end + tokens))
            told = None
            if ids is not None and row.ids is not None:
                told = row.ids + tuple(token for token, p in zip(ids[at], own, strict=True) if p >= 0)
            rows.append(
                RowModel(
                    row.end + tokens, row.seen + tokens, row.columns + columns, row.since_edit + tokens, told, spans
                )
            )
        before, self.rows = self.rows, rows
        outs = []
        for layer, kind, (queries, keys, values) in zip(self.layers, kinds, states, strict=True):
            if layer.is_empty:
                layer.start(kind)
            starts, is_first = [row.end for row in before], not any(row.seen for row in before)
            outs.append(layer.feed(queries, keys, values, places, self.prompt_ends, starts, self.mode, is_first))
        return outs

    def interrupted(self) -> None:
        """A pass that did not complete: nothing has changed, but that it may have forgotten earlier passes."""
        for layer in self.layers:
            layer.sure = 0

    def rollback_is_refused(self, counts: Sequence[int]) -> bool | None:
        """True: it must raise. None: it may, but what it does must be right."""
        if any(n > min(row.end, row.since_edit) for n, row in zip(counts, self.rows, strict=True)):
            return True
        if not any(counts):
            return False
        each = [layer.is_refused(counts) for layer in self.layers]
        return True if True in each else None if None in each else False

    def rollback(self, counts: Sequence[int]) -> None:
        if not any(counts):
            return
        self.rows = [
            row.moved(row.end - n)._replace(
                seen=row.seen - n,
                columns=row.columns - n,
                since_edit=row.since_edit - n,
                ids=None if row.ids is None else row.ids[: len(row.ids) - n],
            )
            for row, n in zip(self.rows, counts, strict=True)
        ]
        for layer in self.layers:
            layer.roll_back(counts, self.ends, self.prompt_ends)

    def change(self, row: int | None, move: Callable[[int], int | None], ends: Sequence[int]) -> None:
        """Move the tokens of one row, or of all; those without a new place go."""
        for layer in self.layers:
            layer.forget()
            for at in range(len(self.rows)) if row is None else [row]:
                if layer.held:
                    layer.held = [list(lists) for lists in layer.held]
                    layer.held[at] = [moved(tokens, move) for tokens in layer.held[at]]
        self.rows = [
            own.moved(end)._replace(since_edit=0) if row is None or at == row else own
            for at, (own, end) in enumerate(zip(self.rows, ends, strict=True))
        ]

    def drop(self, start: int, end: int, row: int | None) -> None:
        ends = [start if start < at <= end else at for at in self.ends]
        self.change(row, lambda p: None if start <= p < end else p, ends)

    def keep(self, start: int, end: int, row: int | None) -> None:
        self.change(row, lambda p: p if start <= p < end else None, [min(at, end) for at in self.ends])

    def moved_ends(self, name: str, start: int, end: int, by: int) -> list[int]:
        """Where the rows go on after a shift or a division."""
        if name == "shift":
            return [at + by if start < at <= end else at for at in self.ends]
        return [(at - 1) // by + 1 if start < at <= end else at for at in self.ends]

    def shift_is_refused(self, start: int, end: int, by: int, row: int | None) -> bool:
        ends = self.moved_ends("shift", start, end, by)
        rows = range(len(self.rows)) if row is None else [row]
        if any(ends[at] < 0 for at in rows):
            return True
        if self.leaves_tokens_past_the_end("shift", start, end, by, row):
            return True
        for layer, at in ((layer, at) for layer in self.layers if layer.held for at in rows):
            # A position is that of one token in all heads of a layer.
            places = [token.position for own in layer.held[at] for token in own]
            moves = [p + by for p in places if start <= p < end]
            stays = [p for p in places if not start <= p < end]
            if moves and (min(moves) < 0 or any(min(moves) <= p <= max(moves) for p in stays)):
                return True
        return False

    def lists(self, rows: Sequence[int]) -> list[tuple[Tokens, int]]:
        return [(own, at) for layer in self.layers if layer.held for at in rows for own in layer.held[at]]

    def leaves_tokens_past_the_end(self, name: str, start: int, end: int, by: int, row: int | None) -> bool:
        ends = self.moved_ends(name, start, end, by)
        rows = range(len(self.rows)) if row is None else [row]
        change = (lambda p: p + by) if name == "shift" else (lambda p: p // by)
        return any(
            (change(t.position) if start <= t.position < end else t.position) >= ends[at]
            for own, at in self.lists(rows)
            for t in own
        )

    def shift(self, start: int, end: int, by: int, row: int | None) -> None:
        ends = self.moved_ends("shift", start, end, by)
        self.change(row, lambda p: p + by if start <= p < end else p, ends)

    def divide(self, start: int, end: int, by: int, row: int | None) -> None:
        """Tokens that then share a position keep the order in which they stood."""
        ends = self.moved_ends("divide", start, end, by)
        for layer in self.layers:
            layer.held = [[sorted(own, key=lambda token: token.position) for own in lists] for lists in layer.held]
        self.change(row, lambda p: p // by if start <= p < end else p, ends)

    def compress_is_refused(self, budget: int, window: int | None) -> bool:
        was = self.options
        new = replace(was, budget=budget, window=was.window if window is None else window)
        return (was.budget is not None and budget > was.budget) or not new.is_possible

    def compress(self, budget: int, window: int | None) -> None:
        was = self.options
        self.options = replace(was, budget=budget, window=was.window if window is None else window)
        self.rows = [row._replace(since_edit=0) for row in self.rows]
        for layer in self.layers:
            layer.compress(self.options.layer_rules, self.ends, self.prompt_ends)

    def take_over(self, states: Sequence[tuple[Array, Array]], kinds: Sequence[Kind], batch: int, tokens: int) -> None:
        """A text of `tokens` tokens from elsewhere, keys (batch, kv_heads, tokens, head_dim) and values per layer."""
        self.rows = [RowModel(tokens, tokens, tokens, tokens, None, ((0, tokens),)) for _ in range(batch)]
        for layer, kind, (keys, values) in zip(self.layers, kinds, states, strict=True):
            layer.batch = batch
            layer.start(kind)
            # A sliding layer has dropped what its window left behind.
            layer.has_evicted = kind.sliding_window is not None and tokens >= kind.sliding_window
            first = 0 if kind.sliding_window is None else max(0, tokens - kind.sliding_window + 1)
            coded = self.codec(layer.index, keys, values)
            for row in range(batch):
                own = [part[row][:, first:] for part in (keys, values, *coded)]
                layer.held[row] = layer.tokens(row, range(first, tokens), own[0], own[1], (own[2], own[3]))
                layer.written[row] = tokens - first

    def select_rows(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[at] for at in rows]
        for layer in self.layers:
            layer.batch = len(rows)
            layer.forget()
            if layer.held:
                layer.held = [layer.held[at] for at in rows]
                layer.written = [layer.written[at] for at in rows]

    def copy(self, source: int, target: int) -> None:
        self.select_rows([source if at == target else at for at in range(len(self.rows))])

    def splice_is_refused(self, other: "CacheModel") -> bool:
        ours, theirs = self.options.rules.merge, other.options.rules.merge
        if theirs is not None and ours != theirs:
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
        for layer, its, lists, read in zip(self.layers, other.layers, theirs, readers, strict=True):
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
            layer.held[row] = [
                mine + self.taken(layer, read_now, number, at, layer.written[row], is_same_store)
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

    def taken(
        self, layer: LayerModel, lists: list[list[tuple[Token, Array, Array]]], number: int, at: int, written: int,
        is_same_store: bool,
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
            result.append(Token(written + place, token.position + at, *coded, exact_key, exact_value, 0.0, count))
        return result


def moved(tokens: Tokens, move: Callable[[int], int | None]) -> Tokens:
    pairs = [(token, move(token.position)) for token in tokens]
    return [token._replace(position=place) for token, place in pairs if place is not None]
