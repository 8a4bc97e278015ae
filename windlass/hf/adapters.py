"""The weights of a model that compute: of PEFT's adapters those that are active, and no others.

PEFT is known by the attributes of its layers, and is not imported.
"""

from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedModel

ANY: Final = "*"  # in place of an adapter's name: what computes does not depend on it
NOT_READ: Final = frozenset({"r", "lora_alpha", "lora_dropout"})  # `scaling` is made of the first two
PEFT_ROOT: Final = "base_model.model."  # begins the names of a model that PEFT wraps


def computing(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors that compute, by the names that they have without adapters; several active adapters share names.

    An adapter that is idle, or switched off, is left out. One that is merged is in the weights of its layer already,
    which round otherwise than the sum of both, so that it is another model. Names hold the scales of adapters.
    """
    tuned = {name: module for name, module in model.named_modules() if _is_tuned(module)}
    if not tuned:
        return [*model.state_dict().items()]
    found: dict[str, str | None] = {}  # how names begin, and what stands there instead: None for what does not compute
    for name, module in tuned.items():
        found |= _saved(name, module) if _kept(module) else _adapted(name, module)
    named = [(_renamed(name, found), tensor) for name, tensor in model.state_dict().items()]
    return [(name.removeprefix(PEFT_ROOT), tensor) for name, tensor in named if name is not None]


def inner_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model of transformers that PEFT wraps; itself, where it is one."""
    if isinstance(model, PreTrainedModel):
        return model
    inner = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return inner[0] if inner else model


def _is_tuned(module: nn.Module) -> bool:
    return bool(getattr(module, "adapter_layer_names", ())) or _kept(module)


def _kept(module: nn.Module) -> bool:
    """Whether PEFT keeps a whole module for each adapter (`modules_to_save`)."""
    return {"original_module", "modules_to_save"} <= module._modules.keys()


def _active(module: Any) -> list[str]:
    """The names of the adapters that compute in a layer."""
    if module.disable_adapters or getattr(module, "merged", False):
        return []
    return list(module.active_adapters)


def _held(module: nn.Module) -> dict[str, Any]:
    """What a layer holds of each adapter, by attribute: its tensors and its numbers."""
    names = (*getattr(module, "adapter_layer_names", ()), *getattr(module, "other_param_names", ()), "lora_variant")
    return {name: getattr(module, name) for name in names if getattr(module, name, None) is not None}


def _adapted(name: str, module: nn.Module) -> dict[str, str | None]:
    active = {each: f"{ANY} {_numbers(module, each)}" for each in _active(module)}
    found: dict[str, str | None] = {f"{name}.base_layer": name}
    for attribute, held in _held(module).items():
        if isinstance(held, nn.Module):
            for each in {key.split(".")[0] for key in (*held._modules, *held._parameters, *held._buffers)}:
                found[f"{name}.{attribute}.{each}"] = f"{name}.{attribute}.{active[each]}" if each in active else None
    return found


def _saved(name: str, module: Any) -> dict[str, str | None]:
    active = [each for each in _active(module) if each in module.modules_to_save]
    found: dict[str, str | None] = {f"{name}.original_module": None if active else name}
    return found | {
        f"{name}.modules_to_save.{each}": name if each in active else None for each in module.modules_to_save
    }


def _numbers(module: nn.Module, adapter: str) -> str:
    """The scale of an adapter in a layer, and whatever else it has there that is no tensor."""
    numbers = {name: held for name, held in _held(module).items() if isinstance(held, dict) and name not in NOT_READ}
    return ", ".join(f"{name} {_told(held[adapter])}" for name, held in sorted(numbers.items()) if adapter in held)


def _told(value: object) -> str:
    """A number as it is, and of an object that computes its class."""
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _renamed(name: str, found: dict[str, str | None]) -> str | None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        start = ".".join(parts[:end])
        if start in found:
            instead = found[start]
            return None if instead is None else instead + name.removeprefix(start)
    return name
