"""The cache as transformers wants it: `past_key_values` of an attached model."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, NoReturn

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from windlass.cache.cache import check_across_ranks, check_fit
from windlass.cache.compress import compress
from windlass.cache.merging import Merge, checked_merge
from windlass.cache.options import DEFAULT_RECALL_STORE, CacheOptions
from windlass.cache.recompute import Fitting
from windlass.cache.shares import Shares
from windlass.core.errors import UsageError, check_kind
from windlass.core.inputs import most_visible
from windlass.core.parse import AUTO, check_recall
from windlass.core.step import PROMPT, READ, AttentionCall, no_inference_mode
from windlass.core.types import Attended, NewKeys, NewValues, Queries
from windlass.hf import model_cache
from windlass.hf.attach import attached
from windlass.hf.attached_model import AttachedModel
from windlass.hf.forward import ROWS, measure_key_means, model_info
from windlass.hf.model_cache import ModelCache
from windlass.hf.model_facts import device_of_inputs
from windlass.hf.passes import check_adapter
from windlass.hf.recurrent import check_policy
from windlass.policies import Policy, Recent
from windlass.policies.base import ModelSpecific
from windlass.policies.wrapper import find
from windlass.positions.modes import PositionMode
from windlass.stores.base import Store

CHUNK: Final = (
    128  # tokens of the second reading at once; the whole text is as far from each of its queries, or nearly so
)


@no_inference_mode
@torch.no_grad()
def compress_fitted(cache: ModelCache, budget: int, window: int | None) -> None:
    """Cut to a budget, and give what stays values that were fitted; see `KVCache.compress`."""
    texts = _texts(cache)
    cut = copy.deepcopy(cache)
    compress(cut, budget, window)
    ends = torch.tensor(cache.next_positions, device=cache.device)
    fitting = Fitting.beside(cache.layers, cut.layers, ends)
    if any(sums is not None for sums in fitting.sums):
        _read_again(cache, texts, fitting)
    fitted = [None if sums is None else sums.values() for sums in fitting.sums]
    compress(cache, budget, window)
    for layer, kept, values in zip(cache.layers, cut.layers, fitted, strict=True):
        if values is not None:
            slots, places = min(layer.table.slots, kept.table.slots), layer.store.in_place()
            assert places is not None, "values that are not held as they are"
            assert torch.equal(layer.positions[..., :slots], kept.positions[..., :slots]), (
                "a cut that kept other tokens"
            )
            places[1][:, :, :slots] = values[:, :, :slots]


def _texts(cache: ModelCache) -> list[list[int]]:
    """The ids of each row. Raises: UsageError where the text can't be read again, or its values not be replaced."""
    texts, what = cache.tokens, "compress(fit=True)"
    if cache.recurrent:
        raise UsageError(
            f"{what} reads the text a second time, and layer {cache.recurrent[0].index} keeps a state that would read "
            "it twice, too; leave fit out"
        )
    if any(layer.rules.has_places for layer in cache.layers) or texts is None:
        raise UsageError(
            f"{what} reads the text a second time, which takes the ids of all of its tokens, and this one came with "
            "pictures or without ids; leave fit out"
        )
    for layer in cache.layers:
        if layer.is_empty:
            continue
        if layer.store.in_place() is None:
            raise UsageError(
                f"{what} writes values that are held as they are, and the store {cache.store.name!r} holds them "
                'otherwise in this model; take store="plain", or leave fit out'
            )
        held = (layer.positions >= 0).sum(-1).amin(1).tolist()
        if layer.rules.most_visible is None and (held != cache.tokens_seen or held != cache.next_positions):
            raise UsageError(
                f"{what} needs the whole text, and layer {layer.index} holds {_listed(held)} of "
                f"{_listed(cache.tokens_seen)} tokens; make the cache without a budget, and compress it before any edit"
            )
    return texts


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _read_again(cache: ModelCache, texts: list[list[int]], fitting: Fitting) -> None:
    """Show the text to every layer for a second time; the cache holds afterwards what it held."""
    attachment = cache.model_id
    assert isinstance(attachment, AttachedModel), "a cache of no model"
    outer = attachment.decoder.outer
    how = replace(PROMPT, is_second_pass=True, defer_eviction=cache.budget is not None)
    cache.fitting = fitting
    cache.reserve(CHUNK)
    try:
        for start in range(0, max(map(len, texts)), CHUNK):
            pieces = [text[start : start + CHUNK] for text in texts]
            width = max(map(len, pieces))
            ids = [piece + [0] * (width - len(piece)) for piece in pieces]
            mask = [[1] * len(piece) + [0] * (width - len(piece)) for piece in pieces]
            fed = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
            cache.schedule(how)
            outer(**{name: each.to(cache.device) for name, each in fed.items()}, past_key_values=cache)
    finally:
        cache.schedule(READ)
        cache.fitting = None


