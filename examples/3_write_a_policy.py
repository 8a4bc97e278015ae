"""A policy of your own: six lines, checked against the contract, then run.

The command line takes it as `--policy examples/3_write_a_policy.py:LargeKeys`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import windlass
from windlass.evals.texts import ASKED, hide_pass_key, novel
from windlass.policies import Slots
from windlass.testing import check_policy


@dataclass(frozen=True)
class LargeKeys(windlass.policies.Policy):
    """Keeps the tokens with the largest keys.

    Source: this example.
    Differs: it has no source to differ from.
    """

    def score(self, slots: Slots) -> torch.Tensor:
        return slots.keys().float().norm(dim=-1)


def main() -> None:
    """Check the policy, then let it read."""
    check_policy(LargeKeys())
    print("LargeKeys keeps the contract")
    model, tokenizer = windlass.load(Path(windlass.__file__).parent / "assets" / "finder-3m", "float32")
    cache = windlass.KVCache(model, budget=128, policy=LargeKeys(), positions="compact", chunk=128)
    prompt = hide_pass_key(novel()[30_000:34_000], key="48213", depth=0.5) + ASKED
    [result] = windlass.generate(model, tokenizer, [prompt], cache, max_tokens=8)
    print(f"read {result.prompt_tokens} tokens, kept 128; hidden: 48213, answered:{result.text}")


if __name__ == "__main__":
    main()
