"""The documentation's section on GPUs, out of the lines of `python -m gpu`.

    python -m gpu.tables OUT/gpu.jsonl

Describes the last run in the file: tables of its measurements, and a list of missing ones. A pure function of the
lines: every ratio is made here.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu.bars import BARS, STATIC, Line, against, copy_rate, of_kind
from windlass.evals.report.page import table

COMMAND = "benchmarks/gpu.sh OUT"


def section(lines: Sequence[Line]) -> str:
    """Markdown of the last run."""
    run = lines[max(index for index, line in enumerate(lines) if line["kind"] == "run") :]
    bars = table(["bar", "asked", "worst, and where", "places", "met"], [bar.cells(run) for bar in BARS])
    parts = [_about(run), bars, _attention(run), _decode(run), _settings(run), _peers(run), _recall(run)]
    parts += [_memory(run), _lacking(run)]
    return "## On a GPU\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _titled(title: str, text: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"### {title}\n\n{text}\n\n{table(heads, rows)}" if rows else ""


def _about(lines: Sequence[Line]) -> str:
    tiny = " **Tiny shapes: these numbers mean nothing.**" if lines[0]["is_tiny"] else ""
    said = [f"`{COMMAND}`, {lines[0]['date'][:10]}.{tiny}"]
    for line in of_kind(lines, "machine"):
        memory = f", {line['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in line else ""
        units = f", {line['multiprocessors']} multiprocessors, CUDA {line['cuda']}" if "cuda" in line else ""
        said.append(
            f"{line['device']}{memory}{units}, torch {line['torch']}, triton {line['triton']}, transformers "
            f"{line['transformers']}. A copy on the device reads and writes {line['copy_gb_per_s']:,.0f} GB/s, a sum "
            f"reads {line['read_gb_per_s']:,.0f} GB/s. `of copy` is a rate over the former."
        )
    for line in of_kind(lines, "parity"):
        counts = ", ".join(f"{line[name]} {name}" for name in ("passed", "failed", "error", "skipped") if line[name])
        said.append(f"Tests on the device: {counts or 'none'} ({line['end']}).")
    said.append("Medians of rounds in turn. All weights, keys and values are random.")
    return "\n".join(said)


def _attention(lines: Sequence[Line]) -> str:
    places: dict[tuple[str, int, int], dict[str, Line]] = {}
    for line in of_kind(lines, "attention"):
        places.setdefault((line["shape"], line["batch"], line["slots"]), {})[line["what"]] = line
    rows = []
    for (shape, batch, slots), found in places.items():
        ours, others = found["unrotated"], ("rotated", "unrotated, mass", "int8", "int4", "pytorch")
        # How much faster each of the others is.
        faster = {name: ours["median_s"] / found[name]["median_s"] for name in others}
        cells = [f"{1 / faster['rotated']:.3f}", *(f"{faster[name]:.2f}" for name in others[1:4])]
        where = [shape, str(batch), f"{slots:,}", f"{ours['gb_per_s']:,.0f}", _of_copy(ours["gb_per_s"], lines)]
        rows.append([*where, *cells, f"{1 / faster['pytorch']:.2f}"])
    heads = ["shape", "batch", "slots", "GB/s", "of copy", "un-rotated / rotated", "with mass", "int8", "int4"]
    text = (
        "One query per row, a CUDA graph over several layers, bfloat16, keys rotated at read. `with mass`, `int8` and "
        "`int4`: speed against this. The last column: our speed over that of PyTorch's attention (`enable_gqa`)."
    )
    eager = sum(line["not_recorded"] is not None for line in of_kind(lines, "attention"))
    text += f" {eager} of the rows' kinds could not be recorded as a graph and were run as they are." if eager else ""
    return _titled("Attention alone", text, [*heads, "ours / PyTorch"], rows)


def _decode(lines: Sequence[Line]) -> str:
    rows = []
    for line, base in against(of_kind(lines, "decode", "storage"), "storage", "rotated"):
        if line["storage"] == "unrotated":
            memory = [_mib(line["bytes_held"]), _mib(line["step_bytes"])]
            rates = [*_rates(line), _of_copy(line["gb_per_s"], lines), _ratio(line, base, 3)]
            rows.append([line["model"], line["test"], line["graph"], *rates, *memory])
    heads = ["model", "test", "graph", "tokens/s", "GB/s", "of copy", "un-rotated / rotated", "cache MiB", "step MiB"]
    text = (
        "A step that is recorded as a graph (`on`) chooses its tokens, too. `b16`: 16 texts at once, whose tokens all "
        "count. GB/s: weights and held keys and values. `step MiB`: the most that steps took beside weights and cache."
    )
    return _titled("Whole decode", text, heads, rows)


def _settings(lines: Sequence[Line]) -> str:
    tables = []
    groups = (("policies", "policy", "Policies", "Recent()"), ("stores", "store", "Stores", "plain"))
    for group, axis, title, first in (*groups, ("compiled", "way", "The model's own part compiled", "as it is")):
        rows = []
        for line, base in against(of_kind(lines, "decode", group), axis, first):
            budget = "all" if line["budget"] is None else f"{line['budget']:,}"
            rows.append(
                [line["model"], line["test"], budget, line["graph"], line[axis], *_rates(line), _ratio(line, base, 3)]
            )
        heads = ["model", "test", "budget", "graph", axis, "tokens/s", "GB/s", "ratio"]
        tables.append(_titled(title, f"Whole decode. The ratio is that of tokens/s to `{first}`.", heads, rows))
    return "\n\n".join(each for each in tables if each)


def _peers(lines: Sequence[Line]) -> str:
    rows, every = [], of_kind(lines, "peers")
    for line in every:
        static = [other for other in every if other["peer"] == STATIC and _place(other) == _place(line)]
        ratio = _ratio(line, static[0], 2) if static else "-"
        quartiles = [f"{line['batch'] * line['tokens'] / line[name]:,.1f}" for name in ("high_s", "low_s")]
        rates = [f"{line['tokens_per_s']:,.1f}", " to ".join(quartiles), ratio]
        rows.append([*_place(line), line["peer"], *rates, _mib(line["step_bytes"])])
    heads = ["shape", "batch", "depth", "cache", "tokens/s", "quartiles", "over static", "step MiB"]
    text = (
        "The same weights in one process, in turn. `static, compiled`: a `StaticCache` and "
        '`torch.compile(mode="reduce-overhead")`. `dynamic`: a `DynamicCache` as it is.'
    )
    return _titled("Against transformers", text, heads, rows)


def _recall(lines: Sequence[Line]) -> str:
    found = of_kind(lines, "recall")
    base = {(line["shape"], line["graph"]): line["median_s"] for line in found if line["what"] == "no recall"}
    rows = [
        [line["shape"], line["graph"], line["what"], f"{1e3 * line['median_s']:.2f}",
         f"{line['median_s'] / base[line['shape'], line['graph']]:.2f}", _mib(line["bytes_held"]),
         _mib(line["recall_bytes"])]
        for line in found
    ]  # fmt: skip
    told = {f"{line['depth']:,} tokens, budget {line['budget']:,}, recall {line['recall']}" for line in found}
    text = f"One token behind a text of {', '.join(sorted(told))}. `recall`: all tokens that can be recalled."
    heads = ["shape", "graph", "recall store", "ms", "over no recall", "slots MiB", "recall MiB"]
    return _titled("Recall", text, heads, rows)


def _memory(lines: Sequence[Line]) -> str:
    rows = [
        [line["shape"], f"{line['prompt_tokens']:,}", line["way"], _mib(line["bytes"])]
        for line in of_kind(lines, "memory")
    ]
    text = "The most memory above the weights while a prompt is read, the cache included."
    return _titled("Memory", text, ["shape", "tokens", "way", "peak MiB"], rows)


def _lacking(lines: Sequence[Line]) -> str:
    skipped = [f"- {line['what']}: {line['why']}" for line in of_kind(lines, "skipped")]
    failed = [f"- {line['part']}: {line['why']}" for line in of_kind(lines, "failed")]
    ended = {line["part"] for line in lines if line["kind"] in ("end", "failed")}
    stopped = sorted({line["part"] for line in lines if "part" in line} - ended)
    lost = [f"- {part}: the run was stopped in it" for part in stopped]
    return "\n".join(["### Not measured", "", *skipped, *failed, *lost]) if skipped + failed + lost else ""


def _place(line: Line) -> list[str]:
    return [line["shape"], str(line["batch"]), f"{line['depth']:,}"]


def _rates(line: Line) -> list[str]:
    rate = f"{line['tokens_per_s']:,.1f} ± {line['half_interquartile_range_per_s']:,.1f}"
    return [rate, f"{line['gb_per_s']:,.0f}"]


def _ratio(line: Line, base: Line, digits: int) -> str:
    return f"{line['tokens_per_s'] / base['tokens_per_s']:.{digits}f}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"


def _of_copy(rate: float, lines: Sequence[Line]) -> str:
    copied = copy_rate(lines)
    return f"{rate / copied:.2f}" if copied else "-"


def main() -> None:
    """Print the section."""
    print(section([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]), end="")


if __name__ == "__main__":
    main()
