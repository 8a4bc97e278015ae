"""Check that `save` could have written the tensors of a prompt-cache file.

Their layouts were compared before. All functions raise: InconsistentFile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from windlass.cache.head_groups import leaves_of
from windlass.cache.layer_config import LayerConfig
from windlass.cache.merging import MERGED, checked_merge
from windlass.cache.options import CacheOptions
from windlass.cache.recall import POSITIONS, RECALL
from windlass.cache.recall import TOKEN_INDEX as TOKEN_INDEX_STATE
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.errors import UsageError
from windlass.core.parse import AUTO, MAX_NUMBER, check_recall
from windlass.core.positions import EMPTY, PLACES
from windlass.core.step import HEADROOM, AttentionCall
from windlass.hf.attach import attached
from windlass.hf.forward import LayerShape
from windlass.hf.model_cache import ModelCache
from windlass.hf.prompt_cache_format import Header, InconsistentFile, LayerHeader, RowHeader, shown
from windlass.hf.recurrent import CHECKPOINT_PREFIX, STATE_PREFIX, checkpoint_name
from windlass.policies import NAMES
from windlass.policies.expected_attention import COUNT
from windlass.stores.base import INDEX_KEYS, Store
from windlass.stores.full_precision import SLOTS, TOKEN_INDEX, WRITTEN, FullPrecisionRing

Make = Callable[[PreTrainedModel, CacheOptions], ModelCache]  # an empty cache of these options


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


@dataclass(frozen=True)
class LayerPlan:
    """Plan of a layer of a file: its rules, and the layouts of its tensors by their names in a layer.

    With shares it may be a group of heads of a layer of the model. `index` is its place among the cache's `layers`.
    """

    index: int
    note: LayerHeader
    shape: LayerShape
    rules: LayerConfig
    layouts: dict[str, TensorSpec]

    @property
    def prefix(self) -> str:
        """Begins the names of its tensors in the file."""
        return f"layers.{self.index}."


def layer_plans(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    header: Header,
    options: CacheOptions,
    found: Mapping[str, TensorSpec],
    make: Make,
) -> list[LayerPlan]:
    """The layers that have tokens, once every tensor of the file is there in its layout, and no other.

    `shapes` are those of the model, and `found` the layouts of the file's tensors, by name. None of them is read, and
    nothing large is allocated.

    Raises: InconsistentFile where document and tensors contradict one another or the model.
    """
    statistics = _statistics(make(model, CacheOptions(policy=options.policy, shares=options.shares)), shapes)
    shapes = _leaf_shapes(options, shapes)
    _check_options(header, options, len(shapes))
    rules = _rules(header, options, shapes, len(attached(model).rotaries))
    expected: dict[str, TensorSpec] = {}
    plans, most_seen = [], max(header.tokens_seen)
    for index, note in enumerate(header.layers):
        if note is not None:
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): layout for name, layout in found.items() if name.startswith(prefix)}
            slots, score_heads = _slots(index, own, header, rules[index], shapes[index])
            layouts = _layouts(options, rules[index], shapes[index], slots, score_heads, most_seen)
            layouts |= _kept(own, rules[index], statistics[index], options.batch, header.policy.name is not None)
            plans.append(LayerPlan(index, note, shapes[index], rules[index], layouts))
            expected |= {prefix + name: layout for name, layout in layouts.items()}
    seen = header.tokens_seen
    if header.has_tokens:
        expected |= {f"tokens.{row}": TensorSpec((count,), torch.int32) for row, count in enumerate(seen)}
    expected |= _states(model, header, options.batch)
    _compare(found, expected)
    return plans


def _leaf_shapes(options: CacheOptions, shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes of the cache's `layers`, of which each has all heads of a layer of the model, or some of them."""
    assert options.shares != AUTO, "shares of no model"
    if options.shares is not None:
        ours = [shape.kv_heads for shape in shapes]
        theirs = [None if own is None else len(own) for own in options.shares.layers]
        if len(ours) != len(theirs) or any(a != b for a, b in zip(ours, theirs, strict=True) if b is not None):
            raise InconsistentFile(f"its shares are of {theirs} kv heads, and the model has {ours}")
    return [
        shapes[leaf.layer] if leaf.heads is None else shapes[leaf.layer].of_heads(len(leaf.heads))
        for leaf in leaves_of(options, len(shapes))
    ]


