"""A linear scorer: fitted on the user's texts to say of each token, as it comes, how much it will be read."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from windlass.core.decode import Ranking
from windlass.core.errors import PolicyError, UsageError
from windlass.core.model_info import ModelInfo
from windlass.core.shapes import NewKeys, Queries, Scores
from windlass.policies import scorer_file
from windlass.policies.base import Needs, Policy, Slots
from windlass.policies.interfaces import Initializer, PerToken, Ranked, Trained
from windlass.policies.scorer_file import Scorer

# Prompt-cache files hold this state under its name, which must not change.
PREDICTED: Final = "predicted_peak"
"""A predicted logarithm, in steps of 1 / STEPS, plus ZERO: a whole number of at least 1. 0: there was no prediction."""
STEPS: Final = 2**10  # so that copies of a word tie, though their queries and keys differ by rounding
ZERO: Final = 2**17  # more than any prediction is below 0, and float32 holds all steps around it


class HeadWeights(NamedTuple):
    """Weights in `STEPS`: (kv_heads, group + 1, 1, head_dim), and the bias plus `ZERO`, (kv_heads, 1)."""

    weights: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Fitted:
    """A scorer that was read, and its weights by device and kv heads: a copy at every step would hold up the device."""

    scorer: Scorer
    at: dict[tuple[torch.device, int, tuple[int, ...] | None], HeadWeights]

    def weights(self, device: torch.device, layer: int, heads: tuple[int, ...] | None) -> HeadWeights | None:
        """Those of some heads of a layer; None where nothing was fitted for it."""
        found = self.at.get((device, layer, heads))
        if found is None and layer in self.scorer.layers:
            own = self.scorer.layers[layer].of(heads)
            found = HeadWeights(own.weights[:, :, None].to(device) * STEPS, own.bias[:, None].to(device) * STEPS + ZERO)
            self.at[device, layer, heads] = found
        return found


@dataclass(frozen=True)
class LinearScorer(Policy, Trained, Initializer, Ranked):
    """Keeps the tokens that a linear map of their own queries and key puts highest.

    `file` is one of `windlass calibrate --scorer`, which fits the map on texts like those to come: to the logarithm of
    the score that `KVzip` has for reading a text twice. A token is scored once, when it comes, so that reading takes as
    long as with `KeyDiff`. Where the texts to come are others than those that it was fitted on, it may keep nothing
    of what they are asked for. A layer without weights, because it has a sliding window, keeps its newest tokens;
    so do tokens that came without queries (`KVCache.from_rotated`), which rank below all others.

    Source: KVzap (arXiv:2601.07891), its linear form.
    Differs: each kv head reads its own un-rotated queries and key in place of the layer's hidden state, so that heads
    of a layer may have shares of their own. Scores are compared in steps of 2**-10 of the logarithm. The paper evicts
    what is below a threshold; here a budget decides.
    """

    file: str

    needs = Needs(state=(PREDICTED,))

    def __post_init__(self) -> None:
        _ = self._fitted  # a file that cannot be read fails here, not in the first step

    @cached_property
    def _fitted(self) -> Fitted:
        try:
            return Fitted(scorer_file.read(Path(self.file)), {})
        except UsageError as error:
            raise PolicyError(str(error)) from None

    @property
    def ranking(self) -> Ranking:
        return Ranking("nothing", "state")

    def check(self, model: ModelInfo) -> None:
        scorer = self._fitted.scorer
        hint = f"fit one to this model with `windlass calibrate --scorer`, in the same dtype ({model.dtype})"
        if scorer.model != model.name:
            raise PolicyError(f"scorer {self.file} was fitted to a {scorer.model}, this is a {model.name}; {hint}")
        if scorer.fingerprint != model.fingerprint():
            raise PolicyError(f"scorer {self.file} was fitted to another {scorer.model}; {hint}")

    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        own = self._fitted.weights(keys.device, layer, heads)
        if own is None:
            return {}
        kv_heads, states, _, head_dim = own.weights.shape
        if (keys.shape[1], queries.shape[1], keys.shape[-1]) != (kv_heads, kv_heads * (states - 1), head_dim):
            raise PolicyError(
                f"scorer {self.file} was fitted to {kv_heads} kv heads of {states - 1} query heads and {head_dim} "
                f"channels in layer {layer}, and these are {keys.shape[1]} of {queries.shape[1] / keys.shape[1]:g} and "
                f"{keys.shape[-1]}; fit one to this model with `windlass calibrate --scorer`"
            )
        return {PREDICTED: predicted(own, queries, keys)}

    def score(self, slots: Slots) -> Scores:
        return slots.state[PREDICTED]


def predicted(own: HeadWeights, queries: Queries, keys: NewKeys) -> Tensor:
    """The state `PREDICTED` of new tokens: (batch, kv_heads, tokens)."""
    states = torch.cat((queries.unflatten(1, (keys.shape[1], -1)), keys.unsqueeze(2)), 2).float()
    # Not a matrix product, which rounds by how many tokens come at once.
    return (states * own.weights).sum((2, 4)).add_(own.bias).round_().clamp_(min=1)
