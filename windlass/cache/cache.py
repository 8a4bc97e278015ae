"""The operations of a cache: passes of a model, all or nothing, and edits between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from windlass.cache import describe as summary
from windlass.cache import edits
from windlass.cache.compress import compress
from windlass.cache.decode import LayerCall
from windlass.cache.edits import check_pictures, check_rewrite, clear_row, put_row
from windlass.cache.fused import FusedDecode
from windlass.cache.head_groups import HeadGroups, Leaf, Take, leaves_of
from windlass.cache.layer import SlotLayer, attend_shared
from windlass.cache.options import CacheOptions
from windlass.cache.recall import RecallMemory, RecallStore
from windlass.cache.recompute import rewrite, second_pass
from windlass.cache.recurrent import RecurrentLayer, check_columns, states_of_row
from windlass.cache.rows import RowTable, check_positions
from windlass.cache.state import CacheState, Text
from windlass.core.errors import UsageError, whole_number
from windlass.core.parse import DEFAULT_SINKS, MAX_NUMBER, SYSTEM
from windlass.core.ranks import RankHeads
from windlass.core.step import HEADROOM, AttentionCall, no_inference_mode
from windlass.core.types import Attended, Hidden, KeyMeans, NewKeys, NewValues, Queries, TokenIds, TokenMask
from windlass.policies.base import TOKEN
from windlass.policies.calls import across_ranks
from windlass.stores.base import Store

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import FewTokens


def check_across_ranks(options: CacheOptions, heads: RankHeads | None) -> None:
    """Check that options give the same result on several ranks as in one process.

    Raises: PolicyError for the policy, and UsageError for another option, naming it.
    """
    across_ranks(options.policy, heads)
    if heads is None:
        return
    if not heads.has_all_queries and not heads.is_split and options.recall:
        raise UsageError(
            f"recall={options.recall} picks tokens by queries, and here each rank has some of the query heads that "
            "read the same keys. Leave recall out"
        )
    if not heads.is_split:
        return
    if options.shares is not None:
        raise UsageError(
            f"shares {options.shares} give heads of a layer other budgets, and each of {heads.ranks.size} ranks has "
            "only some of them. Leave shares out"
        )
    merge = options.merge
    if merge is not None and not options.policy.needs.per_head and (merge.target != "next" or merge.threshold > -1):
        raise UsageError(
            f"merge {merge} looks for one slot for all heads, as {options.policy!r} ranks them alike, and each of "
            f"{heads.ranks.size} ranks has only some of them. Take {type(merge).name}(next), or a policy that ranks "
            "each head by itself"
        )


def check_fit_ranks(heads: RankHeads | None) -> None:
    """Raises: UsageError where the values of kept tokens would be fitted to the queries of this rank alone."""
    if heads is not None and not heads.is_split and not heads.has_all_queries:
        raise UsageError(
            "compress(fit=True) fits values to queries, and here each rank has some of the query heads that read the "
            "same keys. Leave fit out"
        )


def set_sinks(cache: CacheState, tokens: int, row: int = 0, pins: Sequence[tuple[int, int]] = ()) -> None:
    """Never evict the first `tokens` of a row from now on. A cache with `sinks="system"` needs it before it reads.

    `windlass.system_tokens` counts those of a system text. Fewer than 4 count as 4, the default. `pins`: ranges
    [start, stop) of further positions that are never evicted. They count against the budget, and a text with pins can't
    be edited. Layers that hold a whole sliding window evict them once no token sees them.

    Raises: UsageError for a cache with another number of sinks, a row that is not there, more than the budget holds, or
    pins in a cache that merges.
    """
    if cache.options.sinks != SYSTEM:
        raise UsageError(
            f"set_sinks: this cache has sinks={cache.options.sinks}. Make it with sinks={SYSTEM!r} to set them per row"
        )
    tokens = whole_number("sinks", tokens, 0, MAX_NUMBER)
    row = whole_number("row", row, 0, cache.batch_size - 1)
    budgets = [layer.budget for layer in cache.layers if not layer.rules.is_whole_window]
    sinks, apart = max(tokens, DEFAULT_SINKS), pins_behind(max(tokens, DEFAULT_SINKS), pins)
    check_sinks(tokens, cache.options, budgets, apart)
    changed = cache.rows.changed(lambda _, one: replace(one, sinks=sinks, pins=apart), row)
    cache.text = replace(cache.text, rows=changed)


def pins_behind(sinks: int, pins: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The positions in these ranges behind the sinks, as ascending ranges apart from each other.

    Raises: UsageError for a range that ends before it starts.
    """
    found = list[tuple[int, int]]()
    for start, stop in sorted(pins):
        if not 0 <= start <= stop <= MAX_NUMBER:
            raise UsageError(f"pins: [{start}, {stop}) is no range of positions. Give 0 <= start <= stop")
        start = max(start, sinks, found[-1][1] if found else 0)
        if start < stop:
            found.append((start, stop))
    return tuple(found)


