"""Cases to means with intervals, in rows of tables, lines of figures and cells of heat maps."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev
from typing import Final, TypeVar

from windlass.evals.report import TEMPLATES, sentence_of
from windlass.evals.results import FULL, Case

CONFIDENCE: Final = 0.95
BINS: Final = (10, 5, 4, 3, 2, 1)  # of depths, where samples lie anywhere in the text
MOST_BINS: Final = 10
Item = TypeVar("Item")
Key = TypeVar("Key")


@dataclass(frozen=True)
class SettingRow:
    """One setting of the cache at one budget, over `count` independent texts.

    `value` is the mean score, with the ends of its 95 % interval, or the mean nll, with one standard error to each
    side. The ends are None where one text gives no standard error. `slots` and `share` (of the full cache's bytes) are
    means. `kl` is the mean of the `kl_count` texts that have one.
    """

    label: str
    asked: str
    count: int
    slots: float
    share: float
    value: float
    low: float | None
    high: float | None
    kl: float | None = None
    kl_count: int = 0

    @property
    def told(self) -> str:
        """All facts about the row, for the text on hover."""
        numbers = f"{self.value:.4f}"
        if self.low is not None and self.high is not None:
            numbers += f", from {self.low:.4f} to {self.high:.4f}"
        texts = f"{self.count:,} text{'' if self.count == 1 else 's'}"
        held = f"{100 * self.share:.2f} % of the bytes, {self.slots:,.1f} slots"
        return f"{self.label} at {self.asked}: {numbers}; {texts}; {held}"

    @property
    def is_full(self) -> bool:
        """Return True for the row that others are compared with: nothing evicted, nothing else unusual."""
        return self.label == FULL


@dataclass(frozen=True)
class Block:
    """The rows of one length, largest budgets first, best first within a budget."""

    length: int
    rows: tuple[SettingRow, ...]

    @property
    def full(self) -> float | None:
        """The value of the full cache, or None where it was not run."""
        return next((row.value for row in self.rows if row.is_full), None)


@dataclass(frozen=True)
class TurnRows:
    """One setting at one budget: the row of each turn, None where no case has it."""

    label: str
    asked: str
    length: int
    rows: tuple[SettingRow | None, ...]


@dataclass(frozen=True)
class DepthMap:
    """Mean scores of one setting at one budget, a row per depth, a column per length, or None without a case."""

    label: str
    asked: str
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class DepthMaps:
    """All settings of a task on the same axes. `depths` are shares of the text, in words."""

    depths: tuple[str, ...]
    lengths: tuple[int, ...]
    maps: tuple[DepthMap, ...]


def wilson(mean: float, count: int) -> tuple[float, float]:
    """The ends of the 95 % interval of a mean of `count` scores that are each from 0 to 1.

    Never outside of 0 to 1, and of some width even where all scores are alike.

    Source: Wilson 1927 (doi:10.1080/01621459.1927.10502953), the score interval of a share.
    Differs: scores may lie between 0 and 1. Their variance is at most mean * (1 - mean), that of right or wrong
    with the same mean, so that the interval is then wider than it need be, not narrower.
    """
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(mean * (1 - mean) / count + (z / (2 * count)) ** 2)
    return max(0.0, centre - half), min(1.0, centre + half)


def score_blocks(cases: Sequence[Case]) -> tuple[Block, ...]:
    """The scores of one task, by length. Turns on one text are one sample: their mean."""
    return _blocks([case for case in cases if case.score is not None], score_row, True)


def loss_blocks(cases: Sequence[Case]) -> tuple[Block, ...]:
    """The negative log-likelihoods of one task, by length."""
    return _blocks([case for case in cases if case.nll is not None], _loss_row, False)


def turns(cases: Sequence[Case]) -> tuple[TurnRows, ...]:
    """The scores of one task turn by turn, in the order of `score_blocks`, or none without turns."""
    scored = [case for case in cases if case.score is not None and case.turn is not None]
    last = max((case.turn for case in scored if case.turn is not None), default=-1)
    by_turn = grouped(scored, lambda case: (case.length, *_setting(case), case.turn))
    found = []
    for block in score_blocks(scored):
        for row in block.rows:
            own = [by_turn.get((block.length, row.label, row.asked, turn)) for turn in range(last + 1)]
            rows = tuple(None if each is None else score_row(each) for each in own)
            found.append(TurnRows(row.label, row.asked, block.length, rows))
    return tuple(found)


def depth_maps(cases: Sequence[Case]) -> DepthMaps | None:
    """Scores by depth and length, or None where no case has a depth.

    Depths are taken as they are when they are few and round. Otherwise the text is divided into up to ten equal parts,
    as many as have a case each.
    """
    deep = [case for case in cases if case.score is not None and case.depth is not None]
    if not deep:
        return None
    depths = sorted({_depth(case) for case in deep})
    if len(depths) <= MOST_BINS + 1 and all(round(depth, 2) == depth for depth in depths):
        names = [f"{depth:.0%}" for depth in depths]
        places = {depth: index for index, depth in enumerate(depths)}
    else:
        bins = next(count for count in BINS if _is_filled(deep, count))
        names = [f"{part * 100 // bins} to {(part + 1) * 100 // bins}%" for part in range(bins)]
        places = {depth: _bin(depth, bins) for depth in depths}
    lengths = sorted({case.length for case in deep})
    of_setting = grouped(deep, _setting)
    maps = []
    for label, asked in settings(deep):
        by_cell = grouped(of_setting[label, asked], lambda case: (places[_depth(case)], case.length))
        rows = [[by_cell.get((place, length)) for length in lengths] for place in range(len(names))]
        cells = tuple(tuple(_mean_score(cell) if cell else None for cell in row) for row in rows)
        maps.append(DepthMap(label, asked, cells))
    return DepthMaps(tuple(names), tuple(lengths), tuple(maps))


def over_lengths(blocks: Sequence[Block]) -> dict[tuple[str, str], float | None]:
    """The mean value of each setting, every length weighing the same, or None where a setting lacks a length."""
    values: dict[tuple[str, str], list[float]] = {}
    for block in blocks:
        for row in block.rows:
            values.setdefault((row.label, row.asked), []).append(row.value)
    return {setting: fmean(each) if len(each) == len(blocks) else None for setting, each in values.items()}


def settings(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Each label and budget of `cases`: the full cache first, then largest budgets first, then by name."""
    order = _budget_order(cases)
    return sorted({_setting(case) for case in cases}, key=lambda each: (each[0] != FULL, order[each[1]], each[0]))


def labels(cases: Sequence[Case]) -> list[str]:
    """Each label of `cases`, the full cache first, then by name."""
    return sorted({case.label for case in cases}, key=lambda label: (label != FULL, label))


def _blocks(
    cases: Sequence[Case], row_of: Callable[[Sequence[Case]], SettingRow], is_most_best: bool
) -> tuple[Block, ...]:
    sign = -1 if is_most_best else 1
    blocks = []
    for length, of_length in sorted(grouped(cases, lambda case: case.length).items()):
        order = _budget_order(of_length)
        rows = [row_of(each) for each in grouped(of_length, _setting).values()]
        rows.sort(key=lambda row: (order[row.asked], not row.is_full, sign * row.value, row.label))
        blocks.append(Block(length, tuple(rows)))
    return tuple(blocks)


def score_row(cases: Sequence[Case]) -> SettingRow:
    """The mean score of one setting, with its interval."""
    texts = grouped(cases, text_of)
    mean = fmean(_mean_score(of_text) for of_text in texts.values())
    return _row(cases, len(texts), mean, *wilson(mean, len(texts)))


def _loss_row(cases: Sequence[Case]) -> SettingRow:
    losses = [case.nll for case in cases if case.nll is not None]
    distances = [case.kl for case in cases if case.kl is not None]
    mean = fmean(losses)
    is_finite = all(map(math.isfinite, losses))
    error = stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 and is_finite else None
    low, high = (None, None) if error is None else (mean - error, mean + error)
    row = _row(cases, len(losses), mean, low, high)
    return replace(row, kl=fmean(distances) if distances else None, kl_count=len(distances))


def _row(cases: Sequence[Case], count: int, value: float, low: float | None, high: float | None) -> SettingRow:
    slots, share = fmean(case.slots_held for case in cases), fmean(case.share for case in cases)
    # A full cache counts as all slots, without the room that it keeps free.
    share = 1.0 if cases[0].label == FULL else share
    return SettingRow(
        label=cases[0].label,
        asked=cases[0].asked,
        count=count,
        slots=slots,
        share=share,
        value=value,
        low=low,
        high=high,
    )


def _mean_score(cases: Sequence[Case]) -> float:
    return fmean(case.score for case in cases if case.score is not None)


def _setting(case: Case) -> tuple[str, str]:
    return case.label, case.asked


def text_of(case: Case) -> tuple[object, ...]:
    """The text of a case: every turn asks for a needle at a depth of its own."""
    return case.seed, case.length, case.sample, case.depth if case.turn is None else None


def _depth(case: Case) -> float:
    assert case.depth is not None
    return case.depth


def _bin(depth: float, bins: int) -> int:
    return min(int(depth * bins), bins - 1)


def _is_filled(cases: Sequence[Case], bins: int) -> bool:
    """Return True if every setting has a case in each of `bins` ranges of depth, at every length that it was run at."""
    groups = grouped(cases, lambda case: (*_setting(case), case.length))
    return all(len({_bin(_depth(case), bins) for case in each}) == bins for each in groups.values())


def _budget_order(cases: Sequence[Case]) -> dict[str, float]:
    """The place of each budget as it was typed, the largest first."""
    by_budget = grouped(cases, lambda case: case.asked)
    held = {asked: fmean(case.slots_held for case in each) for asked, each in by_budget.items()}
    return {asked: -math.inf if asked == "all" else -slots for asked, slots in held.items()}


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items of each key, in the order in which the keys are met."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


KEPT: Final = 0.95  # of the full cache's score, or of one over its perplexity: a setting above it keeps enough
SURE: Final = 0.05  # below it a difference is no chance
MOST_NAMED: Final = 3
Texts = dict[tuple[object, ...], float]


@dataclass(frozen=True)
class OverallScore:
    """One setting over all tasks and lengths, each weighing the same: its mean `value` and `share` of bytes.

    `texts` has the value of each text. Values are scores, or negative nlls: higher is better.
    """

    label: str
    asked: str
    value: float
    share: float
    texts: Texts

    @property
    def name(self) -> str:
        """The name in a sentence."""
        return self.label if self.asked == "all" else f"{self.label} at {self.asked}"

    @property
    def has_recall(self) -> bool:
        """Return True for a setting that reads evicted tokens again."""
        return ", recall " in self.label

    @property
    def interval(self) -> str:
        """The 95 % interval of a score."""
        return interval(self.value, len(self.texts))

    @property
    def perplexity(self) -> str:
        """The perplexity of a negative nll."""
        return perplexity(-self.value)


def verdict(cases: Sequence[Case]) -> str:
    """The setting that matches the full cache in the fewest bytes, the loss of others, and how sure it is.

    A setting counts that was run on all tasks and lengths, question-blind and question-aware apart. The verdict is
    empty where there is none.
    """
    modes = [("Question-blind", False), ("Question-aware", True)]
    found = [(name, _of_mode([case for case in cases if case.is_aware is is_aware])) for name, is_aware in modes]
    told = [(name, text) for name, text in found if text]
    return told[0][1] if len(told) == 1 else " ".join(f"{name}: {text}" for name, text in told)


def sign_test(wins: int, losses: int) -> float:
    """The probability that two equals are at least as uneven as this, in either direction.

    Source: the sign test, Dixon and Mood 1946 (doi:10.1080/01621459.1946.10501898). Ties are left out.
    """
    count = wins + losses
    tail: int = sum(math.comb(count, number) for number in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**count))


