"""Weights of linear layers in 8 or 4 bits: torchao makes them, and is imported only for that."""

import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from windlass.core.errors import UsageError, WindlassWarning
from windlass.hf.names import AUTO_WEIGHTS
from windlass.hf.torchao_later import quiet_torchao

GROUPS: Final = (128, 64, 32)  # inputs of an output that share a scale in 4 bits; the first that divides them
OUTPUTS: Final = 16  # in 4 bits a layer has a multiple of so many


def quantize(model: PreTrainedModel, weights: str) -> None:
    """Replace the weights of the model's linear layers by codes of `weights` (int8 or int4; auto: leave them).

    int8: one scale for each output. int4: one scale and one zero point for each output and group of `GROUPS` inputs.
    What else the model has stays as it is: embeddings, norms, experts that are one tensor, and, with a warning that
    names the first, linear layers of sizes that cannot be cut into groups. A head that shares its weights with the
    embedding gets codes of its own.

    Raises: UsageError for a model that is quantised already, or of which no layer could be.
    """
    if weights == AUTO_WEIGHTS:
        return
    if getattr(model.config, "quantization_config", None) is not None:
        raise UsageError(f"weights {weights!r}: this {type(model).__name__} is quantised already; leave them out")
    linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    groups = {name: _group(each) if weights == "int4" else each.in_features for name, each in linears.items()}
    taken = {name: group for name, group in groups.items() if group}
    left = [
        f"{name} ({each.in_features} to {each.out_features})" for name, each in linears.items() if name not in taken
    ]
    left += [f"{name} ({' x '.join(map(str, each.shape))})" for name, each in model.named_parameters() if each.ndim > 2]
    if not taken:
        raise UsageError(f"weights {weights!r}: no layer of this {type(model).__name__} can have them; leave them out")
    with torch.no_grad(), quiet_torchao():
        for name, group in taken.items():
            _quantize_one(linears[name], weights, group)
    if left:
        warnings.warn(
            f"weights {weights!r}: {len(left)} tensors stay in {str(model.dtype).removeprefix('torch.')}, the first is "
            f"{left[0]}"
            + (f"; int4 wants inputs that {GROUPS[-1]} divides, and outputs that {OUTPUTS} does" * (weights == "int4")),
            WindlassWarning,
            stacklevel=3,
        )


def name_of(model: nn.Module) -> str | None:
    """What codes the linear layers of a model have, `int8` or `int4`, also where others made them; None for none."""
    kinds = (kind_of(each.weight) for each in model.modules() if type(each) is nn.Linear)
    return next((kind for kind in kinds if kind is not None), None)


def labelled(name: str, model: nn.Module) -> str:
    """A model as results call it: with what its weights are, where they are codes."""
    kind = name_of(model)
    return name if kind is None else f"{name} {kind}"


def kind_of(weights: Any) -> str | None:
    """`int8` or `int4` for such weights of torchao, whose inputs stay floats; known by name, without torchao."""
    kind = type(weights)
    if not kind.__module__.startswith("torchao."):
        return None
    if kind.__name__ == "Int8Tensor" and weights.act_quant_kwargs is None:
        return "int8"
    if kind.__name__ == "Int4OpaqueTensor" and weights.act_mapping_type is None:
        return "int4"
    return None


def parameter_count(model: PreTrainedModel) -> int:
    """How many numbers a model has; once those of a head whose codes were made of the embedding's weights."""
    count = sum(each.numel() for each in model.parameters())
    head = model.get_output_embeddings()
    is_copy = head is not None and kind_of(head.weight) is not None
    is_shared = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return count - head.weight.numel() if is_copy and is_shared else count


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it is held: those of its codes and scales, where it is made of such."""
    return sum(each.nbytes for each in parts_of(tensor).values())


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """The plain tensors of which one is made, by their names; itself, by no name, where it is plain."""
    if not is_traceable_wrapper_subclass(tensor):
        return {"": tensor}
    inner: dict[str, Tensor] = {}
    for name in tensor.__tensor_flatten__()[0]:
        inner |= {f".{name}{rest}": each for rest, each in parts_of(getattr(tensor, name)).items()}
    return inner


def _group(linear: nn.Linear) -> int:
    """How many inputs share a scale in 4 bits; 0 where the layer cannot have them."""
    if linear.out_features % OUTPUTS:
        return 0
    return next((group for group in GROUPS if linear.in_features and linear.in_features % group == 0), 0)


def _quantize_one(linear: nn.Linear, weights: str, group: int) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    # Otherwise torchao changes how all of PyTorch multiplies float32.
    if weights == "int8":
        config = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        config = PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    quantize_(linear, config)
