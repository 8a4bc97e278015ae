"""A linear scorer: fitted on the user's texts to say of each token, as it comes, how much it will be read."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from windlass.core.errors import PolicyError, UsageError
from windlass.core.files import read_bytes, replacing
from windlass.core.inputs import Ranking
from windlass.core.types import ModelInfo, NewKeys, Queries, Scores
from windlass.policies.base import Initializer, KernelPolicy, ModelSpecific, Needs, PerToken, Policy, Slots

KIND: Final = "windlass scorer"
VERSION: Final = 1
AGAIN: Final = "Make it with `windlass calibrate MODEL TEXT --scorer -o FILE`"
DOCUMENT: Final = "windlass"  # the one name of the file's metadata
WEIGHTS: Final = "weights"  # prefix of the names of tensors, before the number of a layer
BIAS: Final = "bias"


@dataclass(frozen=True)
class LayerWeights:
    """Weights for the score of a token in each kv head of a layer.

    It is `bias` (kv_heads) plus the products of the token's un-rotated queries and key in that head with `weights`
    (kv_heads, group + 1, head_dim), the key's last.
    """

    weights: Tensor
    bias: Tensor

    def of(self, heads: tuple[int, ...] | None) -> "LayerWeights":
        """The weights of some kv heads, or of all for None."""
        return self if heads is None else LayerWeights(self.weights[list(heads)], self.bias[list(heads)])


@dataclass(frozen=True, eq=False)
class Scorer:
    """The weights of each layer that has any, and where they were fitted.

    `model` and `fingerprint` name the model. `text` and `tasks` name the texts, which number `texts` and have `tokens`
    in all. `explained` is the part of the variance of the scores that the weights explain in each head of these layers.
    """

    layers: Mapping[int, LayerWeights]
    explained: Mapping[int, tuple[float, ...]]
    model: str
    fingerprint: str
    text: str
    tasks: str
    texts: int
    tokens: int


def write(scorer: Scorer, path: Path) -> None:
    """Write the file, whole or not at all. Raises: UsageError when it cannot be written."""
    told = {name: value for name, value in vars(scorer).items() if name not in ("layers", "explained")}
    explained = {str(layer): list(parts) for layer, parts in scorer.explained.items()}
    document = json.dumps({"kind": KIND, "version": VERSION, **told, "explained": explained})
    tensors = {f"{WEIGHTS}.{layer}": own.weights.contiguous() for layer, own in scorer.layers.items()}
    tensors |= {f"{BIAS}.{layer}": own.bias.contiguous() for layer, own in scorer.layers.items()}
    try:
        with replacing(path.expanduser()) as temporary:
            temporary.write_bytes(save(tensors, {DOCUMENT: document}))
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}. Give another name") from None


def read(path: Path) -> Scorer:
    """The scorer of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        data = read_bytes(path.expanduser(), f"scorer {path}")
    except UsageError as error:
        raise UsageError(f"{error}. {AGAIN}") from None
    document = _document(path, data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"scorer {path} is cut short or damaged: {error}. {AGAIN}") from None
    try:
        return _scorer(document, tensors)
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"scorer {path} is damaged: its fields differ from those of windlass' files. {AGAIN}"
        ) from None


def _document(path: Path, data: bytes) -> dict[str, Any]:
    """The header's entries beside the tensors."""
    try:
        document = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][DOCUMENT])
        kind, version = document.pop("kind"), document.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind = None
    if kind != KIND:
        raise UsageError(f"scorer {path}: this is no file of a scorer, or a damaged one. {AGAIN}")
    if version != VERSION:
        raise UsageError(f"scorer {path} has format version {version}, this windlass reads {VERSION}. {AGAIN}")
    return dict(document)


def _scorer(document: dict[str, Any], tensors: dict[str, Tensor]) -> Scorer:
    """Read the scorer of a file. Raises: KeyError, TypeError or ValueError for contents that `write` does not write."""
    explained = {int(layer): tuple(map(float, parts)) for layer, parts in document.pop("explained").items()}
    if set(tensors) != {f"{name}.{layer}" for name in (WEIGHTS, BIAS) for layer in explained} or not tensors:
        raise ValueError("other tensors")
    layers = {layer: LayerWeights(tensors[f"{WEIGHTS}.{layer}"], tensors[f"{BIAS}.{layer}"]) for layer in explained}
    for layer, own in layers.items():
        are_good = all(each.dtype == torch.float32 and bool(each.isfinite().all()) for each in (own.weights, own.bias))
        sizes = own.weights.dim(), own.bias.shape, len(explained[layer])
        if not are_good or sizes != (3, own.weights.shape[:1], len(own.bias)) or not own.weights.numel():
            raise ValueError("other sizes")
        if not all(map(math.isfinite, explained[layer])):
            raise ValueError("no number")
    kinds = dict.fromkeys(("model", "fingerprint", "text", "tasks"), str) | dict.fromkeys(("texts", "tokens"), int)
    if {name: type(value) for name, value in document.items()} != kinds:
        raise TypeError("other fields")
    return Scorer(layers, explained, **document)


