"""DeepSeek's attention: latents that are held in place of keys and values, and an indexer that picks tokens.

Multi-head latent attention (MLA) holds a token's latent once, in place of the keys and values of all heads. A head's
key is a matrix of its own times the latent, beside channels that all heads share and that alone are rotated. Its value
is another matrix times the latent. The first matrix is applied to queries, the second to their outputs. So attention
runs over one kv head: its key is the shared channels and then the latent, its value the latent.

Sparse attention picks a query's best tokens by an indexer, whose keys a cache holds beside its own. The model's own
indexer does the arithmetic. In a pass with our cache it is asked twice: for the un-rotated keys of the new tokens, and
once they are written, if the layer holds more than it picks, for the picks among all that are held.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 9 to 19, and the absorbed matrices that it mentions.
Source: DeepSeek Sparse Attention, DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from windlass.cache.cache import TextCache
from windlass.core.errors import UnsupportedModel, UsageError
from windlass.core.positions import rotate
from windlass.core.types import Attended, CosSin, IndexKeys, PickedSlots, Picker, Queries
from windlass.hf.passes import AttributePatch, RunningPass, cache_name, not_compiled
from windlass.hf.recurrent import LayerKinds
from windlass.hf.weights import is_plain
from windlass.positions.rotary import Rotary

EXPAND: Final = "expand_kv"  # transformers' method that expands latents to keys and values
PROJECTION: Final = "kv_b_proj"  # and the module in it that holds the matrices
TOLERANCE: Final = 1e-2  # relative, of keys and values in 16 bits


@final
class Latent:
    """The latents of one attention module, whose `expand_kv` it stands in for while it is installed.

    `is_served` says whether the pass that runs now attends over latents.
    """

    def __init__(self, module: nn.Module, is_served: Callable[[], bool]) -> None:
        self._module, self._is_served = module, is_served
        self._heads = 0
        self._width = self._shared = 0  # key channels of each head, and key channels that all heads share
        self.rank = 0
        """Number of channels of a latent (0 until `check` has seen one)."""
        self.replaced = AttributePatch(module, EXPAND, self.expand_kv)

    def expand_kv(self, latents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the one kv head where they are to be attended to so, else those of all heads."""
        if self._is_served():
            return torch.cat((shared, latents), -1), latents
        keys, values = self.replaced.original(latents, shared)
        return keys, values

    def check(self, latents: Tensor, shared: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The key of the one kv head, for these of all heads.

        Raises: UnsupportedModel where they are not two matrices times the latent, and the shared channels.
        """
        self.rank, self._shared = latents.shape[-1], shared.shape[-1]
        self._heads, self._width = keys.shape[1], keys.shape[3] - self._shared
        nothing = self.replaced.original(torch.zeros_like(latents), torch.zeros_like(shared))
        to_keys, to_values = self._matrices(latents)
        own = torch.einsum("bgtr,hdr->bhtd", latents, to_keys), torch.einsum("bgtr,hdr->bhtd", latents, to_values)
        expected = torch.cat((own[0], shared.expand(-1, keys.shape[1], -1, -1)), -1), own[1]
        for states, its, without in zip((keys, values), expected, nothing, strict=True):
            is_equal = states.shape == its.shape and (states - its).norm() <= TOLERANCE * states.norm()
            if not is_equal or without.any():
                raise UnsupportedModel("makes keys and values out of a latent otherwise than by a matrix for each head")
        return torch.cat((shared, latents), -1)

    def queries(self, queries: Tensor) -> Queries:
        """Queries (batch, heads, tokens, channels of a head's key) as those of the one kv head."""
        own, shared = queries.split((self._width, self._shared), -1)
        to_keys, _ = self._matrices(queries)
        return torch.cat((shared, torch.einsum("bhtd,hdr->bhtr", own, to_keys)), -1)

    def values(self, read: Attended) -> Tensor:
        """Values (batch, heads, tokens, channels of a head's value) that each head reads, from its latents."""
        _, to_values = self._matrices(read)
        return torch.einsum("bhtr,hdr->bhtd", read, to_values)

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(heads, channels, rank) of each head's keys and of its values."""
        projection = getattr(self._module, PROJECTION, None)
        if projection is not None and is_plain(projection):
            matrices = projection.weight.unflatten(0, (self._heads, -1))
            return matrices[:, : self._width], matrices[:, self._width :]
        # Each latent channel alone, expanded by the module, gives a column of the matrices.
        each = torch.eye(self.rank, dtype=like.dtype, device=like.device)[None, None]
        keys, values = self.replaced.original(each, each.new_zeros(1, 1, self.rank, self._shared))
        return keys[0, ..., : self._width].mT, values[0].mT


NAME: Final = "indexer"  # attribute of the indexer in transformers' attention modules
LIMIT: Final = "index_topk"  # attribute with the number of picks
HEADS: Final = "n_heads"
SCORE_BYTES: Final = 64 * 2**20  # most bytes of an indexer's scores alive at once

# The arguments of an indexer's forward pass: tensors by column, some optional, and the required arguments.
HIDDEN: Final = "hidden_states"
ANGLES: Final = "position_embeddings"
MASK: Final = "attention_mask"
BY_COLUMN: Final = {HIDDEN: 1, "q_resid": 1, "position_ids": -1}  # and the axis of its columns
NEEDED: Final = {HIDDEN, ANGLES, MASK}  # and the cache, by its name


@final
class Indexer:
    """The indexer of one attention module, which picks nothing while `is_served` is true.

    `note` is called with its inputs instead.
    """

    def __init__(
        self, module: nn.Module, is_served: Callable[[], bool], note: Callable[["Indexer", "IndexerCall"], None]
    ) -> None:
        self._module, self._is_served, self._note = module, is_served, note
        self._signature, self.cache_name = inspect.signature(module.forward), cache_name(module.forward)
        self.limit: int = getattr(module, LIMIT)
        self.heads: int = getattr(module, HEADS, 1)
        self.rotated_channels: slice | None = None
        """Channels of the index keys that RoPE rotates, found at attach (None: no channels)."""
        self.replaced = AttributePatch(module, "forward", self.forward)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The tokens that each query is to see. None are named in a pass with our cache, whose attention picks them.

        `args` and `kwargs` are the module's own, passed on as they come.
        """
        if self._is_served():
            none: Tensor = self._noted(*args, **kwargs)
            return none
        picked: Tensor = self.replaced.original(*args, **kwargs)
        return picked

    @not_compiled
    def _noted(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._signature.bind(*args, **kwargs).arguments
        states = bound[HIDDEN]
        picks: Tensor = states.new_zeros(*states.shape[:2], 0, dtype=torch.int32)
        self._note(self, IndexerCall(self, bound, picks))
        return picks

    @property
    def is_known(self) -> bool:
        """Return True if it takes the arguments that are known here, so that it can be asked again."""
        names = self._signature.parameters.keys()
        needed = NEEDED | {self.cache_name}
        return needed <= names <= needed | BY_COLUMN.keys()


class _Keys:
    """In place of a cache: takes an indexer's new keys, and gives it those of all slots."""

    def __init__(self, keys: IndexKeys | None) -> None:
        self._keys = keys
        self.new: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Keep an indexer's keys, as transformers' caches do, for whatever layer."""
        self.new = keys
        return keys[:, :1] if self._keys is None else self._keys


@dataclass(frozen=True, eq=False)
class IndexerCall:
    """Named inputs of a model's indexer, and its placeholder picks, which name no token."""

    indexer: Indexer
    arguments: Mapping[str, Any]
    picks: Tensor

    def keys(self, is_plain: bool) -> Tensor:
        """(batch, tokens, channels): the new tokens' index keys, un-rotated where `is_plain`, else as they come."""
        angles = _unrotated(self.arguments[ANGLES]) if is_plain else self.arguments[ANGLES]
        own, states = _Keys(None), self.arguments[HIDDEN]
        self.ask(angles, torch.ones(*states.shape[:2], 1, dtype=torch.bool, device=states.device), own)
        assert own.new is not None, "an indexer that hands no keys to its cache"
        return own.new

    def ask(self, angles: CosSin, seen: Tensor, cache: _Keys) -> Tensor:
        """The picks (batch, tokens, picked) of the model's own indexer, by number."""
        named = {ANGLES: angles, MASK: seen, self.indexer.cache_name: cache}
        picked: Tensor = self.indexer.replaced.original(**{**self.arguments, **named})
        return picked

    def columns(self, start: int, stop: int) -> "IndexerCall":
        """The same for some of its columns."""
        cut = {
            name: given.narrow(BY_COLUMN[name], start, stop - start)
            for name, given in self.arguments.items()
            if name in BY_COLUMN and given is not None
        }
        cos, sin = self.arguments[ANGLES]
        angles = cos[:, start:stop], sin[:, start:stop]
        return replace(self, arguments={**self.arguments, **cut, ANGLES: angles})


@final
class ModelPicker(Picker):
    """The model's own indexer, as it was called for the tokens of a pass."""

    def __init__(self, call: IndexerCall, keys: Tensor) -> None:
        self._call, self.keys, self.limit = call, keys, call.indexer.limit

    def columns(self, start: int, stop: int) -> "ModelPicker":
        return ModelPicker(self._call.columns(start, stop), self.keys[:, start:stop])

    def picked(
        self, keys: IndexKeys, seen: PickedSlots, keys_cos_sin: CosSin | None, queries_cos_sin: CosSin | None
    ) -> PickedSlots:
        call, device = self._call, self.keys.device
        given = call.arguments[ANGLES]
        keys = rotated_keys(keys, keys_cos_sin, call.indexer.rotated_channels).to(device)
        cos, sin = (
            _unrotated(given)
            if queries_cos_sin is None
            else tuple(_widened(each, given[0]) for each in queries_cos_sin)
        )
        batch, tokens, slots = seen.shape
        size = max(1, SCORE_BYTES // (batch * slots * call.indexer.heads * 4))
        blocks = []
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            its = seen[:, start:stop].to(device)
            chosen = call.columns(start, stop).ask((cos[:, start:stop], sin[:, start:stop]), its, _Keys(keys))
            blocks.append(torch.zeros_like(its).scatter(-1, chosen.long(), True))
        return torch.cat(blocks, 1).to(seen.device)


def rotated_keys(keys: IndexKeys, cos_sin: CosSin | None, channels: slice | None) -> IndexKeys:
    """Index keys with these channels rotated, in their own dtype, as the model rotates them."""
    if cos_sin is None or channels is None:
        return keys
    cos, sin = (each.to(keys.dtype) for each in cos_sin)
    before, its, after = keys.tensor_split((channels.start, channels.stop), -1)
    return torch.cat((before, rotate(its, cos, sin), after), -1)


def _widened(table: Tensor, like: Tensor) -> Tensor:
    """A column per channel pair as the model has it: all of them twice."""
    return torch.cat((table, table), -1).to(like.device, like.dtype)


def _unrotated(angles: CosSin) -> CosSin:
    return torch.ones_like(angles[0]), torch.zeros_like(angles[1])


def indexers_of(
    modules: Iterable[nn.Module], is_served: Callable[[], bool], note: Callable[[Indexer, IndexerCall], None]
) -> list[Indexer]:
    """The indexers of these attention modules, each now installed."""
    found = [each for each in (getattr(module, NAME, None) for module in modules) if isinstance(each, nn.Module)]
    return [Indexer(each, is_served, note) for each in found if isinstance(getattr(each, LIMIT, None), int)]


def check_picks(indexers: Iterable[Indexer], cache: TextCache, tokens: int, unserved: str | None) -> None:
    """Return if the cache can serve the indexers in a pass of `tokens` columns.

    `unserved` is the reason why the indexers of this model pick nothing (None: they pick).

    Raises: UsageError for a pass in which an indexer would have to choose, and can't.
    """
    limit = min((each.limit for each in indexers), default=None)
    if limit is None:
        return
    most = tokens + max((layer.table.occupancy_bound for layer in cache.layers), default=0)
    if most <= limit:
        return
    why = unserved
    if cache.merge is not None:
        why = f"merge={str(cache.merge)!r} averages tokens, whose index keys can't be averaged"
    if cache.is_rotated:
        why = "this cache holds rotated keys, and index keys that are not"
    if why is not None:
        raise UsageError(
            f"a query of this pass could see {most} tokens, and the model's indexer would pick {limit} of them "
            f"({LIMIT}), which a KVCache can't do here: {why}. Give it a budget, and read the prompt in chunks, so that"
            f" both together are {limit} at most"
        )


@dataclass
class IndexerObservation:
    """A probe's observation of the indexers in one token: their keys, and the layers that were given their picks."""

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
    """Layers that read the picks of an indexer, by number, and the indexer. `unserved` is why there are none."""

    indexers: Mapping[int, Indexer] = field(default_factory=dict)
    widths: Mapping[int, int] = field(default_factory=dict)
    unserved: str | None = None

    def note(self, indexer: Indexer, call: IndexerCall, running: RunningPass) -> None:
        """Note the arguments of an indexer's call in this pass."""
        running.pickers.clear()  # layers share the latest, and others would keep the hidden states of all layers
        if indexer in self.indexers.values():
            running.pickers[indexer] = ModelPicker(call, call.keys(is_plain=True))

    def picker(self, layer: int, running: RunningPass) -> Picker | None:
        """The indexer that picks for a layer in this pass, or None."""
        return running.pickers[self.indexers[layer]] if layer in self.indexers else None


def indexed_layers(
    kinds: LayerKinds,
    rotaries: list[Rotary | None],
    plain: IndexerObservation,
    rotated: IndexerObservation,
    positions: Tensor,
    tolerance: float,
) -> IndexedLayers:
    """The indexed layers, from two probes of one token at `positions` (rows, 1), the first without rotation.

    Notes in each indexer which channels of its keys are rotated.
    """
    found: dict[int, Indexer] = {}
    if rotated.layers and kinds.sources:
        layer, source = next(iter(kinds.sources.items()))
        return IndexedLayers(unserved=f"layer {layer} attends to the keys of layer {source}, and picks for itself")
    for layer, indexer in rotated.layers.items():
        if indexer is None or indexer not in plain.keys or indexer not in rotated.keys:
            return IndexedLayers(unserved=f"layer {layer} has an indexer that windlass does not know")
        rotary = rotaries[kinds.place(layer)]
        if not _is_found(indexer, plain.keys[indexer], rotated.keys[indexer], rotary, positions, tolerance):
            return IndexedLayers(unserved=f"the indexer of layer {layer} rotates its keys otherwise than the layer")
        found[layer] = indexer
    return IndexedLayers(found, {layer: plain.keys[each].shape[-1] for layer, each in found.items()})


def _is_found(
    indexer: Indexer, plain: Tensor, rotated: Tensor, rotary: Rotary | None, positions: Tensor, tolerance: float
) -> bool:
    """Return True if it is now known which channels of its keys an indexer rotates, by the tables of its layer."""
    width = plain.shape[-1]
    channels: list[slice | None] = [None]
    cos_sin: CosSin | None = None
    if rotary is not None:
        table = tuple(each.float().cpu() for each in rotary.asked(positions))
        cos_sin = cos, sin = rotary.layout.columns(table[0], table[1])
        pairs = rotary.rotary_pairs
        if not all(torch.equal(torch.cat((own, own), -1), each) for own, each in zip((cos, sin), table, strict=True)):
            return False  # `ModelPicker` gives a table like this to the indexer
        channels += [slice(0, 2 * pairs), slice(width - 2 * pairs, width)]
    for each in channels:
        if each is not None and each.start < 0:
            continue
        if (rotated_keys(plain, cos_sin, each) - rotated).norm() <= tolerance * rotated.norm():
            indexer.rotated_channels = each
            return True
    return False
