"""Shares of a budget for each kv head of each layer, measured once for a model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from windlass.core.errors import UsageError, check_kind
from windlass.core.files import read_bytes, replacing
from windlass.core.parse import AUTO
from windlass.core.step import Limits
from windlass.core.types import ModelInfo

Auto = Literal["auto"]
MAX_NAME = 255  # characters of a name, as of a file's
Heads = tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """Tokens that each kv head keeps beside sinks and window, in multiples of the mean over all heads.

    `layers` has for each attention layer a number of at least 0 for each of its kv heads. None stands for a layer
    without shares, whose heads each keep the whole budget. Heads of a layer with equal numbers lie in one tensor.
    `name` is their label in rows of results. The other fields tell how they were measured, if known: on which model,
    with the scores of which policy, at which budget (`"4x"`), on how many texts.

    Raises: UsageError for numbers that are not such shares.
    """

    layers: Sequence[Sequence[float] | None]
    name: str = "shares"
    model: str = ""
    fingerprint: str = ""
    policy: str = ""
    budget: str = ""
    texts: int = 0

    def __post_init__(self) -> None:
        check_kind("shares.layers", self.layers, (list, tuple), "a list with the shares of each layer, or None")
        own = tuple(None if shares is None else _numbers(shares, layer) for layer, shares in enumerate(self.layers))
        every = [share for shares in own for share in shares or ()]
        if not any(every):
            raise UsageError("shares: no head gets anything. Give at least one a number above 0")
        if not (self.name.isprintable() and 0 < len(self.name) <= MAX_NAME):
            raise UsageError(f"shares: the name must be one line of at most {MAX_NAME} characters, got {self.name!r}")
        object.__setattr__(self, "layers", own)

    def __str__(self) -> str:
        return self.name

    def groups(self, layer: int) -> tuple[Heads, ...]:
        """The kv heads of a layer that have one size, group by group. A layer without shares has no groups."""
        shares = self.layers[layer] or ()
        sizes = list(dict.fromkeys(shares))
        return tuple(tuple(head for head, share in enumerate(shares) if share == size) for size in sizes)

    def budgets(self, limits: Limits) -> list[list[int]]:
        """Per layer the budget of each group of heads, or an empty list for a layer without shares.

        Their mean over all heads is the budget, or less by a fraction: the sum is short by fewer tokens than a group
        has heads. Each group has room for a token beside sinks and window.
        """
        assert limits.budget is not None, "a share of no budget"
        least = limits.sinks + limits.window + 1
        groups = [(layer, heads) for layer in range(len(self.layers)) for heads in self.groups(layer)]
        sizes = [len(heads) for _, heads in groups]
        parts = [float((self.layers[layer] or ())[heads[0]]) for layer, heads in groups]
        mean = math.fsum(size * part for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        wanted = [part / mean * (limits.budget - least) for part in parts]
        found: list[list[int]] = [[] for _ in self.layers]
        for (layer, _), extra in zip(groups, _rounded(wanted, sizes, limits.budget - least), strict=True):
            found[layer].append(least + extra)
        return found

    def check(self, model: ModelInfo) -> None:
        """Raises: UsageError where these are the shares of another model."""
        hint = "Measure this model's with `windlass calibrate --shares`"
        if len(self.layers) != model.layers:
            raise UsageError(f"shares {self.name}: they are of {len(self.layers)} layers, {model.name} has "
                             f"{model.layers}. {hint}")  # fmt: skip
        if self.fingerprint and self.fingerprint != model.fingerprint():
            raise UsageError(
                f"shares {self.name} were measured on another model than this {model.name}, or in another dtype than "
                f"{model.dtype}. {hint}"
            )

    def document(self) -> dict[str, Any]:
        """All fields as JSON can hold them. See `from_document`."""
        return {**vars(self), "layers": [None if shares is None else list(shares) for shares in self.layers]}

    @classmethod
    def from_document(cls, document: object) -> Shares:
        """The shares that `document` was made of. Raises: UsageError for another document."""
        kinds = {"layers": list, "texts": int} | dict.fromkeys(
            ("name", "model", "fingerprint", "policy", "budget"), str
        )
        if not isinstance(document, dict) or {name: type(value) for name, value in document.items()} != kinds:
            raise UsageError("shares: the fields differ from those of windlass' files")
        return cls(**document)


def _numbers(shares: object, layer: int) -> tuple[float, ...]:
    """The shares of a layer's heads."""
    if isinstance(shares, list | tuple) and shares:
        are_shares = all(type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in shares)
        if are_shares:
            return tuple(map(float, shares))
    raise UsageError(
        f"shares: shares of layer {layer} must be numbers of at least 0, one for each kv head, or None, got {shares!r}"
    )


