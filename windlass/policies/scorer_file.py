"""A file beside a model: the weights of a linear scorer, which `windlass calibrate --scorer` fits."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.files import read_bytes, replacing

KIND: Final = "windlass scorer"
VERSION: Final = 1
AGAIN: Final = "make it with `windlass calibrate MODEL TEXT --scorer -o FILE`"
DOCUMENT: Final = "windlass"  # the one name of the file's metadata
WEIGHTS: Final = "weights"  # begins the names of tensors, before the number of a layer
BIAS: Final = "bias"


@dataclass(frozen=True)
class LayerWeights:
    """What gives the score of a token in each kv head of a layer.

    It is `bias` (kv_heads) plus the products of the token's un-rotated queries and key in that head with `weights`
    (kv_heads, group + 1, head_dim), the key's last.
    """

    weights: Tensor
    bias: Tensor

    def of(self, heads: tuple[int, ...] | None) -> "LayerWeights":
        """Those of some kv heads; None: of all."""
        return self if heads is None else LayerWeights(self.weights[list(heads)], self.bias[list(heads)])


@dataclass(frozen=True, eq=False)
class Scorer:
    """The weights of each layer that has any, and where they were fitted.

    `model` and `fingerprint` tell of which model, `text` and `tasks` on which texts: as many as `texts`, with `tokens`
    in all. `explained` is what part of the variance of the scores the weights explain in each head of these layers.
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
        raise UsageError(f"-o {path} cannot be written: {error.strerror}; give another name") from None


def read(path: Path) -> Scorer:
    """The scorer of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        data = read_bytes(path.expanduser(), f"scorer {path}")
    except UsageError as error:
        raise UsageError(f"{error}; {AGAIN}") from None
    document = _document(path, data)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"scorer {path} is cut short or damaged: {error}; {AGAIN}") from None
    try:
        return _scorer(document, tensors)
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"scorer {path} is damaged: its fields are not those that windlass writes; {AGAIN}") from None


def _document(path: Path, data: bytes) -> dict[str, Any]:
    """What the header tells beside the tensors."""
    try:
        document = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][DOCUMENT])
        kind, version = document.pop("kind"), document.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind = None
    if kind != KIND:
        raise UsageError(f"scorer {path}: this is no file of a scorer, or a damaged one; {AGAIN}")
    if version != VERSION:
        raise UsageError(f"scorer {path} has format version {version}, this windlass reads {VERSION}; {AGAIN}")
    return dict(document)


def _scorer(document: dict[str, Any], tensors: dict[str, Tensor]) -> Scorer:
    """Raises: KeyError, TypeError or ValueError for what `write` does not write."""
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
