"""Whether the cache of a prompt-cache file fits into the memory of its device, before any of it is allocated."""

import os
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.step import HEADROOM
from windlass.hf.attach import attached
from windlass.hf.layer_shapes import LayerShape
from windlass.hf.prompt_cache_document import Contents, next_places
from windlass.hf.prompt_cache_fields import InconsistentFile


def check_memory(
    contents: Contents, options: CacheOptions, shapes: Sequence[LayerShape], model: PreTrainedModel
) -> None:
    """Raises: InconsistentFile where the first step after a load would allocate more than the device has.

    A cache with a budget allocates all of it, and the room for a chunk; every cache has a rotary table.
    """
    device, rotaries = model.device, attached(model).rotaries
    total = memory_of(device)
    if total is None:
        return
    ring = options.store.full_precision
    slots = 0 if options.budget is None else options.budget + max(options.chunk, HEADROOM)
    exact = ring.sinks + (ring.newest + HEADROOM + options.rollback if ring.newest else 0)
    needed = 0
    for shape in shapes:
        per_slot = shape.bytes_per_token(options.store)
        needed += (
            options.batch
            * shape.kv_heads
            * (slots * per_slot + exact * (shape.channels - shape.index) * shape.dtype.itemsize)
        )
    end = max(map(max, next_places(contents), contents.standing["next_positions"])) + 1
    # A state, and the copy that is made before a pass.
    needed += 2 * options.batch * sum(state.nbytes for state in attached(model).states.values())
    tables = {
        rotary.rotary_pairs
        * options.positions.within(rotary.trained_length, options.budget is not None).bound(end, slots or end, 1)
        for rotary in rotaries
        if rotary is not None
    }
    needed += 8 * max(tables, default=0)
    if needed > total:
        raise InconsistentFile(
            f"its cache takes {needed / 2**30:,.1f} GiB (a budget of {options.budget} tokens, {options.batch} rows, "
            f"a text up to position {end - 1}), and {device} has {total / 2**30:,.1f} GiB"
        )


def memory_of(device: torch.device, /) -> int | None:
    """Bytes of memory, in use or not; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
