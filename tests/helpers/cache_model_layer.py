"""One layer of the model of a cache: plain lists of tokens, one for each row and each head that ranks by itself."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_recall import Memory, Noted
from tests.helpers.cache_model_rows import Rules
from tests.helpers.cache_model_rules import PolicyModel, Scores, merged
from tests.helpers.cache_model_tokens import Kind, Token, Tokens, part_of

Array = NDArray[Any]
Codec = Callable[[int, Array, Array], tuple[Array, Array]]  # of a layer's keys and values (..., heads, channels)
Reader = Callable[[Token], tuple[Array, Array]]

SHORT = 16  # columns: passes up to this length are taken token by token
RECENT = PolicyModel("recent", per_head=False)


class Difference(AssertionError):
    """A difference between the cache and the model."""


class Record(NamedTuple):
    """State of a layer before a step, and the step per row: its tokens and the mass that they gave."""

    before: list[list[Tokens]]
    written: list[int]
    lengths: list[int]
    new: list[list[Tokens]]
    mass: list[list[Array]]
    ends: list[int]
    prompt_ends: list[int]
    is_first: bool  # of its pass
    is_small: bool  # of a short pass of a layer that was not over budget
    done: int = 0  # the most tokens of a row that were rolled back


@dataclass
class Counts:
    """Counts of lists over budget, of heads that recalled any, and of evictions and recalls decided by rounding."""

    evictions: int = 0
    resettled: int = 0
    recalls: int = 0


@dataclass
class Held:
    """The lists of one layer, `held[row][list]`. A list is of one kv head, or of all where they are ranked alike."""

    index: int
    configured: Rules
    codec: Codec
    counts: Counts
    batch: int
    kind: Kind | None = None  # set by the first pass
    this_pass: Kind | None = None  # that of the pass being followed, where its scale or softcap is another
    held: list[list[Tokens]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)  # of each row, where evicted tokens are recalled
    has_evicted: bool = False
    is_close: bool = False  # whether rounding may have decided where a token was merged
    is_last: bool = True  # whether a step is the last of its pass: other steps' values are not seen
    is_seen: bool = True  # whether the cache's tokens after this step are known
    is_doubtful: bool = False  # whether rounding may have decided an eviction between two tokens of a pass
    expected: list[list[list[int]]] | None = None  # positions that the cache holds after the pass being followed
    noted: list[Noted] = field(default_factory=list)  # after each step of it
    seen: Noted | None = None  # after the step being followed
    find: Callable[[int, int, Tokens, int], list[int]] | None = None
    """Return the indices of the tokens at one position that the cache holds, given a row, a list and their number."""

    def __post_init__(self) -> None:
        self.rules = self.configured
        self.take_rules()

    @property
    def is_empty(self) -> bool:
        return self.kind is None

    @property
    def is_whole_window(self) -> bool:
        """Return True if it holds the model's sliding window and nothing else."""
        window = None if self.kind is None else self.kind.sliding_window
        budget = self.configured.budget
        return window is not None and (budget is None or window <= budget)

    def take_rules(self) -> None:
        """Use the configured rules, or the window alone."""
        self.rules = self.configured
        if self.is_whole_window and self.kind is not None:
            window = self.kind.sliding_window
            self.rules = replace(self.configured, policy=RECENT, merge=None, budget=window, sinks=0, window=0)

    def start(self, kind: Kind) -> None:
        """Take shape with the first keys."""
        self.kind = kind
        self.take_rules()
        lists = kind.kv_heads if self.rules.policy.per_head else 1
        self.held = [[[] for _ in range(lists)] for _ in range(self.batch)]
        self.written = [0] * self.batch
        self.forget_memory()

    def is_over(self, tokens: Tokens) -> bool:
        budget = self.rules.budget
        return budget is not None and len(tokens) > budget

    @property
    def recalls(self) -> bool:
        """Return True if it recalls evicted tokens: not where its model does not see so far back."""
        return self.configured.recall > 0 and self.kind is not None and self.kind.sliding_window is None

    def remembered(self, row: int) -> int:
        """Tokens of a row that may ever be recalled."""
        return self.memory[row].tokens if self.memory else 0

    def forget_memory(self) -> None:
        """Remember no token of any row."""
        assert self.kind is not None
        none = np.zeros((self.kind.kv_heads, 0, 0))
        self.memory = [Memory(np.zeros(0, dtype=np.int64), *[none] * 6)] * self.batch if self.recalls else []

    def reader(self, row: int) -> Reader | None:
        """How attention reads tokens: the first and the newest of a row are exact, or None where none are."""
        rules, written = self.configured, self.written[row]
        if not rules.store_sinks + rules.store_newest:
            return None

        def read(token: Token) -> tuple[Array, Array]:
            is_exact = token.number < rules.store_sinks or token.number >= written - rules.store_newest
            return (token.exact_key, token.exact_value) if is_exact else (token.key, token.value)

        return read

    def tokens(
        self, row: int, positions: Sequence[int], keys: Array, values: Array, coded: tuple[Array, Array]
    ) -> list[Tokens]:
        """New tokens for each list, out of (heads, tokens, channels)."""
        lists, first, start = len(self.held[row]), self.written[row], self.remembered(row)
        heads = [slice(None)] if lists == 1 else [slice(head, head + 1) for head in range(lists)]
        return [
            [
                Token(
                    first + at,
                    position,
                    coded[0][own, at],
                    coded[1][own, at],
                    keys[own, at],
                    values[own, at],
                    place_in_store=start + at if self.recalls else -1,
                )
                for at, position in enumerate(positions)
            ]
            for own in heads
        ]

    def encoded(self, key: Array, value: Array, number: int, lists: int) -> tuple[Array, Array]:
        """The key and value (heads, channels) of list `number` as the layer's store gives them back."""
        assert self.kind is not None
        heads = list(range(self.kind.kv_heads)) if lists == 1 else [number]
        states = [np.zeros((1, self.kind.kv_heads, 1, part.shape[-1])) for part in (key, value)]
        for whole, part in zip(states, (key, value), strict=True):
            whole[0, heads, 0] = part
        keys, values = self.codec(self.index, *states)
        return keys[0, heads, 0], values[0, heads, 0]

    def observe_and_evict(self, record: Record) -> None:
        """After the step of `record`, whose tokens are the last of each list."""
        policy = self.rules.policy
        for row, lists in enumerate(self.held):
            for at, tokens in enumerate(lists):
                mass = record.mass[row][at]
                if policy.has_state and mass.shape[1]:
                    states = policy.remembered(np.array([token.state for token in tokens]), mass).tolist()
                    lists[at] = [Token(*t[:6], s, *t[7:]) for t, s in zip(tokens, states, strict=True)]
                if self.is_over(tokens):
                    lists[at] = self.evict(row, at, lists[at], record.ends[row], record.prompt_ends[row], policy)

    def evict(self, row: int, at: int, tokens: Tokens, end: int, prompt_end: int, policy: PolicyModel) -> Tokens:
        """Tokens that stay of a list over budget. If rounding decides, those that the cache keeps."""
        rules, kind = self.rules, self.kind
        assert rules.budget is not None
        assert kind is not None
        self.has_evicted = True
        self.counts.evictions += 1
        hidden = -1 if kind.sliding_window is None else end - kind.sliding_window
        scores = policy.scores(
            tokens, self.reader(row), rules.key_rounding, rules.mass_rounding, prompt_end, end - rules.window
        )
        for place, token in enumerate(tokens):
            if token.position <= hidden:
                scores.fix(place, -np.inf)
            elif token.position < rules.sinks or token.position >= end - rules.window:
                scores.fix(place, np.inf)
        order = sorted(range(len(tokens)), key=lambda place: (scores.values[place], tokens[place].position))
        count = len(tokens) - rules.budget
        out = order[:count]
        if self.expected is not None:
            out = self.settled(row, at, tokens, scores, order, count, self.expected[row][at])
        if rules.merge is None:
            return [token for place, token in enumerate(tokens) if place not in out]
        kept = [token for place, token in enumerate(tokens) if place not in out]
        gone = [token for place, token in enumerate(tokens) if place in out]
        lists, oldest = len(self.held[row]), hidden + 1
        odd = range(1, kind.kv_heads, 2) if lists == 1 else [0] * (at % 2)
        result, is_close = merged(
            rules.merge, kept, gone, lambda p: rules.sinks <= p < end - rules.window and p >= oldest,
            lambda p: p < oldest, rules.key_rounding * 32, odd,
        )  # fmt: skip
        self.is_close |= is_close
        return [new if new is old else self.coded(new, at, lists) for new, old in zip(result, kept, strict=True)]

    def coded(self, token: Token, at: int, lists: int) -> Token:
        """A merged token as the store holds it."""
        key, value = self.encoded(token.key, token.value, at, lists)
        return token._replace(key=key, value=value)

    def settled(
        self, row: int, at: int, tokens: Tokens, scores: Scores, order: list[int], count: int, held: list[int]
    ) -> list[int]:
        """Which tokens go. The cache's own choice where rounding may have made it, of which it `held` the rest."""
        places = [token.position for token in tokens]
        chosen, stays = order[:count], Counter(held)
        if len(set(places)) == len(places):
            is_possible = not any(stays[places[place]] for place in chosen)
        else:
            left = Counter(places) - Counter(places[place] for place in chosen)
            is_possible = all(left[position] >= stays[position] for position in set(places))
        if is_possible and not self.is_seen:
            most = max(scores.bound(place, 1) for place in chosen)
            self.is_doubtful |= most > min(scores.bound(place, -1) for place in order[count:])
            return chosen
        if is_possible:
            return self.told_apart(row, at, tokens, scores, chosen, stays)
        spare = Counter(places) - Counter(held)  # positions, as often as a token there must go
        out: list[int] = []
        for place in order:
            if len(out) < count and spare[places[place]] > 0:
                spare[places[place]] -= 1
                out.append(place)
        out = self.told_apart(row, at, tokens, scores, out, Counter(held))
        if set(out) == set(order[:count]):
            return out
        kept = [place for place in range(len(tokens)) if place not in out]
        wrong = [(places[i], places[j]) for i in out for j in kept if not scores.may_go_before(i, j, places)]
        if len(out) < count or wrong:
            wanted = sorted(places[place] for place in order[count:])
            raise Difference(
                f"layer {self.index}, row {row}, list {at}: holds {sorted(held)}, expected {wanted}; "
                f"evicted before those it keeps: {wrong[:3]}"
            )
        self.counts.resettled += 1
        self.is_doubtful |= not self.is_seen
        return out

    def told_apart(
        self, row: int, at: int, tokens: Tokens, scores: Scores, out: list[int], held: Counter[int]
    ) -> list[int]:
        """`out` with the cache's own choice among tokens at one position, where rounding makes it."""
        for position in {tokens[place].position for place in out}:
            places = [place for place, token in enumerate(tokens) if token.position == position]
            gone = [place for place in places if place in out]
            kept = [place for place in places if place not in gone]
            # Of equal ones the earlier in the text goes.
            pairs = [(stay, goes) for stay in kept for goes in gone if not scores.is_one(stay, goes)]
            if self.rules.merge or not any(scores.bound(stay, -1) < scores.bound(goes, 1) for stay, goes in pairs):
                continue
            if not self.is_last:
                self.is_doubtful = True
                continue
            assert self.find is not None
            stays = [places[index] for index in self.find(row, at, [tokens[place] for place in places], held[position])]
            free = [place for place in places if place not in stays][: len(gone)]
            out = [place for place in out if place not in places] + free
        return out

    def cut_to(self, rules: Rules, ends: Sequence[int], prompt_ends: Sequence[int]) -> None:
        """Go by `rules` of a lower budget, and keep no more than that at once."""
        was_window, self.configured = self.is_whole_window, rules
        self.take_rules()
        if self.kind is None:
            return
        ranking = self.rules.policy
        if was_window and not self.is_whole_window:
            if ranking.per_head:
                heads = range(self.kind.kv_heads)
                self.held = [[[part_of(token, head) for token in lists[0]] for head in heads] for lists in self.held]
            if ranking.has_state:  # it has seen nothing yet
                ranking = RECENT
        self.held = [
            [
                self.evict(row, at, own, ends[row], prompt_ends[row], ranking) if self.is_over(own) else own
                for at, own in enumerate(lists)
            ]
            for row, lists in enumerate(self.held)
        ]