# Prompt-cache files hold this state under its name, which must not change.
PREDICTED: Final = "predicted_peak"
"""State: a predicted logarithm in steps of 1 / STEPS, plus ZERO: a whole number of at least 1 (0: no prediction)."""
STEPS: Final = 2**10  # so that copies of a word tie, though their queries and keys differ by rounding
ZERO: Final = 2**17  # more than any prediction is below 0, and float32 holds all steps around it


class HeadWeights(NamedTuple):
    """Weights in `STEPS`: (kv_heads, group + 1, 1, head_dim), and the bias plus `ZERO`, (kv_heads, 1)."""

    weights: Tensor
    bias: Tensor


@dataclass(frozen=True)
class ScorerWeights:
    """A scorer that was read, and its weights by device and kv heads: a copy at every step would hold up the device."""

    scorer: Scorer
    at: dict[tuple[torch.device, int, tuple[int, ...] | None], HeadWeights]

    def weights(self, device: torch.device, layer: int, heads: tuple[int, ...] | None) -> HeadWeights | None:
        """The weights of some heads of a layer. None if nothing was fitted for it."""
        found = self.at.get((device, layer, heads))
        if found is None and layer in self.scorer.layers:
            own = self.scorer.layers[layer].of(heads)
            found = HeadWeights(own.weights[:, :, None].to(device) * STEPS, own.bias[:, None].to(device) * STEPS + ZERO)
            self.at[device, layer, heads] = found
        return found


@dataclass(frozen=True)
class LinearScorer(Policy, ModelSpecific, Initializer, KernelPolicy):
    """Keeps the tokens that a linear map of their own queries and key puts highest.

    `file` is one of `windlass calibrate --scorer`, which fits the map on texts like those to come: to the logarithm of
    the score that `KVzip` has for reading a text twice. A token is scored once, when it comes, so that reading takes as
    long as with `KeyDiff`. On texts unlike those of the fit, it may evict every token that a later question needs. A
    layer without weights, because it has a sliding window, keeps its newest tokens. So do tokens that came without
    queries (`KVCache.from_rotated`), which rank below all others.

    Source: KVzap (arXiv:2601.07891), its linear form.
    Differs: each kv head reads its own un-rotated queries and key in place of the layer's hidden state, so that heads
    of a layer may have shares of their own. Scores are compared in steps of 2**-10 of the logarithm. The paper evicts
    the tokens below a threshold. Here a budget decides.
    """

    file: str

    needs = Needs(state=(PREDICTED,))

    def __post_init__(self) -> None:
        _ = self._fitted  # a file that cannot be read fails here, not in the first step

    @cached_property
    def _fitted(self) -> ScorerWeights:
        try:
            return ScorerWeights(read(Path(self.file)), {})
        except UsageError as error:
            raise PolicyError(str(error)) from None

    @property
    def ranking(self) -> Ranking:
        return Ranking("nothing", "state")

    def check(self, model: ModelInfo) -> None:
        scorer = self._fitted.scorer
        hint = f"Fit one to this model with `windlass calibrate --scorer`, in the same dtype ({model.dtype})"
        if scorer.model != model.name:
            raise PolicyError(f"scorer {self.file} was fitted to a {scorer.model}, this is a {model.name}. {hint}")
        if scorer.fingerprint != model.fingerprint():
            raise PolicyError(f"scorer {self.file} was fitted to another {scorer.model}. {hint}")

    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        own = self._fitted.weights(keys.device, layer, heads)
        if own is None:
            return {}
        kv_heads, states, _, head_dim = own.weights.shape
        if (keys.shape[1], queries.shape[1], keys.shape[-1]) != (kv_heads, kv_heads * (states - 1), head_dim):
            raise PolicyError(
                f"scorer {self.file} was fitted to {kv_heads} kv heads of {states - 1} query heads and {head_dim} "
                f"channels in layer {layer}, and these are {keys.shape[1]} of {queries.shape[1] / keys.shape[1]:g} and "
                f"{keys.shape[-1]}. Fit one to this model with `windlass calibrate --scorer`"
            )
        return {PREDICTED: predicted(own, queries, keys)}

    def score(self, slots: Slots) -> Scores:
        return slots.state[PREDICTED]


def predicted(own: HeadWeights, queries: Queries, keys: NewKeys) -> Tensor:
    """The state `PREDICTED` of new tokens: (batch, kv_heads, tokens)."""
    states = torch.cat((queries.unflatten(1, (keys.shape[1], -1)), keys.unsqueeze(2)), 2).float()
    # Not a matrix product, which rounds by how many tokens come at once.
    return (states * own.weights).sum((2, 4)).add_(own.bias).round_().clamp_(min=1)
