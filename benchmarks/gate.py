"""A trained append-or-accumulate gate, against policies that choose what is dropped or merged, at equal bytes.

    python benchmarks/gate.py needles-3m moby-dick.txt --samples 60 >> benchmarks/results/gate.jsonl

The gate is linear, one per layer and kv head, and reads a token's un-rotated key: whether it joins the token before it
(DMC, arXiv 2403.09636, whose models are trained for that; this one is left as it is). It is fitted on texts with their
questions, pass keys and magic numbers in another novel than those that are measured. One forward pass of each tells by
how much the outputs of attention would change, summed over the queries of question and answer, were a token and the one
before it one token of weight two with their mean; the logarithm of that is regressed on the key, in closed form.
(Summed over all later queries, near ones decide, and the gate joins just what is asked for.) What lies below a
head's quantile joins, so that every head keeps a little less than `1 / ratio` of its tokens. `Gate` joins tokens as
they come, also without a budget (`own`); `GateOrder` merges or drops what is over budget in the order of these numbers.
Prints one JSON line per task, policy, rule and budget, with a 95 % Wilson interval.
"""

import argparse
import json
import random
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from cells import TASKS, Cells
from machine import machine
from merging import Alternate
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from windlass import KeyDiff, Policy, Recent
from windlass.core.errors import PolicyError
from windlass.core.types import NewKeys, Queries, Scores
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit
from windlass.hf.load import load
from windlass.policies import Needs, Slots
from windlass.policies.base import ACCUMULATES, ModelSpecific, NewTokens, scatter_sorted

HARM = "gate_harm"  # state: what the gate says of joining the token before, less is better
MARGIN = 0.9  # of the budget that a gate is set to: heads differ from text to text
RIDGE = 1e-3
RATIOS = (2, 4)
SEED = 1  # of the texts that are fitted on


@dataclass(frozen=True)
class Table:
    """Per layer and kv head: weights (layers, kv_heads, head_dim), biases, and by ratio what joins."""

    weights: Tensor
    biases: Tensor
    thresholds: dict[int, Tensor]

    def harm(self, keys: NewKeys, layer: int) -> Tensor:
        """What joining the token before would cost, (batch, kv_heads, tokens)."""
        weights = self.weights[layer].to(keys.device)
        if weights.shape != (keys.shape[1], keys.shape[3]):
            raise PolicyError(
                f"a gate for keys (kv_heads, head_dim) {tuple(weights.shape)} is given {tuple(keys.shape)}"
            )
        return (keys.float() * weights[:, None]).sum(-1) + self.biases[layer][:, None].to(keys.device)


@cache
def table_of(file: str) -> Table:
    """The gates of a file."""
    held = torch.load(file, weights_only=True)
    return Table(held["weights"], held["biases"], held["thresholds"])


@dataclass(frozen=True)
class Gate(Policy, ModelSpecific):
    """Joins tokens as they come; what is over budget all the same goes oldest first.

    Source: append or accumulate, Nawrot et al. 2024 (arXiv:2403.09636). Differs: see the module.
    """

    file: str
    ratio: int

    needs = Needs(state=(ACCUMULATES,))

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        table = table_of(self.file)
        limit = table.thresholds[self.ratio][layer][:, None].to(keys.device)
        return NewTokens(queries, keys, {ACCUMULATES: (table.harm(keys, layer) < limit).float()})

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float()


@dataclass(frozen=True)
class GateOrder(Policy, ModelSpecific):
    """Evicts tokens in the order in which the gate would join the next one with them.

    Source: as `Gate`. Differs: the budget decides how many.
    """

    file: str

    needs = Needs(state=(HARM,))

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        return NewTokens(queries, keys, {HARM: table_of(self.file).harm(keys, layer)})

    def score(self, slots: Slots) -> Scores:
        order = slots.positions.where(slots.positions >= 0, 2**30).argsort(dim=-1, stable=True)
        return scatter_sorted(slots.state[HARM].gather(-1, order).roll(-1, -1), order)


