"""The caches that `windlass tune` tries, each as large as the bytes allow, and the text that it tries them on."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.spec import parse_list
from windlass.evals.budgets import Budget
from windlass.evals.grid import Settings, axes_of
from windlass.evals.load import load_task
from windlass.evals.measure import CHUNK
from windlass.evals.task import Task
from windlass.evals.tune.fit_bytes import budget_within, layer_bytes, records_of
from windlass.hf.layer_shapes import LayerShape
from windlass.positions.modes import Compact, Original, PositionMode, SelfExtend

DEFAULT_LENGTH = 2048  # tokens of a sample, or twice the smallest budget
SHARE = 0.9  # of the user's text in a sample, at most: samples begin at different sentences
LEAST = 256  # tokens of a text to try anything on
MOST_GROUP = 16  # by which distances are divided
NEAR = 64  # tokens that self_extend reads at their own distance


@dataclass(frozen=True)
class Candidates:
    """What is tried, at texts of `length` tokens; `left_out` tells what could not be, and why.

    `is_whole`: every candidate holds the whole text, so there is nothing to choose.
    """

    settings: tuple[Settings, ...]
    length: int
    left_out: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is evicted under any of them."""
        return all((each.budget.slots or 0) >= self.length for each in self.settings)


def tasks_on(file: Path, tasks: str) -> dict[str, Task]:
    """The tasks that were asked for, by label; those that read a text read that of `file`.

    The label names the file without its folder and its contents, so that another text is another task.

    Raises: UsageError when the file or a task cannot be read.
    """
    text = read_text(file, f"text file {file}")
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    found: dict[str, Task] = {}
    for label, task in parse_list("--tasks", tasks, load_task):
        reading = task.reading(file)
        found[label if reading is None else f"{label}({file.name} {mark})"] = task if reading is None else reading
    return found


def candidates_of(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    ids: Sequence[int],
    lists: Mapping[str, str],
    size: int,
    length: int | None,
    trained: int | None,
) -> Candidates:
    """Every combination of the `lists`, in at most `size` bytes. `ids` are those of the user's text.

    A combination that cannot be made for this model, or not in so few bytes, is left out. Where the text fits
    whole, one policy stands for all. Without a list of positions they are read as they are within the `trained`
    length, and beyond it as `placed` says.

    Raises: WindlassError for a list that cannot be read, a text that is too short, or when nothing is left.
    """
    _check_length(len(ids), length)
    axes = {"positions": [Original()], **axes_of({name: typed for name, typed in lists.items() if typed})}
    made: list[tuple[CacheOptions, int]] = []
    left_out = []
    for values in itertools.product(*axes.values()):
        options = CacheOptions(chunk=CHUNK, **dict(zip(axes, values, strict=True)))
        try:
            layers = [layer_bytes(shape, options) for shape in shapes]
            budget_within(layers, options, size)  # what is far too large is not probed
            records = records_of(model, ids, options, layers)
            made.append((options, budget_within(layers, options, size, records)))
        except UsageError as error:
            left_out.append(str(error))
    if not made:
        raise UsageError(left_out[0])
    wanted = _length(len(ids), length, min(budget for _, budget in made))
    settings: dict[tuple[str, ...], Settings] = {}
    for options, budget in made:
        if not lists.get("positions"):
            budget, mode = placed(len(ids), budget, trained)
            options = replace(options, positions=mode)
        each = Settings(Budget(str(budget), budget), options)
        labels = each.labels | ({"policy": "any"} if budget >= wanted else {}) | {"asked_budget": "any"}
        settings.setdefault(tuple(labels.values()), each)
    return Candidates(tuple(settings.values()), wanted, tuple(left_out))


def placed(tokens: int, budget: int, trained: int | None) -> tuple[int, PositionMode]:
    """The budget and the positions with which a model reads a text of `tokens` of which `budget` could be kept.

    Within the trained length they stay as they are. Past it, kept tokens are counted anew where they fit in what the
    model was trained on beside a chunk, or in half of it. Where they do not, distances are divided by as much as the
    text needs; where that is more than `MOST_GROUP`, fewer are kept, so that they fit.
    """
    if trained is None or tokens <= trained:
        return budget, Original()
    fitting = max(trained - CHUNK, trained // 2)
    group = -(-tokens // max(1, trained - NEAR))
    if budget > fitting and group <= MOST_GROUP:
        return budget, SelfExtend(group, NEAR)
    return min(budget, fitting), Compact()


def _length(tokens: int, asked: int | None, smallest: int) -> int:
    """Tokens of a sample: what was asked for, or twice the smallest budget, as far as the text goes."""
    return asked or min(max(DEFAULT_LENGTH, 2 * smallest), int(SHARE * tokens))


def _check_length(tokens: int, asked: int | None) -> None:
    if asked is not None and asked > tokens:
        raise UsageError(
            f"--length {asked} is more than the {tokens:,} tokens of the text; lower it, or give a longer one"
        )
    if tokens < LEAST:
        raise UsageError(f"the text has {tokens} tokens of this model's; give one of {LEAST} or more")
