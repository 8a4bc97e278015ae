"""Policies and merge rules as their papers say them, over plain lists of tokens, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_tokens import Token, Tokens, stacked

Array = NDArray[Any]
STEPS = 2.0**16  # KeyNorm, KeyDiff and the targets of merging compare in steps of this fraction


class Scores:
    """A score for each token of a list. The lowest are evicted. `slack` is how far rounding may take each.

    `in_steps`: scores are rounded to whole numbers. `sources`: tokens that have the same one share one number, so that
    rounding does not part them, and None or negative where each token has its own.
    """

    def __init__(
        self, raw: Array, slack: Array | float, in_steps: bool = False, sources: list[int] | None = None
    ) -> None:
        self.raw, self.slack, self.in_steps, self.sources = raw, slack, in_steps, sources
        self.values: list[float] = (np.round(raw) if in_steps else raw).tolist()
        self.fixed: set[int] = set()

    def fix(self, place: int, value: float) -> None:
        """Let a token's score be `value`, whatever the policy says."""
        self.values[place] = value
        self.fixed.add(place)

    def bound(self, place: int, sign: int) -> float:
        """The lowest (`sign` -1) or highest score that rounding may give a token."""
        if place in self.fixed:
            return self.values[place]
        slack = self.slack if isinstance(self.slack, float) else self.slack[place]
        edge = float(self.raw[place] + sign * slack)
        return float(np.round(edge)) if self.in_steps else edge

    def is_one(self, one: int, other: int) -> bool:
        """Return True if two tokens' scores are the same number."""
        if self.sources is None or {one, other} & self.fixed:
            return False
        return self.sources[one] == self.sources[other] >= 0

    def may_go_before(self, one: int, other: int, positions: Sequence[int]) -> bool:
        """Return True if rounding may let the first of two tokens be evicted and the second be kept."""
        if self.is_one(one, other):
            return positions[one] <= positions[other]
        return (self.bound(one, -1), positions[one]) <= (self.bound(other, 1), positions[other])


@dataclass(frozen=True)
class PolicyModel:
    """A policy: its memory of attention, and its scores. `observed`: number of last queries (None: all, 0: none)."""

    name: str
    per_head: bool = True
    observed: int | None = 0
    pool: int = 1

    @property
    def has_state(self) -> bool:
        return self.observed != 0

    def remembered(self, states: Array, mass: Array) -> Array:
        """The state of a list's tokens after queries gave them `mass` (heads, queries, held)."""
        queries = mass.shape[1]
        if not queries or not self.has_state:
            return states
        if self.name == "h2o":  # Zhang et al. 2023: the sum since it was written
            return states + mass.sum((0, 1))
        if self.name == "tova":  # Oren et al. 2024: the attention of the newest query, over all heads
            result: Array = mass[:, -1].sum(0)
            return result
        assert self.name == "snap_kv", self.name  # Li et al. 2024: votes of an observation window
        assert self.observed, "a window of no queries"
        seen = min(queries, self.observed)
        return states * (1 - seen / self.observed) + mass[:, -seen:].sum((0, 1)) / self.observed

    def scores(
        self, tokens: Tokens, read: Callable[[Token], tuple[Array, Array]] | None, key_rounding: float,
        mass_rounding: float, prompt_end: int, window_start: int,
    ) -> Scores:  # fmt: skip
        """Scores of a list's tokens, whose keys are as `read` gives them."""
        if self.name == "recent":  # Xiao et al. 2023: the newest
            return Scores(np.array([token.position for token in tokens], dtype=float), 0.0)
        if self.name == "random":  # any order, but a prompt outlasts the generated tokens
            return Scores(np.array([0.5 + (token.position < prompt_end) for token in tokens]), 0.5)
        if self.name == "key_norm":  # Devoto et al. 2024: the smallest norm
            keys, _ = stacked(tokens, read)
            norms = np.sqrt((keys[0] ** 2).sum(-1))
            return Scores(-np.log2(np.maximum(norms, 1e-30)) * STEPS, key_rounding * 32 * STEPS, in_steps=True)
        if self.name == "key_diff":  # Park et al. 2025: unlike the mean direction
            keys, _ = stacked(tokens, read)
            units = keys[0] / np.maximum(np.sqrt((keys[0] ** 2).sum(-1, keepdims=True)), 1e-12)
            mean = units.mean(0)
            length = float(np.sqrt((mean**2).sum()))
            # A mean near zero has a direction that rounding decides.
            slack = key_rounding * 32 * STEPS / max(length, 1e-3)
            return Scores(-(units @ (mean / max(length, 1e-12))) * STEPS, slack, in_steps=True)
        states = np.array([token.state for token in tokens])
        if self.name == "snap_kv":  # votes for the window count for nobody
            states = states * np.array([token.position < window_start for token in tokens])
        slack = np.abs(states) * mass_rounding
        return pooled(tokens, states, slack, self.pool) if self.name == "snap_kv" else Scores(states, slack)


