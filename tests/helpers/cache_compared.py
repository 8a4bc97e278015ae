"""A cache beside its model: whether all that can be seen of both is the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_model_recall import Noted
from tests.helpers.cache_model_steps import LayerModel
from tests.helpers.cache_model_tokens import Token, Tokens, stacked
from tests.helpers.cache_setup import GROUP, KV_HEADS, Setup
from windlass import KVCache
from windlass.cache import recall
from windlass.core.step import AttentionCall, StepRecord

Array = NDArray[Any]


class Compared:
    """A cache and its model. `operations` counts the calls that were compared."""

    def __init__(self, setup: Setup, is_donor: bool = False) -> None:
        self.setup, self.is_donor = setup, is_donor
        if setup.has_adapters and not is_donor:
            setup.adapted.reset()
        recall.CANDIDATES = setup.candidates  # type: ignore[misc]  # small texts have few pages
        self.cache = KVCache.from_options(setup.its_model, setup.options)
        self.model = setup.cache_model()
        self.kinds, whole = setup.kinds(), replace(setup, shares=None).kinds()
        self.calls = [
            AttentionCall(
                kind.scale, kind.sliding_window, kind.softcap,
                None if kind.sink_logits is None else torch.tensor(kind.sink_logits),
            )
            for kind in whole
        ]  # fmt: skip
        self.operations = self.skipped = 0
        self.steps: list[list[Noted]] = []  # of each layer, after each step of a pass
        self.take_budgets()
        self.model.reset()

    def take_budgets(self) -> None:
        """Let the model's layers keep as much as those of the cache, if that is as their shares say."""
        found, setup = [layer.rules.limits.budget for layer in self.cache.layers], self.setup
        budget = self.model.options.budget
        self.model.budgets = [budget] * len(found)
        if setup.shares is None or budget is None:
            wrong = found != self.model.budgets
        else:
            self.model.budgets = list(found)
            wrong = is_wrong(
                [own or 0 for own in found], budget, self.model.options.sinks + self.model.options.window_now + 1, setup
            )
        if wrong:
            raise Difference(f"the layers keep {found} tokens")

    def split(self, states: Sequence[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """The queries, keys and values, or outputs, of all heads of each layer, as each leaf has them."""
        result = []
        for layer, heads in self.model.leaves:
            own = list(range(KV_HEADS)) if heads is None else list(heads)
            members = [head * GROUP + at for head in own for at in range(GROUP)]
            result.append(
                tuple(each if heads is None else each[:, members if each.shape[1] > KV_HEADS else own]
                      for each in states[layer])
            )  # fmt: skip
        return result

    @contextmanager
    def noting(self, cache: KVCache | None = None) -> Iterator[None]:
        """Note the contents of the layers of `cache` (default: this pair's) after each step, a repeated one too."""
        layers, self.steps = list((cache or self.cache).layers), []
        for layer in layers:
            steps: list[Noted] = []
            self.steps.append(steps)
            layer.keep_record = partial(after_step, layer, layer.keep_record, steps)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for layer in layers:
                del layer.keep_record

    def expect(self) -> None:
        """Give the model's layers the contents of the cache, and the notes, for cases that rounding decides."""
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
            self.compare_memory(mine, its)
            most = max(len(own) for lists in mine.held for own in lists)
            if its.table.occupancy_bound < most:
                raise Difference(f"layer {mine.index} counts {its.table.occupancy_bound} tokens, holds {most}")

    def compare_memory(self, mine: LayerModel, its: Any) -> None:
        """The positions of recallable tokens."""
        if not mine.recalls:
            return
        lengths = [own.tokens for own in mine.memory]
        if list(its.table.recall.lengths or [0] * len(lengths)) != lengths:
            raise Difference(f"layer {mine.index} remembers {its.table.recall.lengths} tokens, not {lengths}")
        for row, (own, places) in enumerate(zip(mine.memory, its.table.recall.positions.numpy(), strict=False)):
            here, behind = places[: own.tokens], places[own.tokens :]
            if not np.array_equal(here, own.positions) or behind.max(initial=-1) >= 0:
                raise Difference(f"layer {mine.index}, row {row} remembers {here}, not {own.positions}")

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
        if not tokens:
            return
        own = slice(None) if its.positions.shape[1] == 1 else slice(at, at + 1)
        slots = slots_at(its.positions[row, at].tolist())
        truth = np.concatenate(stacked(tokens, read), -1)
        found = np.concatenate((keys[own], values[own]), -1)
        # Of tokens at one position each takes the slot that is most like it.
        places = []
        for number, token in enumerate(tokens):
            free = slots[token.position]
            near = [np.abs(found[:, slot] - truth[:, number]).max() for slot in free] if len(free) > 1 else [0]
            places.append(free.pop(int(np.argmin(near))))
        apart = np.abs(found[:, places] - truth).max((0, 2))
        bound = (1e-5 if self.setup.dtype == "float32" else 2.0**-7) * np.maximum(1.0, np.abs(truth).max((0, 2)))
        if (apart > bound).any():
            worst = int((apart - bound).argmax())
            raise Difference(
                f"layer {its.index}, row {row}, list {at}: position {tokens[worst].position} is off by "
                f"{apart[worst]:.2g}"
            )
        if merged is not None:
            counts = [token.stands_for for token in tokens]
            if (merged[row, at, places] + 1).tolist() != counts:
                raise Difference(f"layer {its.index}, row {row}, list {at}: tokens do not stand for {counts} tokens")

    def adopt_merges(self) -> None:
        """Copy the contents of merged tokens, where only rounding, or a target chosen by it, makes the difference."""
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
        """Return True if both are at most one step of the store's codes apart."""
        share = {"plain": 2.0**-7, "int8": 2.0**-6, "int4": 0.3}[self.setup.store.partition("(")[0]]
        pairs = ((token.key, key), (token.value, value))
        return all(np.abs(mine - its).max() <= share * max(np.abs(mine).max(), 1.0) for mine, its in pairs)


def after_step(layer: Any, work: Callable[[StepRecord], None], steps: list[Any], record: StepRecord) -> None:
    """The end of a step, and the tokens held after it."""
    work(record)
    store = layer.table.recall
    told = None if store is None or store.is_empty else store.last_recalled.tolist()
    steps.append(Noted(held(layer.positions), told, 0 if told is None else store.candidates))


def is_wrong(found: Sequence[int], budget: int, least: int, setup: Setup) -> bool:
    """Return True if leaves keep other numbers of tokens than shares of a budget say. None keeps fewer than `least`."""
    assert setup.shares is not None
    sizes = [KV_HEADS if heads is None else len(heads) for _, heads in setup.leaves()]
    parts = [setup.shares[layer][0 if heads is None else heads[0]] for layer, heads in setup.leaves()]
    mean = sum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
    ideal = [least + part / mean * (budget - least) for part in parts]
    left = budget * sum(sizes) - sum(size * own for size, own in zip(sizes, found, strict=True))
    is_near = all(ideal_one - 1 < own < ideal_one + KV_HEADS for own, ideal_one in zip(found, ideal, strict=True))
    return not (0 <= left < max(sizes) and is_near)


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
