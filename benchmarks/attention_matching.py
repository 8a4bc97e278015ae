"""Whether values and biases fitted to what all of a text's tokens give make a compressed text answer more questions.

    python benchmarks/attention_matching.py needles-3m --task magic_multikey_2 --samples 100 > results.jsonl

A text of an evaluation task is read whole, before its question is known, and a second time, as `KVzip` does: the
queries of the second reading, which stand behind the text, are the reference. A policy chooses the tokens that stay.
Then, per layer and kv head, three fits (Attention Matching, Zweiger et al. 2026, arXiv:2602.16284):

- `none`: keys and values stay what they are;
- `values`: new values by ridge regression, so that attention to what stays gives each reference query what attention
  to all tokens gives it;
- `bias`: a bias per slot, added to its logits, by least squares with non-negative weights, so that each reference
  query finds as much mass, the sum of the exponentials of its logits, as in all tokens;
- `both`: biases, then values under these biases.

`rms` chooses by the root of the mean squared probability over the reference queries, as the paper's cheap variant does.
Prints one JSON line per choice, fit and budget: the part of the questions that is answered, with a 95 % Wilson interval
over the texts, and the questions won and lost against the same choice with nothing fitted. All rows answer the same
questions. After `--minutes` no further text is begun.
"""

import argparse
import copy
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from head_budgets import kept, scores
from machine import machine
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KeyDiff, KVCache, KVzip, Slots, SnapKV
from windlass.cache.merging import MERGED, merge_of
from windlass.cache.options import CacheOptions
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit, load_task
from windlass.evals.report.summaries import wilson
from windlass.hf.load import load
from windlass.policies.base import Observation
from windlass.policies.calls import scores_of

FITS = ("none", "values", "bias", "both")
CHOICES = ("key_diff", "snapkv", "kvzip", "composite(key_diff)", "composite(kvzip)", "rms")
STEPS = 300  # of projected gradient
MOST = 20.0  # a weight, which is the exponential of a bias, lies between one of this and this
Row = tuple[str, str, int]  # what chooses, what is fitted, the divisor of the budget


@dataclass(frozen=True)
class Outcome:
    """Of one text the score of each question, the error of what reference queries read, and the seconds of the fit."""

    hits: list[float]
    error: float
    seconds: float


@dataclass(frozen=True)
class Reference(KVzip):
    """KVzip that keeps the rotated queries of the second reading, by layer."""

    queries: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list), compare=False, repr=False)

    def observe(self, slots: Slots, observation: Observation) -> None:
        super().observe(slots, observation)
        self.queries[slots.layer].append(slots.rotate(observation.queries, observation.positions[:, None])[0])


@dataclass(frozen=True)
class Layer:
    """What the reference queries find in one layer: rows are queries, of all query heads of a kv head."""

    logits: Tensor  # (kv_heads, rows, tokens)
    values: Tensor  # (kv_heads, tokens, channels)

    @cached_property
    def shares(self) -> Tensor:
        """Probabilities over all tokens."""
        return self.logits.softmax(-1)

    @cached_property
    def outputs(self) -> Tensor:
        """What attention to all tokens gives: (kv_heads, rows, channels)."""
        return self.shares @ self.values

    def fitted(self, stays: Tensor, asked: str, ridge: float, bias_ridge: float) -> tuple[Tensor, Tensor, float]:
        """Weights (kv_heads, n) and values (kv_heads, n, channels) of the n tokens of each head that stay.

        Beside them, how far the reference queries' outputs are off, as part of the norm of what they should be.
        """
        index = stays.nonzero()[:, 1].view(len(stays), -1)
        own = self.shares.gather(-1, index[:, None].expand(-1, self.shares.shape[1], -1))
        values = self.values.gather(1, index[..., None].expand(-1, -1, self.values.shape[-1]))
        weights = torch.ones_like(index, dtype=own.dtype)
        if asked in ("bias", "both"):
            weights = mass_weights(own, bias_ridge)
        found = own * weights[:, None]
        found = found / found.sum(-1, keepdim=True)
        if asked in ("values", "both"):
            values = nearest_values(found, self.outputs, values, ridge)
        return weights, values, float((found @ values - self.outputs).norm() / self.outputs.norm())