@torch.no_grad()
def harms(model: PreTrainedModel, ids: list[int], asked: int) -> tuple[Tensor, Tensor]:
    """Un-rotated keys, and the logarithm of what joining each token with the one before changes from query `asked` on.

    Of the tokens before `asked` but the first: (layers, kv_heads, asked - 1, head_dim), and without the last axis.
    """
    kept: dict[str, list[Tensor]] = {"k_proj": [], "v_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _, __, out, name=name: kept[name].append(out[0]))
        for layer in model.model.layers
        for name in kept
    ]
    attentions = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    kv_heads, found = model.config.num_key_value_heads, []
    for probabilities, values in zip(attentions, kept["v_proj"], strict=True):
        v = values.unflatten(-1, (kv_heads, -1)).transpose(0, 1).double()  # (kv_heads, tokens, channels)
        p = probabilities[0].unflatten(0, (kv_heads, -1))[:, :, asked:].double()
        before, after = p[..., : asked - 1], p[..., 1:asked]  # of token t - 1 and t, by query
        both = (before * after).sqrt()
        a, b = before - both, after - both
        products = [(x * y).sum((1, 2)) for x, y in ((a, a), (b, b), (a, b))]
        first, second = v[:, : asked - 1], v[:, 1:asked]
        lengths = [(x * y).sum(-1) for x, y in ((first, first), (second, second), (first, second))]
        error = products[0] * lengths[0] + products[1] * lengths[1] + 2 * products[2] * lengths[2]
        found.append(error.clamp(min=1e-12).log())
    keys = [each.unflatten(-1, (kv_heads, -1)).transpose(0, 1)[:, 1:asked] for each in kept["k_proj"]]
    return torch.stack(keys).double(), torch.stack(found)


def fitted(name: str, tokenizer: PreTrainedTokenizerBase, novel: Path, texts: int, length: int, file: Path) -> Tensor:
    """Write the gates of a model to `file`; returns which part of the variance they tell, per layer and head."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation="eager").eval()
    draw, keys, targets = random.Random(SEED), list[Tensor](), list[Tensor]()
    for number in range(texts):
        label = draw.choice(("passkey_novel", "magic_single"))
        task = TASKS[label].reading(novel)
        assert task is not None, "a task that reads no novel"
        sample = fit(SampleSpec(task, label, length, SEED, number), tokenizer).sample
        (turn,) = sample.turns
        context = encode(tokenizer, sample.context, is_start=True)
        asking = f"{turn.question}{turn.prefix} {' '.join(turn.expected)}"
        states, told = harms(model, [*context, *encode(tokenizer, asking, is_start=False)], len(context))
        keys.append(states)
        targets.append(told)
    x, y = torch.cat(keys, 2), torch.cat(targets, 2)
    mean_x, mean_y = x.mean(2, keepdim=True), y.mean(2, keepdim=True)
    dx, dy = x - mean_x, y - mean_y
    gram = dx.mT @ dx
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    weights = torch.linalg.solve(gram + RIDGE * scale * torch.eye(x.shape[-1]), (dx.mT @ dy[..., None]))[..., 0]
    biases = mean_y[..., 0] - (mean_x[..., 0, :] * weights).sum(-1)
    told = (x * weights[..., None, :]).sum(-1) + biases[..., None]
    thresholds = {ratio: told.quantile(1 - MARGIN / ratio, dim=-1).float() for ratio in RATIOS}
    torch.save({"weights": weights.float(), "biases": biases.float(), "thresholds": thresholds}, file)
    explained: Tensor = 1 - (y - told).square().mean(-1) / dy.square().mean(-1)
    return explained


def main() -> None:
    """Fit, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("novel", type=Path, help="to fit on")
    parser.add_argument("--file", type=Path, default=Path("gate.pt"), help="where the gates go")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--length", type=int, default=400)
    parser.add_argument("--tasks", nargs="+", default=["passkey_novel", "magic_single"])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32")
    name = {"kind": "gate", **machine(options.threads), "model": options.model.rstrip("/").split("/")[-1]}
    started = time.perf_counter()
    told = fitted(options.model, tokenizer, options.novel, options.texts, options.length, options.file)
    line = {
        "task": "fit",
        "texts": options.texts,
        "explained": [[round(float(each), 3) for each in row] for row in told],
    }
    print(json.dumps({**name, **line, "seconds": time.perf_counter() - started}), flush=True)
    cells = Cells(model, tokenizer, options.length, options.samples)
    file = str(options.file)
    for label in options.tasks:
        print(json.dumps(name | cells.measure(label, Recent(), None, None)), flush=True)
        for ratio in RATIOS:
            gate = cells.measure(label, Gate(file, ratio), None, "mean_count(next)")
            print(json.dumps(name | gate | {"budget": f"own, {ratio}x"}), flush=True)
            rows: list[tuple[Policy, str | None]] = [
                (Gate(file, ratio), "mean_count(next)"),
                (GateOrder(file), "mean_count(next)"),
                (GateOrder(file), None),
                (KeyDiff(), None),
                (Recent(), None),
                (Alternate(ratio), "mean_count(next)"),
                (KeyDiff(), "mean_count"),
            ]
            for policy, rule in rows:
                print(json.dumps(name | cells.measure(label, policy, ratio, rule)), flush=True)


if __name__ == "__main__":
    main()
