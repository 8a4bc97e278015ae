"""Which tensors a prompt-cache file must have: their names, shapes and dtypes, known before one of them is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.leaves import leaves_of
from windlass.cache.options import CacheOptions
from windlass.cache.recall_memory import RECALL
from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.errors import UsageError
from windlass.core.limits import check_recall
from windlass.core.step import HEADROOM, AttentionCall
from windlass.hf.attach import attached
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import LayerShape
from windlass.hf.prompt_cache_document import Contents, LayerNote
from windlass.hf.prompt_cache_fields import InconsistentFile, shown
from windlass.merge import checked_merge
from windlass.stores.base import INDEX_KEYS
from windlass.stores.full_precision import FullPrecisionRing

COLUMNS: Final = "columns"  # a tensor: how many each row was fed, where rows were rolled back by different numbers
POSITIONS: Final = "positions"


@dataclass(frozen=True)
class Layout:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"


@dataclass(frozen=True)
class LayerPlan:
    """What a layer of a file will be: its rules, and the layouts of its tensors by their names in a layer.

    With shares it may be a group of heads of a layer of the model; `index` is its place among the cache's `layers`.
    """

    index: int
    note: LayerNote
    shape: LayerShape
    rules: LayerRules
    layouts: dict[str, Layout]

    @property
    def prefix(self) -> str:
        """Begins the names of its tensors in the file."""
        return f"layers.{self.index}."


def layer_plans(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    contents: Contents,
    options: CacheOptions,
    found: Mapping[str, Layout],
) -> list[LayerPlan]:
    """The layers that have tokens, once every tensor of the file is there in its layout, and no other.

    `shapes` are those of the model, and `found` the layouts of the file's tensors, by name. None of them is read, and
    nothing large is allocated.

    Raises: InconsistentFile where document and tensors contradict one another or the model.
    """
    statistics = _statistics(model, options, shapes)
    shapes = _leaf_shapes(options, shapes)
    _check_options(contents, options, len(shapes))
    rules = _rules(contents, options, shapes, len(attached(model).rotaries))
    expected: dict[str, Layout] = {}
    plans, most_seen = [], max(contents.standing["tokens_seen"])
    for index, note in enumerate(contents.layers):
        if note is not None:
            prefix = f"layers.{index}."
            own = {name.removeprefix(prefix): layout for name, layout in found.items() if name.startswith(prefix)}
            slots, score_heads = _slots(index, own, contents, rules[index], shapes[index])
            layouts = _layouts(options, rules[index], shapes[index], slots, score_heads, most_seen)
            layouts |= _kept(own, rules[index], statistics[index], options.batch, contents.policy.name is not None)
            plans.append(LayerPlan(index, note, shapes[index], rules[index], layouts))
            expected |= {prefix + name: layout for name, layout in layouts.items()}
    seen = contents.standing["tokens_seen"]
    if contents.has_tokens:
        expected |= {f"tokens.{row}": Layout((count,), torch.int32) for row, count in enumerate(seen)}
    expected |= _states(model, contents, options.batch)
    if COLUMNS in found:
        expected[COLUMNS] = Layout((len(seen),), torch.int64)
    _compare(found, expected)
    return plans


def _leaf_shapes(options: CacheOptions, shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """The shapes of the cache's `layers`, of which each has all heads of a layer of the model, or some of them."""
    if options.shares is not None:
        ours = [shape.kv_heads for shape in shapes]
        theirs = [None if own is None else len(own) for own in options.shares.layers]
        if len(ours) != len(theirs) or any(a != b for a, b in zip(ours, theirs, strict=True) if b is not None):
            raise InconsistentFile(f"its shares are of {theirs} kv heads, and the model has {ours}")
    return [
        shapes[leaf.layer] if leaf.heads is None else shapes[leaf.layer].of_heads(len(leaf.heads))
        for leaf in leaves_of(options, len(shapes))
    ]


def _check_options(contents: Contents, options: CacheOptions, layers: int) -> None:
    if options.document() != contents.options:
        raise InconsistentFile("its options are not written as `save` writes them")
    try:
        checked_merge(options.merge, options.budget, options.store, options.policy)
        check_recall(options.recall, options.budget, has_folder=False, has_store=False)
    except UsageError as error:
        raise InconsistentFile(str(error)) from None
    if len(contents.layers) != layers:
        raise InconsistentFile(f"it has notes on {len(contents.layers)} layers, and the cache has {layers}")
    is_empty = [note is None for note in contents.layers]
    if any(is_empty) and (not all(is_empty) or max(contents.standing["tokens_seen"]) > 0):
        raise InconsistentFile("a layer has no tokens, though tokens were seen")


def _rules(contents: Contents, options: CacheOptions, shapes: Sequence[LayerShape], layers: int) -> list[LayerRules]:
    """By which rules each layer keeps tokens, its own budget and sliding window included; the model has `layers`."""
    planned = [leaf.limits for leaf in leaves_of(options, layers)]
    places = contents.has_places
    all_rules = [
        LayerRules(options.policy, options.merge, limits, limits.budget, has_places=places) for limits in planned
    ]
    for index, (note, shape) in enumerate(zip(contents.layers, shapes, strict=True)):
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
    index: int, own: Mapping[str, Layout], contents: Contents, rules: LayerRules, shape: LayerShape
) -> tuple[int, int]:
    """How many slots a layer has, by the shape of its positions, and for how many heads."""
    most = max(1, *contents.standing["tokens_seen"])
    allowed = {shape.kv_heads if rules.policy.needs.per_head else 1}
    if rules.is_whole_window:  # an import may not have known it, and have let each head rank its own
        allowed.add(shape.kv_heads)
    found = own[POSITIONS].shape if POSITIONS in own else ()
    if len(found) != 3 or found[1] not in allowed or not 1 <= found[2] <= most:
        raise InconsistentFile(
            f"layer {index} has positions of shape {found}, not of {contents.options['batch']} rows, "
            f"{' or '.join(map(str, sorted(allowed)))} heads and up to {most} slots"
        )
    return found[2], found[1]


