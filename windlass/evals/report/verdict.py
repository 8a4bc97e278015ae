"""What results come to, in a sentence: `windlass eval` ends with it, and a report begins with it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from windlass.evals.case import FULL, Case
from windlass.evals.report.summaries import text_of, wilson

KEPT: Final = 0.95  # of the full cache's score, or of one over its perplexity: what counts as kept
SURE: Final = 0.05  # below it a difference is no chance
MOST_NAMED: Final = 3
Texts = dict[tuple[object, ...], float]


@dataclass(frozen=True)
class Standing:
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
        """As in a sentence."""
        return self.label if self.asked == "all" else f"{self.label} at {self.asked}"


def verdict(cases: Sequence[Case]) -> str:
    """Which setting keeps what the full cache has in the fewest bytes, what others lose, and how sure that is.

    A setting counts that was run on all tasks and lengths, question-blind and question-aware apart. Empty where
    nothing was.
    """
    modes = [("Question-blind", False), ("Question-aware", True)]
    found = [(name, _of_mode([case for case in cases if case.is_aware is is_aware])) for name, is_aware in modes]
    told = [(name, text) for name, text in found if text]
    return told[0][1] if len(told) == 1 else " ".join(f"{name}: {text}" for name, text in told)


def sign_test(wins: int, losses: int) -> float:
    """How likely two equals are at least as uneven as this, in either direction.

    Source: the sign test, Dixon and Mood 1946 (doi:10.1080/01621459.1946.10501898); ties are left out.
    """
    count = wins + losses
    tail: int = sum(math.comb(count, number) for number in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**count))


def compared(one: Texts, other: Texts) -> tuple[int, int]:
    """On how many texts that both have `one` is higher, and on how many `other` is."""
    both = one.keys() & other.keys()
    return sum(one[text] > other[text] for text in both), sum(one[text] < other[text] for text in both)


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: `"a, b and c"`; of many the first ones and how many more."""
    shown = [*names[:MOST_NAMED], f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED + 1 else [*names]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _of_mode(cases: Sequence[Case]) -> str:
    told = []
    scored = _standings([case for case in cases if case.score is not None], lambda case: case.score or 0.0)
    if scored:
        told.append(_of_scores(scored))
    read = [case for case in cases if case.nll is not None and math.isfinite(case.nll)]
    losses = _standings(read, lambda case: -(case.nll or 0.0))
    if losses:
        told.append(_of_losses(losses))
    return " ".join(told)


def _standings(cases: Sequence[Case], value_of: Callable[[Case], float]) -> list[Standing]:
    """Those of the settings that were run on all tasks and lengths of `cases`; the full cache first."""
    places = {_place(case) for case in cases}
    found = []
    for label, asked in dict.fromkeys((case.label, case.asked) for case in cases):
        own = [case for case in cases if (case.label, case.asked) == (label, asked)]
        questions: dict[tuple[object, ...], list[float]] = {}
        for case in own:
            questions.setdefault((*_place(case), *text_of(case)), []).append(value_of(case))
        texts = {text: fmean(values) for text, values in questions.items()}
        by_place = [[texts[text] for text in texts if text[:2] == place] for place in places]
        shares = [[case.share for case in own if _place(case) == place] for place in places]
        if all(by_place):
            value, share = fmean(map(fmean, by_place)), fmean(map(fmean, shares))
            found.append(Standing(label, asked, value, share, texts))
    # Where most texts of a setting were not run, its mean is not one of the same texts.
    most = max((len(each.texts) for each in found), default=0)
    return sorted((each for each in found if 2 * len(each.texts) > most), key=lambda each: each.label != FULL)


def _place(case: Case) -> tuple[str, int]:
    return case.task, case.length


def _of_scores(standings: Sequence[Standing]) -> str:
    full, others = _full_and_others(standings)
    if full is not None and full.value == 0:
        return "The full cache itself scores 0 %: this model cannot do what is asked, which tells nothing of policies."
    if not others:
        return f"The full cache scores {percent(standings[0].value)}; no other setting was run."
    base = 1.0 if full is None else full.value
    best = _cheapest(others, lambda each: each.value >= KEPT * base)
    count = len(best.texts)
    low, high = wilson(best.value, count)
    interval = f"{100 * low:.0f} to {percent(high)}"
    if full is None:
        told = f"{best.name} scores {percent(best.value)} in {percent(best.share)} of the bytes"
    else:
        told = f"{best.name} keeps {percent(best.value / base)} of the score in {percent(best.share)} of the bytes"
        if best.value < KEPT * base:
            told = f"No setting keeps {percent(KEPT)} of the score; the best is that {told}"
    told += f" ({texts_counted(count)}, 95 % interval of the score {interval})"
    lost = (best if full is None else full).value
    tail, worst = _beside(best, others)
    if worst is not None and lost - worst.value >= 0.005:
        tail.insert(0, f"{worst.label} loses {100 * (lost - worst.value):.0f} points")
    return "; ".join([told, *tail]) + "."


def _of_losses(standings: Sequence[Standing]) -> str:
    full, others = _full_and_others(standings)
    if not others:
        return f"The full cache has a perplexity of {math.exp(-standings[0].value):.4g}; no other setting was run."
    limit = -math.inf if full is None else full.value + math.log(KEPT)
    best = _cheapest(others, lambda each: full is not None and each.value >= limit)
    bytes_held = f"in {percent(best.share)} of the bytes ({texts_counted(len(best.texts))})"
    if full is None:
        told = f"{best.name} has the lowest perplexity, {math.exp(-best.value):.4g}, {bytes_held}"
    else:
        told = f"{best.name} has a perplexity {_above(best, full)} the full cache's {bytes_held}"
        if best.value < limit:
            told = f"No setting stays within 5 % of the full cache's perplexity; the best is that {told}"
    tail, worst = _beside(best, others)
    if worst is not None:
        tail.insert(0, f"that of {worst.label} is {_above(worst, full or best)} {'it' if full is None else 'it, too'}")
    return "; ".join([told, *tail]) + "."


def _full_and_others(standings: Sequence[Standing]) -> tuple[Standing | None, Sequence[Standing]]:
    has_full = standings[0].label == FULL
    return standings[0] if has_full else None, standings[has_full:]


def _cheapest(standings: Sequence[Standing], is_kept: Callable[[Standing], bool]) -> Standing:
    """Of the settings that keep enough the one in the fewest bytes; where none does, the best."""
    kept = [each for each in standings if is_kept(each)]
    if kept:
        return min(kept, key=lambda each: (each.share, -each.value))
    return max(standings, key=lambda each: (each.value, -each.share))


def _beside(best: Standing, others: Sequence[Standing]) -> tuple[list[str], Standing | None]:
    """Who at the same budget cannot be told from `best`, in words, and the worst of those who can."""
    rivals = [each for each in others if each.asked == best.asked and each is not best]
    apart = [each for each in rivals if sign_test(*compared(best.texts, each.texts)) < SURE and each.value < best.value]
    close = [each.label for each in rivals if each not in apart]
    told = [f"{texts_counted(len(best.texts))} do not tell {listed(close)} from it"] if close else []
    return told, min(apart, key=lambda each: each.value, default=None)


def _above(one: Standing, other: Standing) -> str:
    """Of perplexities: `"1.2 % above"`."""
    change = math.expm1(min(other.value - one.value, 20.0))
    return f"{abs(100 * change):.1f} % {'below' if change < 0 else 'above'}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def texts_counted(count: int) -> str:
    return f"{count} text{'' if count == 1 else 's'}"