def check_sinks_fit(tokens: int, options: CacheOptions, layers: int, pins: Sequence[tuple[int, int]] = ()) -> None:
    """Raises: UsageError where a row with these options, in a model of so many layers, has no room for the sinks."""
    if options.sinks == SYSTEM:
        budgets = [leaf.limits.budget for leaf in leaves_of(options, layers)]
        check_sinks(tokens, options, budgets, pins_behind(max(tokens, DEFAULT_SINKS), pins))


def check_sinks(
    tokens: int, options: CacheOptions, budgets: Iterable[int | None], pins: Sequence[tuple[int, int]] = ()
) -> None:
    """Raises: UsageError for more sinks and pins than one of the budgets has room for, beside the window and one token,
    and for pins where tokens are merged into others."""
    if pins and options.merge is not None:
        raise UsageError(
            f"pins: merge={options.merge} averages evicted tokens into those that stay, pinned ones among them. Leave "
            "merge or the pins out"
        )
    tokens += sum(stop - start for start, stop in pins)
    window = options.limits.window
    least = min((budget for budget in budgets if budget is not None), default=None)
    if least is not None and max(tokens, DEFAULT_SINKS) + window + 1 > least:
        apart = "" if least == options.budget else f", of which a layer keeps {least},"
        raise UsageError(
            f"sinks: system text and pins have {tokens} tokens, and the budget of {options.budget} tokens{apart} has "
            f"room for {max(least - window - 1, 0)} beside the window of {window}. Raise budget, shorten or unpin "
            "text, or set sinks to a number"
        )


def check_sinks_set(cache: CacheState, lengths: Iterable[int]) -> None:
    """Raises: UsageError where a row is to read tokens, and its number of sinks has not been set."""
    if cache.options.sinks != SYSTEM:
        return
    for number, (row, tokens) in enumerate(zip(cache.rows.rows, lengths, strict=True)):
        if tokens and row.sinks is None:
            raise UsageError(
                f"sinks={SYSTEM!r} needs the number of tokens of the system text of row {number}. Call "
                f"cache.set_sinks(windlass.system_tokens(tokenizer, messages), row={number}) before it reads, or give "
                "sinks a number"
            )


