"""`windlass calibrate --scorer`: weights that say of a token, by its own queries and key, how much it will be read.

Texts are read twice, as `KVzip` does: a token's score in a kv head is the largest probability that any query of that
head gave it in the second pass. Ridge regression, one for each kv head of each layer, then gives the logarithm of that
score from what the token had in the first pass: its un-rotated queries and key in that head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.errors import UsageError
from windlass.core.shapes import NewKeys, Queries, Scores
from windlass.engine.generate import prefill
from windlass.hf.fingerprint import fingerprint
from windlass.hf.kv_cache import KVCache
from windlass.policies import Initializer, KVzip, Slots
from windlass.policies.interfaces import PerToken
from windlass.policies.scorer_file import LayerWeights, Scorer
from windlass.policies.wrapper import Wrapper

RIDGE: Final = 1e-2  # of the mean variance of a feature
LEAST: Final = 1e-6  # probability: below it, all scores are alike
SINKS: Final = 4  # first tokens of a text, which attention reads whatever they are, and a cache keeps
TEACHER: Final = KVzip(64)
MAX_FEATURES: Final = 4096  # of a head: its products with each other are held in float64, for all heads


@dataclass(frozen=True)
class Noting(Wrapper, Initializer):
    """The policy that it wraps; notes the features of the tokens of each layer, in pieces, as they come.

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
    """Sums over the tokens of a layer, per kv head, of features x and scores y; `products` of (x, y) with (x, y)."""

    tokens: int
    sums: Tensor  # (kv_heads, features + 1)
    products: Tensor  # (kv_heads, features + 1, features + 1)

    @classmethod
    def of(cls, found: Tensor, scores: Tensor) -> "Moments":
        """Those of (kv_heads, tokens, features) and (kv_heads, tokens)."""
        both = torch.cat([found, scores[..., None]], -1).double()
        return cls(both.shape[1], both.sum(1), both.mT @ both)

    def plus(self, other: "Moments") -> "Moments":
        """Those of the tokens of both."""
        return Moments(self.tokens + other.tokens, self.sums + other.sums, self.products + other.products)

    def solved(self) -> tuple[Tensor, Tensor, Tensor]:
        """Per kv head the weights of the features, the bias, and what part of the variance they explain."""
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

    Raises: KeyboardInterrupt before enough texts were read; UsageError for fewer tokens than there are weights, or a
    model that has no such layer or too wide heads.
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
            f"scorer: {tokens:,} tokens are too few to fit {width:,} weights in each head; raise --texts or --length"
        )
    layers, explained = dict[int, LayerWeights](), dict[int, tuple[float, ...]]()
    for layer, each in moments.items():
        weights, bias, part = each.solved()
        layers[layer] = LayerWeights(weights.unflatten(1, shapes[layer]).float(), bias.float())
        explained[layer] = tuple(round(head, 3) for head in part.tolist())
    told = source, tasks, len(texts), sum(map(len, texts))
    return Scorer(layers, explained, type(model).__name__, fingerprint(model), *told)


def _together(found: LayerMoments, own: LayerMoments) -> LayerMoments:
    """The sums of earlier texts, if any, and of one more."""
    return {
        layer: (found[layer][0].plus(moments) if layer in found else moments, shape)
        for layer, (moments, shape) in own.items()
    }


def moments_of(model: PreTrainedModel, ids: Sequence[int]) -> LayerMoments:
    """Of each layer what one text adds to the sums, and the shape of a head's weights: (group + 1, head_dim)."""
    noting = Noting(TEACHER)
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
                f"key, and at most {MAX_FEATURES:,} can be fitted; take key_diff, or shares"
            )
        order = layer.positions[0].where(layer.positions[0] >= 0, len(ids)).argsort(-1)[:, SINKS : len(ids)]
        scores = layer.table.state[peak][0].gather(-1, order).clamp(min=LEAST).log()
        shape = own.shape[-1] // head_dim, head_dim
        found[layer.index] = Moments.of(own[:, SINKS:].cpu(), scores.cpu()), shape
    return found
