"""How a model is served, as the page tells it: what its layers keep, what it cannot have, and bytes."""

from typing import Any

from families.tiny import Family
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from windlass.hf.attach import AttachedModel, attached
from windlass.hf.forward import LayerShape, layer_shapes

BYTES = 2  # of a number in bfloat16
STATE_EDITS = "drop, keep, shift, divide, splice, to and from a DynamicCache, rollback between checkpoints"


def served(family: Family, model: PreTrainedModel) -> dict[str, Any]:
    """The service of an attached model: `how`, what it `lacks`, and `bytes` of a token and layer in bfloat16.

    The bytes are those of the class's own default config, None where its layers differ or its sizes have other names.
    """
    attachment, shapes = attached(model), layer_shapes(model)
    config = CONFIG_MAPPING[family.model_type]().get_text_config(decoder=True)
    how, lacks = _how(attachment, shapes), []
    if attachment.kinds.is_recurrent:
        lacks.append(STATE_EDITS)
    if any(rotary is not None and rotary.norm_weights is not None for rotary in attachment.rotaries):
        lacks.append("self_extend, clamp")
    if attachment.indexers:
        picked = getattr(config, "index_topk", None)
        what = "to and from a DynamicCache, merging" if attachment.indexed.unserved is None else "all"
        lacks.append(f"{what} beyond {picked:,} tokens in budget and chunk" if picked else f"{what} beyond its picks")
    return {"how": "; ".join(how), "lacks": "; ".join(lacks), "bytes": _bytes(config, model, shapes)}


def _how(attachment: AttachedModel, shapes: list[LayerShape]) -> list[str]:
    kinds = attachment.kinds
    words = ["latents, held once" if kinds.latents else "keys and values"]
    if any(shape.sliding_window for shape in shapes):
        words.append("sliding windows")
    if any(shape.attention_chunk for shape in shapes):
        words.append("chunks of the text")
    if kinds.sources:
        words.append("layers that share them")
    if kinds.is_recurrent:
        words.append("states beside (" + ", ".join(sorted({kind for _, _, kind in kinds.recurrent})) + ")")
    if attachment.indexers:
        words.append("an indexer that picks among them" if attachment.kinds.indexed else "an indexer that picks all")
    if any(rotary is not None and rotary.norm_weights is not None for rotary in attachment.rotaries):
        words.append("norms with weights after RoPE")
    if attachment.axes.count:
        words.append("positions on several axes (M-RoPE)")
    if all(rotary is None for rotary in attachment.rotaries):
        words.append("no RoPE")
    return words


def _bytes(config: PreTrainedConfig, model: PreTrainedModel, shapes: list[LayerShape]) -> int | None:
    """Two bytes for each number that the default config tells of, if the same sum is right for the small model."""
    small = model.config.get_text_config(decoder=True)
    if "_heterogeneity_spec" in vars(small):  # layers of several sizes
        return None
    for count in (_of_latents, _of_heads):
        numbers = count(small)
        if numbers is not None and all(shape.kv_heads * shape.channels == numbers for shape in shapes):
            of_default = count(config)
            return None if of_default is None else BYTES * of_default
    return None


def _of_latents(config: PreTrainedConfig) -> int | None:
    rank, shared = (getattr(config, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not isinstance(rank, int) or not isinstance(shared, int):
        return None
    index = getattr(config, "index_head_dim", None)
    return rank + shared + (index if isinstance(index, int) else 0)


def _of_heads(config: PreTrainedConfig) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return None
    return 2 * kv_heads * (width if isinstance(width, int) else config.hidden_size // heads)
