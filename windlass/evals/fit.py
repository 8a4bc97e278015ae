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
class Fitted:
    """A sample and its size.

    `context_tokens` are those of the text alone, `total_tokens` with the longest question and room for its answer.
    """

    sample: Sample
    units: int
    context_tokens: int
    total_tokens: int


def fit(task: Task, label: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, number: int) -> Fitted:
    """Sample `number` of the task, with as many units as fit: text, question and answer take up to `length` tokens.

    The same arguments give the same sample. `label` names the task, in errors and in what is drawn.

    Raises: UsageError as `shortest` does, and for a length that there is not enough filler for.
    Source: length and search as in RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    """
    fits = shortest(task, label, tokenizer, length, seed, number)
    over: Fitted | None = None
    while over is None or over.units - fits.units > 1:
        if over is None:
            units = _more(fits.units, task.most_units)
            if units == fits.units:
                return _all_of_it(fits, label, length)
        else:
            gap = over.units - fits.units
            share = (length - fits.total_tokens) / (over.total_tokens - fits.total_tokens)
            units = fits.units + min(max(int(share * gap), 1), gap - 1)
        tried = _made(task, label, tokenizer, length, seed, number, units)
        if tried.total_tokens <= length:
            fits = tried
        else:
            over = tried
    return fits


def shortest(task: Task, label: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, number: int) -> Fitted:
    """The same sample with as few units as the task allows.

    Raises: UsageError when even that is longer than `length`; or for a task that fails.
    """
    made = _made(task, label, tokenizer, length, seed, number, task.least_units)
    if made.total_tokens > length:
        raise UsageError(
            f"length {length} is too short for task {label}, which takes {made.total_tokens} tokens of this model's "
            f"at the least in text {number}, question and answer included; raise --lengths"
        )
    return made


def _made(
    task: Task, label: str, tokenizer: PreTrainedTokenizerBase, length: int, seed: int, number: int, units: int
) -> Fitted:
    with task_errors(label):
        sample = task.compose(random.Random(f"{seed} {label} {length} {number}"), length, units)
    context = len(encode(tokenizer, sample.context, is_start=True))
    asking = [len(encode(tokenizer, turn.question + turn.prefix, is_start=False)) for turn in sample.turns]
    return Fitted(sample, units, context, context + max(asking, default=0) + task.answer_tokens)


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


def _all_of_it(fits: Fitted, label: str, length: int) -> Fitted:
    """What all there is makes, where that is just enough."""
    if fits.total_tokens < length:
        raise UsageError(
            f"length {length} is more than task {label} can fill: all it has makes {fits.total_tokens} tokens of this "
            "model's; lower --lengths"
        )
    return fits