class TextCache(CacheState):
    """The memory of one text per row: passes of a model write it, and edits change it. It needs nothing but PyTorch."""

    def reset(self) -> None:
        """Forget every token and free the memory."""
        leaves = leaves_of(self.options, len(self.rotaries))
        self.layers = [self._slot_layer(leaf) for leaf in leaves]
        self.by_layer = HeadGroups.of(leaves, self._layers)
        self.recurrent = self.new_recurrent_layers()
        self.rows, self.expects_drafts = RowTable.at_start(self.batch_size), False

    def _slot_layer(self, leaf: Leaf) -> SlotLayer:
        index, layers = leaf.layer, len(self.rotaries)
        means = None if self.key_means is None else self.key_means[index]
        if means is not None and leaf.heads is not None:
            means = means[list(leaf.heads)]
        store, rotary = self._store(index, means), self.rotaries[index]
        is_shared, recall = index in self.shared, self._recall(index, means)
        heads = leaf.heads if self.heads is None else self.heads.heads(index)
        return SlotLayer(
            index=index,
            limits=leaf.limits,
            policy=across_ranks(self.policy, self.heads),
            rotary=rotary,
            store=store,
            merge=self.merge,
            layers=layers,
            is_shared=is_shared,
            recall=recall,
            heads=heads,
        )

    def _store(self, layer: int, key_means: KeyMeans | None) -> Store:
        store = self.store.fresh(key_means)
        store.latent, store.index = self.latent_of(layer), self.index_of(layer)
        return store

    def _recall(self, layer: int, key_means: KeyMeans | None) -> RecallStore | None:
        """The store of a layer's evicted tokens. None: they are lost."""
        options = self.options
        if not options.recall:
            return None
        codec = options.recall_store.fresh(key_means)
        codec.latent = self.latent_of(layer)
        return RecallStore(options.recall, codec, RecallMemory(options.recall_folder))

    def latent_of(self, layer: int) -> int:
        """The number of a layer's last key channels that are its values (MLA). Here 0, for no such channels."""
        return 0

    def index_of(self, layer: int) -> int:
        """The number of channels of an indexer's key that a layer gets behind its own keys. Here 0, for no indexer."""
        return 0

    def new_recurrent_layers(self) -> list[RecurrentLayer]:
        """Empty states for the model's recurrent layers. Here none, as this class knows no model."""
        return []

    def reserve(self, tokens: int) -> None:
        """Grow a cache without budget once for the next `tokens`, not step by step."""
        tokens = whole_number("tokens", tokens, 0, MAX_NUMBER)
        if self._fused is None or not self._fused.has_room(tokens):
            for layer in self.layers:
                layer.reserve_hint = layer.table.occupancy_bound + tokens

    def keep_room(self, is_kept: bool) -> None:
        """Let decode keep the slots for a chunk of a prompt, or give them back, so that nothing is moved in between."""
        for layer in self.layers:
            layer.longest_decode = max(HEADROOM, self.chunk * is_kept)
            slots = layer.rules.slots_for(0, layer.table.slots, layer.table.occupancy_bound, 0, HEADROOM, False)
            if not is_kept and not layer.is_empty and layer.budget is not None and slots < layer.table.slots:
                layer.resize(slots)

    @property
    def tokens_seen(self) -> list[int]:
        """Per row, tokens written since the start, evicted ones included."""
        return self.rows.tokens_seen

    @property
    def tokens(self) -> list[list[int]] | None:
        """Per row, the ids fed, edits aside. None: some tokens came without ids."""
        return self.rows.tokens

    @property
    def budget(self) -> int | None:
        """Most tokens a layer keeps at rest."""
        return self.options.budget

    @property
    def chunk(self) -> int:
        """Most tokens that the engine feeds per step of a prompt."""
        return self.options.chunk

    @property
    def columns_seen(self) -> int:
        """Columns fed so far, padding and evicted tokens included."""
        return self.rows.columns_seen

    @property
    def is_in_step(self) -> bool:
        """Return True if a pass of the model is running."""
        return self.text.pending is not None

    @no_inference_mode
    def begin(
        self,
        batch: int,
        tokens: int,
        mask: TokenMask | None,
        positions: Tensor | None,
        ids: TokenIds | None,
        axes: Tensor | None = None,
    ) -> None:
        """Give the next `tokens` columns their positions. Call it before each pass of the model.

        `mask` marks the real tokens among these columns. `positions` are those of the caller, and are only compared.
        `ids` are stored for the prompt cache and for policies that ask for them. `axes` (axes, batch, tokens) are the
        tokens' positions where a token has several, as in pictures.

        Raises: UsageError when the batch is another, positions do not follow, ids that the policy asks for are
        missing, the cache can't take a picture, sinks="system" has no number yet, a recurrent layer would read padding,
        or the text can't be recomputed in place. Then nothing is changed.
        """
        if batch != self.batch_size:
            raise UsageError(f"this cache was made for batch={self.batch_size}, the model was called with {batch} rows")
        if ids is None and TOKEN in self.policy.needs.state:
            raise UsageError(f"{self.policy!r} ranks by token ids. Call the model with input_ids, not inputs_embeds")
        how, rows = self.next_pass, self.rows
        step = how.step
        if self.recurrent and tokens > 1:
            check_columns(self.recurrent, rows.rows, mask if step is None else step.positions >= 0)
        if step is None:
            ours, lengths = rows.columns(tokens, mask, self.device)
            if positions is not None:
                check_positions(ours, positions.to(self.device))
            step = rows.step(ours, lengths, ids, how, rows.places(ours, axes))
        check_sinks_set(self, step.lengths)
        check_pictures(self, step)
        if step.is_rewrite:
            check_rewrite(self, step.end)
        self.text = Text(rows, pending=step)
        for layer in self.recurrent:
            layer.protect(step)

    @no_inference_mode
    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """Write, attend, observe and evict in one layer. The model's attention calls it."""
        step = self.text.pending
        assert step is not None, "attend outside of a pass"
        layer_call = LayerCall(queries, keys, values, step, self.positions, call)
        take: Take = SlotLayer.step
        if step.is_second_pass:
            take = second_pass if self.fitting is None else self.fitting.second_pass
        elif step.is_rewrite:
            if self.divergence is not None and self.divergence.index == layer:
                self.divergence.reached(layer_call)
            take = rewrite
        return self.by_layer[layer].step(take, layer_call)

    @no_inference_mode
    def fused_decode(
        self, decoder: Sequence[FewTokens], hidden: Hidden, calls: Callable[[], list[AttentionCall]]
    ) -> FusedDecode | None:
        """A backend for steps like the one that runs, in all layers in one call. None: a kernel alone can't take them.

        `calls` gives the attention calls of the layers, and is called only if they are needed.
        """
        step, fused = self.text.pending, self._fused
        assert step is not None, "a decode step outside of a pass"
        if not step.is_token:
            return None
        if fused is not None and fused.serves(decoder, hidden, step, self.positions):
            return fused
        if self.recurrent or len(self.by_layer) != len(decoder):
            return None
        self._fused = FusedDecode.of(self.by_layer, decoder, hidden, step, self.positions, calls())
        return self._fused

    @no_inference_mode
    def decode(self, fused: FusedDecode, hidden: Hidden) -> Hidden:
        """Take the step of the running pass in all layers. Returns the output of the decoder's last layer."""
        step = self.text.pending
        assert step is not None, "a decode step outside of a pass"
        return fused.take(step, hidden)

    @no_inference_mode
    def attend_shared(self, layer: int, queries: Queries, call: AttentionCall) -> Attended:
        """Attention of a layer that has no keys and values, to those of `layer`, which has attended before.

        `queries` are those of the pass's last columns, mostly of all. Raises: UsageError for another sliding window.
        """
        mode = self.positions
        return self.by_layer[layer].read(
            lambda slots, own_queries, own_call: attend_shared(slots, own_queries, mode, own_call), queries, call
        )

    @no_inference_mode
    def commit(self) -> None:
        """Make the pass's tokens part of the text."""
        step, rows, how = self.text.pending, self.rows, self.next_pass
        assert step is not None, "commit without a pass"
        after = rows
        if step.is_rewrite or step.is_insert:
            for row, tokens in enumerate(step.lengths):
                after = after.edited(row) if tokens else after
        elif not step.is_second_pass:
            columns = step.positions.shape[1]
            is_mixed = any(0 < tokens < columns for tokens in step.lengths)
            is_token = (step.positions >= 0).tolist() if is_mixed else None
            after = rows.fed(step.lengths, columns, step.prompt_lengths, is_token)
            if step.places is not None and step.places.has_pictures:
                after = after.shown(step.places.pictures)
            if how.step is None:
                after = after.told(_ids_of(step.ids, step.positions))
            elif how.token_ids is not None:
                after = after.told(how.token_ids)
        for state in self.recurrent:
            state.settle(step)
        self.text = Text(after, latest=step)  # the pass is committed here
        if self._fused is None or not self._fused.took(step):
            for layer in self.layers:
                layer.commit()

    @no_inference_mode
    def take_back(self, before: Text) -> None:
        """Restore the state in which `text` was `before`, with at most one pass since, complete or not.

        A pass notes each change before it makes it, so this may be called wherever an interrupt has ended the pass.
        """
        now = self.text
        if now is before:
            return
        step = now.pending or now.latest
        assert step is not None, "an edit while a pass was running"
        if now.pending is None and (step.is_second_pass or step.is_rewrite):
            # The pass is done: committed layers cannot undo it.
            for its in self.layers:
                its.commit()
            return
        if self._fused is not None and self._fused.took(step):
            self._fused.take_back()
            self.text = before
            return
        for layer in (*self.layers, *self.recurrent):
            layer.take_back(step)
        self.text = before

    @no_inference_mode
    def checkpoint(self) -> None:
        """Copy the states of recurrent layers, so that `rollback` can return to this point of each row's text.

        A row has at most 8 checkpoints. Then the one goes without which the fewest tokens lie between two others. A
        model without recurrent layers needs none.
        """
        if self.recurrent:
            layers = self.recurrent
            rows = self.rows.changed(
                lambda at, row: row if row.is_marked else row.marked(states_of_row(layers, at)), None
            )
            self.text = replace(self.text, rows=rows)

    def checkpoints_of(self, row: int) -> tuple[int, ...] | None:
        """The numbers of a row's tokens at which there is a checkpoint. None: no layer needs any."""
        return tuple(each.tokens for each in self.rows.rows[row].checkpoints) if self.recurrent else None

    @property
    def checkpoints(self) -> list[list[int]]:
        """Per row, the numbers of tokens at which there is a checkpoint of recurrent layers."""
        return [[each.tokens for each in row.checkpoints] for row in self.rows.rows]

    @property
    def bytes_held(self) -> int:
        """Bytes of all tensors that the cache keeps alive: slots, state, and records for rolling back.

        Memory that tensors share counts once. Rotary tables do not count: they are the model's, and all its caches
        read them. Nor do the ids in `tokens`, which are Python's numbers.
        """
        return sum(summary.bytes_by_part(self).values())

    @property
    def recall_bytes(self) -> int:
        """Bytes of evicted tokens that can be recalled, in the host's memory or a file. They grow with the text.

        They are no part of `bytes_held`.
        """
        return summary.recall_bytes(self)

    __repr__ = summary.as_text
    _repr_html_ = summary.as_html
    describe = summary.describe
    compress = compress
    rollback = edits.rollback
    drop = edits.drop
    keep = edits.keep
    shift = edits.shift
    divide = edits.divide
    copy = edits.copy
    splice = edits.splice
    put_row = put_row
    set_sinks = set_sinks
    clear_row = clear_row
    select_rows = edits.select_rows


def _ids_of(ids: Tensor | None, positions: Tensor) -> list[list[int]] | None:
    """The ids of each row's tokens, padding left out."""
    if ids is None:
        return None
    rows = zip(ids.tolist(), (positions >= 0).tolist(), strict=True)
    return [[token for token, is_token in zip(*row, strict=True) if is_token] for row in rows]
