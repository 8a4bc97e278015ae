"""The most bytes that a cache takes while a text is read, by policy: some hold a first text whole before they cut it.

    python benchmarks/peak_bytes.py > benchmarks/results/peak_bytes.jsonl

Two layers with the attention of `1b` (32 heads, 8 kv heads of 64 channels, bfloat16) and random weights, little else of
the model; 8,192 tokens are read into 1,024 slots in chunks of 512. `peak` is the most `bytes_held` after any layer of
any pass, `rest` that at the end, and `process` the bytes by which the peak of the process rose, activations and what
attention and scoring need for a moment among them. Each policy runs in a process of its own, since a process's peak
never falls. Prints one JSON line per policy. For Linux.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from machine import machine
from prefill import resident
from transformers import LlamaConfig, LlamaForCausalLM

import windlass
from windlass import KeyDiff, KVzip, Policy
from windlass.cache.options import policy_of
from windlass.policies import NAMES, WRAPPERS, OneShot, find
from windlass.policies.wrapper import scoring_chunk


def policies() -> list[Policy]:
    """One of each that can be made without a file; `composite` also around a policy that reads twice."""
    made = [kind() for kind in NAMES.values()] + [kind(KeyDiff()) for kind in WRAPPERS.values()]
    return [*made, WRAPPERS["composite"](KVzip())]


def run(policy: Policy, tokens: int, budget: int, chunk: int, heads: int) -> dict[str, int]:
    """Read one text in this process: bytes, see above."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=tokens,
    )
    model = windlass.attach(LlamaForCausalLM(config).bfloat16().eval())
    prompt = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    windlass.prefill(model, windlass.KVCache(model), prompt[:, :16].tolist())  # what is allocated once
    cache, held = windlass.KVCache(model, budget, policy, chunk=chunk), [0]
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: held.append(cache.bytes_held))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    windlass.prefill(model, cache, prompt.tolist())
    return {"peak": max(held), "rest": cache.bytes_held, "process": resident("VmHWM") - before}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--heads", type=int, default=32, help="of queries")
    parser.add_argument("--policy", help="measure this one alone, in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.policy is not None:
        print(json.dumps(run(policy_of(options.policy), options.tokens, options.budget, options.chunk, options.heads)))
        return
    for policy in policies():
        command = [sys.executable, __file__, *sys.argv[1:], "--policy", repr(policy)]
        found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        line = {
            "benchmark": "peak_bytes",
            "policy": repr(policy),
            "is_held_whole": find(policy, OneShot) is not None,
            "readings": 2 if scoring_chunk(policy) else 1,
            **found,
            "tokens": options.tokens,
            "budget": options.budget,
            "chunk": options.chunk,
            "machine": machine(1),
            "heads": options.heads,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
