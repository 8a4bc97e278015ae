"""Where a model's inputs and its cache lie, also where accelerate keeps the weights elsewhere until a layer runs."""

import torch
from transformers import PreTrainedModel

from windlass.core.errors import UsageError


def has_no_weights(model: PreTrainedModel) -> bool:
    """Whether weights are missing that accelerate does not bring from elsewhere when a layer runs."""
    is_offloaded = any("_hf_hook" in vars(module) for module in model.modules())
    return not is_offloaded and any(parameter.is_meta for parameter in model.parameters())


def device_of_inputs(model: PreTrainedModel) -> torch.device:
    """The device of the model's weights; of weights that are offloaded, the one that they are run on.

    Raises: UsageError for a model without weights.
    """
    device = model.device
    if device.type != "meta":
        return device
    hook = getattr(model.get_input_embeddings(), "_hf_hook", None)  # accelerate's
    runs_on = getattr(hook, "execution_device", None)
    if runs_on is None:
        raise UsageError(
            f"{type(model).__name__} has weights on the meta device, and accelerate brings them from nowhere; "
            "load all of them"
        )
    return torch.device(runs_on)