def pooled(tokens: Tokens, votes: Array, slack: Array, pool: int) -> Scores:
    """The largest votes among each token's neighbours in the text."""
    order = sorted(range(len(tokens)), key=lambda at: tokens[at].position)
    best, sources = np.empty(len(tokens)), [-1] * len(tokens)
    wide = np.empty(len(tokens))
    for rank, at in enumerate(order):
        near = order[max(rank - pool // 2, 0) : rank + pool // 2 + 1]
        source = max(near, key=lambda place: votes[place])
        best[at], wide[at] = votes[source], slack[source]
        if all(votes[place] + slack[place] < votes[source] - slack[source] for place in near if place != source):
            sources[at] = source
    return Scores(best, wide, sources=sources)


@dataclass(frozen=True)
class MergeModel:
    """A merge rule: `name` says how, `target` into which kept token, `threshold` how like its key must be."""

    name: str
    target: str = "nearest"
    threshold: float = -1.0

    def __str__(self) -> str:
        return f"{self.name}({self.target}, threshold={self.threshold})"

    @property
    def is_counted(self) -> bool:
        return self.name == "mean_count"


def cosines(token: Token, others: Sequence[Token]) -> Array:
    """Cosines of a token's key with others, averaged over the heads of the list."""
    keys = np.array([other.key for other in others])
    products = (keys * token.key[None]).sum(-1)
    lengths = np.linalg.norm(keys, axis=-1) * np.linalg.norm(token.key, axis=-1)[None]
    return (products / np.maximum(lengths, 1e-24)).mean(-1)


def merged(
    rule: MergeModel, kept: Tokens, evicted: Tokens, is_target: Callable[[int], bool], is_lost: Callable[[int], bool],
    slack: float, odd_heads: Sequence[int],
) -> tuple[Tokens, bool]:  # fmt: skip
    """`kept` with `evicted` merged into targets, and True if rounding might have chosen others."""
    targets = [at for at, token in enumerate(kept) if is_target(token.position)]
    groups: dict[int, Tokens] = {}
    is_close = False
    for token in evicted:
        if not targets or is_lost(token.position):
            continue
        likeness = cosines(token, [kept[at] for at in targets])
        # Of targets at one position the first comes next, and the last is the newest.
        if rule.target == "next":
            after = [at for at in range(len(targets)) if kept[targets[at]].position >= token.position]
            first = min(after, key=lambda at: kept[targets[at]].position, default=None)
            chosen = (
                max(range(len(targets)), key=lambda at: (kept[targets[at]].position, at)) if first is None else first
            )
        else:
            best = np.round(likeness * STEPS).max()
            close = [at for at in range(len(targets)) if np.round((likeness[at] + slack) * STEPS) >= best]
            equal = [at for at in range(len(targets)) if np.round(likeness[at] * STEPS) == best]
            is_close |= len(close) > 1
            chosen = max(equal, key=lambda at: (kept[targets[at]].position, at))
        if rule.threshold > -1:
            is_close |= abs(likeness[chosen] - rule.threshold) < 2 / STEPS + slack
            if likeness[chosen] < rule.threshold - 1 / STEPS:
                continue
        groups.setdefault(targets[chosen], []).append(token)
    result = list(kept)
    for at, group in groups.items():
        result[at] = joined(rule, kept[at], group, odd_heads)
    return result, is_close


def joined(rule: MergeModel, target: Token, group: Tokens, odd_heads: Sequence[int]) -> Token:
    """`target` once the tokens of `group` are merged into it."""
    everyone = [target, *group]
    count = sum(token.stands_for for token in everyone)
    states = [np.concatenate((token.key, token.value), -1) for token in everyone]
    if rule.name == "sum":
        result = np.sum(states, axis=0)
    elif rule.name == "pick":
        last = max(token.position for token in group)
        newest = [state for state, token in zip(states[1:], group, strict=True) if token.position == last]
        result = states[0].copy()
        result[list(odd_heads)] = np.mean(newest, axis=0)[list(odd_heads)]
    else:
        weights = [token.stands_for / count for token in everyone]
        result = np.sum([state * weight for state, weight in zip(states, weights, strict=True)], axis=0)
    width = target.key.shape[-1]
    key, value = result[:, :width], result[:, width:]
    return target._replace(key=key, value=value, exact_key=key, exact_value=value, stands_for=count)
