"""How each layer of a model rotates its keys, from the observations of two probes."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.core.positions import rotate
from windlass.hf.model_facts import trained_length
from windlass.hf.probe import Probe, RotaryCall, check_finite, check_weights
from windlass.positions.rotary import LAYOUTS, Layout, Rotary

MARGIN = 4.0  # a candidate that is this many times closer than the next one is the right one


@dataclass(frozen=True)
class Candidate:
    """A table of the model, scale included, in one channel layout."""

    module: nn.Module
    layer_type: str | None
    layout: Layout
    cos: Tensor  # (rows, tokens, rotary_pairs)
    sin: Tensor
    axes: int  # of the positions that the module takes (0: a single one)

    @property
    def rotary_pairs(self) -> int:
        return self.cos.shape[-1]

    def rotated(self, plain: Tensor) -> Tensor:
        """`plain`, which must be as wide as the table, rotated."""
        pairs, layout = self.rotary_pairs, self.layout
        return layout.from_halves(rotate(layout.to_halves(plain, pairs), self.cos[:, None], self.sin[:, None]), pairs)

    def error(self, plain: Tensor, rotated: Tensor) -> float:
        """Distance of `plain`, rotated by this table, from `rotated`, or infinity for a table that is too wide."""
        return _error(self.rotated(plain), rotated) if 2 * self.rotary_pairs <= plain.shape[-1] else float("inf")


def rotaries_of(model: PreTrainedModel, rotated: Probe, plain: Probe) -> list[Rotary | None]:
    """How each layer rotates its keys, or None where it does not. Layers with the same rotation share one.

    Raises: UnsupportedModel for a layer whose keys are rotated otherwise, or by either of two tables.
    """
    tolerance = tolerance_of(model)
    candidates = _candidates(model, rotated.rotary_calls)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    found: dict[int, Rotary] = {}
    rotaries: list[Rotary | None] = []
    for layer in sorted(rotated.keys):
        check_finite(plain.keys[layer], layer)
        if _error(plain.keys[layer], rotated.keys[layer]) <= tolerance:
            rotaries.append(None)
            continue
        keys, rotated_keys, weights = plain.keys[layer], rotated.keys[layer], rotated.norm_weights.get(layer)
        if weights is not None:
            check_weights(layer, weights)
            queries, keys = weights.left_out(plain.queries[layer], keys)
            rotated_queries, rotated_keys = weights.left_out(rotated.queries[layer], rotated_keys)
        best = _best(layer, candidates, keys, rotated_keys, tolerance, kinds[layer] if layer < len(kinds) else None)
        its = candidates[best]
        rotary = Rotary(
            its.module,
            its.layer_type,
            its.layout,
            its.rotary_pairs,
            trained_length(model.config.get_text_config(), its.layer_type),
            its.axes,
        )
        rotary = found.setdefault(best, rotary)
        if weights is not None and not its.error(queries, rotated_queries) <= tolerance:
            raise UnsupportedModel(f"applies norms to rotated queries of layer {layer} otherwise than to its keys")
        rotaries.append(rotary if weights is None else rotary.with_norm_weights(weights))
    return rotaries


def tolerance_of(model: PreTrainedModel) -> float:
    """How far from another, relatively, states may be that only rounding to the model's own dtype separates."""
    return 1e-4 if model.dtype == torch.float32 else 1e-2


def _candidates(model: PreTrainedModel, calls: list[RotaryCall]) -> list[Candidate]:
    """Each table once per layout.

    Their order is that of the model's modules, not that of the calls: some models go over a set of layer types, in
    another order in every process.
    """
    place = {id(module): index for index, module in enumerate(model.modules())}
    found: list[Candidate] = []
    seen: set[tuple[int, str | None]] = set()
    for call in sorted(calls, key=lambda each: (place[id(each.module)], each.layer_type or "")):
        if (id(call.module), call.layer_type) not in seen:
            seen.add((id(call.module), call.layer_type))
            found.extend(
                Candidate(call.module, call.layer_type, layout, *layout.columns(call.cos, call.sin), call.axes)
                for layout in LAYOUTS
            )
    return found


def _best(
    layer: int, candidates: list[Candidate], plain: Tensor, rotated: Tensor, tolerance: float, kind: str | None
) -> int:
    """The candidate that rotates this layer's keys: by a clear margin, or else by the layer's type."""
    errors = [each.error(plain, rotated) for each in candidates]
    rivals = [each for each in sorted(range(len(errors)), key=errors.__getitem__) if errors[each] <= tolerance]
    if not rivals:
        raise UnsupportedModel(f"does not rotate the keys of layer {layer} by RoPE in any layout that windlass knows")
    best = rivals[0]
    if len(rivals) == 1 or MARGIN * errors[best] < errors[rivals[1]]:
        return best
    for each in rivals:
        if candidates[each].layer_type is not None and candidates[each].layer_type == kind:
            return each
    alike = candidates[best].rotated(plain)
    if not all(torch.equal(candidates[each].rotated(plain), alike) for each in rivals):
        raise UnsupportedModel(
            f"rotates the keys of layer {layer} by either of two tables, which its dtype can't tell apart. "
            "Attach it in float32"
        )
    return best


def _error(states: Tensor, expected: Tensor) -> float:
    """Relative, at the worst row."""
    distances = (states - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    return float(distances.max())