def mass_weights(shares: Tensor, ridge: float) -> Tensor:
    """Weights (heads, n) under which `shares` (heads, rows, n) of all mass sum to 1, as nearly as can be."""
    rows = shares.shape[1]
    square = shares.mT @ shares / rows
    penalty = ridge * square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    square = square + penalty * torch.eye(square.shape[-1], dtype=square.dtype)
    wanted = shares.mean(1) + penalty[..., 0]
    step = 1 / torch.linalg.matrix_norm(square, 2)[:, None]
    weights = ahead = torch.ones_like(wanted)
    momentum = 1.0
    for _ in range(STEPS):
        before, slope = weights, (square @ ahead[..., None])[..., 0] - wanted
        weights = (ahead - step * slope).clamp(1 / MOST, MOST)
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = weights + (momentum - 1) / grown * (weights - before)
        momentum = grown
    return weights


def nearest_values(found: Tensor, wanted: Tensor, values: Tensor, ridge: float) -> Tensor:
    """The values nearest to `values` that `found` shares (heads, rows, n) mix into `wanted` (heads, rows, channels)."""
    square = found.mT @ found / found.shape[1]
    penalty = ridge * square.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    eye = torch.eye(square.shape[-1], dtype=square.dtype)
    missing = found.mT @ (wanted - found @ values) / found.shape[1]
    change: Tensor = torch.linalg.solve(square + penalty * eye, missing)
    return values + change


def read(model: PreTrainedModel, ids: list[int]) -> tuple[KVCache, list[Layer], dict[str, list[Tensor]]]:
    """A cache that holds the text, what the reference queries find there, and per choice the ranks of the tokens."""
    policy = Reference(scoring_chunk=64)
    cache = KVCache(model, policy=policy, chunk=len(ids))
    ranks = {"kvzip": scores(model, cache, ids)}
    ranks["composite(kvzip)"] = ranks["kvzip"]
    ranks["snapkv"] = scores(model, KVCache(model, policy=SnapKV(), chunk=128), ids)
    here = cache.rows.standstill(cache.device)
    layers, ranks["key_diff"], ranks["rms"] = [], [], []
    for layer in cache.layers:
        layer.table.resize(len(ids))
        assert layer.positions[0, 0].tolist() == list(range(len(ids)))
        slots = layer.slots_at(here)
        heads, _, channels = (keys := slots.rotated_keys()[0].double()).shape
        queries = torch.cat(policy.queries[layer.index], 1).double()
        queries = queries.unflatten(0, (heads, -1)).flatten(1, 2)
        logits = queries @ keys.mT / channels**0.5
        layers.append(Layer(logits, slots.values()[0].double()))
        ranks["key_diff"].append(scores_of(KeyDiff(), layer.index, slots)[0].expand(heads, -1).double())
        ranks["rms"].append(logits.softmax(-1).square().mean(1))
    ranks["composite(key_diff)"] = ranks["key_diff"]
    return cache, layers, ranks


