"""A prompt read in chunks against the same prompt read at once: seconds, and the most memory above the weights.

    python benchmarks/prefill.py --shape 1b --tokens 4096 >> benchmarks/results/prefill.jsonl
    python benchmarks/prefill.py --shape 1b --tokens 4096 --trim >> benchmarks/results/prefill.jsonl
    python benchmarks/prefill.py --shape 1b --tokens 4096 --chunk 256 --budget 1024 >> benchmarks/results/prefill.jsonl

Each way runs in a process of its own, since a process's peak memory never falls; the ways alternate.
At once is plain transformers with a DynamicCache, and Windlass with a chunk as long as the prompt. A `--budget` is
that of the chunked way alone.
Prints one JSON line per way. For Linux, where a process can ask for its peak since a moment.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import machine
from transformers import DynamicCache

import windlass
from windlass.engine.generate import prefill
from windlass.evals.speed.rows import random_model, shape_of

WAYS = ("chunked", "at once", "transformers")


def run(way: str, shape: str, tokens: int, chunk: int, budget: int | None) -> dict[str, float]:
    """Read one prompt in this process: seconds, and the bytes by which its peak rose."""
    model = random_model(shape_of(shape, None)[0], torch.bfloat16)
    prompt = torch.randint(0, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    model(input_ids=prompt[:, :16], logits_to_keep=1)  # what PyTorch allocates once
    windlass.attach(model)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of making the weights, is forgotten
    before = resident("VmRSS")
    start = time.perf_counter()
    if way == "transformers":
        model(input_ids=prompt, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
    else:
        is_chunked = way == "chunked"
        policy = "recent" if is_chunked and budget else None
        cache = windlass.KVCache(model, budget if is_chunked else None, policy, chunk=chunk if is_chunked else tokens)
        prefill(model, cache, prompt.tolist())
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": resident("VmHWM") - before}


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--budget", type=int, help="of the chunked way, with the policy recent; none: all tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--trim", action="store_true", help="give freed memory back at once (glibc)")
    parser.add_argument("--way", choices=WAYS, help="Only this way, once, in this process.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.way:
        with torch.inference_mode():
            print(json.dumps(run(options.way, options.shape, options.tokens, options.chunk, options.budget)))
        return
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "1000000"} if options.trim else None
    for _ in range(options.rounds):
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--way", way]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            samples[way].append(json.loads(output.splitlines()[-1]))
    for way, each in samples.items():
        line = {"kind": "prefill", **machine(options.threads), "shape": options.shape, "tokens": options.tokens}
        is_chunked = way == "chunked"
        line |= {"trim": options.trim, "way": way, "chunk": options.chunk if is_chunked else options.tokens}
        line |= {"budget": options.budget if is_chunked else None}
        line |= {name: statistics.median(sample[name] for sample in each) for name in ("seconds", "bytes")}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