def _check_options(header: Header, options: CacheOptions, layers: int) -> None:
    if options.document() != header.options.model_dump():
        raise InconsistentFile("its options are not written as `save` writes them")
    try:
        checked_merge(options.merge, options.budget, options.store, options.policy)
        check_recall(options.recall, options.budget, has_folder=False, has_store=False)
    except UsageError as error:
        raise InconsistentFile(str(error)) from None
    if len(header.layers) != layers:
        raise InconsistentFile(f"it has notes on {len(header.layers)} layers, and the cache has {layers}")
    is_empty = [note is None for note in header.layers]
    if any(is_empty) and (not all(is_empty) or max(header.tokens_seen) > 0):
        raise InconsistentFile("a layer has no tokens, though tokens were seen")


def _rules(header: Header, options: CacheOptions, shapes: Sequence[LayerShape], layers: int) -> list[LayerConfig]:
    """Rules by which each layer keeps tokens, its own budget and sliding window included. The model has `layers`."""
    planned = [leaf.limits for leaf in leaves_of(options, layers)]
    places = header.has_places
    all_rules = [
        LayerConfig(options.policy, options.merge, limits, limits.budget, has_places=places) for limits in planned
    ]
    for index, (note, shape) in enumerate(zip(header.layers, shapes, strict=True)):
        if note is None:
            continue
        if note.sliding_window not in (None, shape.sliding_window):
            raise InconsistentFile(
                f"layer {index} has a sliding window of {note.sliding_window}, in the model of {shape.sliding_window}"
            )
        all_rules[index] = all_rules[index].with_sliding_window(note.sliding_window, shape.attention_chunk)
        if note.budget is not None:
            if options.budget is None or not options.limits.sinks < note.budget <= options.budget * len(shapes):
                raise InconsistentFile(
                    f"layer {index} keeps {note.budget} tokens, and the cache {options.budget} a layer"
                )
            all_rules[index] = all_rules[index].with_budget(note.budget)
    return all_rules


def _slots(
    index: int, own: Mapping[str, TensorSpec], header: Header, rules: LayerConfig, shape: LayerShape
) -> tuple[int, int]:
    """How many slots a layer has, by the shape of its positions, and for how many heads."""
    most = max(1, *header.tokens_seen)
    allowed = {shape.kv_heads if rules.policy.needs.per_head else 1}
    if rules.is_whole_window:  # an import may not have known it, and have let each head rank its own
        allowed.add(shape.kv_heads)
    found = own[POSITIONS].shape if POSITIONS in own else ()
    if len(found) != 3 or found[1] not in allowed or not 1 <= found[2] <= most:
        raise InconsistentFile(
            f"layer {index} has positions of shape {found}, not of {len(header.rows)} rows, "
            f"{' or '.join(map(str, sorted(allowed)))} heads and up to {most} slots"
        )
    return found[2], found[1]


def _layouts(
    options: CacheOptions, rules: LayerConfig, shape: LayerShape, slots: int, score_heads: int, seen: int
) -> dict[str, TensorSpec]:
    """The tensors of a layer, but for the statistics of its policy."""
    batch, own = options.batch, shape.empty_store(type(options.store)())
    layouts = _in_codes(own, shape, batch, slots)
    _, keys, values = shape.states(torch.device("meta"))
    # "meta" allocates no memory for any number of tokens in the options.
    ring = FullPrecisionRing(options.store.full_precision.sinks, options.store.full_precision.newest)
    ring.allocate(keys, own.stored(values), HEADROOM + options.rollback)
    layouts |= {name: TensorSpec((batch, *tensor.shape[1:]), tensor.dtype) for name, tensor in ring.tensors.items()}
    layouts |= _recalled(options, rules, shape, seen)
    per_slot = batch, score_heads, slots
    layouts[POSITIONS] = TensorSpec(per_slot, torch.int32)
    return layouts | {STATE + name: TensorSpec(per_slot, torch.float32) for name in rules.state}


