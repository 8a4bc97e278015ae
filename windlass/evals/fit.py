"""Samples of a given length in tokens, out of tasks that count their filler in units of their own."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError, WindlassError
from windlass.engine.text import encode
from windlass.evals.task import Sample, Task


@dataclass(frozen=True)
class SampleSpec:
    """Which sample: number `number` of those that the task makes with this seed, up to `length` tokens.

    `label` names the task, in errors and in what is drawn. The same specification gives the same sample.
    """

    task: Task
    label: str
    length: int
    seed: int
    number: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        """What tells it from others: tasks of users need not be hashable."""
        return self.label, self.length, self.seed, self.number


@dataclass(frozen=True)
class Fitted:
    """A sample and its size.

    `context_tokens` are those of the text alone, `total_tokens` with the longest question and room for its answer.
    """

    sample: Sample
    units: int
    context_tokens: int
    total_tokens: int


def fit(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase) -> Fitted:
    """The sample with as many units as fit: text, question and answer take up to `spec.length` tokens.

    Raises: UsageError as `shortest` does, and for a length that there is not enough filler for.
    Source: length and search as in RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    """
    fits = shortest(spec, tokenizer)
    over: Fitted | None = None
    while over is None or over.units - fits.units > 1:
        if over is None:
            units = _more(fits.units, spec.task.most_units)
            if units == fits.units:
                return _all_of_it(fits, spec)
        else:
            gap = over.units - fits.units
            share = (spec.length - fits.total_tokens) / (over.total_tokens - fits.total_tokens)
            units = fits.units + min(max(int(share * gap), 1), gap - 1)
        tried = _made(spec, tokenizer, units)
        if tried.total_tokens <= spec.length:
            fits = tried
        else:
            over = tried
    return fits


def shortest(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase) -> Fitted:
    """The same sample with as few units as the task allows.

    Raises: UsageError when even that is longer than `spec.length`; or for a task that fails.
    """
    made = _made(spec, tokenizer, spec.task.least_units)
    if made.total_tokens > spec.length:
        raise UsageError(
            f"length {spec.length} is too short for task {spec.label}, which takes {made.total_tokens} tokens of this "
            f"model's at the least in text {spec.number}, question and answer included; raise --lengths"
        )
    return made


def _made(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, units: int) -> Fitted:
    with task_errors(spec.label):
        draw = random.Random(f"{spec.seed} {spec.label} {spec.length} {spec.number}")
        sample = spec.task.compose(draw, spec.length, units)
    context = len(encode(tokenizer, sample.context, is_start=True))
    asking = [len(encode(tokenizer, turn.question + turn.prefix, is_start=False)) for turn in sample.turns]
    return Fitted(sample, units, context, context + max(asking, default=0) + spec.task.answer_tokens)


@contextmanager
def task_errors(label: str) -> Iterator[None]:
    """Re-raise whatever a task raises as a UsageError that names it."""
    try:
        yield
    except WindlassError:
        raise
    except Exception as error:
        raise UsageError(f"task {label}: {type(error).__name__}: {error}") from error


def _more(units: int, most: int | None) -> int:
    return 2 * units + 1 if most is None else min(2 * units + 1, most)


def _all_of_it(fits: Fitted, spec: SampleSpec) -> Fitted:
    """What all there is makes, where that is just enough."""
    if fits.total_tokens < spec.length:
        raise UsageError(
            f"length {spec.length} is more than task {spec.label} can fill: all it has makes {fits.total_tokens} "
            "tokens of this model's; lower --lengths"
        )
    return fits
