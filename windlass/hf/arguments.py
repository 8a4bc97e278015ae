"""What models hand to the attention function beside queries, keys and values, and what they are handed themselves."""

from collections.abc import Mapping
from typing import Any, Final

from windlass.cache.cache import TextCache
from windlass.core.errors import UsageError
from windlass.hf.running_pass import not_compiled

POSITIONS: Final = "position_ids"

# Passed by some models of transformers; attention over a cache is the same without them. `sliding_window` is among
# them because the mask is what a model's own attention obeys: not all models that have a window pass it on, and some
# pass it in every layer. Packed texts (`cu_seq_lens`, `max_length`) come with positions, which are compared.
HARMLESS: Final = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "dropout",
        "is_causal",
        "is_first_iteration",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)


def check_arguments(layer: int, given: Mapping[str, object]) -> None:
    """Return when attention may leave all of `given` out.

    Raises: UsageError for an argument that is not None and not known to be harmless.
    """
    unknown = sorted(name for name, value in given.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UsageError(
            f"layer {layer} hands its attention {', '.join(unknown)}, which windlass' attention does not know; "
            "leave the argument out, or use the model without a KVCache"
        )


@not_compiled
def at_positions(
    cache: TextCache, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the pass that runs, with the cache's own positions, where the model takes any.

    It may scale queries by them, and would count columns, which after padding or edits are not a row's positions.
    """
    step = cache.text.pending
    assert step is not None, "positions outside of a pass"
    if POSITIONS not in names or (step.places is not None and step.places.has_pictures):  # these the model gives
        return args, kwargs
    at, positions = names.index(POSITIONS), step.positions.clamp(min=0).long()
    if at < len(args):
        return (*args[:at], positions, *args[at + 1 :]), kwargs
    return args, {**kwargs, POSITIONS: positions}
