"""Tokens and bytes of a cache, counted from the tensors that are allocated."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from html import escape
from typing import Final

from torch import Tensor

from windlass.cache.recall import RecallStore
from windlass.cache.state import CacheState
from windlass.core.parse import in_units
from windlass.positions.modes import Original, Windowed


def bytes_by_part(cache: CacheState) -> dict[str, int]:
    """Bytes of all tensors that a cache keeps alive, by part. Shared memory counts once, in the first part.

    The parts are the tensors of the layers, by name: keys, values, positions, state. Then come "recurrent states",
    their "checkpoints", "key_means" where the store copied them, and "rollback" for the records of steps that can be
    rolled back.
    """
    layers = cache.layers_to_read
    parts = [part for layer in layers for part in layer.tensors().items()]
    parts += [("recurrent states", tensor) for layer in cache.recurrent for tensor in layer.tensors().values()]
    parts += [("checkpoints", tensor) for row in cache.rows.rows for tensor in _tensors_in(row.checkpoints)]
    parts += [("key_means", tensor) for tensor in _tensors_in(cache.key_means)]
    undo = [(layer.history, layer.checkpoint) for layer in layers]
    parts += [("rollback", tensor) for layer in cache.recurrent for tensor in layer.undo_tensors]
    parts += [("rollback", tensor) for tensor in _tensors_in((undo, cache.text, cache.next_pass))]
    total: dict[str, int] = {}
    counted = set()
    for name, tensor in parts:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            total[name] = total.get(name, 0) + storage.nbytes()
            counted.add(storage.data_ptr())
    return {name: count for name, count in total.items() if count}


def _tensors_in(record: object) -> Iterator[Tensor]:
    """The tensors of a record: in its fields, and in the records and containers there."""
    if isinstance(record, Tensor):
        yield record
        return
    inner: Iterator[object] = iter(())
    if isinstance(record, dict):
        inner = iter(record.values())
    elif isinstance(record, (list, tuple)) and not (record and isinstance(record[0], int)):  # not the ids of a text
        inner = iter(record)
    elif is_dataclass(record):
        inner = (getattr(record, each.name) for each in fields(record))
    for each in inner:
        yield from _tensors_in(each)


def recall_bytes(cache: CacheState) -> int:
    """Bytes of evicted tokens that can be recalled, beside `bytes_by_part`.

    They are in the host's memory or a file, except digests and positions, which are on the device that ranks tokens.
    """
    return sum(store.nbytes for store in _recalled(cache))


def _recalled(cache: CacheState) -> list[RecallStore]:
    return [layer.table.recall for layer in cache.layers_to_read if layer.table.recall is not None]


def recall_note(cache: CacheState) -> str:
    """A sentence on recall: tokens of each step, tokens that can be recalled, and their bytes."""
    options = cache.options
    place = "in memory" if options.recall_folder is None else f"in a file of {options.recall_folder}"
    held = ", ".join(map(str, cache.rows.tokens_seen))
    size = in_units(recall_bytes(cache))
    near = [tensor for each in _recalled(cache) for tensor in each.allocated() if tensor.device.type != "cpu"]
    beside = f", {in_units(sum(each.nbytes for each in near))} of it on {near[0].device}" if near else ""
    told = f"{size} {place}{beside} ({options.recall_store.name})"
    return f"{options.recall} tokens a layer and step, of {held}, which take {told}"


def reading_now(cache: CacheState) -> str:
    """The position mode in which the newest token of the longest row is read. `auto` gives its current mode."""
    mode = cache.positions.within(cache.trained_length, cache.limits.budget is not None)
    if not isinstance(mode, Windowed):
        return str(mode)
    held = max(
        (layer.table.occupancy_bound for layer in cache.layers_to_read if layer.rules.most_visible is None), default=0
    )
    return mode.label(max(cache.next_positions), held)


def beyond_note(cache: CacheState) -> str | None:
    """A warning about a full cache that reads a text beyond the trained length of its model. None: no such cache."""
    trained, tokens = cache.trained_length, max(cache.next_positions)
    if (
        trained is None
        or tokens <= trained
        or cache.limits.budget is not None
        or not isinstance(cache.positions, Original)
    ):
        return None
    return (
        f"{tokens:,} tokens are more than the {trained:,} this model was trained on. "
        "Read them with positions auto, or set a budget as well"
    )


def describe(cache: CacheState) -> str:
    """The cache's settings, tokens and bytes, line by line, from the tensors that are allocated."""
    limits = cache.limits
    budget = "unbounded" if limits.budget is None else f"{limits.budget} tokens a layer"
    each = [layer.rules.limits.budget for layer in cache.layers_to_read]
    budgets = {budget for budget in each if budget is not None}
    if len(budgets) > 1:
        budget += f" on average, from {min(budgets)} to {max(budgets)}"
    sinks = dict.fromkeys(limits.sinks if row.sinks is None else row.sinks for row in cache.rows.rows)
    reading = reading_now(cache)
    now = "" if reading == str(cache.positions) else f", now {reading}"
    lines = [
        f"KVCache: {len(cache.by_layer)} layers, batch {cache.batch_size}, positions {cache.positions}{now}",
        f"  policy   {cache.policy!r}",
        f"  store    {cache.store.name}" + (f", merge {cache.merge}" if cache.merge is not None else ""),
        f"  budget   {budget}, sinks {' or '.join(map(str, sinks))}, window {limits.window}, chunk {limits.chunk}",
        f"  seen     {', '.join(map(str, cache.rows.tokens_seen))} tokens",
    ]
    if cache.heads is not None:
        lines.insert(1, f"  rank     {cache.heads.label}")
    if cache.options.shares is not None:
        apart = sum(its.whole is None for its in cache.by_layer)
        lines.insert(4, f"  shares   {cache.options.shares}" + (f", heads of {apart} layers apart" if apart else ""))
    note = beyond_note(cache)
    lines += [] if note is None else [f"  note     {note}"]
    groups: dict[str, list[int]] = {}
    for layer in cache.layers_to_read:
        held = "nothing yet" if layer.is_empty else f"{layer.table.occupancy_bound} of {layer.table.slots} slots"
        if layer.sliding_window is not None:
            held += f", sliding window {layer.sliding_window}"
        if layer.rules.attention_chunk is not None:
            held += f", attention within chunks of {layer.rules.attention_chunk}"
        groups.setdefault(held, []).append(layer.index)
    what = "layers" if len(cache.layers_to_read) == len(cache.by_layer) else "layers or groups of heads"
    lines += [f"  held     {held} in {len(layers)} {what}" for held, layers in groups.items()]
    states = Counter(layer.kind for layer in cache.recurrent)
    lines += [f"  states   {kind} in {count} layers, of one size" for kind, count in states.items()]
    marks = [", ".join(str(each.tokens) for each in row.checkpoints) or "none" for row in cache.rows.rows]
    lines += [f"  copies   of states at {' | '.join(marks)} tokens"] if set(marks) != {"none"} else []
    sizes = bytes_by_part(cache)
    parts = ", ".join(f"{name} {in_units(size)}" for name, size in sizes.items())
    if cache.options.recall:
        lines.append(f"  recall   {recall_note(cache)}")
    lines.append(f"  bytes    {in_units(sum(sizes.values()))}" + (f" ({parts})" if parts else ""))
    return "\n".join(lines)


