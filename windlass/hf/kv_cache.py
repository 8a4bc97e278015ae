"""The cache as transformers wants it: `past_key_values` of an attached model."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.cache import check_across_ranks, check_fit
from windlass.cache.compress import compress
from windlass.cache.merging import Merge, checked_merge
from windlass.cache.options import DEFAULT_RECALL_STORE, CacheOptions
from windlass.cache.recompute import Fitting
from windlass.cache.shares import Shares
from windlass.core.errors import UsageError, check_kind
from windlass.core.parse import AUTO, check_recall
from windlass.core.step import PROMPT, READ, no_inference_mode
from windlass.hf import model_cache, prompt_cache
from windlass.hf.attach import AttachedModel, attached
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
    slots: in each layer and kv head the pages of 8 tokens that matter most to the step's queries; 0 forgets it, "half"
    is half as many as the budget. The store grows with the text, in the host's memory or, unnamed, in a file of
    `recall_folder`.
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
        recall: int | str = 0,
        recall_store: str | Store = DEFAULT_RECALL_STORE,
        recall_folder: str | Path | None = None,
        shares: str | Path | Shares | None = None,
    ) -> None:
        check_adapter(model)
        attachment = attached(model)
        options = CacheOptions(
            budget=budget,
            policy=policy,
            sinks=sinks,
            window=window,
            chunk=chunk,
            positions=positions,
            batch=batch,
            rollback=rollback,
            store=store,
            merge=merge,
            recall=recall,
            recall_store=recall_store,
            recall_folder=recall_folder,
            shares=shares,
        )
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
        self._settle()
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce__(self) -> NoReturn:
        """Raises: UsageError. A pickled cache would take its whole model along, and fit no other."""
        raise UsageError(
            "a KVCache can't be pickled, for it belongs to a model of this process; keep it in a file with "
            "cache.save(path), or copy it with copy.deepcopy"
        )

    def save(self, path: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write this cache to a file; an older file there is replaced once the new one is whole, or not at all.

        The ids of the tokens are written where those of all rows are known. Of a model on several ranks all of them
        call this, and rank 0 writes one file with the heads of all of them. With a `tokenizer` the file notes the hash
        of its chat template.

        Raises: PromptCacheError when the file cannot be written; UsageError when the cache reads at positions that
        have no name.
        """
        prompt_cache.save(self, path, self._attachment.model, tokenizer)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        policy: str | Policy | None = None,
        recall_folder: str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> KVCache:
        """The cache that `save` wrote: going on with it is as if the text had never been interrupted.

        `policy`, as a policy or its name, is needed only where the file's is not one of windlass' own. A file need not
        come from a friend: all of it is checked before anything of it is used, and it changes nothing but the cache
        that is returned. `recall_folder` is that of `KVCache`: evicted tokens of the file go there. The model runs for
        one token, so that shapes are compared with its own. With a `tokenizer`, a warning tells where the file was made
        with another chat template: the text in the cache stays as it was written.

        Raises: PromptCacheError, naming the file, when it is missing, damaged, of another format, made by
        another model, or made with another policy; UsageError when the model is not attached.
        """
        return prompt_cache.load(path, model, cls.from_options, policy, recall_folder, tokenizer)

    @property
    def _attachment(self) -> AttachedModel:
        assert isinstance(self.model_id, AttachedModel), "a cache of no model"
        return self.model_id

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