def _in_codes(store: Store, shape: LayerShape, batch: int, slots: int) -> dict[str, TensorSpec]:
    """The tensors of an empty store, once it holds so many slots of a layer of this shape."""
    _, keys, values = shape.states(torch.device("cpu"))
    try:
        store.allocate(keys, values, 1)
    except UsageError as error:
        raise InconsistentFile(str(error)) from None
    per_slot = {*store.part_names, INDEX_KEYS}
    return {
        name: TensorSpec(
            (batch, shape.kv_heads, slots, tensor.shape[3]) if name in per_slot else tuple(tensor.shape), tensor.dtype
        )
        for name, tensor in store.tensors().items()
    }


def _recalled(options: CacheOptions, rules: LayerConfig, shape: LayerShape, seen: int) -> dict[str, TensorSpec]:
    """The tensors of a layer's recall store, which has all of the text's `seen` tokens."""
    if not rules.recalls:
        return {}
    layouts = _in_codes(shape.empty_store(type(options.recall_store)()), shape, options.batch, seen)
    layouts[POSITIONS] = TensorSpec((options.batch, seen), torch.int32)
    return {RECALL + name: layout for name, layout in layouts.items()}


def _statistics(cache: ModelCache, shapes: Sequence[LayerShape]) -> list[dict[str, Tensor]]:
    """Layouts of the policy's statistics in each of the `layers` of an empty cache, after a token of zeros."""
    if not cache.policy.needs.statistics:
        return [{} for _ in cache.layers]
    cache.begin(1, 1, None, None, torch.zeros(1, 1, dtype=torch.long, device=cache.device))
    for layer, shape in enumerate(shapes):
        cache.attend(layer, *shape.states(cache.device), AttentionCall(1.0))  # no window: the policy is at work
    return [layer.table.statistics for layer in cache.layers]


def _states(model: PreTrainedModel, header: Header, batch: int) -> dict[str, TensorSpec]:
    """The states of recurrent layers, without which no token was seen, and those in checkpoints."""
    states = attached(model).states
    if states and not header.has_states and max(header.tokens_seen) > 0:
        raise InconsistentFile("its recurrent layers have no states, though tokens were seen")
    if header.has_states and not states:
        raise InconsistentFile("it has states of recurrent layers, and the model has none")
    if not header.has_states:
        return {}
    expected = {name: TensorSpec((batch, *state.shape[1:]), state.dtype) for name, state in states.items()}
    ends = [(at, end) for at, row in enumerate(header.rows) for end in row.checkpoints]
    return expected | {
        checkpoint_name(at, end, name): TensorSpec((*state.shape[1:],), state.dtype)
        for at, end in ends
        for name, state in states.items()
    }


def _kept(
    own: Mapping[str, TensorSpec], rules: LayerConfig, sample: Mapping[str, Tensor], batch: int, is_ours: bool
) -> dict[str, TensorSpec]:
    """The statistics of a layer's policy: none before it has observed a query."""
    names = [name for name in rules.policy.needs.statistics if STATISTICS + name in own]
    if not names:
        return {}
    if is_ours:
        return {STATISTICS + name: TensorSpec((batch, *each.shape[1:]), each.dtype) for name, each in sample.items()}
    # Only a policy from elsewhere knows its own shapes.
    return {STATISTICS + name: TensorSpec((batch, *own[STATISTICS + name].shape[1:]), torch.float32) for name in names}


