"""The cache as transformers wants it: `past_key_values` of an attached model."""

import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

from transformers import Cache, DynamicCache, PreTrainedModel

from windlass.cache.across_ranks import check_across_ranks, check_fit
from windlass.cache.compress import compress
from windlass.cache.options import CacheOptions
from windlass.cache.recall_options import DEFAULT_RECALL_STORE
from windlass.cache.shares import Shares
from windlass.core.check import check_kind
from windlass.core.errors import UsageError
from windlass.core.limits import check_recall
from windlass.core.spec import AUTO
from windlass.core.step import no_inference_mode
from windlass.hf import convert
from windlass.hf.attach import attached
from windlass.hf.fit_values import compress_fitted
from windlass.hf.guards import check_adapter
from windlass.hf.key_means import ROWS, measure_key_means
from windlass.hf.linear_layer import check_policy
from windlass.hf.model_cache import ModelCache
from windlass.hf.model_info import model_info
from windlass.hf.placement import device_of_inputs
from windlass.merge import Merge, checked_merge
from windlass.policies import Policy, Recent
from windlass.policies.interfaces import Trained
from windlass.policies.wrapper import find
from windlass.positions.modes import PositionMode
from windlass.stores.base import Store


class KVCache(ModelCache):
    """A cache of un-rotated keys, of fixed size, for a model that went through `windlass.attach`.

    Pass it as `past_key_values` to the model or to `generate`, or to `windlass.stream` and its kin.
    It owns the positions: every row of the batch has its own text, and tokens continue it.

    `budget`: most tokens a layer keeps at rest, per row; None keeps them all and grows on demand.
    `sinks`: first positions of the text that are never evicted; "system": those of each row's system text, which
    `set_sinks` is told before the row reads its first token, see `windlass.system_tokens`.
    `window`: newest tokens that are never evicted; None takes a quarter of what the sinks leave, at most 64.
    `policy`: which tokens are kept, as a policy or its name: `"key_diff"`, `"SnapKV(pool=7)"`, `"file.py:Class"`;
    "auto" (or None) is the best of those that read a text once, see docs/findings.md;
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
    whose key is most like its own; see `windlass.merge`.
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
        trained = find(options.policy, Trained)
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
    def from_options(cls, model: PreTrainedModel, options: CacheOptions) -> "KVCache":
        """An empty cache with all of these options. Raises: UsageError, like the class itself."""
        check_kind("options", options, CacheOptions, "CacheOptions")
        return cls(model, **{each.name: getattr(options, each.name) for each in fields(options)})

    @no_inference_mode
    def __deepcopy__(self, memo: dict[int, object]) -> "KVCache":
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
    ) -> "KVCache":
        """A cache with the tokens of a transformers `DynamicCache`, their keys un-rotated.

        The text is taken to start at position 0 in every row, without padding; there are as many rows as in the
        `DynamicCache`, whatever `options` say. What exceeds the budget is evicted at the next step.

        Raises: UsageError for a cache of another kind, or one filled under positions that changed
        with the length of the text (dynamic NTK past its window).
        """
        check_kind("options", options, (CacheOptions, type(None)), "CacheOptions or None")
        options = replace(options or CacheOptions(), batch=convert.rows_of(past_key_values, attached(model).kinds))
        cache = cls.from_options(model, options)
        convert.fill_from_rotated(cache, past_key_values, cache.kinds, cache.config)
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
        return convert.to_rotated(self, self.config, self.kinds)


def _name_of(model: PreTrainedModel) -> str:
    """The name of the model's folder, without where that is, and its class."""
    folder, kind = Path(model.config.name_or_path or "").name, type(model).__name__
    return f"{folder} ({kind})" if folder else kind