def compared(one: Texts, other: Texts) -> tuple[int, int]:
    """The number of shared texts on which `one` is higher, and the number on which `other` is."""
    both = one.keys() & other.keys()
    return sum(one[text] > other[text] for text in both), sum(one[text] < other[text] for text in both)


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: `"a, b and c"`. Of many, the first ones and the number of further ones."""
    shown = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED + 1 else [*names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _of_mode(cases: Sequence[Case]) -> str:
    scored = _standings([case for case in cases if case.score is not None], lambda case: case.score)
    read = [case for case in cases if case.nll is not None and math.isfinite(case.nll)]
    losses = _standings(read, lambda case: -(case.nll or 0.0))
    told = [_told(scored, "scores.txt", KEPT, 0.0)] if scored else []
    told += [_told(losses, "losses.txt", 1.0, math.log(KEPT))] if losses else []
    return " ".join(told)


def _standings(cases: Sequence[Case], value_of: Callable[[Case], float | None]) -> list[OverallScore]:
    """The settings that were run on all tasks and lengths of `cases`, the full cache first."""
    places = {_place(case) for case in cases}
    found = []
    for (label, asked), own in grouped(cases, _setting).items():
        texts = text_means(own, value_of)
        by_place = [[texts[text] for text in texts if text[:2] == place] for place in places]
        shares = [[case.share for case in own if _place(case) == place] for place in places]
        if all(by_place):
            value, share = fmean(map(fmean, by_place)), fmean(map(fmean, shares))
            found.append(OverallScore(label, asked, value, share, texts))
    # Where most texts of a setting were not run, its mean is not one of the same texts.
    most = max((len(each.texts) for each in found), default=0)
    return sorted((each for each in found if 2 * len(each.texts) > most), key=lambda each: each.label != FULL)


def text_means(cases: Sequence[Case], value_of: Callable[[Case], float | None]) -> Texts:
    """The mean value of each text, by task, length and text. A case without a value does not count."""
    found = grouped(cases, lambda case: (*_place(case), *text_of(case)))
    values = {text: [value for case in own if (value := value_of(case)) is not None] for text, own in found.items()}
    return {text: fmean(own) for text, own in values.items() if own}


def _place(case: Case) -> tuple[str, int]:
    return case.task, case.length


def _told(standings: Sequence[OverallScore], template: str, factor: float, offset: float) -> str:
    """The verdict on settings in words.

    A setting keeps enough if it has the full cache's value by `factor` and `offset`. Of those that do, the best is the
    one in the fewest bytes. Where none does, it is the one of the highest value. Other settings at its budget are
    `close` where a sign test does not tell them from it. `worst` is the lowest of the rest.
    """
    full = standings[0] if standings[0].label == FULL else None
    others = [each for each in standings if each is not full]
    base = full.value if full else 1.0  # the highest score, and a perplexity that no text reaches
    kept = [each for each in others if each.value >= factor * base + offset]
    best = max(others, key=lambda each: (each.value, -each.share), default=None)
    if kept:
        best = min(kept, key=lambda each: (each.share, -each.value))
    rivals = [each for each in others if best and each.asked == best.asked and each is not best]
    apart = [each for each in rivals if best and each.value < best.value and _is_sure(best, each)]
    worst = min(apart, key=lambda each: each.value, default=None)
    facts = {
        "full": full,
        "best": best,
        "worst": worst,
        "close": [each.label for each in rivals if each not in apart],
        "is_kept": bool(kept),
        "kept": KEPT,
        "lost": (full or best or worst).value - worst.value if worst else 0.0,
        "texts": texts_counted(len(best.texts)) if best else "",
    }
    return sentence_of(template, facts)


def _is_sure(one: OverallScore, other: OverallScore) -> bool:
    return sign_test(*compared(one.texts, other.texts)) < SURE


def above(one: float, other: float) -> str:
    """The distance of a perplexity above another, both as negative nlls: `"1.2 % above"`."""
    change = math.expm1(min(other - one, 20.0))
    return f"{abs(100 * change):.1f} % {'below' if change < 0 else 'above'}"


def perplexity(nll: float) -> str:
    return f"{math.exp(min(nll, 700.0)):.4g}"


def interval(score: float, count: int) -> str:
    """The ends of the 95 % interval of a mean score: `"49 to 94 %"`."""
    low, high = wilson(score, count)
    return f"{100 * low:.0f} to {percent(high)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def texts_counted(count: int) -> str:
    return f"{count} text{'' if count == 1 else 's'}"


TEMPLATES.filters.update(above=above, listed=listed, percent=percent)
