"""Evidence on a real language model: `docs/results/smollm2.md`, made by one command that can be resumed.

    PYTHONPATH=benchmarks python -m quality.real_model MODEL NOVEL NOVEL [--minutes M] [--write docs/results/smollm2.md]

Any two text files serve. Each finished cell is a line of `--results`, and a cell that stands there is not measured again.
Cells come in the order of their use, so that the first minutes fill the tables that matter most.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from machine import machine

from quality import real_page
from quality.real_tasks import PINNED, Material, chats, facts, streamed
from windlass import CacheOptions, load
from windlass.policies import NAMES, ModelSpecific, OneShot, find

RESULTS = Path(__file__).parents[1] / "results" / "smollm2.jsonl"
FULL, PIN = "full cache", "Random, prompt pinned"
KEY = ("table", "row", "tokens", "budget", "chunk", "part")
UNIFORM = "random(keep_prompt=False)"
MERGES = ("mean_count", "mean_count(next)")
STORES = ("int8", "int4")
MODES = ("auto", "original", "compact", "clamp(8192)")


@dataclass(frozen=True)
class Cell:
    """One measurement: a row of a table, `tokens` of each text, and the arguments of `CacheOptions`.

    `budget` is the whole working set, in slots. Where `options` recall, half of it is recalled. `part` numbers the
    sample of texts.
    """

    table: str
    row: str
    tokens: int
    budget: int | None
    chunk: int = 64
    part: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """The fields that tell cells apart."""
        return tuple(getattr(self, name) for name in KEY)

    def made(self) -> CacheOptions:
        """The options of the cache."""
        given = {"budget": self.budget, "chunk": self.chunk} | self.options
        if given.pop("half", False):
            recall = (self.budget or 0) // 16 * 8
            given |= {"budget": (self.budget or 0) - recall, "recall": recall}
        return CacheOptions(**given)

    def measured(self, material: Material) -> dict[str, object]:
        """Measure it."""
        if self.table == "facts":
            return facts(material, self.made(), self.tokens, self.part, self.row == PIN)
        if self.table == "chats":
            return chats(material, self.made(), self.part)
        return streamed(material, self.made(), self.tokens, self.part, self.table == "agreement")


def streaming_policies() -> dict[str, str]:
    """Every policy that evicts as it reads and needs no file, by its label."""
    kinds = {name: kind for name, kind in NAMES.items() if name not in ("random", "recent", "key_diff")}
    found = {k.__name__: n for n, k in kinds.items() if not find(k(), OneShot) and not find(k(), ModelSpecific)}
    return {"KeyDiff": "key_diff", "Recent": "recent"} | found


def cells() -> list[Cell]:
    """All cells, the most useful first."""
    pinned = {"policy": UNIFORM, "sinks": PINNED}
    core = {"KeyDiff": "key_diff", "Recent": "recent", "LagKV": "lag_kv", "SnapKV": "snapkv", "Random": UNIFORM}

    def stream(budget: int, chunk: int, names: dict[str, str]) -> list[Cell]:
        tokens = max(1536, 3 * budget)
        rows = [Cell("stream", FULL, tokens, None)]
        rows += [Cell("stream", row, tokens, budget, chunk, options={"policy": spec}) for row, spec in names.items()]
        rows.append(Cell("stream", PIN, tokens, budget, chunk, options=pinned))
        half = {"policy": "key_diff", "half": True}
        return [*rows, Cell("stream", "KeyDiff, half recalled", tokens, budget, chunk, options=half)]

    def find_facts(tokens: int, factor: int, part: int, names: dict[str, str]) -> list[Cell]:
        budget = tokens // factor
        rows = [Cell("facts", FULL, tokens, None, part=part)]
        half = {"policy": "key_diff", "half": True}
        rows += [Cell("facts", "KeyDiff, half recalled", tokens, budget, part=part, options=half)]
        for row, spec in {**names, PIN: UNIFORM}.items():
            rows.append(Cell("facts", row, tokens, budget, part=part, options={"policy": spec}))
        return rows

    def talk(part: int) -> list[Cell]:
        rows = [Cell("chats", FULL, 0, None, part=part)]
        for row, options in {
            "KeyDiff": {"policy": "key_diff"},
            "KeyDiff, system text pinned": {"policy": "key_diff", "sinks": "system"},
            "Recent": {"policy": "recent"},
            "Random": {"policy": UNIFORM},
            PIN: {"policy": UNIFORM, "sinks": "system"},
            "KeyDiff, half recalled": {"policy": "key_diff", "half": True},
        }.items():
            rows.append(Cell("chats", row, 0, 256, part=part, options=options))
        return rows

    def variants(options: dict[str, dict[str, Any]], tokens: int = 1536, table: str = "stream") -> list[Cell]:
        controls = {"Recent": {"policy": "recent"}, "Random": {"policy": UNIFORM}, PIN: pinned}
        rows = {"KeyDiff": {"policy": "key_diff"}, **options, **controls}
        return [Cell(table, FULL, tokens, None)] + [Cell(table, r, tokens, 256, options=o) for r, o in rows.items()]

    changes: dict[str, dict[str, Any]] = {f"KeyDiff, {rule}": {"merge": rule} for rule in MERGES}
    changes |= {f"KeyDiff, {store}": {"store": store} for store in STORES}
    modes = {f"KeyDiff, {mode}": {"positions": mode} for mode in MODES}
    few = {name: core[name] for name in ("KeyDiff", "Recent", "Random")}
    ordered = stream(256, 64, core) + find_facts(1000, 4, 0, few) + variants(changes) + talk(0)
    ordered += find_facts(1000, 2, 0, few) + find_facts(1000, 8, 0, few) + stream(256, 8, few)
    ordered += variants({"KeyDiff, half recalled": {"half": True}}, 1024, "agreement")
    for factor in (4, 2, 8):
        ordered += find_facts(1000, factor, 1, few) + find_facts(1000, factor, 0, core)
    ordered += stream(256, 64, streaming_policies()) + stream(256, 8, core)
    for factor in (4, 8, 2):
        ordered += find_facts(4000, factor, 0, few)
    ordered += variants(modes, 12_288)
    for part in range(4):
        for factor in (4, 2, 8):
            ordered += find_facts(1000, factor, part, core)
    for budget in (128, 512, 1024):
        ordered += stream(budget, 64, core) + stream(budget, 8, few)
    ordered += talk(1) + find_facts(7000, 8, 0, few) + find_facts(2000, 4, 0, few)
    keys = [cell.key for cell in ordered]
    return [cell for at, cell in enumerate(ordered) if keys.index(cell.key) == at]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The finished cells of a file of results, none where it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(material: Material, wanted: list[Cell], results: Path, minutes: float) -> None:
    """Measure what is missing in `results` and append it; no cell begins after so many minutes."""
    began = time.monotonic()
    done = {tuple(line[name] for name in KEY) for line in lines_of(results)}
    for cell in wanted:
        if cell.key in done:
            continue
        if time.monotonic() - began > 60 * minutes:
            return
        start = time.monotonic()
        line = {"kind": "smollm2", **dict(zip(KEY, cell.key, strict=True)), **cell.measured(material)}
        line |= {"seconds": round(time.monotonic() - start, 1), **machine(torch.get_num_threads())}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = {name: each for name, each in line.items() if name in (*KEY, "found", "n", "kl", "seconds")}
        print(shown, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, file or name of a chat model")
    parser.add_argument("novels", nargs=2, type=Path, help="two text files")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after so many (600)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of finished cells")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", 1)), help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.minutes > 0:
        model, tokenizer = load(options.model, "bfloat16")
        run(Material.of(model, tokenizer, options.novels), cells(), options.results, options.minutes)
    if options.write:
        names = [file.stem.replace("_", " ") for file in options.novels]
        options.write.write_text(real_page.page(lines_of(options.results), len(cells()), names))


if __name__ == "__main__":
    main()
