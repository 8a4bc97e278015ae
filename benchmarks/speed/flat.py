"""Endless generation in fixed memory: bytes held and time per token, block by block.

    PYTHONPATH=benchmarks python -m speed.flat tests/models/stories260K --tokens 20000 --budget 256

Prints one JSON line per block of tokens, then one with the model's own negative
log-likelihood of the end of the text, read afresh inside its trained window.
"""

import json
import statistics
import time
from typing import Annotated

import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import windlass


def main(
    model_name: Annotated[str, typer.Argument(metavar="MODEL")],
    tokens: int = 20_000,
    budget: int = 256,
    policy: str = "recent",
    positions: str = "compact",
    threads: int = 1,
    block: int = 2_000,
) -> None:
    """Generate a text and watch what it takes."""
    torch.set_num_threads(threads)
    model = windlass.attach(AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32).eval())
    tokenizer = AutoTokenizer.from_pretrained(model_name, model_max_length=10**9)
    cache = windlass.KVCache(model, budget=budget, policy=policy, positions=positions)
    sampling = windlass.Sampling(temperature=0.8, seed=1)
    stream = windlass.stream(model, tokenizer, "Once upon a time", cache, tokens, sampling, stop=())
    times: list[float] = []
    last, text = time.perf_counter(), []
    for piece in stream:
        now = time.perf_counter()
        times.append(now - last)
        text.append(piece)
        last = now
        if len(times) == block:
            row = {
                "tokens_seen": cache.tokens_seen[0],
                "bytes_held": cache.bytes_held,
                "held": cache.layers[0].table.occupancy_bound,
            }
            print(json.dumps({**row, "ms_per_token": round(statistics.median(times) * 1e3, 3)}), flush=True)
            times.clear()
    window = model.config.max_position_embeddings
    ids = torch.tensor([tokenizer("".join(text)[-8 * window :])["input_ids"][:window]])
    with torch.no_grad():
        nats = cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")[window // 8 :].mean()
    print(json.dumps({"nats_per_token_of_the_end": round(float(nats), 3), "end": "".join(text)[-200:]}))


if __name__ == "__main__":
    typer.run(main)
