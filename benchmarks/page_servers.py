"""The section of `docs/benchmarks.md` about servers."""

from collections.abc import Sequence

from section import Line, section

COUNTS = (1, 4, 16)


def serving(lines: Sequence[Line]) -> str:
    """Windlass' server beside others."""
    rows = []
    for line in lines:
        groups = [line[f"clients_{count}"] for count in COUNTS]
        beside, reuse = line["beside_long"], line["reuse"]
        rows.append(
            [
                line["date"],
                line["cpu"].split("(")[0],
                line["server"],
                *(f"{group['tokens_per_s']:.1f}" for group in groups),
                *(f"{group['first']['p50']:.2f}, {group['first']['p95']:.2f}" for group in groups),
                f"{beside['gap']['p95']:.2f}",
                f"{beside['long_first']:.1f}",
                f"{reuse['ratio']:.3f}",
                f"{line['memory']['rss'] / 1e9:.1f}",
            ]
        )
    heads = ["date", "CPU", "server", *(f"tokens/s, {count}" for count in COUNTS)]
    heads += [f"first token s, {count}" for count in COUNTS]
    heads += ["p95 gap beside a long prompt, s", "its first token s", "hit / miss", "RSS GB"]
    text = (
        "4 layers of the shape `1b`, random weights, bfloat16, 1, 4 and 16 clients at once, each with a prompt of "
        "some 180 tokens and 48 or 64 to write; first token as p50, p95. A long prompt is one of 9,000 tokens, "
        "which comes while three other clients write. Hit: the time to a first token when that prompt comes again, "
        "over the first time. Windlass has 16 rows of 1,024 slots, of the long prompt, too; the others keep all of "
        "it, unless they say so. `windlass` computed all 16 rows in each step, `windlass, rows that write` does "
        "not. OpenVINO GenAI has no server: `benchmarks/peers/openvino_server.py` puts HTTP before its pipeline; "
        "its weights are float16, and computed with in bfloat16. `1,024 kept` is with its cache eviction, which "
        "excludes its prefix cache. One run each, those of one date and CPU one after the other."
    )
    return section("Servers", "benchmarks/serving.py", text, heads, rows, lines[-1])
