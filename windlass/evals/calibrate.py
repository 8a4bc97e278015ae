"""`windlass calibrate`: costs of pairs, shares of heads, weights of a scorer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.cache.shares import Shares
from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.parse import parse_list
from windlass.core.step import PROMPT
from windlass.core.types import NewKeys, Queries, Scores
from windlass.engine.generate import prefill
from windlass.engine.text import encode
from windlass.evals.grid import SampleSpec, fit, load_task
from windlass.evals.task import Budget
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache
from windlass.hf.weights import fingerprint
from windlass.policies import Initializer, KVzip, Needs, Policy, Slots
from windlass.policies.base import PerToken
from windlass.policies.calls import scores_of
from windlass.policies.linear_scorer import LayerWeights, Scorer
from windlass.policies.pairs import PairTable
from windlass.policies.wrappers import Wrapper

DIGITS: Final = 3  # decimals of a share: heads with equal shares form a group


def measure_shares(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    policy: Policy,
    budget: Budget,
    groups: int,
    progress: Callable[[int, int], None],
) -> Shares:
    """The shares of the heads of `model`, on average over `texts` of token ids, by the scores of `policy`.

    The heads of a layer are put into at most so many `groups` of one share each. `progress` is called with (texts read,
    texts). After an interrupt the shares are those of fewer texts.

    Raises: KeyboardInterrupt before a text was read, and UsageError for texts that fit into the budget whole, or a
    policy that has no scores to compare.
    """
    found: list[list[Tensor | None]] = []  # per text and layer
    try:
        for number, ids in enumerate(texts):
            progress(number, len(texts))
            found.append(kept_shares(model, ids, policy, budget, is_by_head=groups > 1))
        progress(len(texts), len(texts))
    except KeyboardInterrupt:
        if not found:
            raise
    by_layer = [[each for each in own if each is not None] for own in zip(*found, strict=True)]
    means = [torch.stack(own).mean(0).tolist() if own else None for own in by_layer]
    layers = [None if mean is None else clustered(mean, groups) for mean in means]
    return Shares(
        layers, model=type(model).__name__, fingerprint=fingerprint(model), policy=repr(policy),
        budget=budget.asked, texts=len(found),
    )  # fmt: skip


@torch.no_grad()
def kept_shares(
    model: PreTrainedModel, ids: Sequence[int], policy: Policy, budget: Budget, is_by_head: bool
) -> list[Tensor | None]:
    """The tokens that each kv head of each layer keeps of one text, in multiples of the mean.

    A layer that has its own size gets None. One ranking goes over the tokens of all heads, or over those of a rank in
    all heads of a layer, where not `is_by_head`.
    """
    cache = KVCache(model, policy=policy, chunk=512, rollback=0)
    prefill(model, cache, [list(ids)])
    limits = CacheOptions(budget.of(len(ids)), policy=policy).limits
    assert limits.budget is not None, "shares of no budget"
    free = limits.budget - limits.sinks - limits.window
    here = cache.rows.standstill(cache.device)
    found: list[Tensor | None] = [None] * len(cache.layers)
    scores: dict[int, Tensor] = {}
    for layer in cache.layers:
        if layer.rules.most_visible is not None:
            continue
        score = scores_of(policy, layer.index, layer.slots_at(here))[0].double()
        at = layer.positions[0]
        is_free = (at >= limits.sinks) & (at < len(ids) - limits.window)
        score = score.nan_to_num().masked_fill(~is_free, -torch.inf).expand(layer.store.layout[0], -1)
        if not is_by_head:
            score = score.sort(-1, descending=True).values.mean(0, keepdim=True).expand_as(score)
        scores[layer.index] = score
    if not scores:
        raise UsageError(
            "shares: all layers of this model attend to a window of their own, so there is nothing to share"
        )
    every = torch.cat([score.flatten() for score in scores.values()])
    wanted = free * sum(score.shape[0] for score in scores.values())
    if wanted >= int((every > -torch.inf).sum()):
        raise UsageError(f"shares: a text of {len(ids)} tokens fits into a budget of {limits.budget}. Give longer ones")
    # Among equal scores the lower layer and head win.
    is_kept = torch.zeros_like(every, dtype=torch.bool)
    is_kept[every.sort(descending=True, stable=True).indices[:wanted]] = True
    parts = is_kept.split([score.numel() for score in scores.values()])
    for (index, score), kept in zip(scores.items(), parts, strict=True):
        found[index] = kept.view(score.shape).sum(-1).double() / free
    return found


def clustered(shares: Sequence[float], groups: int) -> list[float]:
    """The shares of heads in at most so many groups, each with the mean of its own, so that they differ least.

    Groups hold neighbours in the order of their shares. The sum of squared differences from the means is least.
    """
    order = sorted(range(len(shares)), key=lambda head: shares[head])
    values = [shares[head] for head in order]

    def cost(start: int, stop: int) -> float:
        mean = sum(values[start:stop]) / (stop - start)
        return sum((value - mean) ** 2 for value in values[start:stop])

    # The best cuts of the first n values into k groups: (cost, starts of the groups).
    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, stop), (0,)) for stop in range(1, len(values) + 1)]
    for _ in range(1, min(groups, len(values))):
        best = [
            min(
                [
                    best[stop - 1],
                    *((best[cut - 1][0] + cost(cut, stop), (*best[cut - 1][1], cut)) for cut in range(1, stop)),
                ]
            )
            for stop in range(1, len(values) + 1)
        ]
    starts = best[-1][1]
    result = [0.0] * len(shares)
    for start, stop in zip(starts, (*starts[1:], len(values)), strict=True):
        for place in range(start, stop):
            result[order[place]] = round(sum(values[start:stop]) / (stop - start), DIGITS)
    return result


RULE: Final = "mean_count(next)"
FIRST_TOKENS: Final = 4  # first tokens of a stretch, which are in no pair
CONTEXT: Final = 128  # tokens of a stretch, in which pairs are merged
FOLLOWING: Final = 32  # tokens after it, whose predictions are compared
ROWS: Final = 32  # pairs that are measured side by side


def measure_pair_costs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> PairTable:
    """The costs of about `tokens` pairs, in stretches of the text that `seed` chooses.

    `progress` is called with (pairs measured, pairs to measure). After an interrupt the table is of fewer pairs.

    Raises: UsageError for a text too short for one stretch, and KeyboardInterrupt before anything is measured.
    """
    ids = encode(tokenizer, text, is_start=False)
    start = encode(tokenizer, text, is_start=True)
    start = start[: len(start) - len(ids)]  # special tokens
    inner = CONTEXT - len(start)
    stretches = range(0, len(ids) - inner - FOLLOWING, inner)
    if not stretches:
        raise UsageError(f"the text has {len(ids)} tokens. Give one of at least {inner + FOLLOWING + 1}")
    firsts = range(max(FIRST_TOKENS, len(start)), CONTEXT - 1)
    wanted = min(len(stretches), math.ceil(tokens / len(firsts)))
    done: list[tuple[list[int], list[float]]] = []
    try:
        for number, at in enumerate(sorted(random.Random(seed).sample(stretches, wanted))):
            progress(number * len(firsts), wanted * len(firsts))
            stretch = start + ids[at : at + inner + FOLLOWING + 1]
            done.append((stretch, pair_costs(model, stretch, firsts)))
        progress(wanted * len(firsts), wanted * len(firsts))
    except KeyboardInterrupt:
        if not done:
            raise
    costs: dict[tuple[int, int], list[float]] = {}
    for stretch, own in done:
        for pair, cost in zip(firsts, own, strict=True):
            costs.setdefault((stretch[pair], stretch[pair + 1]), []).append(cost)
    pairs = [(*pair, len(found), sum(found) / len(found)) for pair, found in costs.items()]
    return PairTable(
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        merge=RULE,
        tokens=len(done) * len(firsts),
        seed=seed,
        pairs=sorted(pairs, key=lambda pair: (pair[3], pair)),
    )


@torch.inference_mode()
def pair_costs(model: PreTrainedModel, stretch: Sequence[int], firsts: Sequence[int]) -> list[float]:
    """The cost of merging the token at each of the indices `firsts`, which follow each other, into the next one.

    In nats: the mean KL over the predictions of the tokens that follow `CONTEXT` and one.
    """
    ids = torch.tensor([stretch], device=model.device)
    full = _predicted(model, KVCache(model), ids, 1)
    costs: list[float] = []
    for at in range(0, len(firsts), ROWS):
        rows = min(ROWS, len(firsts) - at)
        # The step of the token after `CONTEXT` is the first to be over budget, by one.
        cache = KVCache(
            model, CONTEXT, Successive(firsts[at]), FIRST_TOKENS, window=1, chunk=CONTEXT, rollback=0, merge=RULE
        )
        merged = _predicted(model, cache, ids, rows)
        costs += (full.exp() * (full - merged)).sum(-1).mean(-1).clamp(min=0).tolist()
    return costs


@dataclass(frozen=True)
class Successive(Policy):
    """Evicts position `first` in the first row, the next one in the second row, and so on.

    Source: none. Differs: none, as it measures.
    """

    first: int

    needs = Needs(per_head=False)

    def score(self, slots: Slots) -> Scores:
        rows = torch.arange(slots.positions.shape[0], device=slots.positions.device)
        return (slots.positions != self.first + rows[:, None, None]).float()


def _predicted(model: PreTrainedModel, cache: KVCache, ids: Tensor, rows: int) -> Tensor:
    """Log-probabilities (rows, following, vocabulary) after the tokens that follow, of `rows` copies of the text."""
    forward(model, ids[:, :CONTEXT], None, cache, [])
    cache.select_rows(torch.zeros(rows, dtype=torch.long, device=ids.device))
    ids = ids.expand(rows, -1)
    forward(model, ids[:, CONTEXT : CONTEXT + 1], None, cache, [])
    following = ids[:, CONTEXT + 1 :]
    columns = list(range(following.shape[1]))
    return forward(model, following, None, cache, columns, how=PROMPT).float().log_softmax(-1)


RIDGE: Final = 1e-2  # of the mean variance of a feature
LEAST: Final = 1e-6  # probability: below it, all scores are alike
SINKS: Final = 4  # first tokens of a text: attention reads any token there, and a cache never evicts them
TEACHER: Final = KVzip(64)
MAX_FEATURES: Final = 4096  # of a head: its products with each other are held in float64, for all heads


@dataclass(frozen=True)
class FeatureRecorder(Wrapper, Initializer):
    """The wrapped policy, which also notes the features of each layer's tokens, in pieces, as they come.

    Source: none.
    Differs: none.
    """

    pieces: dict[int, list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        self.pieces.setdefault(layer, []).append(features(queries, keys)[0])
        return {}

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)


def features(queries: Queries, keys: NewKeys) -> Tensor:
    """(batch, kv_heads, tokens, (group + 1) * head_dim): the queries of each kv head, and behind them the key."""
    own = torch.cat([queries.unflatten(1, (keys.shape[1], -1)), keys[:, :, None]], 2)
    return own.transpose(2, 3).flatten(3).float()


class Moments(NamedTuple):
    """Sums over the tokens of a layer, per kv head: features x, scores y, and products of (x, y) with (x, y)."""

    tokens: int
    sums: Tensor  # (kv_heads, features + 1)
    products: Tensor  # (kv_heads, features + 1, features + 1)

    @classmethod
    def of(cls, found: Tensor, scores: Tensor) -> Moments:
        """Sums over (kv_heads, tokens, features) and (kv_heads, tokens)."""
        both = torch.cat([found, scores[..., None]], -1).double()
        return cls(both.shape[1], both.sum(1), both.mT @ both)

    def plus(self, other: Moments) -> Moments:
        """Sums over the tokens of both."""
        return Moments(self.tokens + other.tokens, self.sums + other.sums, self.products + other.products)

    def solved(self) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the features, the bias, and the part of the variance they explain, per kv head."""
        means = self.sums / self.tokens
        spread = self.products / self.tokens - means[:, :, None] * means[:, None]
        among, towards, variance = spread[:, :-1, :-1], spread[:, :-1, -1], spread[:, -1, -1]
        ridge = RIDGE * among.diagonal(dim1=1, dim2=2).mean(-1).clamp(min=torch.finfo(torch.float64).tiny)
        # Not by linalg.solve: with several threads, LU of oneMKL failed on such matrices (torch 2.13).
        factor = torch.linalg.cholesky(among + ridge[:, None, None] * torch.eye(among.shape[-1]))
        weights = torch.cholesky_solve(towards[..., None], factor).squeeze(-1)
        bias = means[:, -1] - (weights * means[:, :-1]).sum(-1)
        left = variance - 2 * (weights * towards).sum(-1) + torch.einsum("hi,hij,hj->h", weights, among, weights)
        return weights, bias, 1 - left / variance.clamp(min=torch.finfo(torch.float64).tiny)


