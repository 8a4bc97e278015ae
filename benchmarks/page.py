"""The page `docs/benchmarks.md`, out of the samples in `benchmarks/results`.

    python benchmarks/page.py > docs/benchmarks.md

Every number on it comes from there. Each section names the command that measures it again.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import page_questions
import page_servers
from gpu import tables as gpu_tables
from peers.tables import tables as peer_tables
from section import Line, section

RESULTS = Path(__file__).parent / "results"
INTRODUCTION = """# Benchmarks

Made by `python benchmarks/page.py` out of `benchmarks/results/*.jsonl`; losing rows are left in. Ratios compare
things that were measured in turn within one run, on random weights and texts (`windlass bench --shape`). The machine
is virtual, has two cores, and shares its host with others, so ratios are more reliable than rates.
"""


def main() -> None:
    """Print the page."""
    made = {**SECTIONS, **page_questions.SECTIONS}
    sections = [INTRODUCTION, *(make(_lines(name)) for name, make in made.items() if _lines(name))]
    # What is not measured there is told, too.
    print("\n".join([*sections, gpu_tables.section(_lines("gpu"))]), end="")


def _lines(name: str) -> list[Line]:
    """What was measured; nothing where no run was kept."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def attention(lines: Sequence[Line]) -> str:
    """Kernels alone."""
    rows = []
    for line in lines:
        seconds = line["seconds"]
        ours, read = seconds["unrotated"], seconds["read"]
        rates = [f"{line['bytes'] / seconds[name] / 1e9:.1f}" for name in ("unrotated", "rotated", "read")]
        ratios = [seconds["sdpa_repeat"] / ours, seconds["sdpa_gqa"] / ours, seconds["rotated"] / ours, read / ours]
        where = line["cpu"].split("(")[0]
        rows.append([line["shape"], f"{line['depth']:,}", where, *rates, *(f"{ratio:.2f}" for ratio in ratios)])
    heads = ["shape", "depth", "CPU", "un-rotated GB/s", "rotated GB/s", "plain read GB/s"]
    heads += ["PyTorch (repeat) / ours", "PyTorch (gqa) / ours", "rotated / un-rotated time", "of plain read"]
    text = (
        "One query, one layer, bfloat16. A ratio above 1 means that ours is faster. `rotated / un-rotated time` is the "
        "kernel's time over keys stored after RoPE, divided by its time when it rotates them itself; 1 means that the "
        "rotation is free. On the AMD EPYC PyTorch's own attention takes several times as long as on the Intel CPU."
    )
    cpus = dict.fromkeys(line["cpu"] for line in lines)
    about = {**lines[-1], "cpu": " and ".join(cpus)}  # the date is that of the last
    return section("Decode attention alone", "benchmarks/attention.py", text, heads, rows, about)


def paired(lines: Sequence[Line]) -> str:
    """Windlass and transformers in one process."""
    rows = [
        [
            line["shape"] + (f" ({line['layers']} layers)" if line["layers"] else ""),
            f"pp{line['prompt']}" if line["prompt"] else f"tg1 @ d{line['depth']}",
            str(line["threads"]),
            *(f"{1e3 * line['seconds'][name]:.1f}" for name in ("windlass", "transformers")),
            f"{line['ratio']:.3f}",
            " to ".join(f"{quartile:.3f}" for quartile in line["quartiles"]),
        ]
        for line in lines
    ]
    heads = ["shape", "test", "threads", "windlass ms", "transformers ms", "ratio", "quartiles of the pairs"]
    text = (
        "The same weights in one process, a token or a prompt of each in turn, chunks of 512, transformers with a "
        "DynamicCache; the ratio is the median over pairs, above 1 where windlass is faster."
    )
    return section("Against transformers in one process", "benchmarks/paired.py", text, heads, rows, lines[-1])


