"""What budgets that differ between heads or layers would gain over one for all, and the bytes that they would take.

    python benchmarks/head_budgets.py --samples 200 >> benchmarks/results/head_budgets.jsonl

A text of an evaluation task is read whole, before its question is known, and each policy ranks its tokens. Then
as many are kept in four shapes: `uniform`, as many in every head; `heads`, one ranking over the heads of a layer,
each head sure of a fifth of its budget (Ada-KV, arXiv:2407.11550); `composite`, layers differ and the heads of
one do not (see `windlass.Composite`); `all`, one ranking over all heads of all layers. Tokens are counted, not
bytes: what is not kept is freed where it lies. Prints one JSON line per policy, budget and shape: the score with
a 95 % Wilson interval, the tokens kept per head, and the bytes of key and value that these would take packed as
tightly as can be (`bytes_ragged`) and in one tensor a layer, as wide as its largest head (`bytes_rectangular`).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from machine import machine
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KVCache, Policy
from windlass.cache.compress import shared_budgets
from windlass.cache.options import CacheOptions, policy_of
from windlass.cli.demo import MODEL
from windlass.core.step import Limits
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit, load_task
from windlass.evals.report.summaries import wilson
from windlass.hf.load import load
from windlass.policies.calls import scores_of

SHAPES = ("uniform", "heads", "composite", "all")
FLOOR = 0.2  # of the mean budget, which each head of a layer is sure of


def scores(model: PreTrainedModel, cache: KVCache, ids: list[int]) -> list[Tensor]:
    """Read a text into an empty cache without budget; per layer the rank (heads, tokens) of each of its tokens."""
    generate.prefill(model, cache, [ids])
    here = cache.rows.standstill(cache.device)
    ranks = []
    for layer in cache.layers:
        score = scores_of(cache.policy, layer.index, layer.slots_at(here))[0]
        order = layer.positions[0].where(layer.positions[0] >= 0, 2**30).argsort(-1)[:, : len(ids)]
        heads = layer.store.layout[0]
        ranks.append(score.gather(-1, order).expand(heads, -1).double().nan_to_num())
    return ranks


def kept(ranks: list[Tensor], limits: Limits, shape: str) -> list[Tensor]:
    """Per layer which tokens (heads, tokens) stay, of equal ones the newer."""
    assert limits.budget is not None
    heads, tokens = ranks[0].shape
    places = torch.arange(tokens)
    is_sure = (places < limits.sinks) | (places >= tokens - limits.window)
    room = limits.budget - limits.sinks - limits.window
    contested = [rank.masked_fill(is_sure, -torch.inf) for rank in ranks]
    rooms = [room] * len(ranks)
    if shape == "composite":
        rooms = [
            budget - limits.sinks - limits.window for budget in shared_budgets([c[None] for c in contested], limits)
        ]
    if shape in ("uniform", "composite"):
        return [best(c, n, -1) | is_sure for c, n in zip(contested, rooms, strict=True)]
    if shape == "all":
        chosen = best(torch.cat(contested).flatten(), room * heads * len(ranks), 0).view(len(ranks), heads, tokens)
        return [each | is_sure for each in chosen]
    floors = [best(c, min(room, int(FLOOR * limits.budget)), -1) for c in contested]
    rest = [room * heads - int(floor.sum()) for floor in floors]
    more = [
        best(c.masked_fill(floor, -torch.inf).flatten(), n, 0).view(heads, tokens)
        for c, floor, n in zip(contested, floors, rest, strict=True)
    ]
    return [floor | each | is_sure for floor, each in zip(floors, more, strict=True)]


def best(score: Tensor, count: int, dim: int) -> Tensor:
    """Whether each is one of the `count` highest along `dim`."""
    order = score.flip(dim).argsort(dim=dim, descending=True, stable=True).flip(dim)
    places = score.shape[dim] - 1 - order.narrow(dim, score.shape[dim] - count, count)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(dim, places, True)


def sizes(model: PreTrainedModel, masks: list[Tensor]) -> dict[str, float]:
    """Tokens per head, and bytes of bfloat16 keys and values."""
    counts = torch.stack([mask.sum(-1) for mask in masks])
    config = model.config.get_text_config()
    token = 2 * 2 * config.head_dim
    widest = int(counts.amax(-1).sum()) * counts.shape[1]
    return {
        "tokens_per_head": float(counts.double().mean()),
        "bytes_ragged": int(counts.sum()) * token,
        "bytes_rectangular": widest * token,
    }


def main() -> None:
    """Read the arguments, print a line for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, default=Path("windlass/assets") / MODEL)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--task", default="magic_single")
    parser.add_argument("--policies", default="key_diff snapkv kvzip(64)")
    parser.add_argument("--divisors", default="4 8")
    parser.add_argument("--tokens", type=int, default=440)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(str(options.model), "float32")
    divisors = [int(each) for each in options.divisors.split()]
    for name in options.policies.split():
        policy = policy_of(name)
        rows = [(divisor, shape) for divisor in divisors for shape in SHAPES]
        hits: dict[tuple[int, str], list[float]] = defaultdict(list)
        held: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
        for number in range(options.samples):
            for row, hit, size in asked(model, tokenizer, policy, rows, options, number):
                hits[row].append(hit)
                held[row].append(size)
        for divisor, shape in rows:
            found = hits[divisor, shape]
            low, high = wilson(sum(found) / len(found), len(found))
            means = {
                key: sum(each[key] for each in held[divisor, shape]) / len(found) for key in held[divisor, shape][0]
            }
            line = {
                "benchmark": "head_budgets",
                "model": options.model.name,
                "task": options.task,
                "tokens": options.tokens,
                "policy": repr(policy),
                "divisor": divisor,
                "shape": shape,
                "samples": len(found),
                "score": sum(found) / len(found),
                "low": low,
                "high": high,
                **{key: round(value, 2) for key, value in means.items()},
                "seed": options.seed,
                "machine": machine(1),
            }
            print(json.dumps(line), flush=True)


def asked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    policy: Policy,
    rows: list[tuple[int, str]],
    options: argparse.Namespace,
    number: int,
) -> list[tuple[tuple[int, str], float, dict[str, float]]]:
    """The score of every setting on one text, all of them as rows of one batch, and what each keeps."""
    task = load_task(options.task)[1]
    sample = fit(SampleSpec(task, options.task, options.tokens, options.seed, number), tokenizer).sample
    ids = encode(tokenizer, sample.context, is_start=True)
    cache = KVCache(model, policy=policy, chunk=len(ids))
    ranks = scores(model, cache, ids)
    masks = [
        kept(ranks, CacheOptions(len(ids) // divisor, chunk=1, rollback=0).limits, shape) for divisor, shape in rows
    ]
    cache.select_rows(torch.zeros(len(rows), dtype=torch.long))
    for layer in cache.layers:
        stays = torch.stack([mask[layer.index] for mask in masks])  # (rows, heads, tokens)
        if layer.positions.shape[1] != stays.shape[1]:
            layer.table.split_heads()
        layer.edit(
            lambda positions, stays=stays: positions.where(  # type: ignore[misc]
                stays.gather(-1, positions.clamp(min=0).long()) & (positions >= 0), -1
            )
        )
    turn = sample.turns[0]
    results = generate.generate(model, tokenizer, [turn.question + turn.prefix] * len(rows), cache, task.answer_tokens)
    return [
        (row, task.score(turn, result.text), sizes(model, mask))
        for row, result, mask in zip(rows, results, masks, strict=True)
    ]


if __name__ == "__main__":
    main()
