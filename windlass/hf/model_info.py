"""`ModelInfo` of a transformers model, for rooms that do not import transformers."""

from functools import partial

from transformers import PreTrainedModel

from windlass.core.model_info import ModelInfo
from windlass.hf.attach import attached
from windlass.hf.fingerprint import fingerprint


def model_info(model: PreTrainedModel) -> ModelInfo:
    """What tells a policy whether it can serve an attached model; the fingerprint is taken when it is asked for."""
    return ModelInfo(type(model).__name__, partial(fingerprint, model), model.dtype, len(attached(model).rotaries))
