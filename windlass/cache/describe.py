"""What a cache holds and what it takes, read from what is allocated."""

from windlass.cache.state import CacheState

UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def bytes_by_tensor(cache: CacheState) -> dict[str, int]:
    """Bytes allocated over all layers, by the name of the tensor: keys, values, positions, state."""
    total: dict[str, int] = {}
    for layer in cache.layers:
        for name, tensor in layer.tensors().items():
            total[name] = total.get(name, 0) + tensor.untyped_storage().nbytes()
    return total


def in_units(count: int) -> str:
    """A number of bytes as people write it: `"1.50 MiB"`."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def describe(cache: CacheState) -> str:
    """What is held and what it takes, from what is allocated."""
    limits = cache.limits
    budget = "unbounded" if limits.budget is None else f"{limits.budget} tokens a layer"
    each = [layer.rules.limits.budget for layer in cache.layers]
    budgets = {budget for budget in each if budget is not None}
    if len(budgets) > 1:
        budget += f" on average, from {min(budgets)} to {max(budgets)}"
    lines = [
        f"KVCache: {len(cache.layers)} layers, batch {cache.batch_size}, positions {cache.positions}",
        f"  policy   {cache.policy!r}",
        f"  store    {cache.store.name}" + (f", merge {cache.merge}" if cache.merge is not None else ""),
        f"  budget   {budget}, sinks {limits.sinks}, window {limits.window}, chunk {limits.chunk}",
        f"  seen     {', '.join(map(str, cache.rows.tokens_seen))} tokens",
    ]
    groups: dict[str, list[int]] = {}
    for layer in cache.layers:
        held = "nothing yet" if layer.is_empty else f"{layer.table.occupancy_bound} of {layer.table.slots} slots"
        if layer.sliding_window is not None:
            held += f", sliding window {layer.sliding_window}"
        groups.setdefault(held, []).append(layer.index)
    lines += [f"  held     {held} in {len(layers)} layers" for held, layers in groups.items()]
    sizes = bytes_by_tensor(cache)
    parts = ", ".join(f"{name} {in_units(size)}" for name, size in sizes.items())
    lines.append(f"  bytes    {in_units(sum(sizes.values()))}" + (f" ({parts})" if parts else ""))
    return "\n".join(lines)
