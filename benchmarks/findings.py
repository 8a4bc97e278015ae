"""The page `docs/findings.md`, out of the samples in `benchmarks/results` and the words in `benchmarks/findings.md`.

    python benchmarks/findings.py > docs/findings.md

A line `<!-- table: NAME -->` of the words is replaced by that table, so that every number in it was measured.
"""

import re
from collections.abc import Callable
from pathlib import Path

from finder_tables import finder, finder_merging, finder_positions, merged_digits, pass_keys
from samples import Line, chosen, counted, lines_of, of_full, pivot, scored, scores, shown

from windlass.evals.report.page import table
from windlass.evals.report.summaries import wilson

HERE = Path(__file__).parent
WORDS = HERE / "findings.md"
MAIN_BUDGETS = ("all", "2x", "4x", "8x")
RANDOM = "Random(keep_prompt=True, seed=0)"
CHOOSING = ("KeyDiff()", "Leverage(sketch=48, ridge=0.01)", "KeyNorm()", RANDOM, "Recent()")
GROUPS = [f"InGroups(policy={policy}, group={group})" for group in (4, 8) for policy in CHOOSING]


def main() -> None:
    """Print the page."""
    words = WORDS.read_text()
    print(re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]](), words), end="")


def extended() -> str:
    """Pass keys in texts longer than the trained window."""
    lines = chosen("worth", model="passkey-3m", task="passkey_novel", length=(2000, 4000, 8000, 16000))
    rows = [
        [
            f"{line['length']:,}",
            line["positions"],
            "full cache" if line["budget"] == "all" else f"{shown(line['policy'])}, {line['budget']}",
            f"{line['slots']:,}",
            str(line["samples"]),
            scored(line),
        ]
        for line in sorted(lines, key=lambda line: line["length"])
    ]
    return table(["tokens", "positions", "cache", "slots", "texts", "found"], rows, 3)


def long_text() -> str:
    """Keys found at each depth of a text of 100,000 tokens."""
    found: dict[str, list[Line]] = {}
    for line in lines_of("long_text"):
        found.setdefault(shown(line["policy"]), []).append(line)
    rows = []
    for policy, lines in found.items():
        cells = [f"{line['found']} of {line['keys']}" for line in lines]
        hits, keys = (sum(line[name] for line in lines) for name in ("found", "keys"))
        low, high = wilson(hits / keys, keys)
        rows.append([policy, *cells, f"{hits} of {keys} [{100 * low:.0f}, {100 * high:.0f}]"])
    depths = list(dict.fromkeys(f"{line['depth']:.0%}" for line in lines_of("long_text")))
    return table(["policy", *depths, "all"], rows, 1)


def eviction_steps() -> str:
    """Nats per token of a text, policy by policy, by how many tokens were read before each eviction."""
    found: dict[str, dict[int, str]] = {}
    for line in chosen("eviction_steps", tokens=2048):
        found.setdefault(shown(line["policy"]), {})[line["step"]] = f"{line['nll']:.3f}"
    rows = [[policy, *(cells.get(step, "not run") for step in (64, 8, 1))] for policy, cells in found.items()]
    return table(["policy", "steps of 64", "of 8", "of 1"], rows, 1)


def stream() -> str:
    """Nats per token along a stream, and beside windows that were read afresh."""
    rows = [
        [
            line["positions"],
            f"{line['tokens']:,}",
            *(f"{tenth:.2f}" for tenth in line["nll_by_tenth"]),
            f"{line['nll']:.4f}",
            f"{line['nll_afresh']:.4f}",
            f"{line['difference'] / line['nll_afresh']:+.2%} ± {line['error'] / line['nll_afresh']:.2%}",
        ]
        for line in lines_of("stream")
    ]
    tenths = [f"{n}/10" for n in range(1, 11)]
    return table(["positions", "tokens", *tenths, "at the places", "afresh", "difference"], rows, 1)


