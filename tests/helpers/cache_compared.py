"""A cache beside its model: whether all that can be seen of both is the same."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_model_tokens import Token, Tokens
from tests.helpers.cache_setup import Setup
from windlass import KVCache
from windlass.core.record import StepRecord
from windlass.core.step import AttentionCall

Array = NDArray[Any]


class Compared:
    """A cache and its model. `operations` counts the calls that were compared."""

    def __init__(self, setup: Setup, is_donor: bool = False) -> None:
        self.setup, self.is_donor = setup, is_donor
        self.cache = KVCache.from_options(setup.its_model, setup.options)
        self.model = setup.cache_model()
        self.kinds = setup.kinds()
        self.calls = [
            AttentionCall(
                kind.scale, kind.sliding_window, kind.softcap,
                None if kind.sink_logits is None else torch.tensor(kind.sink_logits),
            )
            for kind in self.kinds
        ]  # fmt: skip
        self.operations = self.skipped = 0
        self.steps: list[list[list[list[list[int]]]]] = []  # of each layer: what it held after each step of a pass

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the cache's layers hold after each step that is taken, or taken again."""
        layers, self.steps = list(self.cache.layers), []
        for layer in layers:
            steps: list[list[list[list[int]]]] = []
            self.steps.append(steps)
            layer.keep_record = partial(after_step, layer, layer.keep_record, steps)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in layers:
                del layer.keep_record

    def expect(self) -> None:
        """Tell the model's layers what the cache holds, and what was noted, for where rounding decides."""
        steps, self.steps = self.steps or [[] for _ in self.cache.layers], []
        for mine, its, noted in zip(self.model.layers, self.cache.layers, steps, strict=True):
            mine.expected, mine.noted = held(its.positions), noted
            mine.find = lambda row, at, tokens, count, its=its: nearest(its, row, at, tokens, count)

    def compare(self) -> None:
        cache, model = self.cache, self.model
        for what, ours, truth in (
            ("next_positions", cache.next_positions, model.ends),
            ("tokens_seen", cache.tokens_seen, [row.seen for row in model.rows]),
            ("columns_seen", cache.columns_seen, min(row.columns for row in model.rows)),
            ("batch_size", cache.batch_size, len(model.rows)),
            ("is_in_step", cache.is_in_step, False),
        ):
            if ours != truth:
                raise Difference(f"{what} is {ours}, expected {truth}")
        ids = [row.ids for row in model.rows]
        if cache.tokens != (None if None in ids else [list(own) for own in ids if own is not None]):
            raise Difference(f"tokens are {cache.tokens}, expected {ids}")
        for mine, its in zip(model.layers, cache.layers, strict=True):
            if its.is_empty:
                if any(own for lists in mine.held for own in lists):
                    raise Difference(f"layer {mine.index} holds nothing")
                continue
            for row, (heads, lists) in enumerate(zip(held(its.positions), mine.held, strict=True)):
                found = [sorted(head) for head in heads]
                wanted = [sorted(token.position for token in own) for own in lists]
                if found != wanted:
                    raise Difference(f"layer {mine.index}, row {row} holds {found}, not {wanted}")
            most = max(len(own) for lists in mine.held for own in lists)
            if its.table.occupancy_bound < most:
                raise Difference(f"layer {mine.index} counts {its.table.occupancy_bound} tokens, holds {most}")

    def compare_contents(self) -> None:
        """Keys, values and counts of every token held."""
        for mine, its in zip(self.model.layers, self.cache.layers, strict=True):
            if its.is_empty:
                continue
            keys, values = (
                its.store.packed_keys().floats().double().numpy(),
                its.store.packed_values().floats().double().numpy(),
            )
            merged = its.table.state.get("merged")
            for row, lists in enumerate(mine.held):
                for at, tokens in enumerate(lists):
                    self.compare_list(its, row, at, tokens, keys[row], values[row], merged, mine.reader(row))

    def compare_list(
        self, its: Any, row: int, at: int, tokens: Tokens, keys: Array, values: Array, merged: Tensor | None,
        read: Callable[[Token], tuple[Array, Array]] | None,
    ) -> None:  # fmt: skip
        own = slice(None) if its.positions.shape[1] == 1 else slice(at, at + 1)
        slots = slots_at(its.positions[row, at].tolist())
        for token in tokens:
            key, value = (token.key, token.value) if read is None else read(token)
            near = [
                np.abs(np.concatenate((keys[own, s] - key, values[own, s] - value), -1)).max()
                for s in slots[token.position]
            ]
            best = int(np.argmin(near))
            slot = slots[token.position].pop(best)
            if near[best] > (1e-5 if self.setup.dtype == "float32" else 2.0**-7) * max(
                1.0, np.abs(key).max(), np.abs(value).max()
            ):
                raise Difference(
                    f"layer {its.index}, row {row}, list {at}: position {token.position} is off by {near[best]:.2g}"
                )
            if merged is not None and int(merged[row, at, slot]) + 1 != token.stands_for:
                raise Difference(
                    f"layer {its.index}, row {row}: position {token.position} stands for {token.stands_for} tokens"
                )

    def adopt_merges(self) -> None:
        """Take over what merged tokens hold, where only rounding, or a target that it chose, makes the difference."""
        if self.model.options.rules.merge is None:
            return
        is_exact = self.setup.store == "plain" and self.setup.dtype == "float32"
        for mine, its in zip(self.model.layers, self.cache.layers, strict=True):
            if its.is_empty or "merged" not in its.table.state or (is_exact and not mine.is_close):
                continue
            keys, values = (
                its.store.packed_keys().floats().double().numpy(),
                its.store.packed_values().floats().double().numpy(),
            )
            merged = its.table.state["merged"]
            for row, lists in enumerate(mine.held):
                slots = [slots_at(head) for head in its.positions[row].tolist()]
                for at, tokens in enumerate(lists):
                    own = slice(None) if len(lists) == 1 else slice(at, at + 1)
                    for place, token in enumerate(tokens):
                        slot = slots[at][token.position].pop(0)
                        key, value = keys[row][own, slot], values[row][own, slot]
                        count = int(merged[row, at, slot]) + 1
                        if not mine.is_close and (count != token.stands_for or not self.is_near(token, key, value)):
                            raise Difference(
                                f"layer {mine.index}, row {row}: position {token.position} stands for {count} tokens, "
                                f"not {token.stands_for}, or is {key}, not {token.key}; {value}, not {token.value}"
                            )
                        tokens[place] = token._replace(
                            key=key, value=value, exact_key=key, exact_value=value, stands_for=count
                        )
            self.model.counts.resettled += int(mine.is_close)
            mine.is_close = False

    def is_near(self, token: Token, key: Array, value: Array) -> bool:
        """Whether both are one step of the store's codes apart at most."""
        share = {"plain": 2.0**-7, "int8": 2.0**-6, "int4": 0.3}[self.setup.store.partition("(")[0]]
        pairs = ((token.key, key), (token.value, value))
        return all(np.abs(mine - its).max() <= share * max(np.abs(mine).max(), 1.0) for mine, its in pairs)