LayerMoments = dict[int, tuple[Moments, tuple[int, int]]]  # with the shape of a head's weights, by layer


@torch.no_grad()
def fitted(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    progress: Callable[[int, int], None],
    source: str = "",
    tasks: str = "",
) -> Scorer:
    """The weights of each layer of `model` that holds whole texts, fitted to `texts` of token ids.

    `source` and `tasks` say where the texts come from. `progress` is called with (texts read, texts). After an
    interrupt the weights are fitted to fewer texts.

    Raises: KeyboardInterrupt before enough texts were read, and UsageError for fewer tokens than there are weights, or
    a model that has no such layer or too wide heads.
    """
    read, found, is_interrupted = 0, LayerMoments(), False
    try:
        for number, ids in enumerate(texts):
            progress(number, len(texts))
            # In one assignment: an interrupt leaves all layers with the same texts.
            read, found = number + 1, _together(found, moments_of(model, ids))
        progress(len(texts), len(texts))
    except KeyboardInterrupt:
        if not read:
            raise
        is_interrupted = True
    texts = texts[:read]
    moments = {layer: own for layer, (own, _) in found.items()}
    shapes = {layer: shape for layer, (_, shape) in found.items()}
    if not moments:
        raise UsageError("scorer: all layers of this model attend to a window of their own, so there is none to fit")
    tokens, width = min(each.tokens for each in moments.values()), max(map(math.prod, shapes.values()))
    if tokens <= width:
        if is_interrupted:
            raise KeyboardInterrupt
        raise UsageError(
            f"scorer: {tokens:,} tokens are too few to fit {width:,} weights in each head. Raise --texts or --length"
        )
    layers, explained = dict[int, LayerWeights](), dict[int, tuple[float, ...]]()
    for layer, each in moments.items():
        weights, bias, part = each.solved()
        layers[layer] = LayerWeights(weights.unflatten(1, shapes[layer]).float(), bias.float())
        explained[layer] = tuple(round(head, 3) for head in part.tolist())
    return Scorer(
        layers=layers, explained=explained, model=type(model).__name__, fingerprint=fingerprint(model), text=source,
        tasks=tasks, texts=len(texts), tokens=sum(map(len, texts)),
    )  # fmt: skip