class KVCache(ModelCache):
    """A cache of un-rotated keys, of fixed size, for a model that went through `windlass.attach`.

    Pass it as `past_key_values` to the model or to `generate`, or to `windlass.stream` and its kin.
    It owns the positions: every row of the batch has its own text, and tokens continue it.

    `budget`: most tokens a layer keeps at rest, per row; None keeps them all and grows on demand.
    `sinks`: first positions of the text that are never evicted; "system": those of each row's system text, which
    `set_sinks` is told before the row reads its first token, see `windlass.system_tokens`.
    `window`: newest tokens that are never evicted; None takes a quarter of what the sinks leave, at most 64.
    `policy`: which tokens are kept, as a policy or its name: `"key_diff"`, `"SnapKV(pool=7)"`, `"file.py:Class"`;
    "auto" (or None) is the best of those that read a text once, see docs/results/findings.md;
    without a budget it is `Recent`, also for a later `compress`.
    `chunk`: most tokens that the engine feeds per step of a prompt; room for these is allocated.
    `positions`: where kept tokens are read, see `windlass.positions`; may be reassigned at any time. "auto" reads as
    the model does while a text is inside of the trained length, and so that it stays inside of it afterwards.
    `batch`: rows.
    `rollback`: tokens, fed in steps of their own, that can be rolled back beside the last step.
    `store`: "plain" holds keys and values as they are, "int8" in 0.52 of the bytes of bfloat16, "int4" in 0.27;
    "int4(sinks=4, newest=32)" keeps these tokens in full precision, too. The first low-bit cache of a model runs
    the model for 16 steps.
    `merge`: what happens to an evicted token's content: None drops it, "mean_count" averages it into the kept token
    whose key is most like its own; see `windlass.cache.merging`.
    `recall`: what is evicted stays in a recall store, and each step reads up to so many tokens of it again, beside the
    slots: in each layer and kv head the pages of 8 tokens that matter most to the step's queries; 0 forgets it. The
    store grows with the text, in the host's memory or, unnamed, in a file of `recall_folder`.
    `recall_store`: how it holds keys and values: "plain", "int8" or "int4".
    `shares`: what part of the budget each layer and each kv head gets, as a file of `windlass calibrate --shares`, or
    `windlass.Shares`; all heads of the model together keep as many tokens as without. None: all get as much.

    Raises: UsageError for limits that cannot be honoured, or a model that is not attached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int | None = None,
        policy: str | Policy | None = AUTO,
        sinks: int | str = 4,
        window: int | None = None,
        chunk: int = 512,
        positions: str | PositionMode = AUTO,
        batch: int = 1,
        rollback: int = 16,
        store: str | Store = "plain",
        merge: str | Merge | None = None,
        recall: int = 0,
        recall_store: str | Store = DEFAULT_RECALL_STORE,
        recall_folder: str | Path | None = None,
        shares: str | Path | Shares | None = None,
    ) -> None:
        check_adapter(model)
        attachment = attached(model)
        newest = recall, recall_store, recall_folder, shares
        options = CacheOptions(budget, policy, sinks, window, chunk, positions, batch, rollback, store, merge, *newest)
        has_store = options.recall_store.name != DEFAULT_RECALL_STORE
        check_recall(options.recall, options.budget, options.recall_folder is not None, has_store)
        trained = find(options.policy, ModelSpecific)
        if trained is not None:
            trained.check(model_info(model))
        if options.shares is not None:
            options.shares.check(model_info(model))
        checked_merge(options.merge, options.budget, options.store, options.policy)
        device, config = device_of_inputs(model), model.config.get_text_config()
        check_policy(attachment.kinds, options.policy)
        super().__init__(attachment, options, attachment.rotaries, device, config, attachment.kinds)
        self.model_name, self.heads = _name_of(model), attachment.heads
        check_across_ranks(options, attachment.heads)
        if options.store.needs_key_means or (options.recall and options.recall_store.needs_key_means):
            if attachment.key_means is None:
                attachment.key_means = measure_key_means(
                    model, KVCache(model, policy=Recent(), positions="original", batch=ROWS)
                )
            self.key_means = attachment.key_means
        self.reset()

    @classmethod
    def from_options(cls, model: PreTrainedModel, options: CacheOptions) -> KVCache:
        """An empty cache with all of these options. Raises: UsageError, like the class itself."""
        check_kind("options", options, CacheOptions, "CacheOptions")
        return cls(model, **{each.name: getattr(options, each.name) for each in fields(options)})

    @no_inference_mode
    def __deepcopy__(self, memo: dict[int, object]) -> KVCache:
        """A cache of its own for the same model, which is not copied."""
        for shared in (self.model_id, self.config, *self.rotaries):
            memo[id(shared)] = shared
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce__(self) -> NoReturn:
        """Raises: UsageError. A pickled cache would take its whole model along, and fit no other."""
        raise UsageError(
            "a KVCache can't be pickled, for it belongs to a model of this process; keep it in a file with "
            "windlass.prompt_cache.save, or copy it with copy.deepcopy"
        )

    @classmethod
    @no_inference_mode
    def from_rotated(
        cls, model: PreTrainedModel, past_key_values: Cache, options: CacheOptions | None = None
    ) -> KVCache:
        """A cache with the tokens of a transformers `DynamicCache`, their keys un-rotated.

        The text is taken to start at position 0 in every row, without padding; there are as many rows as in the
        `DynamicCache`, whatever `options` say. What exceeds the budget is evicted at the next step.

        Raises: UsageError for a cache of another kind, or one filled under positions that changed
        with the length of the text (dynamic NTK past its window).
        """
        check_kind("options", options, (CacheOptions, type(None)), "CacheOptions or None")
        options = replace(options or CacheOptions(), batch=model_cache.rows_of(past_key_values, attached(model).kinds))
        cache = cls.from_options(model, options)
        model_cache.fill_from_rotated(cache, past_key_values, cache.kinds, cache.config)
        return cache

    def compress(self, budget: int, window: int | None = None, fit: bool = False) -> None:
        """Keep `budget` tokens a layer from now on; the others go at once, their memory too, and can't be rolled back.

        `window`: None takes what the cache was made with. A sliding window that no longer fits keeps its newest, if
        the policy keeps state.
        `fit`: the tokens that stay get values under which attention to them gives what attention to all gave, for the
        queries of the text itself, which the model reads a second time. That takes about as long as the first time, and
        meanwhile memory for a second copy of the cache and budget**2 numbers per kv head.

        Raises: UsageError for what cannot be honoured, or a higher budget; nothing is changed.
        """
        check_kind("fit", fit, bool, "True or False")
        if fit:
            check_fit(self.heads)
            compress_fitted(self, budget, window)
        else:
            compress(self, budget, window)

    def to_rotated(self) -> DynamicCache:
        """A transformers `DynamicCache` with this cache's tokens, keys rotated; this one stays as it is.

        Under `positions="compact"` the tokens get their ranks as positions, so a cache that has
        evicted can travel too.

        Raises: UsageError when rows or heads do not hold positions 0, 1, 2, ... up to one length.
        """
        return model_cache.to_rotated(self, self.config, self.kinds)


def _name_of(model: PreTrainedModel) -> str:
    """The name of the model's folder, without where that is, and its class."""
    folder, kind = Path(model.config.name_or_path or "").name, type(model).__name__
    return f"{folder} ({kind})" if folder else kind


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, the dtype of its keys, and its sliding window or chunk of attention.

    `latent`: of its keys' channels the last so many are its values (MLA), and are held once; 0 for none. `index`:
    channels of an indexer's key, held beside each key; 0 for none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None
    latent: int = 0
    attention_chunk: int | None = None
    index: int = 0

    @property
    def most_visible(self) -> int | None:
        """The most tokens that a query sees; None where there is no limit."""
        return most_visible(self.sliding_window, self.attention_chunk)

    @property
    def channels(self) -> int:
        """Numbers that are held of each token and kv head."""
        return self.head_dim + (0 if self.latent else self.value_dim) + self.index

    def of_heads(self, kv_heads: int) -> LayerShape:
        """That of so many of its kv heads, with their query heads."""
        return replace(self, heads=self.heads // self.kv_heads * kv_heads, kv_heads=kv_heads)

    def empty_store(self, like: Store) -> Store:
        """A store of the same settings as `like`, for this layer."""
        store = like.fresh(None)
        store.latent, store.index = self.latent, self.index
        return store

    def bytes_per_token(self, store: Store) -> int:
        """Bytes that a token takes per kv head in such a store, see `Store.bytes_per_token`."""
        return self.empty_store(store).bytes_per_token(self.head_dim, self.value_dim, self.dtype)

    def states(self, device: torch.device) -> tuple[Queries, NewKeys, NewValues]:
        """Queries, keys and values of one token, all 0."""
        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        queries, keys, values = (torch.zeros(1, n, 1, width, dtype=self.dtype, device=device) for n, width in sizes)
        return queries, keys, values


class _ShapeCache(KVCache):
    """A cache that holds nothing, and notes the shapes of what it is handed."""

    def __init__(self, model: PreTrainedModel) -> None:
        KVCache.__init__(self, model)
        self.shapes: dict[int, LayerShape] = {}
        self._values: dict[int, NewValues] = {}

    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """What one token alone reads: its own value."""
        heads, kv_heads = queries.shape[1], keys.shape[1]
        self.shapes[layer] = LayerShape(
            heads,
            kv_heads,
            keys.shape[3],
            values.shape[3],
            keys.dtype,
            call.sliding_window,
            self.latent_of(layer),
            call.attention_chunk,
            self.index_of(layer),
        )
        self._values[layer] = values
        return values.repeat_interleave(heads // kv_heads, 1)

    def attend_shared(self, layer: int, queries: Queries, call: AttentionCall) -> Attended:
        """As `attend`, of a layer that wrote."""
        values = self._values[layer]
        return values.repeat_interleave(queries.shape[1] // values.shape[1], 1)


@no_inference_mode
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """The shape of each layer of an attached model, from one pass of one token that no cache holds.

    Raises: UsageError when the model is not attached.
    """
    cache = _ShapeCache(model)
    first: Tensor = torch.zeros(1, 1, dtype=torch.long, device=device_of_inputs(model))
    model(input_ids=first, past_key_values=cache)
    return [cache.shapes[layer] for layer in range(len(cache.layers))]