def heads() -> str:
    """Budgets that differ between heads: scores, and bytes packed and in one tensor a layer."""
    rows = [
        [
            line["model"],
            line["task"],
            shown(line["policy"]),
            f"{line['divisor']}x",
            line["shape"],
            scored({**line, "interval": (line["low"], line["high"])}),
            f"{line['bytes_ragged'] / 1000:,.0f}",
            f"{line['bytes_rectangular'] / 1000:,.0f}",
        ]
        for line in lines_of("head_budgets")
    ]
    heads = ["model", "task", "policy", "budget", "shape", "found", "kB packed", "kB in a tensor a layer"]
    return table(heads, rows, 5)


def fitted() -> str:
    """What each choice finds with its own values and with fitted ones, and the questions won and lost by these."""
    cells: dict[str, dict[str, str]] = {}
    for line in lines_of("attention_matching"):
        if line["choice"] == "full cache":
            continue
        said = f"{100 * line['score']:.0f}" + ("" if line["fit"] == "none" else f" (+{line['won']} -{line['lost']})")
        cells.setdefault(line["choice"], {}).setdefault(f"{line['task']} {line['divisor']}x", "")
        column = f"{line['task']} {line['divisor']}x"
        before = cells[line["choice"]][column]
        cells[line["choice"]][column] = f"{before}, {said}" if before else said
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    return table(
        ["choice", *columns], [[row, *(found.get(each, "") for each in columns)] for row, found in cells.items()], 1
    )


def peak_bytes() -> str:
    """The most that a cache takes while a text is read, by policy."""
    rows = [
        [
            shown(line["policy"]),
            "whole" if line["is_held_whole"] else "within the budget",
            str(line["readings"]),
            f"{line['peak'] / 1e6:.1f}",
            f"{line['rest'] / 1e6:.1f}",
            f"{line['peak'] / line['rest']:.1f}",
        ]
        for line in lines_of("peak_bytes")
    ]
    return table(["policy", "holds the text", "readings", "MB at most", "MB at the end", "of that"], rows, 2)


def shares() -> str:
    """What each kind of shares finds, by task and budget across."""
    cells: dict[str, dict[str, str]] = {}
    lines = lines_of("shares")
    for line in lines:
        said = f"{line['nll']:.3f}" if "nll" in line else f"{scored(line)}{'' if line['samples'] == 200 else ' *'}"
        cells.setdefault(line["shares"], {})[f"{line['task']} {line['budget']}"] = said
    columns = list(dict.fromkeys(f"{line['task']} {line['budget']}" for line in lines))
    columns = [each for each in columns if each != "magic_single 4x"]
    rows = sorted(cells, key=[*dict.fromkeys(line["shares"] for line in lines)].index)
    return table(["shares", *columns], [[row, *(cells[row].get(each, "") for each in columns)] for row in rows], 1)


