"""How often each row of the demo comes out, over several seeds: key, depth and all else drawn anew.

    python benchmarks/demo_rates.py --seeds 10

Prints one JSON line per setting. The whole novel takes about 15 s a seed and setting on 2 cores.
"""

import json
from importlib import resources
from random import Random
from typing import Annotated

import torch
import typer

from windlass.cache.options import policy_of
from windlass.cli import demo
from windlass.evals import texts
from windlass.hf.load import load

SETTINGS = [
    # policy, budget, positions, tokens (None: the whole novel)
    ("key_diff", 256, "compact", None),
    ("recent", 256, "compact", None),
    ("recent", None, "original", 3000),
    ("recent", None, "self_extend(8, 64)", 3000),
    ("recent", None, "original", 6000),
    ("recent", None, "self_extend(8, 64)", 6000),
]


def main(
    seeds: Annotated[int, typer.Option(min=1)] = 10,
    first: int = 0,
    threads: int = 2,
) -> None:
    """Count the keys found."""
    torch.set_num_threads(threads)
    with resources.as_file(resources.files("windlass") / "assets" / demo.MODEL) as folder:
        model, tokenizer = load(str(folder), "float32")
    for policy, budget, positions, tokens in SETTINGS:
        novel = texts.novel()
        text = novel if tokens is None else demo.beginning(tokenizer, novel, tokens)
        found = []
        for seed in range(first, first + seeds):
            draw = Random(seed)
            key = "".join(draw.choice("0123456789") for _ in range(5))
            setup = demo.Setup(texts.hide_pass_key(text, key, draw.random()), policy_of(policy), budget, positions)
            found.append(demo.read_and_ask(model, tokenizer, setup, key).is_found)
        row = {"cache": setup.label, "tokens": tokens or "all"}
        print(json.dumps({**row, "found": sum(found), "of": seeds, "seeds": [first, first + seeds]}), flush=True)


if __name__ == "__main__":
    typer.run(main)