MAX_ROWS: Final = 6  # rows of a batch that are described one by one


def facts(cache: CacheState) -> dict[str, str]:
    """The cache's options and contents, by name. Counts slots, and copies none of them."""
    options = cache.options.labels()
    told = {"model": cache.model_name} if cache.model_name else {}
    told["budget"] = "none" if cache.limits.budget is None else f"{cache.limits.budget:,}"
    told |= {name: str(options[name]) for name in ("policy", "positions", "store")}
    if cache.merge is not None:
        told["merge"] = str(cache.merge)
    if cache.options.shares is not None:
        told["shares"] = str(cache.options.shares)
    if cache.options.recall:
        told["recall"] = cache.options.recalled
    if cache.batch_size > 1:
        told["rows"] = f"{cache.batch_size:,}"
    told["tokens seen"] = _numbers(cache.rows.tokens_seen)
    told["tokens kept"] = _kept(cache)
    told["bytes held"] = in_units(sum(bytes_by_part(cache).values()))
    return told


def as_text(cache: CacheState) -> str:
    """Two lines: the cache's options, and its tokens and bytes."""
    told = facts(cache)
    name = f"KVCache of {told.pop('model')}" if "model" in told else "KVCache"
    seen, kept, held = (told.pop(each) for each in ("tokens seen", "tokens kept", "bytes held"))
    asked = ", ".join([name, *(f"{each} {value}" for each, value in told.items())])
    return f"{asked}\n  {seen} tokens seen, {kept} kept, {held} held"


def as_html(cache: CacheState) -> str:
    """A table of two columns."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(cache).items())
    return f"<table><caption>KVCache</caption>{''.join(lines)}</table>"


def _kept(cache: CacheState) -> str:
    """Tokens that each row keeps, or the least and the most where layers differ, or heads after an edit."""
    counts = [(layer.positions >= 0).sum(-1).T.tolist() for layer in cache.layers_to_read if not layer.is_empty]
    heads = [rows for layer in counts for rows in layer]
    if not heads:
        return "0"
    if all(rows == heads[0] for rows in heads):
        return _numbers(heads[0])
    every = [number for rows in heads for number in rows]
    return f"{min(every):,} to {max(every):,} a layer"


def _numbers(rows: Sequence[int]) -> str:
    """One number where all rows have it, each row's where they are few, else the least and the most."""
    if len(set(rows)) == 1:
        return f"{rows[0]:,}"
    return ", ".join(f"{each:,}" for each in rows) if len(rows) <= MAX_ROWS else f"{min(rows):,} to {max(rows):,}"