def asked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[Row],
    options: argparse.Namespace,
    number: int,
) -> list[Outcome]:
    """What came of one text in every row."""
    task = load_task(options.task)[1]
    sample = fit(SampleSpec(task, options.task, options.tokens, options.seed, number), tokenizer).sample
    ids = encode(tokenizer, sample.context, is_start=True)
    cache, layers, ranks = read(model, ids)
    cache.select_rows(torch.zeros(len(rows), dtype=torch.long))
    for its in cache.layers:
        its.rules = replace(its.rules, merge=merge_of("mean_count"))
        its.table.state[MERGED] = torch.zeros_like(its.positions, dtype=torch.float32)
    errors, seconds = [0.0] * len(rows), [0.0] * len(rows)
    for row, (choice, fits, divisor) in enumerate(rows):
        if divisor == 1:
            continue
        limits = CacheOptions(len(ids) // divisor, chunk=1, rollback=0).limits
        shape = "composite" if choice.startswith("composite") else "uniform"
        for its, layer, stays in zip(cache.layers, layers, kept(ranks[choice], limits, shape), strict=True):
            started = time.perf_counter()
            weights, values, off = layer.fitted(stays, fits, options.ridge, options.bias_ridge)
            seconds[row] += time.perf_counter() - started
            errors[row] += off / len(layers)
            places = its.store.in_place()
            assert places is not None
            its.positions[row].masked_fill_(~stays, -1)
            places[1][row][stays] = values.flatten(0, 1).float()
            its.table.state[MERGED][row][stays] = weights.flatten().float() - 1
    if min(divisor for _, _, divisor in rows) > 1:
        for its in cache.layers:
            its.resize(int((its.positions >= 0).sum(-1).max()) + 1)
    hits: list[list[float]] = [[] for _ in rows]
    for turn in sample.turns:
        again = copy.deepcopy(cache) if len(sample.turns) > 1 else cache
        results = generate.generate(
            model, tokenizer, [turn.question + turn.prefix] * len(rows), again, task.answer_tokens
        )
        for row, result in enumerate(results):
            hits[row].append(task.score(turn, result.text))
    return [Outcome(*each) for each in zip(hits, errors, seconds, strict=True)]


def main() -> None:
    """Read the arguments, print a line for each setting."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--task", default="magic_multikey_2")
    parser.add_argument("--choices", default=",".join(CHOICES))
    parser.add_argument("--fits", default=",".join(FITS))
    parser.add_argument("--divisors", default="4,8,16")
    parser.add_argument("--tokens", type=int, default=480)
    parser.add_argument("--ridge", type=float, default=1e-2)
    parser.add_argument("--bias-ridge", type=float, default=1e-2)
    parser.add_argument("--full", action="store_true", help="ask the full cache, and no other")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(str(options.model), "float32")
    names = options.choices.split(",")
    rows = [
        (name, fits, int(d)) for d in options.divisors.split(",") for name in names for fits in options.fits.split(",")
    ]
    if options.full:
        rows = [("full cache", "none", 1)]
    found: dict[Row, list[Outcome]] = {row: [] for row in rows}
    ends = time.monotonic() + 60 * options.minutes
    for number in range(options.samples):
        if time.monotonic() > ends:
            break
        for row, outcome in zip(rows, asked(model, tokenizer, rows, options, number), strict=True):
            found[row].append(outcome)
    for (choice, fits, divisor), its in found.items():
        scored = [hit for outcome in its for hit in outcome.hits]
        plain = [hit for outcome in found.get((choice, "none", divisor), its) for hit in outcome.hits]
        hits = sum(scored) / len(scored)
        low, high = wilson(hits, len(its))
        line = {
            "benchmark": "attention_matching",
            "model": options.model.name,
            "task": options.task,
            "tokens": options.tokens,
            "choice": choice,
            "fit": fits,
            "divisor": divisor,
            "samples": len(its),
            "questions": len(scored),
            "score": round(hits, 4),
            "low": low,
            "high": high,
            "won": sum(new > old for new, old in zip(scored, plain, strict=True)),
            "lost": sum(new < old for new, old in zip(scored, plain, strict=True)),
            "error": round(sum(outcome.error for outcome in its) / len(its), 4),
            "fit_seconds": round(sum(outcome.seconds for outcome in its) / len(its), 4),
            "ridge": options.ridge,
            "bias_ridge": options.bias_ridge,
            "seed": options.seed,
            "machine": machine(1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