def _layouts(
    options: CacheOptions, rules: LayerRules, shape: LayerShape, slots: int, score_heads: int, seen: int
) -> dict[str, Layout]:
    """The tensors of a layer, but for the statistics of its policy."""
    batch, own = options.batch, shape.empty_store(type(options.store)())
    _, keys, values = shape.states(torch.device("cpu"))
    try:
        own.allocate(keys, values, 1)
    except UsageError as error:
        raise InconsistentFile(str(error)) from None
    layouts = {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in own.tensors().items()}
    for name in [name for name in (*own.part_names, INDEX_KEYS) if name in layouts]:
        layouts[name] = Layout((batch, shape.kv_heads, slots, layouts[name].shape[3]), layouts[name].dtype)
    # On "meta" nothing is allocated, whatever number of tokens the options ask for.
    ring = FullPrecisionRing(options.store.full_precision.sinks, options.store.full_precision.newest)
    ring.allocate(keys.to("meta"), own.stored(values).to("meta"), HEADROOM + options.rollback)
    layouts |= {name: Layout((batch, *tensor.shape[1:]), tensor.dtype) for name, tensor in ring.tensors.items()}
    layouts |= _recalled(options, rules, shape, seen)
    per_slot = batch, score_heads, slots
    layouts[POSITIONS] = Layout(per_slot, torch.int32)
    return layouts | {STATE + name: Layout(per_slot, torch.float32) for name in rules.state}


def _recalled(options: CacheOptions, rules: LayerRules, shape: LayerShape, seen: int) -> dict[str, Layout]:
    """The tensors of what a layer has evicted and may recall: all of the text's `seen` tokens."""
    if not rules.recalls:
        return {}
    codec, (_, keys, values) = shape.empty_store(type(options.recall_store)()), shape.states(torch.device("cpu"))
    try:
        codec.allocate(keys, values, 1)
    except UsageError as error:
        raise InconsistentFile(str(error)) from None
    layouts = {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in codec.tensors().items()}
    for name in [name for name in codec.part_names if name in layouts]:
        width, dtype = layouts[name].shape[3], layouts[name].dtype
        layouts[name] = Layout((options.batch, shape.kv_heads, seen, width), dtype)
    layouts[POSITIONS] = Layout((options.batch, seen), torch.int32)
    return {RECALL + name: layout for name, layout in layouts.items()}


def _statistics(model: PreTrainedModel, options: CacheOptions, shapes: Sequence[LayerShape]) -> list[dict[str, Tensor]]:
    """What the policy keeps of each of a cache's `layers`, for one row, once it has observed a token of zeros."""
    cache = KVCache(model, policy=options.policy, shares=options.shares)
    if not options.policy.needs.statistics:
        return [{} for _ in cache.layers]
    cache.begin(1, 1, None, None, torch.zeros(1, 1, dtype=torch.long, device=model.device))
    for layer, shape in enumerate(shapes):
        cache.attend(layer, *shape.states(model.device), AttentionCall(1.0))  # no window: the policy is at work
    return [layer.table.statistics for layer in cache.layers]


def _states(model: PreTrainedModel, contents: Contents, batch: int) -> dict[str, Layout]:
    """The states of recurrent layers, without which no token was seen."""
    states = attached(model).states
    if states and not contents.has_states and max(contents.standing["tokens_seen"]) > 0:
        raise InconsistentFile("its recurrent layers have no states, though tokens were seen")
    if contents.has_states and not states:
        raise InconsistentFile("it has states of recurrent layers, and the model has none")
    if not contents.has_states:
        return {}
    return {name: Layout((batch, *state.shape[1:]), state.dtype) for name, state in states.items()}


def _kept(
    own: Mapping[str, Layout], rules: LayerRules, sample: Mapping[str, Tensor], batch: int, is_ours: bool
) -> dict[str, Layout]:
    """The statistics of a layer's policy: none before it has observed a query."""
    names = [name for name in rules.policy.needs.statistics if STATISTICS + name in own]
    if not names:
        return {}
    if is_ours:
        return {STATISTICS + name: Layout((batch, *each.shape[1:]), each.dtype) for name, each in sample.items()}
    # Only a policy from elsewhere knows its own shapes.
    return {STATISTICS + name: Layout((batch, *own[STATISTICS + name].shape[1:]), torch.float32) for name in names}


def _compare(found: Mapping[str, Layout], expected: Mapping[str, Layout]) -> None:
    for name, layout in expected.items():
        if name not in found:
            raise InconsistentFile(f"tensor {name} is missing")
        if found[name] != layout:
            raise InconsistentFile(f"tensor {name} is {found[name]}, and must be {layout}")
    for name in found:
        if name not in expected:
            raise InconsistentFile(f"tensor {shown(name)} is none that it should have")