def _rounded(wanted: Sequence[float], sizes: Sequence[int], mean: int) -> list[int]:
    """Whole numbers near those `wanted`, for groups of `sizes` heads, whose mean over heads is `mean` or just less."""
    numbers = [int(each) for each in wanted]
    left = mean * sum(sizes) - sum(number * size for number, size in zip(numbers, sizes, strict=True))
    for group in sorted(range(len(wanted)), key=lambda group: numbers[group] - wanted[group]):
        if sizes[group] <= left:
            numbers[group] += 1
            left -= sizes[group]
    smallest = min(range(len(sizes)), key=lambda group: (sizes[group], -wanted[group]))
    numbers[smallest] += left // sizes[smallest]
    return numbers


KIND: Final = "windlass shares"
VERSION: Final = 1
AGAIN: Final = "Make it with `windlass calibrate MODEL TEXT --shares -o FILE`"
SHIPPED: Final = Path(__file__).parents[1] / "assets" / "shares"


def shares_of(spec: str | Path | Shares | None) -> Shares | Auto | None:
    """The shares in a file, named after it. Shares, None and "auto" are returned as they are.

    Raises: UsageError for a file that cannot be read, or holds no shares.
    """
    kinds = (str, Path, Shares, type(None))
    check_kind("shares", spec, kinds, 'a file of `windlass calibrate --shares`, Shares, or "auto"')
    if spec == AUTO:
        return AUTO
    return read(Path(spec)) if isinstance(spec, str | Path) else spec


def shipped(model: ModelInfo, folder: Path = SHIPPED) -> Shares | None:
    """The shares of this model among those that come with Windlass, or None. The weights' fingerprint finds them."""
    files = [read(file) for file in sorted(folder.glob("*.json"))]
    known = [each for each in files if (each.model, len(each.layers)) == (model.name, model.layers)]
    return next((each for each in known if each.fingerprint == model.fingerprint()), None)


def write(shares: Shares, path: Path) -> None:
    """Write the file, whole or not at all. Raises: UsageError when it cannot be written."""
    document = {"kind": KIND, "version": VERSION, **shares.document()}
    del document["name"]
    try:
        with replacing(path.expanduser()) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}. Give another name") from None


def read(path: Path) -> Shares:
    """The shares of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        document = json.loads(read_bytes(path.expanduser(), f"shares {path}").decode("utf-8-sig"))
    except UsageError as error:
        raise UsageError(f"{error}. {AGAIN}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"shares {path}: this is no file of shares, or a damaged one. {AGAIN}") from None
    if not isinstance(document, dict) or document.pop("kind", None) != KIND:
        raise UsageError(f"shares {path}: this is no file of shares. {AGAIN}")
    if (version := document.pop("version", None)) != VERSION:
        raise UsageError(f"shares {path} has format version {version}, this windlass reads {VERSION}. {AGAIN}")
    try:
        return replace(Shares.from_document({**document, "name": "shares"}), name=path.name)
    except UsageError as error:
        raise UsageError(f"shares {path} is damaged: {error}. {AGAIN}") from None
