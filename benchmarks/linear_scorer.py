"""Whether a linear map of a token's own queries and key can say what KVzip would: a trial, no part of the package.

    python benchmarks/linear_scorer.py needles-3m three-men.txt --tasks magic_multikey_2,magic_multiturn,magic_single
    windlass calibrate needles-3m three-men.txt --shares --groups 1 --policy benchmarks/linear_scorer.py:Linear \
        --tasks magic_multikey_2 --dtype float32 -o shares.json
    windlass eval needles-3m --tasks magic_multikey_2 --policies benchmarks/linear_scorer.py:Linear --budgets 4x \
        --shares shares.json --dtype float32 -o results.jsonl

Per layer, ridge regression from the un-rotated queries and keys of all heads to the logarithm of the largest
probability that a second reading gives the token in each kv head. Weights go to `linear_scorer.pt` in this folder, and
are for that model alone. `--tasks ""` fits on stretches of the novel. A policy can't tell groups of heads apart, so
that only layers may have shares of their own.
"""

import argparse
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from windlass import KVCache, KVzip, Needs, Policy, Slots, prefill
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries, Scores
from windlass.core.step import AttentionCall
from windlass.evals.calibration_texts import calibration_texts
from windlass.hf.load import load
from windlass.policies.base import Observation

FILE = Path(__file__).with_name("linear_scorer.pt")
RIDGE = 1e-2  # of the mean square of a feature
LEAST = 1e-6  # probability
SKIPPED = 4  # first tokens of a text, which attention takes as sinks


@cache
def weights() -> dict[int, Tensor]:
    """Per layer (features, kv_heads); none before anything was fitted."""
    found: dict[int, Tensor] = torch.load(FILE) if FILE.exists() else {}
    return found


def features(queries: Tensor, keys: Tensor) -> Tensor:
    """(batch, tokens, features): the queries and keys of all heads, and 1."""
    own = torch.cat([each.transpose(1, 2).flatten(2) for each in (queries, keys)], -1).float()
    return torch.cat([own, torch.ones_like(own[..., :1])], -1)


@dataclass(frozen=True)
class Linear(Policy):
    """Keeps the tokens that a linear map of their own queries and keys puts highest.

    Source: KVzap (arXiv:2601.07891), its linear form.
    Differs: reads un-rotated queries and keys in place of hidden states. Where a layer has other sizes than those that
    were fitted, all tokens rank alike.
    """

    needs = Needs(state=("worth",), mass=False)
    observed_queries = None

    def observe(self, slots: Slots, observation: Observation) -> None:
        fitted, keys = weights().get(slots.layer), slots.keys()
        at = observation.positions[:, None, :, None]
        is_token = (slots.positions[:, :, None] == at) & (at >= 0)  # (batch, kv_heads, tokens, slots)
        index = is_token.int().argmax(-1)
        own = keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[-1]))
        found = features(observation.queries, own)
        if fitted is None or found.shape[-1] != fitted.shape[0]:
            return
        worth, state = (found @ fitted).transpose(1, 2), slots.state["worth"]
        state.scatter_(-1, index, worth.where(is_token.any(-1), state.gather(-1, index)))

    def score(self, slots: Slots) -> Scores:
        return slots.state["worth"]


class Noting(KVCache):
    """Notes the queries and keys of each layer, the first time it attends."""

    noted: dict[int, tuple[Queries, NewKeys]] | None = None

    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """As any cache."""
        if self.noted is not None:
            self.noted.setdefault(layer, (queries, keys))
        return KVCache.attend(self, layer, queries, keys, values, call)


def main() -> None:
    """Read the arguments, fit, write the weights, and print how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("novel", type=Path)
    parser.add_argument("--tasks", default="magic_multikey_2,magic_multiturn,magic_single")
    parser.add_argument("--texts", type=int, default=90)
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, "float32", "cpu")
    started = time.perf_counter()
    texts = calibration_texts(tokenizer, options.novel, None, options.texts // 4, 500, options.seed + 1)
    texts += calibration_texts(tokenizer, options.novel, options.tasks or None, options.texts, 500, options.seed)
    squares, products = dict[int, Tensor](), dict[int, Tensor]()
    for ids in texts:
        cache = Noting(model, policy=KVzip(64), chunk=len(ids))
        cache.noted = {}
        prefill(model, cache, [ids])
        for layer in cache.layers:
            found = features(*cache.noted[layer.index])[0, SKIPPED:].double()
            order = layer.positions[0].where(layer.positions[0] >= 0, 2**30).argsort(-1)[:, SKIPPED : len(ids)]
            wanted = layer.table.state["peak"][0].gather(-1, order).T.clamp(min=LEAST).log().double()
            squares[layer.index] = squares.get(layer.index, torch.zeros(())) + found.T @ found
            products[layer.index] = products.get(layer.index, torch.zeros(())) + found.T @ wanted
    fitted = {}
    for number, square in squares.items():
        ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square))
        fitted[number] = torch.linalg.solve(square + ridge, products[number]).float()
    torch.save(fitted, FILE)
    print(f"{FILE.name}: {len(texts)} texts, {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
