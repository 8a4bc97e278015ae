"""The table of the README: named numbers in the shipped novel, asked for one by one once it is read.

    PYTHONPATH=benchmarks python -m quality.facts --threads 1 [--write]

Texts are those of `windlass eval --tasks facts`. All caches read the same texts in turn. `--write` puts the table
between its marks in the README.
"""

import argparse
import platform
import statistics
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cli.demo import CHUNK, MODEL, FactsRow, Memory, facts_in, memories, read_and_ask_all
from windlass.core.parse import in_units
from windlass.evals.report.page import table
from windlass.evals.texts import novel
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load
from windlass.policies import KeyDiff, Recent

README = Path(__file__).parents[2] / "README.md"
BUDGET = 256
BEGIN, END = "<!-- table:begin -->\n", "\n<!-- table:end -->"


@dataclass(frozen=True)
class FullMemory(Memory):
    """A cache without a budget, read within the length that the model was trained on (`positions="auto"`)."""

    def cache(self, model: PreTrainedModel) -> KVCache:
        """Return an empty cache."""
        return KVCache(model, chunk=CHUNK)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=5, help="texts with 40 facts")
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of such a text")
    parser.add_argument("--seed", type=int, default=0, help="chooses the texts and facts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
    rows = measured(model, tokenizer, options)
    text = f"{facts_table(rows)}\n\n{conditions(rows, options.threads)}"
    print(text)
    if options.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}")


def measured(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> dict[str, list[FactsRow]]:
    """Facts found by each cache in each text."""
    budget, recall = memories(KeyDiff(), BUDGET)
    caches = {
        "full cache": FullMemory(Recent(), 0, 0),
        f"budget {BUDGET}": budget,
        f"budget {recall.slots}, recall {recall.recall}": recall,
    }
    rows: dict[str, list[FactsRow]] = {name: [] for name in caches}
    for index in range(options.texts):
        facts = facts_in(tokenizer, novel(), None, options.tokens, options.seed + index)
        for name, memory in caches.items():
            rows[name].append(read_and_ask_all(model, tokenizer, memory, facts))
        print(f"text {index + 1}: {[each[-1] for each in rows.values()]}", file=sys.stderr)
    return rows


def facts_table(rows: dict[str, list[FactsRow]]) -> str:
    """The table in Markdown, a row for each cache."""
    shown = []
    for name, done in rows.items():
        memory = in_units(max(row.bytes_held for row in done))
        if store := max(row.recall_bytes for row in done):
            memory += f" + {in_units(store)} host"
        speed = statistics.median(row.tokens_read / row.reading_s for row in done)
        found, asked = sum(row.found for row in done), sum(row.asked for row in done)
        shown.append([name, memory, f"{speed:,.0f}", f"{found} of {asked}"])
    return table(["", "memory", "tokens/s", "facts found"], shown, 1)


def conditions(rows: dict[str, list[FactsRow]], threads: int) -> str:
    """The conditions of the measurement."""
    done = next(iter(rows.values()))
    cores = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f"`{MODEL}` (3.5M parameters, trained on 1,024 tokens, float32) reads {len(done)} texts of "
        f"{statistics.median(row.tokens_read for row in done):,.0f} tokens with {done[0].asked} facts each. tokens/s: "
        f"median of reading, {cores} of {cpu()}, torch {torch.__version__}."
    )


def cpu() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
