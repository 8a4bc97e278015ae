"""The tables of the README, measured on the shipped model.

Facts: 40 named numbers in the shipped novel, read with and without recall, then asked for one by one, as `windlass eval
--tasks facts` makes them. Pass keys: one in a stretch of the novel, read, then asked for. Every cache reads the same
texts in turn. `--write` puts the tables between their marks in the README; without it they are only printed.
"""

import argparse
import platform
import random
import statistics
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cli.demo import (
    MODEL,
    DemoRow,
    FactsRow,
    Setup,
    facts_in,
    fitted,
    memories,
    read_and_ask,
    read_and_ask_all,
)
from windlass.core.parse import in_units
from windlass.evals.report.page import table
from windlass.evals.report.summaries import wilson
from windlass.evals.texts import hide_pass_key, novel
from windlass.hf.load import load
from windlass.policies import H2O, KeyDiff, Recent, SnapKV

README = Path(__file__).parents[1] / "README.md"
BUDGET = 256
MEMORIES = memories(KeyDiff(), BUDGET)


def main() -> None:
    """Measure, print, and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fact-texts", type=int, default=5, help="texts with 40 facts")
    parser.add_argument("--fact-tokens", type=int, default=20_000, help="tokens of such a text")
    parser.add_argument("--texts", type=int, default=10, help="texts with a pass key")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of such a text, about")
    parser.add_argument("--seed", type=int, default=0, help="chooses the texts, facts, keys and depths")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--write", action="store_true", help="put the tables into README.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
        setups = setups_of(folder)
    threads = "one thread" if options.threads == 1 else f"{options.threads} threads"
    machine = f"on {threads} of {cpu()}, torch {torch.__version__}"
    trained = f"`{MODEL}`, 3.5M parameters, trained on {model.config.max_position_embeddings:,} tokens, float32"
    facts = facts_of(model, tokenizer, options)
    keys = keys_of(model, tokenizer, setups, options)
    shown = {
        "table": f"{facts_measured(facts)}\n\n{facts_conditions(facts, trained, machine)}",
        "keys": f"{keys_measured(keys, setups)}\n\n{keys_conditions(keys, trained, machine)}",
    }
    print("\n\n".join(shown.values()))
    if options.write:
        page = README.read_text()
        for mark, text in shown.items():
            begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
            before, rest = page.split(begin)
            page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
        README.write_text(page)


def facts_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[list[FactsRow]]:
    """What each cache found in each text."""
    rows: list[list[FactsRow]] = [[] for _ in MEMORIES]
    for index in range(options.fact_texts):
        facts = facts_in(tokenizer, novel(), None, options.fact_tokens, options.seed + index)
        for done, memory in zip(rows, MEMORIES, strict=True):
            done.append(read_and_ask_all(model, tokenizer, memory, facts))
        print(f"facts {index + 1}: found {[each[-1].found for each in rows]}", file=sys.stderr)
    return rows


def facts_measured(rows: list[list[FactsRow]]) -> str:
    """The table in Markdown, one line per cache."""
    shown = []
    for done, memory in zip(rows, MEMORIES, strict=True):
        found, asked = sum(row.found for row in done), sum(row.asked for row in done)
        low, high = (round(100 * edge) for edge in wilson(found / asked, asked))
        name = f"KeyDiff, {memory.slots} slots" + (f" + {memory.recall} recalled" if memory.recall else "")
        store = in_units(max(row.recall_bytes for row in done)) if memory.recall else "none"
        speed = statistics.median(row.tokens_read / row.reading_s for row in done)
        answer = statistics.median(row.asking_s / row.asked for row in done)
        held = in_units(max(row.bytes_held for row in done))
        shown.append(
            [name, f"{found} of {asked}", f"{low} to {high} %", held, store, f"{speed:,.0f}", f"{answer:.2f} s"]
        )
    heads = ["cache", "facts found", "95 %", "bytes of slots", "recall store", "tokens/s", "an answer"]
    return table(heads, shown, 1)


def facts_conditions(rows: list[list[FactsRow]], trained: str, machine: str) -> str:
    """What the numbers hold for."""
    lengths = [row.tokens_read for row in rows[0]]
    return (
        f"{len(lengths)} texts of {min(lengths):,} to {max(lengths):,} tokens from a novel with its digits, "
        f"{rows[0][0].asked} named numbers in each, asked for one by one once the text is read. Both caches read "
        f"{BUDGET} tokens in a step. The recall store holds the whole text, in int4, in the host's memory. Model: "
        f"{trained}. tokens/s: median of reading, {machine}."
    )


def setups_of(folder: Path) -> list[Setup]:
    """The caches that read a text with a pass key, which is still to come."""
    kept = [Setup("", each, BUDGET, "compact") for each in (KeyDiff(), SnapKV(), H2O(), Recent())]
    scorer, shares = fitted(folder)
    whole = [Setup("", Recent(), None, positions) for positions in ("original", "self_extend(8, 64)")]
    return [Setup("", scorer, BUDGET, "compact", shares), *kept, *whole]


def keys_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, setups: list[Setup], options: argparse.Namespace
) -> list[list[DemoRow]]:
    """What each cache answered to each text."""
    rows: list[list[DemoRow]] = [[] for _ in setups]
    draw = random.Random(options.seed)
    for index in range(options.texts):
        key, text = task(tokenizer, draw, options.tokens)
        for done, setup in zip(rows, setups, strict=True):
            done.append(read_and_ask(model, tokenizer, replace(setup, text=text), key))
        print(f"text {index + 1} of {options.texts}: found {[each[-1].is_found for each in rows]}", file=sys.stderr)
    return rows


def task(tokenizer: PreTrainedTokenizerBase, draw: random.Random, tokens: int) -> tuple[str, str]:
    """A pass key, and a stretch of the novel with the key at a random depth."""
    text = novel()
    # A token of this tokenizer is 3 characters or so, never more than 8 for long.
    start = draw.randrange(len(text) - 8 * tokens)
    piece = text[start : start + 8 * tokens]
    offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    key = f"{draw.randrange(10**5):05}"
    return key, hide_pass_key(piece[: offsets[tokens][0]], key, draw.random())


def keys_measured(rows: list[list[DemoRow]], setups: list[Setup]) -> str:
    """The table in Markdown, one line per cache."""
    shown = []
    for done, setup in zip(rows, setups, strict=True):
        name = "full cache" if setup.budget is None else type(setup.policy).__name__  # all with their default numbers
        name += "" if setup.shares is None else ", shares"
        found = f"{sum(row.is_found for row in done)} of {len(done)}"
        speed = statistics.median(row.tokens_per_s for row in done)
        slots, held = max(row.slots for row in done), in_units(max(row.bytes_held for row in done))
        shown.append([name, setup.positions, found, f"{slots:,}", held, f"{speed:,.0f}"])
    return table(["cache", "positions", "pass key found", "tokens held", "bytes", "tokens/s"], shown, 2)


def keys_conditions(rows: list[list[DemoRow]], trained: str, machine: str) -> str:
    """What the numbers hold for."""
    lengths = [row.tokens_read for row in rows[0]]
    return (
        f"{len(lengths)} texts of {min(lengths):,} to {max(lengths):,} tokens from the novel with its digits, read "
        f"before the question is known. Model: {trained}. bytes: all that the cache keeps, records for rollback "
        f"included. tokens/s: median of reading, {machine}."
    )


def cpu() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