def scorer() -> str:
    """What a linear scorer finds, by task."""
    lines = [line for line in lines_of("scorer") if line["kind"] == "found"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        cells.setdefault((line["policy"], line["shares"]), {})[line["task"]] = scored(line)
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    rows = [[*row, *(found.get(task, "") for task in tasks)] for row, found in cells.items()]
    return table(["policy", "shares of the task", *tasks], rows, 2)


def scorer_time() -> str:
    """What a linear scorer costs."""
    rows = [
        [
            f"{line['model']}, {line['layers']} layers",
            line["dtype"],
            f"{line['tokens']:,}",
            f"{line['budget']:,}",
            f"{line['groups'] or 1}",
            f"{line['read_ratio']:.3f}",
            f"{line['token_ratio']:.3f}",
        ]
        for line in lines_of("scorer")
        if line["kind"] == "scorer"
    ]
    return table(["model", "dtype", "tokens", "slots", "groups of heads", "reading", "a token after it"], rows, 2)


def self_extend_merging() -> str:
    """Keys found under self-extend, by model, and by what becomes of tokens that share a position."""
    names = {"halved": "half the text", "full": "nothing divided", "apart": "nothing merged", "none": "dropped"}
    cells: dict[tuple[str, str], dict[str, str]] = {}
    lines = lines_of("self_extend_merging")
    for line in lines:
        rule = str(line["merge"])
        label = names.get(rule, rule) + (f", {line['sinks']} sinks" if line["sinks"] else "")
        cells.setdefault((line["model"], f"{line['tokens']:,}"), {})[label] = f"{scored(line)}, {line['slots']:,} slots"
    rows = [[model, label, tokens, cell] for (model, tokens), found in cells.items() for label, cell in found.items()]
    return table(["model", "neighbours", "tokens", "found"], rows, 2)


def gate() -> str:
    """A fitted gate and policies at equal bytes: scores by task and budget, with the slots that were in use."""
    lines = [line for line in lines_of("gate") if line["task"] != "fit"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        policy = re.sub(r"file='[^']*'(, ratio=\d)?", "", line["policy"]).removesuffix("()")
        name = "full cache" if line["budget"] == "all" else policy.replace("(group=2)", "").replace("(group=4)", "")
        name += ", no budget" if line["budget"].startswith("own") else ""
        budgets = ("2x", "4x") if line["budget"] == "all" else (line["budget"].removeprefix("own, "),)
        for budget in budgets:
            found = cells.setdefault((name, line["merge"]), {})
            found[f"{line['task']} {budget}"] = f"{scored(line)}, {line['slots']}"
    columns = list(dict.fromkeys(column for found in cells.values() for column in found))
    return table(
        ["policy", "merge", *columns], [[*key, *(found.get(c, "") for c in columns)] for key, found in cells.items()], 2
    )


def merging_time() -> str:
    """What merging adds to reading a prompt."""
    rows = [
        [
            line["shape"],
            f"{line['prompt']:,}",
            line["merge"],
            f"{line['ratio']:.3f}",
            " to ".join(f"{quartile:.3f}" for quartile in line["quartiles"]),
        ]
        for line in lines_of("merging_time")
    ]
    return table(["shape", "tokens", "rule", "time with merging / without", "quartiles of the pairs"], rows, 3)


TABLES: dict[str, Callable[[], str]] = {
    **{f"finder_{budget}": finder(budget) for budget in ("4x", "16x")},
    "finder_merging": finder_merging,
    "merged_digits": merged_digits,
    "finder_positions": finder_positions,
    "shares": shares,
    "scorer": scorer,
    "scorer_time": scorer_time,
    "fitted": fitted,
    "peaks": peak_bytes,
    "needles": of_full(
        "worth", model="passkey-3m", task="magic_single", merge="none", storage="unrotated", budget=MAIN_BUDGETS
    ),
    "among": of_full("worth", model="needles-3m", task="magic_multikey_2"),
    "multiturn": of_full("worth", model="needles-3m", task="magic_multiturn"),
    "chains": of_full("worth", model="needles-3m", task="vt"),
    "rotated": scores(
        ("storage",),
        "budget",
        task="passkey_novel",
        policy="KeyDiff()",
        budget=("8x", "10x", "16x"),
        merge="none",
        length=500,
        chunk=128,
        seed=0,
    ),
    "merged": scores(
        ("task", "merge"),
        "budget",
        model="passkey-3m",
        policy="KeyDiff()",
        length=500,
        task=("passkey", "passkey_novel"),
        budget=("2x", "4x", "8x"),
        storage="unrotated",
    ),
    "chance": scores(
        ("task", "merge"),
        "budget",
        model="passkey-3m",
        policy=RANDOM,
        budget="4x",
        length=500,
        task=("passkey", "passkey_novel"),
    ),
    "pr5719": counted(policy=("Alternate(group=2)",)),
    "groups": counted(policy=GROUPS, positions="original"),
    "pairs": counted(policy=["Pairs(table='pairs.json')"]),
    "extended_groups": counted(policy=["Recent()", *GROUPS], positions="self_extend(4, 64)"),
    "extended": extended,
    "long_text": long_text,
    "pass_keys": pass_keys,
    "eviction_steps": eviction_steps,
    "stream": stream,
    "heads": heads,
    "time": merging_time,
    "self_extend_merging": self_extend_merging,
    "words": lambda: pivot(
        [{**line, "rule": f"{line['budget']} {line['merge']}"} for line in lines_of("words")], ("task",), "rule"
    ),
    "gate": gate,
}

if __name__ == "__main__":
    main()
