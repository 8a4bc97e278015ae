"""The longest text that a model was trained on, as its config tells."""

from typing import Final

from transformers import PreTrainedConfig

from windlass.core.limits import MAX_NUMBER

# With these schemes `max_position_embeddings` stays what it was before the window was extended by `factor`, as
# transformers asks; where a config tells the original length, too, the scheme does not matter.
KEEPS_LENGTH: Final = ("linear", "dynamic")


def trained_length(config: PreTrainedConfig, layer_type: str | None = None) -> int | None:
    """Tokens of the longest text that the model can read as it is, an extended window in full; None if it is not told.

    Of several readings of a config the longest counts: reading a text as the model does is what happened before.
    """
    longest = _whole(getattr(config, "max_position_embeddings", None))
    if longest is None:
        return None
    shared = getattr(config, "rope_parameters", None) or {}
    own = shared.get(layer_type)
    parameters = own if isinstance(own, dict) else shared
    factor, original = parameters.get("factor"), _whole(parameters.get("original_max_position_embeddings"))
    if parameters.get("rope_type") == "longrope":  # extended in any case; its original length may be made up
        return longest
    if parameters is not own and parameters.get("rope_type") in KEEPS_LENGTH:
        original = original or longest
    if original is None or not isinstance(factor, int | float) or not factor >= 1:
        return longest
    return max(longest, int(min(original * factor, MAX_NUMBER)))


def _whole(number: object) -> int | None:
    return number if type(number) is int and 0 < number <= MAX_NUMBER else None
