"""The table of the README, measured on the shipped model.

A pass key is hidden in a stretch of the shipped novel, the text is read, then the question is asked. Every
cache reads the same texts in turn. `--write` puts the table between the README's `table:begin` and
`table:end`; without it the table is only printed.
"""

import argparse
import platform
import random
import statistics
import sys
from importlib import resources
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from windlass.cli.demo import MODEL, Row, Setup, read_and_ask
from windlass.core.units import in_units
from windlass.evals.report.markdown import table
from windlass.evals.texts import hide_pass_key, novel
from windlass.hf.load import load
from windlass.policies import H2O, KeyDiff, Recent, SnapKV

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
BUDGET = 256
SETUPS = (
    (KeyDiff(), BUDGET, "compact"),
    (SnapKV(), BUDGET, "compact"),
    (H2O(), BUDGET, "compact"),
    (Recent(), BUDGET, "compact"),
    (Recent(), None, "original"),
    (Recent(), None, "self_extend(8, 64)"),
)


def main() -> None:
    """Measure, print, and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20, help="texts for each cache")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of a text, about")
    parser.add_argument("--seed", type=int, default=0, help="chooses the texts, keys and depths")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
    rows: list[list[Row]] = [[] for _ in SETUPS]
    draw = random.Random(options.seed)
    for index in range(options.texts):
        key, text = task(tokenizer, draw, options.tokens)
        for done, (policy, budget, positions) in zip(rows, SETUPS, strict=True):
            done.append(read_and_ask(model, tokenizer, Setup(text, policy, budget, positions), key))
        print(f"text {index + 1} of {options.texts}: found {[each[-1].is_found for each in rows]}", file=sys.stderr)
    shown = f"{measured(rows)}\n\n{conditions(rows, options.threads)}"
    print(shown)
    if options.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{shown}\n{END}{rest.split(END)[1]}")


def task(tokenizer: PreTrainedTokenizerBase, draw: random.Random, tokens: int) -> tuple[str, str]:
    """A pass key, and a stretch of the novel with the key at a random depth."""
    text = novel()
    # A token of this tokenizer is 3 characters or so, never more than 8 for long.
    start = draw.randrange(len(text) - 8 * tokens)
    piece = text[start : start + 8 * tokens]
    offsets = tokenizer(piece, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    key = f"{draw.randrange(10**5):05}"
    return key, hide_pass_key(piece[: offsets[tokens][0]], key, draw.random())


def measured(rows: list[list[Row]]) -> str:
    """The table in Markdown, one line per cache."""
    shown = []
    for done, (policy, budget, positions) in zip(rows, SETUPS, strict=True):
        name = "full cache" if budget is None else type(policy).__name__
        found = f"{sum(row.is_found for row in done)} of {len(done)}"
        speed = statistics.median(row.tokens_per_s for row in done)
        slots, held = max(row.slots for row in done), in_units(max(row.bytes_held for row in done))
        shown.append([name, positions, found, f"{slots:,}", held, f"{speed:,.0f}"])
    return table(["cache", "positions", "pass key found", "tokens held", "bytes", "tokens/s"], shown, 2)


def conditions(rows: list[list[Row]], threads: int) -> str:
    """What the numbers hold for."""
    lengths = [row.tokens_read for row in rows[0]]
    return (
        f"{len(lengths)} texts of {min(lengths):,} to {max(lengths):,} tokens from a novel, read before the question "
        f"is known. Model: `{MODEL}`, 3.5M parameters, trained on 512 tokens, float32. bytes: all that the cache "
        f"keeps, records for rollback included. tokens/s: median of reading, on {threads} threads of {cpu()}, torch "
        f"{torch.__version__}."
    )


def cpu() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
