"""The sections of `docs/benchmarks.md` that answer one question each."""

from collections.abc import Callable, Sequence

from section import Line, section, spread

MIB = 2**20


def unrotated(lines: Sequence[Line]) -> str:
    """What un-rotated storage costs a token or a prompt."""
    rows = [
        [
            shape_of(line),
            weights_of(line),
            f"pp{line['prompt']}" if line["prompt"] else "tg1",
            f"{line['depth']:,}",
            "all" if line["by_module"] else "rotated only",
            *(f"{1e3 * line['seconds'][name]:.1f}" for name in ("unrotated", "rotated")),
            str(line["pairs"]),
            spread(line["ratios"]),
        ]
        for line in lines
    ]
    heads = [
        "shape",
        "weights",
        "test",
        "depth",
        "by module",
        "un-rotated ms",
        "rotated ms",
        "pairs",
        "un-rotated / rotated speed",
    ]
    text = (
        "The same kernels and model, a token (or a prompt) of each in turn; `rotated` stores keys after RoPE, as other "
        "libraries do. The kernel of all layers takes un-rotated keys only; `all`: it is off, and rotation is all that "
        "differs. `rotated only`: what a user has. Medians; the ratio is that of the pairs, with quartiles, above 1 "
        "where un-rotated is faster."
    )
    return section(
        "Un-rotated against rotated, token by token", "benchmarks/unrotated.py", text, heads, rows, lines[-1]
    )


def copies(lines: Sequence[Line]) -> str:
    """The rotation against a copy of the keys."""
    ways = list(lines[0]["seconds"])
    rows = [
        [
            line["shape"],
            f"{line['depth']:,}",
            f"{1e6 * line['seconds'][ways[0]]:,.0f}",
            *(spread(line["ratios"][way]) for way in ways[1:]),
        ]
        for line in lines
    ]
    text = (
        "Decode attention, one query, one layer, bfloat16, the same kernel. `neither` reads keys that are stored "
        "rotated; `rotation` rotates stored keys in registers; `copy` copies the keys first, `concatenation` into a "
        "new tensor as a cache does that grows by a token; `rotated copy` has PyTorch rotate a copy of un-rotated "
        "keys, and reads that. Time over that of `neither`, with quartiles."
    )
    heads = ["shape", "depth", f"{ways[0]} us", *ways[1:]]
    return section("A rotation against a copy", "benchmarks/copies.py", text, heads, rows, lines[-1])


def first_layer(lines: Sequence[Line]) -> str:
    """A table of the first layer's keys and values."""
    rows = [
        [
            line["shape"],
            f"{1e6 * line['seconds']['products']:.0f}",
            f"{1e6 * line['seconds']['gather']:.0f}",
            f"{line['table_bytes'] / MIB:,.0f}",
            f"{1e3 * line['token_s']:.0f}",
            f"{line['table_gain']:.2%}",
            f"{line['most_gain']:.1%}",
        ]
        for line in lines
    ]
    heads = ["shape", "products us", "row of a table us", "table MiB", "token ms", "gain of the table"]
    heads += ["all products of q, k, v"]
    measured = ", ".join(f"{line['measured_layers']} of {line['layers']}" for line in lines)
    text = (
        "Before RoPE the first layer's key and value depend on the token alone, so a table could replace two of its "
        "products. What that would gain, of a whole token, and what it would take; the last column is the share of all "
        "products of queries, keys and values in all layers, which is the most that a model without them could gain. "
        f"Weights in bfloat16, behind {lines[-1]['depth']:,} tokens, {measured} layers measured, the rest of the token "
        "in proportion. No table gains the 2 % that it would be built for."
    )
    if max(line["table_gain"] for line in lines) >= 0.02:
        raise ValueError("a table of the first layer gains 2 %: the text of this section is no longer true")
    return section("Keys of the first layer by token", "benchmarks/first_layer.py", text, heads, rows, lines[-1])


def chunks(lines: Sequence[Line]) -> str:
    """Prompts in chunks of several sizes."""
    rows = [
        [
            shape_of(line),
            f"{line['tokens']:,}",
            "none" if line["budget"] is None else f"{line['budget']:,}",
            chunk,
            f"{line['tokens'] / seconds:.0f}",
            spread(line["ratios"][chunk]),
            f"{line['bytes'][chunk] / MIB:,.0f}",
        ]
        for line in lines
        for chunk, seconds in line["seconds"].items()
    ]
    heads = ["shape", "tokens", "budget", "chunk", "tokens/s", "time over that of 512", "peak MiB above weights"]
    text = (
        "One prompt, read in chunks of several sizes in turn, in one process that gives freed memory back between "
        "them; policy `recent`. The cache is part of the peak."
    )
    return section("Sizes of chunks", "benchmarks/chunks.py", text, heads, rows, lines[-1])


