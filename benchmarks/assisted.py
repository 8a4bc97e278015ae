"""Whether assisted decoding and prompt lookup write what greedy decoding writes, for every policy.

    python benchmarks/assisted.py

In float32: in bfloat16 a matrix product of several tokens rounds otherwise than one of one token, which decides where
two tokens are nearly as likely. The drafts of the assistant, which is the same model without a budget, are often wrong
once something is evicted.
Prints one line per model and policy, and how many tokens differ in all.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import windlass
from windlass.evals.texts import novel
from windlass.policies import NAMES, Policy
from windlass.testing import tiny_model

LIMITS: dict[str, Any] = {"sinks": 2, "window": 8}
DRAFTS = ("assistant", "lookup")


def models() -> Iterator[tuple[str, PreTrainedModel, torch.Tensor]]:
    """Each by its name, with a text."""
    model, tokenizer = windlass.load(Path(windlass.__file__).parent / "assets" / "finder-3m", dtype="float32")
    yield "finder-3m", model, tokenizer(novel()[5000:7000], return_tensors="pt").input_ids[:, :300]
    for family in ("llama", "gemma3"):
        tiny = windlass.attach(tiny_model(family))
        yield family, tiny, torch.randint(tiny.config.vocab_size, (1, 90), generator=torch.Generator().manual_seed(0))


def differing(model: PreTrainedModel, ids: torch.Tensor, policy: Policy, budget: int, tokens: int) -> list[int]:
    """Per kind of drafts, tokens that are not greedy's."""
    generate: Any = model.generate
    run: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    start = ids.shape[1]
    greedy = generate(ids, past_key_values=windlass.KVCache(model, budget, policy, **LIMITS), **run)[0, start:]
    found = []
    for drafts in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 10}):
        cache = windlass.KVCache(model, budget, policy, **LIMITS)
        ours = generate(ids, past_key_values=cache, **drafts, **run)[0, start:]
        found.append(tokens - int((ours == greedy).sum()))
    return found


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wrong = compared = 0
    for name, model, ids in models():
        for policy in (make() for make in NAMES.values()):
            found = differing(model, ids, policy, options.budget, options.tokens)
            wrong, compared = wrong + sum(found), compared + len(found) * options.tokens
            told = ", ".join(f"{kind} {count}" for kind, count in zip(DRAFTS, found, strict=True))
            print(f"{name} {policy!r}: {told} of {options.tokens} tokens differ", flush=True)
    print(f"{wrong} of {compared} tokens differ")


if __name__ == "__main__":
    main()
