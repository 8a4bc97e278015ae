"""The first table of the demo: facts spread over a novel, asked for with and without recall.

Both caches read equally many tokens in a step. One has that many slots; the other has half of them, and recalls the
rest from what was evicted.
"""

import copy
import random
import time
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cli.terminal import Bar, progress
from windlass.core.errors import UsageError
from windlass.core.limits import PAGE
from windlass.core.units import in_units
from windlass.engine import generate as engine
from windlass.engine.text import encode
from windlass.evals.fit import SampleSpec, fit
from windlass.evals.task import Sample, Task
from windlass.evals.tasks import NAMES
from windlass.hf.kv_cache import KVCache
from windlass.policies import Policy

TASK = "facts"
LENGTH = 20_000  # tokens: half a minute for both rows on one core
CHUNK = 128


@dataclass(frozen=True)
class Facts:
    """A text with its questions: what `windlass eval --tasks facts` makes of the same length and seed."""

    task: Task
    sample: Sample

    @property
    def asked(self) -> int:
        """How many there are."""
        return len(self.sample.turns)


@dataclass(frozen=True)
class Memory:
    """What a step reads: slots, and tokens that are recalled beside them."""

    policy: Policy
    slots: int
    recall: int

    @property
    def label(self) -> str:
        """As in the first column."""
        return repr(self.policy).removesuffix("()") + (", recall" if self.recall else "")

    def cache(self, model: PreTrainedModel) -> KVCache:
        """An empty cache. Raises: UsageError for a budget or a policy that cannot be had."""
        return KVCache(model, self.slots, self.policy, positions="compact", chunk=CHUNK, recall=self.recall)


@dataclass(frozen=True)
class FactsRow:
    """One row of the table. `recall_bytes` are those of all tokens that can be recalled, outside of the slots."""

    label: str
    tokens_read: int
    slots: int
    recall: int
    bytes_held: int
    recall_bytes: int
    reading_s: float
    asking_s: float
    found: int
    asked: int


def memories(policy: Policy, budget: int) -> list[Memory]:
    """`budget` slots without recall, and about half as many with it.

    Raises: UsageError for a budget whose half is less than a page.
    """
    recall = budget // 2 // PAGE * PAGE
    if not recall:
        raise UsageError(
            f"budget ({budget} tokens) must be at least {2 * PAGE}: the second row recalls half of it, in pages of "
            f"{PAGE}; raise --budget"
        )
    return [Memory(policy, budget, 0), Memory(policy, budget - recall, recall)]


def facts_in(tokenizer: PreTrainedTokenizerBase, text: str, file: Path | None, length: int | None, seed: int) -> Facts:
    """Facts in `text`, that of `file` or of the shipped novel if None: `length` tokens with question and answer.

    If `length` is None: `LENGTH`, or all of a text that has fewer.

    Raises: UsageError for more tokens than the text has, or too few for the facts.
    """
    task = NAMES[TASK] if file is None else NAMES[TASK].reading(file)
    assert task is not None
    there = len(encode(tokenizer, text, is_start=True))
    if length is None and there < LENGTH:
        return Facts(task, task.compose(random.Random(f"{seed} {TASK}"), there, task.most_units or 0))
    if length is not None and length > there:
        raise UsageError(f"length ({length:,} tokens) is more than the {there:,} of the text; lower --length")
    return Facts(task, fit(SampleSpec(task, TASK, length or LENGTH, seed, 0), tokenizer).sample)


def read_and_ask_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, memory: Memory, facts: Facts
) -> FactsRow:
    """Read the text, then ask for every fact, each time with the cache as the text left it."""
    cache, sample = memory.cache(model), facts.sample
    ids = encode(tokenizer, sample.context, is_start=True)
    started = time.perf_counter()
    with Bar(f"{memory.label}:", len(ids)) as bar:
        engine.prefill(model, cache, [ids], bar)
    read = time.perf_counter()
    slots = max(layer.table.occupancy_bound for layer in cache.layers)
    found = bytes_held = 0
    with progress("questions") as questions:
        for turn in questions.track(sample.turns, description=f"{memory.label}:"):
            asking = [turn.question + turn.prefix]
            [result] = engine.generate(model, tokenizer, asking, copy.deepcopy(cache), facts.task.answer_tokens)
            found += facts.task.score(turn, result.text) == 1
            bytes_held = max(bytes_held, result.bytes_held)
    return FactsRow(
        label=memory.label,
        tokens_read=len(ids),
        slots=slots,
        recall=memory.recall,
        bytes_held=bytes_held,
        recall_bytes=cache.recall_bytes,
        reading_s=read - started,
        asking_s=time.perf_counter() - read,
        found=found,
        asked=facts.asked,
    )


def facts_table(rows: list[FactsRow]) -> Table:
    """The rows side by side."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("cache", min_width=15, overflow="fold")
    for head in ("tokens", "slots", "recall", "bytes", "store", "time", "found"):
        shown.add_column(head, justify="right", no_wrap=head == "found")
    for row in rows:
        store = in_units(row.recall_bytes) if row.recall else "none"
        seconds = f"{row.reading_s + row.asking_s:.1f} s"
        counts = f"{row.tokens_read:,}", f"{row.slots:,}", f"{row.recall:,}"
        found = f"{row.found} of {row.asked}"
        shown.add_row(Text(row.label), *counts, in_units(row.bytes_held), store, seconds, found)
    return shown
