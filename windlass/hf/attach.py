"""Attaching to a model of transformers: what a pass with our cache does to it, and how that is undone.

A model is neither forked nor copied. In a forward pass with our cache, and in no other, its rotary
module returns the identity, so that the keys it hands to `past_key_values.update` are not rotated,
and its attention function is ours, which lets the cache write, attend, observe and evict.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from windlass.core.errors import UsageError, WindlassError
from windlass.hf.attached_model import NAME, AttachedModel
from windlass.hf.mask import Mask, mask
from windlass.hf.model_facts import check_kind_of_model, refusal
from windlass.hf.passes import BUSY, ModuleState, check_arguments, check_model, inference_only, not_compiled
from windlass.hf.probe import decoder_of
from windlass.hf.tensor_parallel import heads_of, ranks_of


def attach(model: PreTrainedModel, own_linear: bool = True) -> PreTrainedModel:
    """Let `model` work with a `KVCache`; returns the same model.

    Without our cache the model does exactly what it did before, in training too. Attaching twice
    changes nothing. Two passes of one token find out how each layer rotates its keys; then a short text is read
    with a cache and without, and a model that attends otherwise is refused. While a pass with our cache runs, a
    pass of another thread is refused; give each thread a model of its own.

    `own_linear`: in a pass of at most 16 tokens with our cache, all rows counted, linear layers on a CPU are computed
    by a kernel of ours, and so is what is beside attention in decoder layers whose code is that of Llama, Mistral,
    Qwen2 or Qwen3, which many families share. Hooks and modules put in place of others are called as before.
    docs/results/benchmarks.md compares it with PyTorch. It rounds otherwise, and the result of a token does not depend
    on the other tokens of the pass. False: PyTorch's always.

    Of a model that transformers has spread over processes (tensor parallel) each process attaches its own part, and all
    of them do it together: docs/parallel.md.

    An attached model can be copied, pickled and saved with `torch.save`: the copy is attached, too.

    Raises: UnsupportedModel, naming the model and the reason; the model is then as it was. UsageError for what is no
    model of transformers, and for a model that is attached with another `own_linear`, or shares its layers with one
    that is attached.
    """
    check_model(model)
    before = _found(model)
    if before is not None and before.model is not model:
        raise UsageError(
            f"this {type(model).__name__} shares its layers with a {type(before.model).__name__} that is attached; use "
            "that one, or call windlass.detach with either of them first"
        )
    if before is not None:
        if before.own_linear != own_linear:
            raise UsageError(
                f"own_linear={own_linear}, but the model is attached with {before.own_linear}; detach it first"
            )
        return model
    state = ModuleState(model)
    try:
        # Where the model was compiled before, none of these few passes is worth compiling.
        with torch.compiler.set_stance("force_eager"):
            check_kind_of_model(model)
            ranks = ranks_of(model)
            decoder = decoder_of(model)
            attachment = AttachedModel(model, decoder, own_linear)
            for module in (model, *decoder.attention_modules):
                setattr(module, NAME, attachment)
            attachment.find_rotaries(model)
            if ranks is not None:
                attachment.heads = heads_of(ranks, attachment.probed(model, False), attachment.kinds)
    except BaseException as error:
        state.put_back()
        if not isinstance(error, Exception):
            raise
        raise refusal(model, error) from (None if isinstance(error, WindlassError) else error)
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`; returns the same model. Its caches can no longer be used with it.

    `model` may also be what PEFT had wrapped, or what it left of the attached model.
    """
    check_model(model)
    attachment = _found(model) or attached(model)
    attachment.remove()
    for module in (*attachment.model.modules(), *attachment.decoder.attention_modules):
        if isinstance(vars(module).get(NAME), AttachedModel):
            delattr(module, NAME)
    return model


def attached(model: PreTrainedModel) -> AttachedModel:
    """What `attach` left on the model. Raises: UsageError when it is not attached."""
    attachment = getattr(model, NAME, None)
    if not isinstance(attachment, AttachedModel):
        check_model(model)
        raise UsageError(f"{type(model).__name__} is not attached to windlass; call windlass.attach(model) first")
    return attachment


def _found(model: nn.Module) -> AttachedModel | None:
    """The attachment of a model, or of one around it."""
    found = (vars(module).get(NAME) for module in model.modules())
    return next((each for each in found if isinstance(each, AttachedModel)), None)


@not_compiled
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Raises: UsageError for arguments that it does not know."""
    attachment, own = getattr(module, NAME), module.layer_idx
    assert isinstance(attachment, AttachedModel), "windlass attention outside of an attached model"
    assert isinstance(own, int), "an attention layer without a number"
    layer = attachment.numbers.get(module, own)
    picks = kwargs.pop("indices", None) if attachment.indexers else None
    check_arguments(layer, kwargs)
    if attachment.probe is not None:
        latent = attachment.latents.get(module)
        attachment.probe.picks.note_layer(own, picks)
        return attachment.probe.attention(module, own, query, key, value, attention_mask, latent), None
    cache = attachment.current_cache
    if cache is None:
        raise UsageError(BUSY)
    assert isinstance(attention_mask, Mask), "a mask that was not there when the model was attached"
    if layer in attachment.attended:
        raise UsageError(f"layer {layer} calls attention twice in one pass; a KVCache takes one call per layer")
    attachment.attended.add(layer)
    query = attachment.at_positions(layer, query)
    latent = attachment.latents.get(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if latent is not None:
        query = latent.queries(query)
    place, is_shared = attachment.place(layer, key)
    rotary = attachment.rotaries[place]
    if rotary is not None:
        query, key = rotary.plain(query, key)
    call = attachment.call(layer, attention_mask, scale, softcap, s_aux)
    out = cache.attend_shared(place, query, call) if is_shared else cache.attend(place, query, key, value, call)
    out = inference_only(out, query, key, value)
    if latent is not None:
        out = latent.values(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, mask)