def slot_counts(lines: Sequence[Line]) -> str:
    """Round and odd numbers of slots."""
    rows = [
        [line["shape"], f"{int(slots):,}", f"{1e9 * each:.1f}", spread(line["ratios"][slots])]
        for line in lines
        for slots, each in line["seconds_per_slot"].items()
    ]
    heads = ["shape", "slots", "ns a slot", "time a slot over the first count's"]
    text = "Decode attention, one query, one layer, bfloat16, un-rotated keys, over numbers of slots in turn."
    return section("Round and odd numbers of slots", "benchmarks/slot_counts.py", text, heads, rows, lines[-1])


def eviction(lines: Sequence[Line]) -> str:
    """A long prompt of which few tokens are held, beside OpenVINO."""
    rows = []
    for line in lines:
        for name in line["reading_s"]:
            ratio = spread(line["ratios"][name]) if name in line["ratios"] else "1"
            took = line["reading_s"][name]
            reading = "-" if took is None else f"{line['batch'] * line['prompt'] / took:.0f}"
            over = "-" if took is None else f"{line['reading_s']['openvino'] / took:.2f}"
            cells = [shape_of(line), f"{line['prompt']:,}", f"{line['budget']:,}", str(line["batch"]), name]
            cells += [reading, over, f"{line['tokens_per_s'][name]:.1f}", ratio]
            rows.append([*cells, f"{line['peak_bytes'][name] / 2**30:.2f}"])
    heads = ["shape", "prompt", "held", "texts", "library", "reading tokens/s", "to OpenVINO", "writing tokens/s, all"]
    heads += ["to OpenVINO, quartiles", "peak GiB"]
    text = (
        "Random weights in bfloat16, the same prompt in each text. OpenVINO GenAI reads with all tokens and then "
        "evicts (`NORM_SUM`, blocks of 32 tokens); windlass evicts while it reads. Reading was measured once, one "
        "after the other, and is left out where other work came between; writing in turn, 8 tokens each. The peak is "
        "that of the process, weights included, "
        f"without loading; OpenVINO maps its file and makes a copy. OpenVINO GenAI {lines[-1]['openvino']}."
    )
    return section("Eviction beside OpenVINO", "python -m peers.eviction", text, heads, rows, lines[-1])


def speculative(lines: Sequence[Line]) -> str:
    """Text written with drafts."""
    rows = [
        [
            line["shape"] or "finder-3m",
            f"{line['draft_layers']} of {line['layers']}",
            str(line["drafts"]),
            line["policy"],
            f"{line['budget']:,}",
            *(f"{line['tokens_per_s'][name]:.1f}" for name in ("greedy", "drafts")),
            spread(line["ratios"]),
            f"{line['differing']} of {line['tokens']}",
        ]
        for line in lines
    ]
    heads = ["model", "layers of the draft", "drafts", "policy", "budget", "greedy tokens/s", "with drafts", "ratio"]
    heads += ["tokens that differ"]
    text = (
        "A text over budget by `generate` of transformers, its prompt of some hundred tokens included, with drafts of "
        "the model's own first layers and without, in turn. The shipped model is so small that its passes take the "
        "same time whatever they read. Of a shape with random weights every draft is right: the most that drafts can "
        "gain."
    )
    return section("Writing with drafts", "benchmarks/speculative.py", text, heads, rows, lines[-1])


def settings(lines: Sequence[Line]) -> str:
    """Policies, and stores, in turn."""
    rows = [
        [
            shape_of(line),
            weights_of(line),
            f"pp{line['prompt']}" if line["prompt"] else f"tg1 @ d{line['depth']}",
            "all" if line["budget"] is None else f"{line['budget']:,}",
            name,
            f"{1e3 * seconds:,.1f}",
            str(line["rounds"]),
            spread(line["ratios"][name]),
        ]
        for line in lines
        for name, seconds in line["seconds"].items()
    ]
    heads = ["shape", "weights", "test", "held", "policy or store", "ms", "rounds", "speed over the first one's"]
    text = (
        "One model, and a cache for each policy or store; a token, or a prompt, of each in turn. Whole model, head "
        "included. The ratio is that within a round, with quartiles, above 1 where it is faster than the first row."
    )
    return section("Policies and stores in turn", "benchmarks/settings.py", text, heads, rows, lines[-1])


def weights_of(line: Line) -> str:
    """What its matrices are."""
    return "bfloat16" if line["weights"] == "auto" else str(line["weights"])


def shape_of(line: Line) -> str:
    """Its name, and how many layers it had where these are not all."""
    return str(line["shape"]) + (f" ({line['layers']} layers)" if line["layers"] else "")


SECTIONS: dict[str, Callable[[Sequence[Line]], str]] = {
    "unrotated": unrotated,
    "settings": settings,
    "copies": copies,
    "first_layer": first_layer,
    "chunks": chunks,
    "slot_counts": slot_counts,
    "eviction": eviction,
    "speculative": speculative,
}
