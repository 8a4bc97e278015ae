"""The cache as transformers wants it: `past_key_values` of an attached model."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Final, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.cache import check_across_ranks, check_fit_ranks
from windlass.cache.compress import compress
from windlass.cache.merging import Merge, checked_merge
from windlass.cache.options import DEFAULT_RECALL_STORE, CacheOptions
from windlass.cache.recompute import Fitting
from windlass.cache.shares import Shares, shipped
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
from windlass.policies.wrappers import find
from windlass.positions.modes import PositionMode
from windlass.stores.base import Store

CHUNK: Final = 128  # tokens of each step of the second pass. The whole text is about equally far from its queries


@no_inference_mode
@torch.no_grad()
def compress_fitted(cache: ModelCache, budget: int, window: int | None) -> None:
    """Evict down to a budget and give the cached tokens fitted values, see `KVCache.compress`."""
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
            places[1].data[:, :, :slots] = values[:, :, :slots]


def _texts(cache: ModelCache) -> list[list[int]]:
    """The ids of each row. Raises: UsageError where the text can't be read again, or its values not be replaced."""
    texts, what = cache.tokens, "compress(fit=True)"
    if cache.recurrent:
        raise UsageError(
            f"{what} reads the text a second time, and layer {cache.recurrent[0].index} keeps a state that would read "
            "it twice, too. Leave fit out"
        )
    if any(layer.rules.has_places for layer in cache.layers) or texts is None:
        raise UsageError(
            f"{what} reads the text a second time, which takes the ids of all of its tokens, and this one came with "
            "pictures or without ids. Leave fit out"
        )
    for layer in cache.layers:
        if layer.is_empty:
            continue
        if (places := layer.store.in_place()) is None or places[1].scales is not None:
            way_out = "Leave fit out" if cache.store.name == "plain" else 'Take store="plain", or leave fit out'
            raise UsageError(
                f"{what} writes values that are held as they are, and the store {cache.store.name!r} holds them "
                f"otherwise in this model. {way_out}"
            )
        held = (layer.positions >= 0).sum(-1).amin(1).tolist()
        if layer.rules.most_visible is None and (held != cache.tokens_seen or held != cache.next_positions):
            raise UsageError(
                f"{what} needs the whole text, and layer {layer.index} holds {_listed(held)} of "
                f"{_listed(cache.tokens_seen)} tokens. Make the cache without a budget, and compress it before any edit"
            )
    return texts


def _listed(counts: list[int]) -> str:
    return ", ".join(map(str, counts))