def _compare(found: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> None:
    for name, layout in expected.items():
        if name not in found:
            raise InconsistentFile(f"tensor {name} is missing")
        if found[name] != layout:
            raise InconsistentFile(f"tensor {name} is {found[name]}, and must be {layout}")
    for name in found:
        if name not in expected:
            raise InconsistentFile(f"tensor {shown(name)} is not expected")


def check_rows(header: Header, tensors: Mapping[str, Tensor], vocabulary: int) -> None:
    """Check the ids of the text, and that the states of recurrent layers are finite."""
    for row in range(len(header.rows) if header.has_tokens else 0):
        ids = tensors[f"tokens.{row}"]
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise InconsistentFile(f"row {row} has token ids that are not among the model's {vocabulary}")
    for name, tensor in tensors.items():
        if name.startswith((STATE_PREFIX, CHECKPOINT_PREFIX)) and not _is_finite(tensor):
            raise InconsistentFile(f"tensor {name} has numbers that are not finite")


def check_layer(plan: LayerPlan, header: Header, options: CacheOptions, tensors: Mapping[str, Tensor]) -> None:
    """Check that the numbers of a layer are finite, and that each row holds tokens that its text can have."""
    own = {name: tensors[plan.prefix + name] for name in plan.layouts}
    is_ours, has_known_numbers = header.policy.name is not None, header.policy.name in NAMES
    kept = {STATE + name for name in options.policy.needs.state}
    for name, tensor in own.items():
        # The numbers of a user's policy, or of a wrapper, are unknown here.
        is_free = name in kept or (name.startswith(STATISTICS) and not is_ours)
        if (
            (has_known_numbers or not is_free)
            and tensor.is_floating_point()
            and tensor.numel()
            and not _is_finite(tensor)
        ):
            raise InconsistentFile(f"tensor {plan.prefix + name} has numbers that are not finite")
        if (has_known_numbers or name not in kept) and name.startswith(STATE) and bool((tensor < 0).any()):
            raise InconsistentFile(f"tensor {plan.prefix + name} has numbers below 0")
    counts = own.get(STATISTICS + COUNT) if is_ours else None
    if counts is not None:
        most = counts.flatten(1).amax(1)
        if bool((counts < 0).any() or (most > counts.new_tensor(header.tokens_seen)).any()):
            raise InconsistentFile(f"layer {plan.index} has observed other numbers of tokens than were seen")
    for at, row in enumerate(header.rows):
        where, positions = f"layer {plan.index}, row {at}", own[POSITIONS][at]
        _check_positions(where, plan, row, positions)
        if header.has_places:
            _check_places(where, positions, [own[STATE + name][at] for name in PLACES], row.next_place)
        if STATE + MERGED in own:
            _check_merged(where, row, positions, own[STATE + MERGED][at])
        if plan.rules.recalls:
            _check_recalled(where, row, positions, own[STATE + TOKEN_INDEX_STATE][at], own[RECALL + POSITIONS][at])
        if WRITTEN in own:
            ring = {name: own[name][at] for name in (SLOTS, TOKEN_INDEX, WRITTEN)}
            _check_ring(where, plan, row, positions, ring, options.store.full_precision)
    if int((own[POSITIONS] >= 0).sum(-1).max()) < own[POSITIONS].shape[2] > 1:
        raise InconsistentFile(f"layer {plan.index} has more slots than tokens")


def _is_finite(tensor: Tensor) -> bool:
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _check_positions(where: str, plan: LayerPlan, row: RowHeader, positions: Tensor) -> None:
    """Check that `positions` (score_heads, slots) are free, or of the text. Held ones come first.

    After `divide` several tokens may stand at one position, but none that came after it.
    """
    if int(positions.min()) < EMPTY or int(positions.max()) >= row.next_position:
        raise InconsistentFile(f"{where} holds positions outside of its text, which continues at {row.next_position}")
    is_held = positions >= 0
    if bool((is_held[:, 1:] & ~is_held[:, :-1]).any()):
        raise InconsistentFile(f"{where} has tokens behind free slots")
    ordered = positions.sort(-1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= row.edited_end) & (ordered[:, 1:] >= 0)
    if bool(is_double.any()):
        raise InconsistentFile(f"{where} holds a position twice in one head")
    since = (positions >= max(row.edited_end, 0)).sum(-1)
    if int((is_held.sum(-1) - since).max()) > row.tokens_seen - row.since_edit:
        raise InconsistentFile(f"{where} holds more tokens than were seen before its last edit")
    # An import holds no more than a sliding window shows, and nothing was evicted for that.
    window = plan.shape.most_visible
    kept = row.since_edit if window is None else min(row.since_edit, window - 1)
    if not plan.note.has_evicted and int(since.min()) < kept:
        raise InconsistentFile(f"{where} lacks tokens, though none was evicted")


def _check_recalled(where: str, row: RowHeader, positions: Tensor, index: Tensor, places: Tensor) -> None:
    """Check that each slot's token is the one at its `index` in the row. `places` are the positions of all tokens."""
    places = pad(places, (0, 1), value=EMPTY)
    if (
        int(places.min()) < EMPTY
        or int(places.max()) >= row.next_position
        or bool((places[row.tokens_seen :] != EMPTY).any())
    ):
        raise InconsistentFile(f"{where} recalls positions outside of its text, which continues at {row.next_position}")
    named = index.where(positions >= 0, 0.0)
    if bool((named != named.floor()).any()) or int(named.max()) >= max(row.tokens_seen, 1):
        raise InconsistentFile(f"{where} holds other tokens than the {row.tokens_seen} that it may recall")
    stands = places.expand(len(positions), -1).gather(1, named.long())
    ordered = index.where(positions >= 0, -1.0).sort(-1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(((stands != positions) & (positions >= 0)).any() or is_double.any()):
        raise InconsistentFile(f"{where} holds tokens elsewhere than it would recall them")


def _check_places(where: str, positions: Tensor, places: list[Tensor], end: int) -> None:
    """`places`: where the tokens at `positions` are read, and how far their pictures reach, all of it up to `end`."""
    at, start, stop = (each.where(positions >= 0, 0.0) for each in places)
    is_whole = all(torch.equal(each, each.floor()) for each in (at, start, stop))
    is_inside = (start <= at) & (at < stop) & (stop <= end) | (positions < 0)
    if not (is_whole and bool(is_inside.all())):
        raise InconsistentFile(f"{where} reads tokens outside of its text, up to {end}")


def _check_merged(where: str, row: RowHeader, positions: Tensor, merged: Tensor) -> None:
    """`merged` (score_heads, slots): how many tokens each held one has taken in."""
    counts = merged.double().where(positions >= 0, 0.0)
    tokens = counts.sum(-1) + (positions >= 0).sum(-1)
    # Counts are float32, whose sums round from 2^24 on.
    is_count = bool((counts >= 0).all() and (counts == counts.floor()).all())
    if not is_count or float(tokens.max()) > row.tokens_seen * (1 + 1e-6):
        raise InconsistentFile(f"{where} has merged other than its {row.tokens_seen} tokens")


def _check_ring(
    where: str,
    plan: LayerPlan,
    row: RowHeader,
    positions: Tensor,
    ring: Mapping[str, Tensor],
    exact: FullPrecisionRing,
) -> None:
    """The tokens in full precision are the first and the newest that were written, each with the slot of its codes."""
    owners, token_index, written = ring[SLOTS][:, :-1].long(), ring[TOKEN_INDEX], int(ring[WRITTEN])
    # An import gave a sliding layer only the newest tokens.
    is_whole = plan.shape.most_visible is None
    least = row.since_edit if is_whole else 0
    if not least <= written <= row.tokens_seen or (is_whole and row.since_edit == row.tokens_seen != written):
        raise InconsistentFile(f"{where} has written {written} tokens of {row.tokens_seen}")
    if int(ring[SLOTS].min()) < -1 or int(ring[SLOTS].max()) >= positions.shape[1]:
        raise InconsistentFile(f"{where} has slots in full precision that it has not")
    sinks, newest = exact.sinks, exact.newest
    index, entries = token_index[:-1], torch.arange(len(token_index) - 1)
    size = max(len(entries) - sinks, 1)
    home = index.where(index < sinks, sinks + index % size)
    is_wrong = (index < -1) | (index > MAX_NUMBER) | ((index >= 0) & (home != entries))
    # Which token each entry has, if it is a first or one of the newest.
    latest = written - 1 - (written - 1 - (entries - sinks)) % size
    wanted = entries.where(entries < sinks, latest)
    is_wanted = (wanted < written) & ((entries < sinks) | (latest >= max(sinks, written - newest)))
    if bool((is_wrong | (is_wanted & (index != wanted))).any()) or int(token_index[-1]) != -1:
        raise InconsistentFile(f"{where} has other tokens in full precision than its first {sinks} and newest {newest}")
    held = positions.expand(len(owners), -1).gather(1, owners.clamp(min=0))
    is_owned = (owners >= 0) & (index >= 0) & (held >= 0)
    own = torch.where(
        held >= row.edited_end, index == written - row.next_position + held, index < written - row.since_edit
    )
    counts = torch.zeros_like(positions.expand(len(owners), -1)).scatter_add(
        1, owners.clamp(min=0), ((owners >= 0) & (index >= 0)).to(positions.dtype)
    )
    if bool((is_owned & ~own).any()) or int(counts.max()) > 1:
        raise InconsistentFile(f"{where} has other tokens in full precision than in their slots")
