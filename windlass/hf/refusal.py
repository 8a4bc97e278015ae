"""Architectures that are known not to work, each with its reason."""

from collections.abc import Mapping
from typing import Final

from transformers import PreTrainedModel, __version__

from windlass.core.errors import UnsupportedModel, UsageError
from windlass.hf.linear_layer import keeps_states, layer_kinds, unknown_types
from windlass.hf.mask import Mask
from windlass.hf.placement import has_no_weights

# Layer types of configs. A class of which some models are recurrent says so of all: then these decide.
ATTENTION: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
STATES_SINCE: Final = (5, 22)  # a version of transformers: before it, models reach into the layers of their caches
COMPRESSED: Final = "keeps one entry for several tokens ({types}), none of which can be evicted by itself"
BLOCKS: Final = "picks blocks of columns of its cache ({types}), which are other tokens once any is evicted"
PREFILL: Final = (
    "keeps whatever came in the first pass of a text, and slides over what came later ({types}): what a token sees "
    "depends on how the text was fed, and not on positions, by which a KVCache decides it"
)
# Layer types that no eviction can serve, and why.
REFUSED: Final[Mapping[str, str]] = {
    "compressed_sparse_attention": COMPRESSED,
    "heavily_compressed_attention": COMPRESSED,
    "minimax_m3_sparse": BLOCKS,
    "reference_sliding_attention": PREFILL,
}


def check_kind_of_model(model: PreTrainedModel) -> None:
    """Return for a model that may work. Raises: UnsupportedModel, with the reason."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    reason, refused = None, sorted(kinds & REFUSED.keys())
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder: its cross-attention has no text positions"
    elif refused:
        reason = REFUSED[refused[0]].format(types=", ".join(refused))
    elif getattr(model, "_is_stateful", False) and not keeps_states(config) and not (kinds and kinds <= ATTENTION):
        reason = "is recurrent, or keeps other states, in layers that its config's layer_types don't tell of"
    elif keeps_states(config) and tuple(map(int, __version__.split(".")[:2])) < STATES_SINCE:
        since = ".".join(map(str, STATES_SINCE))
        reason = f"has recurrent layers, which are served with transformers {since} or newer; this is {__version__}"
    elif unknown := unknown_types(config):
        reason = f"has recurrent layers, and others of types that transformers' own cache does not know: {unknown}"
    elif keeps_states(config) and not layer_kinds(model).attention:
        reason = "is recurrent in all layers: no layer attends, so there are no keys to keep"
    elif has_no_weights(model):
        reason = "has weights on the meta device, not loaded; attach runs the model, so load all of them"
    if reason is not None:
        raise UnsupportedModel(reason)


def refusal(model: PreTrainedModel, error: Exception) -> UnsupportedModel:
    """What to raise for a model that `error` kept from being attached: its name, and the reason."""
    name = type(model).__name__
    if isinstance(error, UnsupportedModel):
        return UnsupportedModel(f"{name} {error}")
    if isinstance(error, UsageError):
        return UnsupportedModel(f"{name}: {error}")
    if isinstance(error, AttributeError) and isinstance(error.obj, Mask):
        return UnsupportedModel(f"{name} makes its own attention mask")
    return UnsupportedModel(f"{name} can't be run with attention replaced: {type(error).__name__}: {error}")
