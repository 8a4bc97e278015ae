"""A long text through a small cache, token by token, against a window that is read afresh for every token.

    python benchmarks/stream.py windlass/assets/finder-3m --tokens 100000 >> benchmarks/results/stream.jsonl

The shipped novel (or `--text FILE`) is predicted from a cache of `--budget` slots under each of `--positions`.
At `--samples` places, evenly over the text, the model itself (transformers, no cache of ours) predicts the same
token from as many tokens as the cache showed it: the first of the text and the newest. Prints a JSON line per mode:
the mean negative log-likelihood per tenth of the text, and both means at those places, in nats per token.
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

from windlass import KVCache, Recent
from windlass.engine.text import encode
from windlass.evals.texts import novel
from windlass.hf.load import load

ROWS = 16  # windows that are read together


def streamed(model: PreTrainedModel, cache: KVCache, ids: Sequence[int]) -> Tensor:
    """Negative log-likelihood of every token but the first, from a cache that takes one token a step."""
    losses = torch.empty(len(ids) - 1)
    for at, token in enumerate(ids[:-1]):
        logits = model(torch.tensor([[token]]), past_key_values=cache).logits[0]
        losses[at] = cross_entropy(logits.float(), torch.tensor([ids[at + 1]]))
    return losses


def afresh(model: PreTrainedModel, ids: Sequence[int], places: Sequence[int], seen: int) -> Tensor:
    """The same for `places` only, each from the first token of the text and the `seen - 1` newest ones."""
    losses = []
    for start in range(0, len(places), ROWS):
        some = places[start : start + ROWS]
        windows = torch.tensor([[ids[0], *ids[at - seen + 2 : at + 1]] for at in some])
        logits = model(windows, use_cache=False, logits_to_keep=1).logits[:, -1]
        losses.append(cross_entropy(logits.float(), torch.tensor([ids[at + 1] for at in some]), reduction="none"))
    return torch.cat(losses)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--positions", nargs="+", default=["compact", "original"])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32")
    text = novel() if options.text is None else options.text.read_text()
    ids = encode(tokenizer, text, is_start=True)[: options.tokens + 1]
    seen = options.budget + 1  # the kept tokens and the one that asks
    places = [round(each) for each in torch.linspace(2 * seen, len(ids) - 2, options.samples).tolist()]
    fresh = afresh(model, ids, places, seen)
    for mode in options.positions:
        start = time.perf_counter()
        losses = streamed(model, KVCache(model, options.budget, Recent(), positions=mode, rollback=0), ids)
        line = {"kind": "stream", "model": Path(options.model).name, "policy": "Recent()", "budget": options.budget}
        line |= {"positions": mode, "text": "novel" if options.text is None else options.text.name}
        line |= {"tokens": len(losses), "nll_by_tenth": [float(tenth.mean()) for tenth in losses.tensor_split(10)]}
        differences = losses[places] - fresh
        line |= {"samples": len(places), "nll": float(losses[places].mean()), "nll_afresh": float(fresh.mean())}
        line |= {"difference": float(differences.mean()), "error": float(differences.std() / len(places) ** 0.5)}
        print(json.dumps({**line, "seconds": time.perf_counter() - start, **machine(options.threads)}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
