"""Evidence on a real language model: `docs/results/smollm2.md`, made by one command that can be resumed.

    PYTHONPATH=benchmarks python -m quality.real_model MODEL NOVEL NOVEL [--name NAME] [--minutes M] [--write PAGE]

Each finished cell is a line of `benchmarks/results/NAME.jsonl`, and is not measured again. Cells come in the order of
their use: the first minutes fill the tables that matter most. Any two text files serve. OMP_NUM_THREADS sets the
threads.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from machine import machine
from quality import real_page
from quality.real_page import FULL, PIN
from quality.real_tasks import PINNED, Material, chats, facts, streamed

from windlass import CacheOptions, load
from windlass.cache.shares import SHIPPED
from windlass.cache.shares import read as read_shares
from windlass.core.parse import DEFAULT_SINKS
from windlass.policies import NAMES, ModelSpecific, OneShot, find

RESULTS = Path(__file__).parents[1] / "results"
SHIPPED_SHARES = {"smollm2": "smollm2-135m-instruct-q4_1.json"}  # by the name of the model
RECALLED, SHARED = "KeyDiff, half recalled", "KeyDiff, shares"
KEY = ("table", "row", "tokens", "budget", "chunk", "part")
UNIFORM = {"policy": "random(keep_prompt=False)"}
Variants = dict[str, dict[str, Any]]  # options of `CacheOptions` by row. `half` recalls half of the budget instead
MERGES, STORES = ("mean_count", "mean_count(next)"), ("int8", "int4")
MODES = ("auto", "original", "compact", "clamp(8192)")


@dataclass(frozen=True)
class Cell:
    """One row of a table, on the sample `part` of texts. `budget` is the whole working set, in slots."""

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
            given["recall"] = given["budget"] // 16 * 8
            given["budget"] -= given["recall"]
        return CacheOptions(**given)

    def measured(self, material: Material) -> dict[str, object]:
        """Measure it."""
        if self.table == "facts":
            return facts(material, self.made(), self.tokens, self.part, self.row == PIN)
        if self.table == "chats":
            return chats(material, self.made(), self.part)
        return streamed(material, self.made(), self.tokens, self.part, self.table == "agreement")


def streaming_policies() -> Variants:
    """Every policy that evicts as it reads and needs no file or training, with its usual numbers."""
    kinds = {name: kind for name, kind in NAMES.items() if name not in ("random", "recent")}
    found = {k.__name__: n for n, k in kinds.items() if not find(k(), OneShot) and not find(k(), ModelSpecific)}
    return {row: {"policy": spec} for row, spec in found.items()}


def fitted_shares(name: str) -> Variants:
    """`KeyDiff` with the shares that come with Windlass for the weights of this model, which may be decoded here."""
    if name not in SHIPPED_SHARES:
        return {}
    return {SHARED: {"shares": replace(read_shares(SHIPPED / SHIPPED_SHARES[name]), fingerprint="")}}


def rows_of(table: str, tokens: int, budget: int, variants: Variants, chunk: int = 64, part: int = 0) -> list[Cell]:
    """The full cache and these rows."""
    rows = [Cell(table, row, tokens, budget, chunk, part, each) for row, each in variants.items()]
    return [Cell(table, FULL, tokens, None, part=part), *rows]


def beside(table: str, tokens: int, budget: int, variants: Variants, chunk: int = 64, part: int = 0) -> list[Cell]:
    """The full cache, these rows, and the controls: `Recent`, `Random`, and that with pinned tokens."""
    sinks = {"stream": PINNED, "agreement": PINNED, "facts": DEFAULT_SINKS, "chats": "system"}[table]
    controls: Variants = {"Recent": {"policy": "recent"}, "Random": UNIFORM, PIN: {**UNIFORM, "sinks": sinks}}
    return rows_of(table, tokens, budget, {**variants, **controls}, chunk, part)


def cells(name: str = "smollm2") -> list[Cell]:
    """All cells of a model, the most useful first."""
    policies, fitted = streaming_policies(), fitted_shares(name)
    few: Variants = {"KeyDiff": policies["KeyDiff"], RECALLED: {"half": True}} | fitted
    core = few | {name: policies[name] for name in ("LagKV", "SnapKV")}
    changes: Variants = {f"KeyDiff, {x}": {"merge": x} for x in MERGES}
    changes |= {f"KeyDiff, {x}": {"store": x} for x in STORES}
    limits: Variants = {f"KeyDiff, window {size}": {"window": size} for size in (16, 125)}
    limits |= {f"KeyDiff, {size} sinks": {"sinks": size} for size in (0, 16)}
    modes: Variants = {f"KeyDiff, {mode}": {"positions": mode} for mode in MODES}
    talks = few | {"KeyDiff, system text pinned": {"sinks": "system"}}
    parts = range(4)
    ordered = beside("stream", 1536, 256, core) + beside("facts", 1000, 250, few)
    ordered += beside("stream", 1536, 256, changes) + beside("agreement", 1024, 256, few)
    ordered += [
        cell for budget in (250, 500, 125) for part in parts for cell in rows_of("facts", 1000, budget, few, part=part)
    ]
    ordered += beside("facts", 1000, 500, few) + beside("facts", 1000, 125, few) + rows_of("facts", 1000, 250, core)
    ordered += rows_of("facts", 1000, 250, {name: policies[name] for name in ("RKV", "ExpectedAttention", "H2O")})
    sure = {250: {"RKV": policies["RKV"]}, 500: {"SnapKV": policies["SnapKV"], "KeyDiff, window 250": {"window": 250}}}
    ordered += [c for x in parts for budget, rows in sure.items() for c in rows_of("facts", 1000, budget, rows, part=x)]
    ordered += rows_of("stream", 1536, 256, limits) + rows_of("facts", 1000, 250, limits)
    ordered += beside("stream", 1536, 256, policies) + beside("stream", 1536, 256, core, 8)
    ordered += beside("chats", 0, 256, talks) + beside("facts", 4000, 1000, few)
    far = {row: policies[row] for row in ("SnapKV", "LagKV", "RKV")} | {"KeyDiff, window 128": {"window": 128}}
    ordered += beside("stream", 12_288, 256, modes | far | fitted | {RECALLED: {"half": True}})
    ordered += [cell for budget in (128, 512) for cell in beside("stream", 1536, budget, core)]
    ordered += beside("stream", 3072, 1024, few) + beside("facts", 4000, 500, few) + beside("facts", 7000, 875, few)
    keys = [cell.key for cell in ordered]
    return [cell for at, cell in enumerate(ordered) if keys.index(cell.key) == at]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The finished cells of a file of results, none where it does not exist."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(material: Material, name: str, wanted: list[Cell], results: Path, minutes: float) -> None:
    """Measure cells that are missing in `results` and append them. No cell begins after so many minutes."""
    began = time.monotonic()
    done = {tuple(line[name] for name in KEY) for line in lines_of(results)}
    for cell in wanted:
        start = time.monotonic()
        if cell.key in done or start - began > 60 * minutes:
            continue
        line = {"kind": name, **dict(zip(KEY, cell.key, strict=True)), **cell.measured(material)}
        line |= {"seconds": round(time.monotonic() - start, 1), **machine(torch.get_num_threads())}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print({name: line[name] for name in (*KEY, "seconds")}, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, file or name of a chat model")
    parser.add_argument("novels", nargs=2, type=Path, help="two text files")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no cell after so many (600)")
    parser.add_argument("--name", choices=real_page.ABOUT, default="smollm2", help="name of the model's page")
    parser.add_argument("--dtype", default="bfloat16", help="number type of the computation")
    parser.add_argument("--write", type=Path, help="write the page here")
    options = parser.parse_args()
    results, wanted = RESULTS / f"{options.name}.jsonl", cells(options.name)
    if options.minutes > 0:
        model, tokenizer = load(options.model, options.dtype)
        wanted = wanted if tokenizer.chat_template else [cell for cell in wanted if cell.table != "chats"]
        run(Material.of(model, tokenizer, options.novels), options.name, wanted, results, options.minutes)
    if options.write:
        names = [file.stem for file in options.novels]
        options.write.write_text(real_page.page(lines_of(results), len(wanted), names, options.name))


if __name__ == "__main__":
    main()
