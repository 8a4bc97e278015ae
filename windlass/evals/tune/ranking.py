"""Who did best on a text, how sure that is, and the line to paste."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from windlass.core.units import in_units
from windlass.evals.case import Case
from windlass.evals.grid import Settings
from windlass.evals.report.summaries import text_of, wilson
from windlass.evals.report.verdict import SURE, Texts, compared, listed, percent, sign_test, texts_counted
from windlass.policies.spelling import spelled


@dataclass(frozen=True)
class Ranked:
    """How one candidate did: per text what it found of what was hidden there (0 to 1), and the nll of what it read.

    `kl` is the mean divergence from a full cache, where one was read beside; `bytes_held` the most of any case.
    """

    settings: Settings
    found: Texts
    losses: Texts
    kl: float | None
    bytes_held: int

    @property
    def samples(self) -> int:
        """Texts that it was tried on."""
        return max(len({text[2:] for text in texts}) for texts in (self.found, self.losses))

    @property
    def share_found(self) -> float | None:
        """The mean of what was found; None where nothing was hidden."""
        return fmean(self.found.values()) if self.found else None

    @property
    def nll(self) -> float | None:
        """The mean, in nats per token; None where no text was predicted."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def order(self) -> tuple[float, float, float]:
        """What was tried on most texts comes first, then who found most, then who predicts best."""
        nll = self.nll
        is_known = nll is not None and math.isfinite(nll)
        return -float(self.samples), -(self.share_found or 0.0), nll if nll is not None and is_known else math.inf

    @property
    def policy(self) -> str:
        """As the command line spells it."""
        return spelled(self.settings.labels["policy"])

    @property
    def name(self) -> str:
        """As in a sentence: `"key_diff in int8"`."""
        labels = self.settings.labels
        unusual = [labels["positions"]] if labels["positions"] != "original" else []
        unusual += [labels["merge"]] if labels["merge"] != "none" else []
        return ", ".join([f"{self.policy} in {labels['store']}", *unusual])


def ranked(settings: Sequence[Settings], cases: Sequence[Case], samples: int | None = None) -> list[Ranked]:
    """Those of `settings` that have cases, the best first; only the first `samples` texts of each count."""
    found = []
    for each in settings:
        own = [
            case
            for case in cases
            if all(getattr(case, name) == label for name, label in each.labels.items())
            and (samples is None or case.sample < samples)
        ]
        if own:
            scores = {text: fmean(values) for text, values in _by_text(own, "score").items()}
            losses = {text: fmean(values) for text, values in _by_text(own, "nll").items()}
            kls = [case.kl for case in own if case.kl is not None]
            most = max(case.bytes_held for case in own)
            found.append(Ranked(each, scores, losses, fmean(kls) if kls else None, most))
    return sorted(found, key=lambda each: each.order)


def sentence(results: Sequence[Ranked], full: Ranked | None, size: int) -> str:
    """The verdict on `results`, the best first, none of which takes more than `size` bytes; `full` evicts nothing."""
    best, *others = results
    finalists = [each for each in others if each.samples == best.samples]
    close = [each.name for each in finalists if not is_surely_better(best, each)]
    texts = texts_counted(best.samples)
    told = f"Of {len(results)} candidates within {in_units(size)}, {best.name} did best"
    told += f", with {best.settings.budget.slots:,} tokens a layer: "
    if not others:
        told = f"{best.name} was the only candidate within {in_units(size)}: "
    told += (" with " if best.share_found else " and was taken for ").join(
        [*_recall(best, texts), *_perplexity(best, full)]
    )
    if finalists and len(close) == len(finalists):
        told += f"; none is significantly better than another: {texts} do not tell {listed(close)} from it"
    elif close:
        told += f"; {texts} do not tell {listed(close)} from it"
    elif finalists:
        told += f"; on {texts} that is surely better than {listed([each.name for each in finalists])}"
        if best.share_found and all(each.share_found == best.share_found for each in finalists):
            told += ", by perplexity alone, for they found as much"
    return told + "."


def is_surely_better(one: Ranked, other: Ranked) -> bool:
    """Whether a sign test tells that `one` finds more, or that it predicts better where both find the same."""
    wins, losses = compared(one.found, other.found)
    if wins != losses:
        return wins > losses and sign_test(wins, losses) < SURE
    higher, lower = compared(one.losses, other.losses)
    return lower > higher and sign_test(lower, higher) < SURE


def command(model: str, text: str, best: Ranked, loading: Sequence[str]) -> str:
    """The line that reads a text in the cache that did best; `loading` are the options of the model, as typed."""
    labels, options = best.settings.labels, best.settings.options
    words = ["windlass", "generate", model, "--budget", labels["asked_budget"], "--policy", best.policy]
    words += ["--store", labels["store"], "--positions", labels["positions"]]
    words += ["--merge", labels["merge"]] if options.merge is not None else []
    return shlex.join([*words, "--chunk", str(options.chunk), *loading, "--file", text])


def _recall(best: Ranked, texts: str) -> list[str]:
    if best.share_found is None:
        return []
    if best.share_found == 0:
        return [f"it found nothing of what was hidden in {texts}, as all others,"]
    low, high = wilson(best.share_found, len(best.found))
    interval = f"95 % interval {100 * low:.0f} to {percent(high)}"
    return [f"it found {percent(best.share_found)} of what was hidden in {texts} ({interval})"]


def _perplexity(best: Ranked, full: Ranked | None) -> list[str]:
    if best.nll is None:
        return []
    told = f"a perplexity of {math.exp(min(best.nll, 700.0)):.4g}"
    if full is not None and full.nll is not None:
        change = 100 * math.expm1(min(best.nll - full.nll, 20.0))
        told += f", {abs(change):.1f} % {'below' if change < 0 else 'above'} the full cache's"
    return [told]


def _by_text(cases: Sequence[Case], measure: str) -> dict[tuple[object, ...], list[float]]:
    found: dict[tuple[object, ...], list[float]] = {}
    for case in cases:
        value: float | None = getattr(case, measure)
        if value is not None:
            found.setdefault((case.task, case.length, *text_of(case)), []).append(value)
    return found
