"""Texts to calibrate on: stretches of one text, or texts of evaluation tasks that are made of it."""

import random
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.spec import parse_list
from windlass.engine.text import encode
from windlass.evals.fit import SampleSpec, fit
from windlass.evals.load import load_task


def calibration_texts(
    tokenizer: PreTrainedTokenizerBase, file: Path, tasks: str | None, count: int, length: int, seed: int
) -> list[list[int]]:
    """The token ids of up to `count` texts of `length` tokens, which `seed` chooses.

    Without `tasks` they are stretches of the file, none of which overlap, and fewer where it is too short. Else the
    tasks take turns, each with the file as its filler, if it reads one; their questions are left out.

    Raises: UsageError for a task that cannot be found or made, or a text too short for one stretch.
    """
    if tasks is not None:
        loaded = parse_list("--tasks", tasks, load_task)
        own = [(label, task.reading(file) or task) for label, task in loaded]
        texts = []
        for number in range(count):
            label, task = own[number % len(own)]
            sample = fit(SampleSpec(task, label, length, seed, number), tokenizer).sample
            texts.append(encode(tokenizer, sample.context, is_start=True))
        return texts
    text = read_text(file, f"text {file}")
    ids, start = encode(tokenizer, text, is_start=False), encode(tokenizer, text, is_start=True)
    start = start[: len(start) - len(ids)]  # special tokens
    inner = length - len(start)
    stretches = range(0, len(ids) - inner + 1, inner) if inner > 0 else range(0)
    if not stretches:
        raise UsageError(f"the text has {len(ids)} tokens, and one of {length} is wanted; lower --length")
    chosen = random.Random(seed).sample(stretches, min(count, len(stretches)))
    return [start + ids[at : at + inner] for at in sorted(chosen)]