def linear(lines: Sequence[Line]) -> str:
    """Linear layers of few rows."""
    rows = []
    for line in lines:
        seconds = line["seconds"]
        rates = [f"{line['bytes'] / seconds[name] / 1e9:.1f}" for name in ("windlass", "pytorch", "read")]
        ratios = [f"{seconds[name] / seconds['windlass']:.2f}" for name in ("pytorch", "read")]
        rows.append([line["shape"], line["dtype"], str(line["rows"]), *rates, *ratios])
    heads = ["matrix", "weights", "rows", "windlass GB/s", "PyTorch GB/s", "plain read GB/s"]
    heads += ["PyTorch / ours", "of plain read"]
    text = (
        "One linear layer, inputs of so many rows; weights read per second. Inputs of int8 and int4 weights are "
        "bfloat16; PyTorch's kernels for them are `_weight_int8pack_mm` and `_weight_int4pack_mm_for_cpu`. A ratio "
        "above 1 means that ours is faster. The plain read is PyTorch's sum of all weights taken as float32."
    )
    return section("Linear layers of few rows", "benchmarks/linear.py", text, heads, rows, lines[-1])


def latent(lines: Sequence[Line]) -> str:
    """Latents held once, against transformers, which expands them."""
    rows = [
        [
            line["shape"],
            f"{line['depth']:,}",
            *(f"{line['tokens_per_s'][name]:.2f}" for name in ("unrotated", "rotated", "transformers")),
            f"{line['to_transformers']:.1f}",
            f"{line['to_rotated']:.3f}",
        ]
        for line in lines
    ]
    heads = ["shape", "depth", "windlass, tokens/s", "stored rotated", "transformers", "to transformers", "to rotated"]
    text = (
        "Decode of DeepSeek V3's shape (128 heads, latents of 512 and 64 channels) with one layer, without experts. "
        "Transformers holds latents, too, and expands all of them to keys and values in every step. Above 1 windlass "
        "is faster; `to rotated` is the median over 60 pairs."
    )
    return section("Latent attention", "benchmarks/latent.py", text, heads, rows, lines[-1])


def prefill(lines: Sequence[Line]) -> str:
    """In chunks against at once."""
    rows = []
    for at, line in enumerate(lines):
        whole = next(each for each in lines[at:] if each["way"] == "transformers")  # the last of each run
        rows.append(
            [
                line["shape"],
                f"{line['tokens']:,}",
                line["way"] + (f", budget {line['budget']:,}" if line.get("budget") else ""),
                "given back" if line["trim"] else "kept",
                str(line["chunk"]),
                f"{line['tokens'] / line['seconds']:.0f}",
                f"{line['bytes'] / 2**20:,.0f}",
                f"{whole['seconds'] / line['seconds']:.2f}",
                f"{line['bytes'] / whole['bytes']:.2f}",
            ]
        )
    heads = ["shape", "tokens", "way", "freed memory", "chunk", "tokens/s", "peak MiB above weights", "speed", "memory"]
    text = (
        "A prompt read in chunks, at once, and at once by plain transformers, each in a separate process; the last "
        "two columns compare with transformers. The cache itself is part of the peak. The allocator keeps freed "
        "memory for later, as is usual, or gives it back at once (`--trim`)."
    )
    return section("Prompts in chunks", "benchmarks/prefill.py", text, heads, rows, lines[-1])


def verification(lines: Sequence[Line]) -> str:
    """Passes of several drafts."""
    rows = []
    for line in lines:
        one = line["seconds"]["1"]
        passes = [f"{1e3 * taken:.1f} ({taken / one:.2f})" for taken in line["seconds"].values()]
        rows.append([line["shape"], f"{line['depth']:,}", f"{line['budget']:,}", line["policy"], *passes])
    heads = ["shape", "depth", "budget", "policy", *(f"{name} ms" for name in lines[0]["seconds"])]
    text = (
        "A pass that verifies drafts, by its tokens; in brackets over a pass of one token. A layer that evicts takes "
        "these tokens one by one; `whole` is the same pass taken as a chunk of a prompt."
    )
    return section("Verifying drafts", "benchmarks/verification.py", text, heads, rows, lines[-1])


def peers(lines: Sequence[Line]) -> str:
    """Windlass and other libraries."""
    body = peer_tables(json.dumps(line) for line in lines)
    return f"## Against other libraries\n\n`make bench-peers`. Same weights, same threads.\n\n{body}"


SECTIONS: dict[str, Callable[[Sequence[Line]], str]] = {
    "attention": attention,
    "paired": paired,
    "linear": linear,
    "latent": latent,
    "prefill": prefill,
    "verification": verification,
    "peers": peers,
    "serving": page_servers.serving,
}

if __name__ == "__main__":
    main()
