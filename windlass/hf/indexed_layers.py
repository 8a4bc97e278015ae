"""Which layers of a model read what an indexer picks, found out at attach."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from windlass.core.picks import Picker, Turn
from windlass.hf.indexer import Indexer, IndexerCall, ModelPicker, turned
from windlass.hf.linear_layer import LayerKinds
from windlass.hf.running_pass import RunningPass
from windlass.positions.rotary import Rotary


@dataclass
class SeenPicks:
    """What a probe of one token saw of the indexers: their keys, and the layers that were given their picks."""

    calls: list[IndexerCall] = field(default_factory=list)
    keys: dict[Indexer, Tensor] = field(default_factory=dict)  # (rows, tokens, channels)
    layers: dict[int, Indexer | None] = field(default_factory=dict)  # None: picks from elsewhere

    def note(self, indexer: Indexer, call: IndexerCall) -> None:
        """Note a call of an indexer."""
        self.calls.append(call)
        if indexer.is_known:
            self.keys[indexer] = call.keys(is_plain=False).float().cpu()

    def note_layer(self, layer: int, picks: object) -> None:
        """Note which picks a layer was handed, perhaps those of an earlier layer."""
        if picks is not None:
            self.layers[layer] = next((call.indexer for call in self.calls if call.picks is picks), None)


@dataclass(frozen=True)
class IndexedLayers:
    """By number, the layers that read what an indexer picks, and that indexer; `unserved` says why there are none."""

    indexers: Mapping[int, Indexer] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)
    unserved: str | None = None

    def note(self, indexer: Indexer, call: IndexerCall, running: RunningPass) -> None:
        """Note what an indexer was called with in this pass."""
        running.pickers.clear()  # layers share the latest; others would keep the hidden states of all layers
        if indexer in self.indexers.values():
            running.pickers[indexer] = ModelPicker(call, call.keys(is_plain=True))

    def picker(self, layer: int, running: RunningPass) -> Picker | None:
        """The indexer that picks for a layer in this pass; None where none does."""
        return running.pickers[self.indexers[layer]] if layer in self.indexers else None


def indexed_layers(
    kinds: LayerKinds,
    rotaries: list[Rotary | None],
    plain: SeenPicks,
    rotated: SeenPicks,
    positions: Tensor,
    tolerance: float,
) -> IndexedLayers:
    """What two probes of one token at `positions` (rows, 1) tell, the first of which did not rotate.

    Notes in each indexer which channels of its keys are rotated.
    """
    found: dict[int, Indexer] = {}
    if rotated.layers and kinds.sources:
        layer, source = next(iter(kinds.sources.items()))
        return IndexedLayers(unserved=f"layer {layer} attends to the keys of layer {source}, and picks for itself")
    for layer, indexer in rotated.layers.items():
        if indexer is None or indexer not in plain.keys or indexer not in rotated.keys:
            return IndexedLayers(unserved=f"layer {layer} has an indexer that windlass does not know")
        keys, rotary = (plain.keys[indexer], rotated.keys[indexer]), rotaries[kinds.place(layer)]
        if not _is_found(indexer, *keys, rotary, positions, tolerance):
            return IndexedLayers(unserved=f"the indexer of layer {layer} rotates its keys otherwise than the layer")
        found[layer] = indexer
    return IndexedLayers(found, {layer: plain.keys[each].shape[-1] for layer, each in found.items()})


def _is_found(
    indexer: Indexer, plain: Tensor, rotated: Tensor, rotary: Rotary | None, positions: Tensor, tolerance: float
) -> bool:
    """Whether it is now known which channels of its keys an indexer rotates, by the tables of its layer."""
    width = plain.shape[-1]
    channels: list[slice | None] = [None]
    turn: Turn | None = None
    if rotary is not None:
        table = tuple(each.float().cpu() for each in rotary.asked(positions))
        turn = cos, sin = rotary.layout.columns(table[0], table[1])
        pairs = rotary.rotary_pairs
        if not all(torch.equal(torch.cat((own, own), -1), each) for own, each in zip((cos, sin), table, strict=True)):
            return False  # `ModelPicker` gives a table like this to the indexer
        channels += [slice(0, 2 * pairs), slice(width - 2 * pairs, width)]
    for each in channels:
        if each is not None and each.start < 0:
            continue
        if (turned(plain, turn, each) - rotated).norm() <= tolerance * rotated.norm():
            indexer.turned = each
            return True
    return False
