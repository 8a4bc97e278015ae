"""Tables of what finder-3m finds, out of `benchmarks/results/finder.jsonl`."""

import re
from collections.abc import Callable

from samples import Line, chosen, lines_of, scored, shown

from windlass.evals.report.page import table
from windlass.evals.report.summaries import wilson

SHARES = {
    "none": "",
    "turns.json": ", shares of turns",
    "among.json": ", shares among needles",
    "sall.json": ", shares of its own",
}


def named(policy: str) -> str:
    """A policy without its numbers: the page says that they are the default ones."""
    return re.sub(r"\((?!policy)[^()]*\)", "", shown(policy)).replace("policy=", "")


def finder(budget: str) -> Callable[[], str]:
    """What finder-3m finds at a budget on every task, by policy, and the share of what its full cache finds."""

    def make() -> str:
        lines = chosen("finder", run="policies")
        full = {line["task"]: line for line in lines if line["budget"] == "all"}
        cells: dict[str, dict[str, str]] = {"full cache": {task: scored(line) for task, line in full.items()}}
        for line in lines:
            if line["budget"] == budget:
                label = named(line["policy"]) + SHARES[line["shares"]]
                said = f"{scored(line)} {line['score'] / full[line['task']]['score']:.0%}"
                said += "" if line["samples"] == 200 else f" ({line['samples']})"
                cells.setdefault(label, {})[line["task"]] = said
        rows = [[label, *(found.get(task, "") for task in full)] for label, found in cells.items()]
        return table(["policy", *full], rows, 1)

    return make


def finder_merging() -> str:
    """What finder-3m finds where evicted tokens are merged into the most similar key, or into the next."""
    lines = chosen("finder", run="merging")
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in sorted(lines, key=lambda line: (line["policy"], line["budget"])):
        row = named(line["policy"]), line["budget"], "dropped" if line["merge"] == "none" else line["merge"]
        said = "" if line["samples"] == 200 else f" ({line['samples']})"
        cells.setdefault(row, {})[line["task"]] = scored(line) + said
    rows = [[*row, *(found.get(task, "") for task in tasks)] for row, found in cells.items()]
    return table(["policy", "budget", "evicted", *tasks], rows, 3)


def finder_positions() -> str:
    """What finder-3m finds in texts longer than it was trained on, by the way in which positions are read."""
    lines = chosen("finder", run="positions")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in lines:
        cache = "full cache" if line["budget"] == "all" else f"{named(line['policy'])}, {line['budget']} slots"
        cache += "" if line["shares"] == "none" else ", shares"
        cache += "" if line.get("recalled", "none") == "none" else f", {line['recalled'].partition(' ')[0]} recalled"
        row = line["task"], f"{line['length']:,}", cache
        said = "" if line["samples"] == 200 else f" ({line['samples']})"
        cells.setdefault(row, {})[line["positions"]] = scored(line) + said
    modes = list(dict.fromkeys(line["positions"] for line in lines))
    rows = [[*row, *(found.get(mode, "") for mode in modes)] for row, found in cells.items()]
    return table(["task", "tokens", "cache", *modes], rows, 3)


def merged_digits() -> str:
    """The share of heads that hold each digit of a hidden number at its place, first digit first."""
    lines = lines_of("merged_digits")
    most = max(len(line["held"]) for line in lines)
    rows = []
    for line in lines:
        evicted = "dropped" if line["merge"] == "none" else line["merge"]
        held = [f"{100 * share:.0f}" for share in line["held"]]
        rows.append([line["model"], line["task"].partition("(")[0], evicted, *held, *[""] * (most - len(held))])
    return table(["model", "task", "evicted", *(f"digit {number}" for number in range(1, most + 1))], rows, 3)


def pass_keys() -> str:
    """Keys found in novels with all their own numbers."""
    cells: dict[str, dict[str, list[Line]]] = {}
    for line in lines_of("pass_keys"):
        label = named(line["policy"]) + ("" if line["shares"] is None else ", shares")
        cells.setdefault(label, {}).setdefault(line["text"], []).append(line)
    texts = list(dict.fromkeys(line["text"] for line in lines_of("pass_keys")))
    rows = []
    for label, found in cells.items():
        every = [line for lines in found.values() for line in lines]
        counts = [
            [sum(line[name] for line in lines) for name in ("found", "keys")] for lines in (*found.values(), every)
        ]
        low, high = wilson(counts[-1][0] / counts[-1][1], counts[-1][1])
        each = [f"{hits} of {keys}" for hits, keys in counts]
        rows.append([label, *each[:-1], f"{each[-1]} [{100 * low:.0f}, {100 * high:.0f}]"])
    return table(["policy", *(text.replace("_", " ") for text in texts), "all"], rows, 1)
