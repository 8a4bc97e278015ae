"""Architectures that are known not to work, each with its reason."""

from transformers import PreTrainedModel

from windlass.core.errors import UnsupportedModel
from windlass.hf.placement import has_no_weights


def refuse(model: PreTrainedModel) -> None:
    """Return for a model that may work. Raises: UnsupportedModel, naming the model and the reason."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    schemes = [rope, *(scheme for scheme in rope.values() if isinstance(scheme, dict))]
    kinds = getattr(config, "layer_types", None) or []
    # `vars`: a config whose layers differ raises when it is asked for what varies, and not an AttributeError.
    latent = vars(config).get("kv_lora_rank")
    reason = None
    if model.config.is_encoder_decoder:
        reason = "is an encoder-decoder: its cross-attention has no text positions"
    elif latent:
        reason = "uses multi-head latent attention (MLA): its keys are part rotated, part compressed"
    elif any("mrope_section" in scheme for scheme in schemes):
        reason = "uses multi-dimensional positions (M-RoPE): a token has no single place in the text"
    elif getattr(model, "_is_stateful", False) or {"conv", "linear_attention"} & set(kinds):
        reason = "is recurrent in some layers: tokens can't be taken out of their state"
    elif "chunked_attention" in kinds:
        reason = "attends within fixed chunks of the text: only full and sliding-window attention are known"
    elif not getattr(model, "_supports_attention_backend", False):
        reason = "does not let its attention function be chosen"
    elif has_no_weights(model):
        reason = "has weights on the meta device, not loaded; attach runs the model, so load all of them"
    if reason is not None:
        raise UnsupportedModel(f"{type(model).__name__} {reason}")
