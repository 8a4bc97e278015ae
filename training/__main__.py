"""Trains a small language model on novels and on the tasks of `windlass eval`.

FOLDER gets the model and its tokenizer, which transformers opens, and checkpoint.pt, from which the same
command goes on.
"""

import copy
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from training.books import Books, open_books
from training.course import Course, Stage, contexts_of, course_of, mix_of
from training.learner import Learner, Schedule, check
from training.lessons import lessons
from training.options import MIX, Options, options_of
from training.rows import Batches, Rows
from training.start import from_config, from_folder
from windlass.cli.terminal import INTERRUPTED
from windlass.core.errors import UsageError

LOGGED = 10  # steps
MEMORY = 0.95  # of the mean loss that is shown
SAMPLING = (
    "seed",
    "batch_tokens",
    "muon_rate",
    "adam_rate",
    "start",
    "config",
    "tokenizer",
    "precision",
)  # what a run cannot change


def main(arguments: list[str] | None = None) -> int:
    """Train as the arguments say; returns the exit code. What a user can mend is one line on stderr."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        train(options_of(arguments, str(__doc__)))
    except UsageError as error:
        print(f"training: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("training: interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    return 0


def train(options: Options) -> None:
    """Train until all steps are done or the minutes are over, then write the model; prints as it goes.

    Raises: UsageError for what cannot be honoured, before anything is written.
    """
    books = open_books(options.books)
    taught = lessons(books)
    course = _course(options, list(taught))
    contexts, mixes = course.contexts, course.mixes
    model, tokenizer = _started(options, books, max(contexts))
    rows = [Rows(tokenizer, taught, mix, options.seed) for mix in mixes]
    schedule = Schedule(contexts, mixes, options.warm_up, options.decay)
    precision: torch.dtype = getattr(torch, options.precision)
    learner = Learner(model, schedule, options.muon_rate, options.adam_rate, precision)
    made_with = {name: str(value) for name, value in asdict(options).items() if name in SAMPLING}
    made_with["books of characters"] = str(len(books.text))
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        learner.resume(checkpoint, made_with)
        print(f"going on after step {learner.done}", flush=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    loader = DataLoader(
        Batches(rows, contexts, options.batch_tokens),
        batch_size=None,
        sampler=range(learner.done, len(contexts)),
        num_workers=options.workers,
    )
    started = saved = time.monotonic()
    mean, seen = None, 0
    for tokens, weights in loader:
        loss = learner.step(tokens.to(options.device), weights.to(options.device))
        mean = loss if mean is None else MEMORY * mean + (1 - MEMORY) * loss
        seen += tokens.numel()
        context, now = tokens.shape[1] - 1, time.monotonic()
        if learner.done % LOGGED == 0:
            where = f"step {learner.done}/{len(contexts)} context {context}"
            print(f"{where} loss {mean:.3f} tokens/s {seen / (now - started):.0f}", flush=True)
        if learner.done % options.check_steps == 0:
            shares = check(model, rows[learner.done - 1], context, precision)
            print("right: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()), flush=True)
        is_over = now - started > 60 * options.minutes
        if is_over or now - saved > 60 * options.save_minutes or learner.done == len(contexts):
            learner.save(checkpoint, made_with)
            saved = now
        if is_over:
            break
    export(model, tokenizer, options.folder)


def _course(options: Options, names: list[str]) -> Course:
    if options.stages is not None:
        return course_of(options.stages, options.batch_tokens, names)
    assert options.contexts is not None
    return Course([Stage(contexts_of(options.contexts, options.batch_tokens), mix_of(options.mix or MIX, names))])


def _started(options: Options, books: Books, longest: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on its device, as it is before any step, and its tokenizer.

    Raises: UsageError where the contexts have no room in it.
    """
    torch.manual_seed(options.seed)
    if options.start is not None:
        model, tokenizer = from_folder(options.start, options.attention)
    else:
        assert options.config is not None
        model, tokenizer = from_config(options.config, options.tokenizer, options.attention, books)
    if options.positions is not None:
        model.config.max_position_embeddings = options.positions
    positions = model.config.max_position_embeddings
    if longest > positions:
        raise UsageError(f"context {longest} is beyond the {positions} positions of the model; raise --positions")
    tokenizer.model_max_length = positions
    try:
        nn.Module.to(model, options.device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {options.device} is not there: {str(error).splitlines()[0]}") from error
    return model, tokenizer


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the weights in bfloat16, and the tokenizer."""
    made = copy.deepcopy(model)
    nn.Module.to(made, torch.bfloat16)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
