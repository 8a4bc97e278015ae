"""Rows and layers of the model of a cache: passes, rollback, and edits of their text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from tests.helpers.cache_model_layer import Codec, Counts
from tests.helpers.cache_model_rows import Leaf, Options, RowModel
from tests.helpers.cache_model_steps import LayerModel
from tests.helpers.cache_model_tokens import Kind, Mode, Tokens

Array = NDArray[Any]


@dataclass
class TextModel:
    """The layers and rows of a cache. Methods that end in `_is_refused` say whether an edit must raise.

    `layers` are one for each of `leaves`, which keep `budgets` tokens.
    """

    options: Options
    leaves: Sequence[Leaf]
    batch: int
    codec: Codec
    recall_codec: Codec | None
    mode: Mode

    def __post_init__(self) -> None:
        self.counts = Counts()
        self.rows = [RowModel() for _ in range(self.batch)]
        self.layers: list[LayerModel] = []
        self.budgets: list[int | None] = [self.options.budget] * len(self.leaves)
        self.reset()

    def reset(self) -> None:
        batch = len(self.rows)
        self.rows = [RowModel() for _ in range(batch)]
        self.layers = [
            LayerModel(at, rules, self.codec, self.counts, batch, recall_codec=self.recall_codec)
            for at, rules in enumerate(self.options.leaf_rules(self.budgets))
        ]

    @property
    def ends(self) -> list[int]:
        return [row.end for row in self.rows]

    @property
    def prompt_ends(self) -> list[int]:
        return [row.prompt_end for row in self.rows]

    @property
    def has_ties(self) -> bool:
        """Return True if two tokens of a list, or of those that may be recalled, share a position."""
        lists = [[t.position for t in own] for layer in self.layers for lists in layer.held for own in lists]
        lists += [[p for p in own.positions.tolist() if p >= 0] for layer in self.layers for own in layer.memory]
        return any(len(set(own)) < len(own) for own in lists)

    def positions(self, mask: Sequence[Sequence[bool]]) -> list[list[int]]:
        """Positions of the next columns, -1 for padding."""
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
        """One pass of the model with queries, keys and values `states` of each layer: the outputs of each layer."""
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
        """True: it must raise. None: it may, but otherwise must be right."""
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
        """Move the tokens of one row, or of all. Those without a new place go."""
        for layer in self.layers:
            layer.forget()
            for at in range(len(self.rows)) if row is None else [row]:
                if layer.held:
                    layer.held = [list(lists) for lists in layer.held]
                    layer.held[at] = [moved(tokens, move) for tokens in layer.held[at]]
                if layer.memory:
                    layer.memory = list(layer.memory)
                    layer.memory[at] = layer.memory[at].moved(move)
        self.rows = [
            own.moved(end)._replace(since_edit=0) if row is None or at == row else own
            for at, (own, end) in enumerate(zip(self.rows, ends, strict=True))
        ]

    def drop(self, start: int, end: int, row: int | None) -> None:
        ends = [start if start < at <= end else at for at in self.ends]
        self.change(row, lambda p: None if start <= p < end else p, ends)

    def keep(self, start: int, end: int, row: int | None) -> None:
        self.change(row, lambda p: p if start <= p < end else None, [min(at, end) for at in self.ends])

    def cut_is_refused(self, name: str, start: int, end: int, row: int | None) -> bool:
        """Return True if it moves an end back to where a layer's window would see tokens that it has evicted."""
        last = start if name == "drop" else end
        for at in range(len(self.rows)) if row is None else [row]:
            if last >= self.ends[at] or (name == "drop" and end < self.ends[at]):
                continue
            for layer in self.layers:
                if layer.held and layer.is_whole_window and layer.has_evicted and layer.kind is not None:
                    first = min(places_of(layer, at), default=last)
                    if last > 0 and first > max(last - (layer.kind.sliding_window or 0) + 1, 0):
                        return True
        return False

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
            places = places_of(layer, at)
            moves = [p + by for p in places if start <= p < end]
            stays = [p for p in places if not start <= p < end]
            if moves and (min(moves) < 0 or any(min(moves) <= p <= max(moves) for p in stays)):
                return True
        return False

    def leaves_tokens_past_the_end(self, name: str, start: int, end: int, by: int, row: int | None) -> bool:
        ends = self.moved_ends(name, start, end, by)
        rows = range(len(self.rows)) if row is None else [row]
        change = (lambda p: p + by) if name == "shift" else (lambda p: p // by)
        return any(
            (change(place) if start <= place < end else place) >= ends[at]
            for layer in self.layers
            for at in rows
            for place in places_of(layer, at)
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

    def set_budget(self, budget: int, window: int | None) -> None:
        """Take the arguments of `compress`. `budgets` follow."""
        was = self.options
        self.options = replace(was, budget=budget, window=was.window if window is None else window)

    def compress(self) -> None:
        """Keep no more than `budgets` from now on."""
        self.rows = [row._replace(since_edit=0) for row in self.rows]
        for layer, rules in zip(self.layers, self.options.leaf_rules(self.budgets), strict=True):
            layer.compress(rules, self.ends, self.prompt_ends)


def moved(tokens: Tokens, move: Callable[[int], int | None]) -> Tokens:
    pairs = [(token, move(token.position)) for token in tokens]
    return [token._replace(position=place) for token, place in pairs if place is not None]


def places_of(layer: LayerModel, row: int) -> list[int]:
    """The positions of all tokens of a row that a layer reads, or may recall."""
    if layer.memory:
        return [place for place in layer.memory[row].positions.tolist() if place >= 0]
    return [token.position for own in layer.held[row] for token in own] if layer.held else []