def _together(found: LayerMoments, own: LayerMoments) -> LayerMoments:
    """The sums of earlier texts, if any, and of one more."""
    return {
        layer: (found[layer][0].plus(moments) if layer in found else moments, shape)
        for layer, (moments, shape) in own.items()
    }


def moments_of(model: PreTrainedModel, ids: Sequence[int]) -> LayerMoments:
    """Each layer's part of the sums in one text, and the shape of a head's weights: (group + 1, head_dim)."""
    noting = FeatureRecorder(TEACHER)
    cache = KVCache(model, policy=noting, chunk=512, rollback=0)
    prefill(model, cache, [list(ids)])
    (peak,) = TEACHER.needs.state
    found = {}
    for layer in cache.layers:
        if layer.rules.most_visible is not None:
            continue
        own, head_dim = torch.cat(noting.pieces[layer.index], 1), layer.store.layout[1]
        if own.shape[-1] > MAX_FEATURES:
            raise UsageError(
                f"scorer: a kv head of layer {layer.index} has {own.shape[-1]:,} numbers a token, in its queries and "
                f"key, and at most {MAX_FEATURES:,} can be fitted. Take key_diff, or shares"
            )
        order = layer.positions[0].where(layer.positions[0] >= 0, len(ids)).argsort(-1)[:, SINKS : len(ids)]
        scores = layer.table.state[peak][0].gather(-1, order).clamp(min=LEAST).log()
        shape = own.shape[-1] // head_dim, head_dim
        found[layer.index] = Moments.of(own[:, SINKS:].cpu(), scores.cpu()), shape
    return found


