"""The page `docs/results/models.md`, out of the results of `families.run`."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from families.checks import BUDGET, CHUNKS, LONG, LONG_CHUNK, SHORT, SHORTER, SINKS, TOLERANCE, WRITTEN

from windlass.evals.report.page import table

Line = dict[str, Any]

OUTCOMES = {
    "equal": "equal to plain transformers",
    "refused": "refused by `attach`, by name and with the reason",
    "raises": "**attached, then raised**",
    "wrong": "**attached, then differed**",
    "no text alone": "plain transformers cannot run it on text alone",
    "not built": "not built",
}
MAPPINGS = {"causal LM": "causal LM", "image-text": "image-text, text only", "variant": "variants"}


def page(lines: Sequence[Line], clients: Sequence[Line]) -> str:
    """The whole page, out of the results of `families.run` and of `clients.run`."""
    lines = sorted(lines, key=lambda line: (list(MAPPINGS).index(line["mapping"]), _name(line)))
    last = max(lines, key=lambda line: str(line["date"]))
    versions = f"transformers {last['transformers']}, torch {last['torch']}, {last['date']}"
    sections = [
        f"# Models\n\n{_introduction(versions)}",
        f"## Counts\n\n{_counts(lines)}",
        f"## Reasons for refusal\n\n{_reasons(lines)}",
        *([f"## Other programs on an attached model\n\n{_clients(clients)}"] if clients else []),
        f"## Equal\n\n{_about_equal(lines)}\n\n{_equal(lines)}",
        f"## All others\n\n{_others(lines)}",
    ]
    return "\n\n".join(sections) + "\n"


def _introduction(versions: str) -> str:
    return f"""Every class of the causal-LM and image-text mappings of transformers, and some variants of their configs,
attached and compared with itself unattached. Out of `benchmarks/results/families.jsonl`, with {versions}:

    PYTHONPATH=benchmarks python -m families.run --write docs/results/models.md

The models are tiny and random: the default config of the class, shrunk to a hidden size of 64 and 4 to 6 layers, every
layer type of it kept. Their weights are drawn so that attention is far from uniform and norms and biases are not
constant, and that a changed token and moved positions show. So this page tells of arithmetic, but nothing of the
quality of a policy, and nothing of pictures: image-text classes read text alone.

"Equal" means, in float32 and against plain eager attention in one pass, at most {TOLERANCE:.0e} of a standard deviation
of the logits at any token:

- {SHORT} tokens, read {", ".join(map(str, CHUNKS[:-1]))} and all at once, and {LONG} tokens, {LONG_CHUNK} at once,
- rows of {SHORT} and {SHORTER} tokens, padded on the left, each as if it were alone,
- {SHORT} tokens, one by one, in a budget of {BUDGET} with {SINKS} sinks and the policy `Recent`, against the plain
  model under the mask that this amounts to,
- `generate`: the same {WRITTEN} tokens as plain greedy decoding,
- and the attached model without our cache, and the detached one, are to the bit what the plain one was.

States of recurrent layers round by how a text is cut. Where a check is beyond that limit, the plain model reads the
same pieces with transformers' own cache, and must be as near. The notes tell how far it is from one pass itself. States
add up how linear layers round, too: where ours bring a check beyond the limit, the class is read with PyTorch's, and
the notes tell how far both are from float64.

In bfloat16, {LONG} tokens read {LONG_CHUNK} at once may be 1.5 times
as far from float32 as the plain model in bfloat16 is."""


def _counts(lines: Sequence[Line]) -> str:
    counts = Counter((line["mapping"], line["outcome"]) for line in lines)
    rows = [[text, *(str(counts[each, outcome]) for each in MAPPINGS)] for outcome, text in OUTCOMES.items()]
    totals = ["all", *(str(sum(line["mapping"] == each for line in lines)) for each in MAPPINGS)]
    return table(["", *MAPPINGS.values()], [*rows, totals])


def _reasons(lines: Sequence[Line]) -> str:
    """Model types by what `attach` said, without the numbers of layers."""
    names: dict[str, list[str]] = {}
    for line in lines:
        if line["outcome"] == "refused":
            names.setdefault(_reason(line), []).append(_name(line))
    rows = [[reason, str(len(each)), ", ".join(dict.fromkeys(each))] for reason, each in names.items()]
    return str(
        table(["`attach` says that it ...", "classes", "model types"], sorted(rows, key=lambda row: -int(row[1])))
    )


def _reason(line: Line) -> str:
    return _cell(line["reason"]).split(": [")[0]


def _cell(text: object) -> str:
    """A text as a table of prose takes it."""
    return str(text).replace("|", "/").replace("; ", ", ")


def _name(line: Line) -> str:
    return f"{line['model_type']} ({line['variant']})" if line["variant"] else str(line["model_type"])


def _about_equal(lines: Sequence[Line]) -> str:
    same = [line for line in lines if line["outcome"] == "equal"]
    top = [
        statistics.fmean(line["errors"][f"bfloat16 top tokens {who}"] for line in same) for who in ("windlass", "plain")
    ]
    return (
        "What its layers keep, what `attach` cannot give it, and the bytes of a token in a layer that attends, in "
        "bfloat16 with the sizes of the class's default config (none told where its layers differ). Then the largest "
        "difference in float32, in standard deviations of the logits, and the errors in bfloat16, "
        f"relative to float32. In bfloat16 the most likely token is that of float32 in {top[0]:.2%} of the places "
        f"with windlass, and in {top[1]:.2%} with plain transformers, on average over these rows."
    )


def _equal(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        if line["outcome"] == "equal":
            errors = line["errors"]
            largest = max(error for name, error in errors.items() if not name.startswith("bfloat16"))
            low = (f"{errors[f'bfloat16 {who}']:.4f}" for who in ("windlass", "plain"))
            its = line["served"]
            size = "" if its["bytes"] is None else f"{its['bytes']:,}"
            about = _cell(its["how"]), _cell(its["lacks"]), size
            rows.append(
                [_name(line), line["class_name"], *about, f"{largest:.0e}", *low, _cell(", ".join(line["notes"]))]
            )
    heads = ["model type", "class", "what layers keep", "what it cannot have", "bytes per token and layer"]
    heads += ["float32", "bfloat16, windlass", "bfloat16, plain", "notes"]
    return table(heads, rows)


def _others(lines: Sequence[Line]) -> str:
    rows = [
        [_name(line), line["class_name"], line["outcome"], _cell(line["reason"])]
        for line in lines
        if line["outcome"] != "equal"
    ]
    return table(["model type", "class", "outcome", "reason"], rows)


def _clients(lines: Sequence[Line]) -> str:
    last = lines[-1]
    versions = ", ".join(f"{package} {version}" for package, version in last["versions"].items())
    about = (
        f"`make bench-clients`, with {versions}, transformers {last['transformers']}, torch {last['torch']}, "
        f"{last['date']}. The model that is shipped, in float32 on a CPU, against the same program on a plain one. "
        "Equal means logits within 1e-5 of those of plain, relative to their norm, 24 greedy tokens as plain, and a "
        "run in a budget of 128 at `compact` positions. For the harness, the same answers."
    )
    rows = []
    for line in lines:
        error = line.get("logits_error")
        text = "" if error is None else f"{error:.0e}"
        rows.append([line["client"], line["result"], text, _cell(line["reason"])])
    return f"{about}\n\n{table(['client', 'result', 'logits', 'in its words'], rows)}"
