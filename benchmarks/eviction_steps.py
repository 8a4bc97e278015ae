"""A text predicted from a small cache that evicts in steps of one token, of 8 and of 64, policy by policy.

    python benchmarks/eviction_steps.py MODEL TEXT -o benchmarks/results/eviction_steps.jsonl
    python benchmarks/eviction_steps.py MODEL TEXT --policies lag_kv "lag_kv(16)" --steps 1 8 -o FILE

The first `--tokens` tokens of TEXT are predicted from `--budget` slots. A step of 8 or 64 is a chunk of a prompt, and
eviction comes after it. Steps of one are those of decode: pieces of 8 tokens that belong to no prompt, in which each
layer writes, attends and evicts token by token. Adds a JSON line per policy and step to `-o`, and passes over those
that it has. Policies that score no text that streams (`KVzip`, `Composite`), and those made of a file, are left out.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from windlass import KVCache
from windlass.cache.options import policy_of
from windlass.core.step import PROMPT
from windlass.engine.text import encode
from windlass.hf.load import load
from windlass.policies import NAMES, WRAPPERS, KeyDiff, OneShot, Policy

DECODED = 8  # tokens of a piece that evicts token by token: a pass of more is a chunk of a prompt


def policies() -> list[Policy]:
    """Each policy that scores a text as it streams, wrappers around `KeyDiff`."""
    made = [*(kind() for kind in NAMES.values()), *(kind(KeyDiff()) for kind in WRAPPERS.values())]
    return [policy for policy in made if not isinstance(policy, OneShot)]


def streamed(model: PreTrainedModel, cache: KVCache, ids: Sequence[int], step: int) -> Tensor:
    """Negative log-likelihood of every token but the first, where `step` tokens at a time are evicted."""
    losses, size = [], DECODED if step == 1 else step
    for start in range(0, len(ids) - 1, size):
        if step > 1:
            cache.schedule(PROMPT)
        piece, following = ids[start : start + size], ids[start + 1 : start + size + 1]
        logits = model(torch.tensor([piece[: len(following)]]), past_key_values=cache).logits[0]
        losses.append(cross_entropy(logits.float(), torch.tensor(following), reduction="none"))
    return torch.cat(losses)


def main() -> None:
    """Measure what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--policies", nargs="+", type=policy_of, default=policies())
    parser.add_argument("--steps", nargs="+", type=int, default=[64, 8, 1])
    parser.add_argument("--tokens", type=int, default=5120)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, options.dtype)
    ids = encode(tokenizer, options.text.read_text(), is_start=True)[: options.tokens + 1]
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    known = [json.loads(line) for line in lines]
    setting = {"kind": "eviction_steps", "model": Path(options.model).name, "dtype": options.dtype}
    setting |= {"text": options.text.stem, "tokens": len(ids) - 1, "budget": options.budget}
    for step in options.steps:
        for policy in options.policies:
            cell = {**setting, "policy": repr(policy), "step": step}
            if any(cell.items() <= line.items() for line in known):
                continue
            start = time.perf_counter()
            losses = streamed(model, KVCache(model, options.budget, policy, rollback=0), ids, step)
            cell |= {"nll": float(losses.mean()), "nll_by_quarter": [float(each.mean()) for each in losses.chunk(4)]}
            line = {**cell, "seconds": time.perf_counter() - start, **machine(options.threads)}
            with options.output.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