def after_step(layer: Any, work: Callable[[StepRecord], None], steps: list[Any], record: StepRecord) -> None:
    """The end of a step, and what is held after it."""
    work(record)
    steps.append(held(layer.positions))


def slots_at(places: list[int]) -> dict[int, list[int]]:
    """The slots of each position, those of one in the order of the text."""
    slots: dict[int, list[int]] = {}
    for slot, position in enumerate(places):
        slots.setdefault(position, []).append(slot)
    return slots


def held(positions: Tensor) -> list[list[list[int]]]:
    return [[[p for p in head if p >= 0] for head in row] for row in positions.tolist()]


def nearest(layer: Any, row: int, at: int, tokens: Tokens, count: int) -> list[int]:
    """Which `count` of tokens at one position a layer holds, by their values: words repeat, and so do keys."""
    own = slice(None) if layer.positions.shape[1] == 1 else slice(at, at + 1)
    slots = [slot for slot, p in enumerate(layer.positions[row, at].tolist()) if p == tokens[0].position]
    values = layer.store.values()[row].double().numpy()
    found: list[int] = []
    for slot in slots[:count]:
        left = [place for place in range(len(tokens)) if place not in found]
        found.append(min(left, key=lambda place: float(np.abs(tokens[place].value - values[own, slot]).max())))
    return found