def calibration_texts(
    tokenizer: PreTrainedTokenizerBase, file: Path, tasks: str | None, count: int, length: int, seed: int
) -> list[list[int]]:
    """The token ids of up to `count` texts of `length` tokens, which `seed` chooses.

    Without `tasks` they are stretches of the file, none of which overlap, and fewer where it is too short. Otherwise
    the tasks take turns, each with the file as its filler, if it reads one. Their questions are left out.

    Raises: UsageError for a task that cannot be found or made, or a text too short for one stretch.
    """
    if tasks is not None:
        loaded = parse_list("--tasks", tasks, load_task)
        own = [(label, task.reading(file) or task) for label, task in loaded]
        texts = []
        for number in range(count):
            label, task = own[number % len(own)]
            sample = fit(SampleSpec(task, label, length, seed, number), tokenizer).sample
            texts.append(encode(tokenizer, sample.context, is_start=True))
        return texts
    text = read_text(file, f"text {file}")
    ids, start = encode(tokenizer, text, is_start=False), encode(tokenizer, text, is_start=True)
    start = start[: len(start) - len(ids)]  # special tokens
    inner = length - len(start)
    stretches = range(0, len(ids) - inner + 1, inner) if inner > 0 else range(0)
    if not stretches:
        raise UsageError(f"the text has {len(ids)} tokens, and one of {length} is wanted. Lower --length")
    chosen = random.Random(seed).sample(stretches, min(count, len(stretches)))
    return [start + ids[at : at + inner] for at in sorted(chosen)]