def _read_again(cache: ModelCache, texts: list[list[int]], fitting: Fitting) -> None:
    """Run the text through every layer a second time. The cache's content is the same afterwards."""
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
    """KV cache of fixed size, with keys stored before RoPE, for a model prepared by `windlass.attach`.

    Pass it as `past_key_values` to the model or to `generate`, or to `windlass.stream`, `generate` and `prefill`.
    The cache sets the positions: every row of the batch has its own text, and new tokens continue it.

    `budget`: most tokens that a layer caches between steps, per row. None caches all of them and grows on demand.
    `sinks`: number of first tokens of the text that are never evicted. "system" means each row's system text: call
    `set_sinks` before the row reads its first token, see `windlass.system_tokens`.
    `window`: newest tokens that are never evicted. None takes a quarter of the budget left by the sinks, at most 64.
    `policy`: decides which tokens are evicted. A policy or its name: `"key_diff"`, `"SnapKV(pool=7)"`,
    `"file.py:Class"`. "auto" (or None) is the best policy that reads a text once, see docs/results/findings.md.
    Without a budget it is `Recent`, also for a later `compress`.
    `chunk`: most tokens that the engine feeds per step of a prompt. The cache allocates slots for them.
    `positions`: the positions at which cached tokens are read, see `windlass.positions`. It can be reassigned at any
    time. "auto" reads at the model's own positions while a text is within the trained length, and beyond it at
    positions that stay within.
    `batch`: rows.
    `rollback`: tokens, fed in steps of their own, that can be rolled back in addition to the last step.
    `store`: "plain" stores keys and values in the model's dtype, "int8" in 0.52 of the bytes of bfloat16, "int4" in
    0.34. "int4(sinks=4, newest=32)" keeps these tokens in full precision, too. The first low-bit cache of a model
    runs the model for 16 steps.
    `merge`: None drops an evicted token's content. "mean_count" averages it into the cached token with the most similar
    key, see `windlass.cache.merging`: a study, which predicts novels worse than dropping on SmolLM2-135M.
    `recall`: evicted tokens stay in a recall store, and each step reads up to this many of them in addition to the
    slots: in each layer and kv head the pages of 8 tokens that the step's queries score highest. 0 drops evicted
    tokens, "half" is half as many as the budget. The store grows with the text, in host memory or in an unnamed file of
    `recall_folder`.
    `recall_store`: format of the recall store: "plain", "int8" or "int4".
    `shares`: the part of the budget that each layer and kv head gets, as a file of `windlass calibrate --shares` or
    `windlass.Shares`. The total over all heads is unchanged. None gives all heads the same. "auto" takes the shares
    that come with Windlass for these weights, if there are any and a budget.

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
        attachment.check_unchanged()
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
        if options.shares == AUTO:
            options = replace(options, shares=None if budget is None else shipped(model_info(model)))
        elif options.shares is not None:
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

    def activate_past_recording(self) -> None:
        self._attachment.read_drafts()
        super().activate_past_recording()

    def copy_of_row(self, row: int = 0, tokens: int | None = None) -> KVCache:
        """A cache of one row with a copy of row `row`, without free slots.

        `tokens`: only the first so many, of a row that has evicted none under a policy without state.
        """
        twin = type(self).from_options(self._attachment.model, replace(self.options, batch=1))
        twin.put_row(0, self, row, tokens)
        return twin

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
            "a KVCache can't be pickled, for it belongs to a model of this process. Keep it in a file with "
            "cache.save(path), or copy it with copy.deepcopy"
        )

    def save(self, path: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Write this cache to a file. An existing file is replaced only once the new one is complete.

        Token ids are written if those of all rows are known. On a tensor-parallel model every rank must call this, and
        rank 0 writes one file with the heads of all ranks. With a `tokenizer` the file records the hash of its chat
        template.

        Raises: PromptCacheError if the file cannot be written, UsageError if the cache's positions mode has no name.
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
        """Load a cache that `save` wrote. Continuing it gives the same results as without the interruption.

        `policy`, as a policy or its name, is needed only if the file's policy is not one of Windlass.
        `recall_folder` is that of `KVCache`: the file's evicted tokens go there. The model runs for one token to
        compare shapes. With a `tokenizer`, a file made with another chat template causes a warning. The cached text is
        not changed.

        The file cannot run code or name another file. Its header, checksum, model and tensors are checked before the
        cache is made: names, shapes, dtypes and the memory of the cache, finite numbers, token ids of the vocabulary,
        and positions within the text. The checksum finds damage and not forgery. Nothing checks that keys, values and
        states belong to the token ids, so a forged file can steer the model's output like a prompt. The state of a
        wrapper or of your own policy may have any numbers.

        Raises: PromptCacheError, naming the file, if it is missing, damaged, of another format, or made with another
        model or policy. UsageError if the model is not attached.
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
        """Make a cache from the tokens of a transformers `DynamicCache`, whose keys are un-rotated.

        The text must start at position 0 in every row, without padding. The number of rows is that of the
        `DynamicCache`, and `options.batch` is ignored. Tokens beyond the budget are evicted at the next step.

        Raises: UsageError for a cache of another kind, or one filled under positions that changed
        with the length of the text (dynamic NTK past its window).
        """
        check_kind("options", options, (CacheOptions, type(None)), "CacheOptions or None")
        options = replace(options or CacheOptions(), batch=model_cache.rows_of(past_key_values, attached(model).kinds))
        cache = cls.from_options(model, options)
        model_cache.fill_from_rotated(cache, past_key_values, cache.kinds, cache.config)
        return cache

    def compress(self, budget: int, window: int | None = None, fit: bool = False) -> None:
        """Lower the budget to `budget` tokens per layer.

        Tokens beyond it are evicted at once, their memory is freed, and they cannot be rolled back.

        `window`: None keeps the window that the cache was made with. A sliding window that no longer fits keeps its
        newest tokens if the policy has state.
        `fit`: fits the values of the cached tokens, so that attention to them comes as close as possible to attention
        to all tokens, for the text's own queries. The model reads the text a second time. This takes about as long as
        the first time, and memory for a second copy of the cache and budget**2 numbers per kv head.

        Raises: UsageError for options that cannot be honoured or a higher budget. The cache is unchanged then.
        """
        check_kind("fit", fit, bool, "True or False")
        if fit:
            check_fit_ranks(self.heads)
            compress_fitted(self, budget, window)
        else:
            compress(self, budget, window)

    def to_rotated(self) -> DynamicCache:
        """Return a transformers `DynamicCache` with this cache's tokens and rotated keys. This cache is unchanged.

        Under `positions="compact"` tokens get their ranks as positions, so a cache with evictions can be converted too.

        Raises: UsageError if rows or heads do not hold positions 0, 1, 2, ... up to one length.
        """
        return model_cache.to_rotated(self, self.config, self.kinds)


def _name_of(model: PreTrainedModel) -> str:
    """The name of the model's folder, without where that is, and its class."""
    folder, kind = Path(model.config.name_or_path or "").name, type(model).__name__
    return f"{folder} ({kind})" if folder else kind
