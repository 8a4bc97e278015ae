"""The cache of a whole model: its layers, and where each row's text stands."""

import copy
from collections.abc import Sequence

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from windlass.cache import describe, edits
from windlass.cache.compress import compress, layer_limits
from windlass.cache.layer import LayerCache
from windlass.cache.rows import Standing, check_positions
from windlass.cache.second_pass import reread
from windlass.cache.undo import undo_if_last
from windlass.core.errors import UsageError
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries, TokenIds, TokenMask
from windlass.core.step import AttentionCall, Step, checked_limits, outlasting
from windlass.hf import convert
from windlass.hf import key_means as calibrate
from windlass.hf.attach import seam_of
from windlass.hf.transformers_cache import TransformersCache
from windlass.merge import Merge, checked_merge, readable
from windlass.policies import Policy, Recent
from windlass.policies.base import TOKEN
from windlass.positions.modes import PositionMode
from windlass.stores.base import Store
from windlass.stores.low_bit import store_of


class KVCache(TransformersCache):
    """A cache of un-rotated keys, of fixed size, for a model that went through `windlass.attach`.

    Pass it as `past_key_values` to the model or to `generate`, or to `windlass.stream` and its kin.
    It owns the positions: every row of the batch has its own text, and tokens continue it.

    `budget`: most tokens a layer keeps at rest, per row; None keeps them all and grows on demand.
    `sinks`: first positions of the text that are never evicted.
    `window`: newest tokens that are never evicted; None takes a quarter of what the sinks leave, at most 64.
    `chunk`: most tokens that the engine feeds per step of a prompt; room for these is allocated.
    `positions`: where kept tokens are read, see `windlass.positions`; may be reassigned at any time.
    `batch`: rows.
    `rollback`: tokens, fed in steps of their own, that can be taken back beside the last step. A
    policy that keeps state can take back the last step only.
    `store`: "plain" holds keys and values as they are, "int8" in 0.52 of the bytes of bfloat16, "int4" in 0.27;
    "int4(sinks=4, newest=32)" keeps these tokens exact, too. A model's first low-bit cache runs it for 16 steps.
    `merge`: what happens to an evicted token's content: None drops it, "mean_count" lets the kept token that is
    most like it stand for both; see `windlass.merge`.

    Raises: UsageError for limits that cannot be honoured, or a model that is not attached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        budget: int | None = None,
        policy: Policy | None = None,
        sinks: int = 4,
        window: int | None = None,
        chunk: int = 512,
        positions: str | PositionMode = "original",
        batch: int = 1,
        rollback: int = 16,
        store: str | Store = "plain",
        merge: str | Merge | None = None,
    ) -> None:
        seam = seam_of(model)
        super().__init__(seam)
        self.limits, self.given_window = checked_limits(budget, sinks, window, chunk, batch, rollback), window
        self.policy = Recent() if policy is None else policy
        self.policy.check(model)
        self.store = store_of(store)
        self.merge = checked_merge(merge, budget, self.store, self.policy)
        self._positions = readable(self.merge, positions)
        self._seam, self._batch, self.device = seam, batch, model.device
        self.config = model.config.get_text_config()
        self._pending: Step | None = None
        self.script: Step | None = None  # what the next pass is, where it was decided elsewhere, tokens counted too
        if self.store.needs_centres and seam.centres is None:
            seam.centres = calibrate.key_centres(model, KVCache(model, batch=calibrate.ROWS))
        self.reset()

    def reset(self) -> None:
        """Forget every token and free the memory."""
        centres = self._seam.centres or [None] * len(self._seam.rotaries)
        each = zip(layer_limits(self.policy, self.limits, len(centres)), self._seam.rotaries, centres, strict=True)
        self.layers: list[LayerCache] = [  # type: ignore[assignment]  # transformers' own kinds of layers
            LayerCache(index, limits, self.policy, rotary, self.store.fresh(centre), self.merge)
            for index, (limits, rotary, centre) in enumerate(each)
        ]
        self.standing = Standing.at_start(self._batch)
        self.is_rereading = False  # whether what is fed was read before, see `engine.prefill`

    @outlasting
    def __deepcopy__(self, memo: dict[int, object]) -> "KVCache":
        """A cache of its own for the same model, which is not copied."""
        for shared in (self._seam, self.config, *self._seam.rotaries):
            memo[id(shared)] = shared
        twin = KVCache.__new__(KVCache)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def reserve(self, tokens: int) -> None:
        """Let a cache without budget grow once, not step by step, while the next `tokens` are written."""
        for layer in self.layers:
            layer.reserved = layer.most_held + tokens

    @property
    def tokens_seen(self) -> list[int]:
        """Per row, tokens written since the start, evicted ones included."""
        return self.standing.tokens_seen

    @property
    def next_positions(self) -> list[int]:
        """Per row, the position of the next token."""
        return self.standing.next_positions

    @property
    def tokens(self) -> list[list[int]] | None:
        """Per row, the ids fed, edits aside; None once any came without ids."""
        return self.standing.tokens

    @property
    def positions(self) -> PositionMode:
        """Where kept tokens are read. Nothing is stored with it, so it may change between steps."""
        return self._positions

    @positions.setter
    def positions(self, mode: str | PositionMode) -> None:
        self._positions = readable(self.merge, mode)

    @property
    def budget(self) -> int | None:
        """Most tokens a layer keeps at rest."""
        return self.limits.budget

    @property
    def chunk(self) -> int:
        """Most tokens that the engine feeds per step of a prompt."""
        return self.limits.chunk

    @property
    def batch_size(self) -> int:
        return self._batch

    @property
    def columns_seen(self) -> int:
        return self.standing.columns_seen

    @property
    def is_in_step(self) -> bool:
        return self._pending is not None

    @outlasting
    def begin(
        self, batch: int, tokens: int, mask: TokenMask | None, positions: Tensor | None, ids: TokenIds | None
    ) -> None:
        """Give the next `tokens` columns their positions. `hf` calls this before each forward pass.

        `mask` tells the real tokens of these columns from padding. `positions` are the caller's,
        only compared. `ids` are remembered for the prompt cache and for policies that ask for them.

        Raises: UsageError when the batch is another, positions do not follow, or ids that the policy asks
        for are missing; nothing is changed.
        """
        if batch != self._batch:
            raise UsageError(f"this cache was made for batch={self._batch}, the model was called with {batch} rows")
        if ids is None and TOKEN in self.policy.state:
            raise UsageError(f"{self.policy!r} ranks by token ids; call the model with input_ids, not inputs_embeds")
        if self.script is not None:
            self._pending = self.script
            return
        ours, lengths = self.standing.columns(tokens, mask, self.device)
        if positions is not None:
            check_positions(ours, positions.to(self.device))
        self._pending = self.standing.step(ours, lengths, ids, self.is_rereading)

    @outlasting
    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """One layer's write, attend, observe, evict. `hf` calls this from the model's attention."""
        assert self._pending is not None, "attend outside of a step"
        step, its = self._pending, self.layers[layer]
        return (reread if step.is_reread else LayerCache.step)(its, queries, keys, values, step, self._positions, call)

    @outlasting
    def end(self, is_complete: bool) -> None:
        """Make the step's tokens part of the text, or take them back if the pass did not complete."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not is_complete:
            for layer in self.layers:
                undo_if_last(layer, pending)
        elif not pending.is_reread and pending is not self.script:
            self.standing.advance(pending)

    def compress(self, budget: int, window: int | None = None) -> None:
        """Keep `budget` tokens a layer from now on; the others go at once, their memory too, and can't be taken back.

        `window`: None takes what the cache was made with. A sliding window that no longer fits keeps its newest, if
        the policy keeps state. Raises: UsageError for what cannot be honoured, or a higher budget; nothing is changed.
        """
        compress(self, budget, window)

    # The edits: integers change, keys and values never do. See `windlass.edits`.

    def rollback(self, tokens: int | Sequence[int]) -> None:
        """Forget the newest `tokens` of every row (or one number per row), exactly.

        The cache is then as if they had never been written, evictions and policy state included.

        Raises: UsageError when they reach further back than can be taken back; nothing is changed.
        """
        edits.rollback(self, tokens)

    def drop(self, start: int, end: int, row: int | None = None) -> None:
        """Free the tokens at positions `start` up to `end`; the others keep their places.

        Dropping the newest tokens moves the end of the text back to `start`.
        """
        edits.drop(self, start, end, row)

    def keep(self, start: int, end: int, row: int | None = None) -> None:
        """Free every token but those at positions `start` up to `end`."""
        edits.keep(self, start, end, row)

    def shift(self, start: int, end: int, by: int, row: int | None = None) -> None:
        """Add `by` to the positions from `start` up to `end`.

        Raises: UsageError when a token would stand before 0 or where another one stands.
        """
        edits.shift(self, start, end, by, row)

    def divide(self, start: int, end: int, by: int, row: int | None = None) -> None:
        """Divide the positions from `start` up to `end`, rounding down: several tokens may share one."""
        edits.divide(self, start, end, by, row)

    def copy(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`: its tokens, positions and policy state."""
        edits.copy(self, source, target)

    def splice(self, other: "KVCache", source: int = 0, row: int = 0) -> None:
        """Append the kept tokens of row `source` of another cache to row `row`, as text that goes on here.

        Keys are copied (converted once, into another kind of store); distances among them stay. They have
        not seen the text before them, as after any join. What exceeds the budget goes at the next step.

        Raises: UsageError when the caches differ in model or layout.
        """
        edits.splice(self, other, source, row)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, in that order; a row may be named more than once."""
        self._batch = edits.select_rows(self, rows)

    def nbytes(self) -> int:
        """Bytes allocated for slots, positions and policy state."""
        return sum(describe.bytes_by_tensor(self).values())

    def describe(self) -> str:
        """What is held and what it takes, from what is allocated."""
        return describe.describe(self)

    @classmethod
    @outlasting
    def from_rotated(
        cls,
        model: PreTrainedModel,
        past_key_values: Cache,
        budget: int | None = None,
        policy: Policy | None = None,
        sinks: int = 4,
        window: int | None = None,
        chunk: int = 512,
        positions: str | PositionMode = "original",
        store: str | Store = "plain",
    ) -> "KVCache":
        """A cache with the tokens of a transformers `DynamicCache`, their keys un-rotated.

        The text is taken to start at position 0 in every row, without padding. What exceeds the
        budget is evicted at the next step.

        Raises: UsageError for a cache of another kind, or one filled under positions that changed
        with the length of the text (dynamic NTK past its window).
        """
        batch = convert.rows_of(past_key_values)
        cache = cls(model, budget, policy, sinks, window, chunk, positions, batch, store=store)
        convert.fill_from_rotated(cache, past_key_values)
        return cache

    def to_rotated(self) -> DynamicCache:
        """A transformers `DynamicCache` with this cache's tokens, keys rotated; this one stays as it is.

        Under `positions="compact"` the tokens get their ranks as positions, so a cache that has
        evicted can travel too.

        Raises: UsageError when rows or heads do not hold positions 0, 1, 2, ... up to one length.
        """
        return convert.to_rotated(self)
