"""Weights of linear layers: codes of 8 or 4 bits, kernels for few tokens, and the model's fingerprint."""

import copy
import hashlib
import json
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import kernels
from windlass.core.errors import UsageError, WindlassWarning
from windlass.core.inputs import GroupCodes, LinearInput, LinearLayer
from windlass.core.parse import AUTO_WEIGHTS
from windlass.core.ranks import whole_of
from windlass.core.torchao_later import quiet_torchao
from windlass.core.types import LinearInputs, LinearOutputs
from windlass.hf.passes import AttributePatch, WholePass
from windlass.kernels.cpu import MAX_ROWS, can_read_codes

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import Watch

GROUPS: Final = (128, 64, 32)  # inputs that share a scale in 4 bits. A layer uses the first that divides its inputs
OUTPUTS: Final = 16  # in 4 bits the number of outputs is a multiple of this


aten: Final = torch.ops.aten
# Operations that keep codes as they are, and operations that read only a tensor's size, dtype and device.
KEEPING: Final = frozenset({aten.detach, aten.alias, aten.clone, aten._to_copy})
EMPTY: Final = frozenset(
    {
        *(aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full),
        *(aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like),
    }
)


@final
class CodedWeights(Tensor):
    """A matrix of codes in the place of a parameter: of a linear layer, an embedding, or of both.

    It has the shape of the matrix, and the dtype in which its module computes. A product with it reads the codes, a
    look-up decodes rows, and all else decodes the matrix. `label` names the types of the file out of which it came.

    Matrices of all experts are one tensor of three dimensions, whose `groups` have one more too. The number of an
    expert is the index of its matrix.
    """

    groups: GroupCodes
    label: str

    @staticmethod
    def __new__(cls, groups: GroupCodes, dtype: torch.dtype, label: str) -> "CodedWeights":
        size = *groups.codes.shape[:-2], groups.out_features, groups.in_features
        made: CodedWeights = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=groups.codes.device)
        return made

    def __init__(self, groups: GroupCodes, dtype: torch.dtype, label: str) -> None:
        self.groups, self.label = groups, label

    @property
    def codes(self) -> Tensor:
        """The packed codes, see `GroupCodes`."""
        return self.groups.codes

    @property
    def pairs(self) -> Tensor:
        """Scales, and perhaps zero points."""
        return self.groups.pairs

    @property
    def supers(self) -> Tensor | None:
        """Super-scales."""
        return self.groups.supers

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        numbers = (self.groups.group, self.groups.block, self.groups.out_features, self.groups.bits, self.groups.middle)
        return self._names, (numbers, self.dtype, self.label)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], size: object, stride: object
    ) -> "CodedWeights":
        (group, block, outputs, bits, middle), dtype, label = context
        groups = GroupCodes(
            codes=inner["codes"],
            pairs=inner["pairs"],
            group=group,
            block=block,
            out_features=outputs,
            bits=bits,
            middle=middle,
            supers=inner.get("supers"),
        )
        return CodedWeights(groups, dtype, label)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedWeights({self.label}, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "CodedWeights":
        copied: Any = self._like(copy.deepcopy(self.groups, memo), self.dtype)
        if isinstance(cast(Tensor, self), nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        made: CodedWeights = copied
        return made

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return CodedWeights, (self.groups, self.dtype, self.label)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear and not isinstance(args[0] if args else kwargs.get("input"), CodedWeights):
            return _multiplied(*args, **kwargs)
        if func is Tensor.__getitem__ and args[0].ndim == 3 and _is_number(args[1]):
            return args[0].expert(int(args[1]))
        if func is Tensor.storage:  # asked for by `save_pretrained`
            raise UsageError("weights of a GGUF file are codes, which no other format holds. Keep the GGUF file")
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.embedding and isinstance(args[1], CodedWeights):
                return args[1].rows(args[0])
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        dtype = kwargs.get("dtype")
        if packet in KEEPING and (dtype is None or dtype.is_floating_point):
            own: CodedWeights = args[0]
            parts = {
                name: func(getattr(own, name), **(kwargs | {"dtype": None} if dtype else kwargs)) for name in own._names
            }
            made = own._like(replace(own.groups, **parts), dtype or own.dtype)
            return return_and_correct_aliasing(func, args, kwargs, made)
        if func._schema.is_mutable:
            raise UsageError("weights of a GGUF file are codes, which are not changed in place. Replace the parameter")
        if packet in EMPTY:
            args = tree_map_only(
                CodedWeights,
                lambda own: torch.empty((), dtype=own.dtype, device=own.codes.device).expand(own.shape),
                args,
            )
        else:
            args, kwargs = tree_map_only(CodedWeights, CodedWeights.decoded, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def _names(self) -> list[str]:
        return ["codes", "pairs"] + ["supers"] * (self.supers is not None)

    def _like(self, groups: GroupCodes, dtype: torch.dtype) -> "CodedWeights":
        return CodedWeights(groups, dtype, self.label)

    def decoded(self) -> Tensor:
        """The whole matrix, or those of all experts."""
        panel = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        if self.ndim == 3:
            for number, matrix in enumerate(panel):
                kernels.decode_into(matrix, self.expert(number).groups, 0)
        else:
            kernels.decode_into(panel, self.groups, 0)
        return panel

    def expert(self, number: int) -> "CodedWeights":
        """The matrix of one expert, in the same memory."""
        parts = {name: getattr(self, name)[number] for name in self._names}
        return self._like(replace(self.groups, **parts), self.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Decode the rows of an embedding with these ids.

        Raises: IndexError, as PyTorch's embedding on a CPU, for an id without a row.
        """
        if not torch.compiler.is_compiling():
            found = kernels.decoded_outputs(self.groups, ids, self.dtype)
            if found is not None:
                return found
            if ids.device.type == "cpu" and ids.numel():
                least, most = ids.aminmax()
                if least < 0 or most >= self.shape[0]:
                    raise IndexError(f"token ids {least} to {most}: the embedding has {self.shape[0]} rows, from 0 on")
        floats = self.groups.floats(torch.promote_types(self.dtype, torch.float32), ids.flatten())
        return floats.to(self.dtype).view(*ids.shape, self.shape[1])


def _is_number(index: object) -> bool:
    if isinstance(index, Tensor):
        return index.ndim == 0 and index.dtype in (torch.int64, torch.int32)
    return type(index) is int


def _multiplied(input: Tensor, weight: CodedWeights, bias: Tensor | None = None) -> Tensor:  # names of PyTorch's
    """The linear layer: `kernels.linear`, or PyTorch's with the whole matrix where gradients are wanted."""
    has_gradients = torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad))
    if torch.is_autocast_enabled(input.device.type):
        input = input.to(torch.get_autocast_dtype(input.device.type))
    fits = input.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    if fits and type(input) is Tensor and input.is_floating_point() and input.numel() and not has_gradients:
        return kernels.linear(LinearInput(input, LinearLayer(weight.groups, bias)))
    floats = weight.decoded()
    return functional.linear(input, floats.to(input.dtype) if input.is_floating_point() else floats, bias)


def quantize(model: PreTrainedModel, weights: str) -> None:
    """Quantise the model's linear layers in place to `weights`: int8, int4, or auto to leave them as they are.

    int8: one scale for each output. int4: one scale and one zero point for each output and group of `GROUPS` inputs.
    Embeddings, norms and experts merged into one tensor keep their weights. So do linear layers whose sizes do not
    divide into groups, with a warning that names the first. A head that shares its weights with the embedding gets
    codes of its own.

    Raises: UsageError for a model that is quantised already or has no layer that can be.
    """
    if weights == AUTO_WEIGHTS:
        return
    if getattr(model.config, "quantization_config", None) is not None or name_of(model) is not None:
        raise UsageError(f"weights {weights!r}: this {type(model).__name__} is quantised already. Leave them out")
    linears = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    groups = {name: _group(each) if weights == "int4" else each.in_features for name, each in linears.items()}
    taken = {name: group for name, group in groups.items() if group}
    left = [
        f"{name} ({each.in_features} to {each.out_features})" for name, each in linears.items() if name not in taken
    ]
    left += [f"{name} ({' x '.join(map(str, each.shape))})" for name, each in model.named_parameters() if each.ndim > 2]
    if not taken:
        raise UsageError(f"weights {weights!r}: no layer of this {type(model).__name__} can have them. Leave them out")
    with torch.no_grad(), quiet_torchao():
        for name, group in taken.items():
            _quantize_one(linears[name], weights, group)
    if left:
        warnings.warn(
            f"weights {weights!r}: {len(left)} tensors stay in {str(model.dtype).removeprefix('torch.')}, the first is "
            f"{left[0]}"
            + (f". For int4, {GROUPS[-1]} must divide the inputs and {OUTPUTS} the outputs" * (weights == "int4")),
            WindlassWarning,
            stacklevel=3,
        )


def name_of(model: nn.Module) -> str | None:
    """Name the quantisation of a model's linear layers, or return None if they are plain.

    `int8` or `int4` for weights of torchao, whoever made them, and a GGUF file's own label such as `Q4_K_M`.
    """
    kinds = (kind_of(each.weight) for each in model.modules() if type(each) is nn.Linear)
    return next((kind for kind in kinds if kind is not None), None)


def labelled(name: str, model: nn.Module) -> str:
    """Return the model's name for results: quantisation is appended unless the name ends with it."""
    name, kind = name.removesuffix(".gguf"), name_of(model)
    return name if kind is None or name.lower().endswith(kind.lower()) else f"{name} {kind}"


def kind_of(weights: Any) -> str | None:
    """Name the quantisation of a weight, or return None if it is not a known one.

    `int8` or `int4` for weight-only tensors of torchao, recognised by class name without importing torchao. The file's
    label for weights of a GGUF file.
    """
    if isinstance(weights, CodedWeights):
        return weights.label
    kind = type(weights)
    if not kind.__module__.startswith("torchao."):
        return None
    if kind.__name__ == "Int8Tensor" and weights.act_quant_kwargs is None:
        return "int8"
    if kind.__name__ == "Int4OpaqueTensor" and weights.act_mapping_type is None:
        return "int4"
    return None


def parameter_count(model: PreTrainedModel) -> int:
    """Count a model's parameters. A quantised copy of a tied embedding as head is not counted again."""
    count = sum(each.numel() for each in model.parameters())
    head = model.get_output_embeddings()
    is_copy = head is not None and kind_of(head.weight) is not None
    is_copy = is_copy and head.weight is not model.get_input_embeddings().weight
    is_shared = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    return count - head.weight.numel() if is_copy and is_shared else count


def stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor as it is held: those of its codes and scales, where it is made of such."""
    return sum(each.nbytes for each in parts_of(tensor).values())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a token of decode reads: all but the input embedding, of which it reads one row.

    An embedding that is also the head counts, and so does every expert of a mixture.
    """
    total = sum(map(stored_bytes, model.parameters()))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        return total
    assert isinstance(embedding, Tensor)
    return total - stored_bytes(embedding)


def parts_of(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors inside a tensor subclass, by name. A plain tensor returns itself under an empty name."""
    wrapper: object = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        return {"": tensor}
    inner: dict[str, Tensor] = {}
    for name in wrapper.__tensor_flatten__()[0]:
        inner |= {f".{name}{rest}": each for rest, each in parts_of(getattr(tensor, name)).items()}
    return inner


def _group(linear: nn.Linear) -> int:
    """Return the number of inputs that share a scale in 4 bits, or 0 if the layer's sizes do not allow any."""
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


# Outputs that lie side by side in codes of 4 bits, by the instructions for which PyTorch packs them here.
PACKED_BLOCKS: Final = {"AVX512": 64, "AVX2": 32}


@final
@dataclass(frozen=True)
class Codes:
    """Weights of torchao as our kernel takes them, and the tensors of which they were made.

    `weights` is None for those that torchao itself has to multiply.
    """

    made_of: tuple[Tensor, Tensor]
    weights: Tensor | GroupCodes | None = None
    scales: Tensor | None = None

    @classmethod
    def of(cls, weights: Any, kind: str) -> "Codes":
        """Read a torchao tensor of this kind."""
        made_of = tensors_of(weights, kind)
        if weights.act_pre_scale is not None:
            return cls(made_of)
        if kind == "int8":
            is_symmetric = weights.zero_point is None or not weights.zero_point.any()
            is_known = is_symmetric and list(weights.block_size) == [1, weights.shape[1]]
            return cls(made_of, weights.qdata, weights.scale[:, 0]) if is_known else cls(made_of)
        block = PACKED_BLOCKS.get(torch.backends.cpu.get_cpu_capability(), 0)
        codes, pairs = made_of
        groups = GroupCodes(codes, pairs, weights.block_size[1], block, out_features=len(codes))
        return cls(made_of, groups if can_read_codes(groups) else None)

    def layer(self, bias: Tensor | None) -> LinearLayer | None:
        """Return the layer with these weights, or None if our kernel cannot read them."""
        return None if self.weights is None else LinearLayer(self.weights, bias, self.scales)


def tensors_of(weights: Any, kind: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor of torchao's."""
    return weights.qdata, weights.scale if kind == "int8" else weights.scale_and_zero


@final
class FewRows:
    """The forward pass of one `nn.Linear` in a pass that is served.

    Few rows go through our kernel. Many are multiplied by panels of the weights where these are codes, or where PyTorch
    multiplies their dtype slowly (`kernels.needs_panels`), and else by the module's own forward. So are all rows where
    gradients are wanted, and those of weights or inputs that are no plain tensors, torchao's weights of 8 and 4 bits
    aside.
    """

    def __init__(self, module: nn.Linear, whole: WholePass) -> None:
        self._module, self._whole = module, whole
        self._codes: Codes | None = None
        self._code = type(module).forward  # replaced by the kernel
        self.replaced = AttributePatch(module, "forward", self.forward)

    def forward(self, inputs: LinearInputs) -> LinearOutputs:
        """Run our kernel, or the module's own forward where it does not apply."""
        call = None if torch.compiler.is_compiling() else self._call(inputs)
        if call is None:
            own: Tensor = self.replaced.original(inputs)
            return own
        return kernels.linear(call)

    def layer(self) -> LinearLayer | None:
        """Return the module's weights in the kernel's form, or None for a kind it does not know."""
        held: dict[str, Any] = self._module._parameters
        if "weight" not in held or "bias" not in held:  # made anew by each call, as pruning does
            return None
        weights, bias = held["weight"], held["bias"]  # a tensor, perhaps of a type of torchao's
        if type(weights) is nn.Parameter:
            return LinearLayer(weights, bias)
        if isinstance(weights, CodedWeights):
            return LinearLayer(weights.groups, bias)
        kind = kind_of(weights)
        if kind is None:
            return None
        codes, scales = tensors_of(weights, kind)
        known = self._codes
        if known is None or known.made_of[0] is not codes or known.made_of[1] is not scales:
            known = self._codes = Codes.of(weights, kind)
        return known.layer(bias)

    def _call(self, inputs: Tensor) -> LinearInput | None:
        """Return the kernel's input, or None if the module's own forward must run."""
        if type(self._module).forward is not self._code:
            return None
        if not self._whole.is_served or type(inputs) is not Tensor or torch.is_autocast_enabled("cpu"):
            return None
        width = inputs.shape[-1]
        layer = self.layer() if width else None
        if layer is None or width != layer.in_features:
            return None
        call = LinearInput(inputs, layer)
        if call.rows > MAX_ROWS and not kernels.needs_panels(call):
            return None
        weights, wants_gradients = layer.weights, torch.is_grad_enabled()
        if wants_gradients and inputs.requires_grad:
            return None
        if isinstance(weights, GroupCodes):
            is_like = inputs.dtype == self._module.weight.dtype and inputs.device == weights.codes.device
        else:
            is_like = inputs.device == weights.device and not (wants_gradients and weights.requires_grad)
        return call if is_like else None


def is_plain(module: nn.Module) -> bool:
    """True if a module is its weight and its bias and nothing else: not quantised, adapted, hooked, or offloaded."""
    forward = vars(module).get("forward")
    is_replaced = forward is not None and not isinstance(getattr(forward, "__self__", None), FewRows)
    is_hooked = module._forward_hooks or module._forward_pre_hooks or is_replaced
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not is_hooked


def linears_of(model: nn.Module, whole: WholePass) -> list[AttributePatch]:
    """Install our kernel in the model's plain linear layers whose device has one, and return the patches."""
    plain = (each for each in model.modules() if type(each) is nn.Linear and "forward" not in vars(each))
    return [FewRows(each, whole).replaced for each in plain if kernels.has_linear(each.weight.device.type)]


def watch_weights(watch: "Watch", module: nn.Module) -> None:
    """Let `watch` look at the memory of a linear layer's weights: plain ones, or codes of torchao."""
    held: dict[str, Any] = module._parameters
    for name, tensor in held.items():
        watch.item(held, name, tensor)
        if tensor is None:
            continue
        if isinstance(tensor, CodedWeights):
            watch.attribute(tensor, "groups", tensor.groups)  # codes, which nobody changes in place
            continue
        kind = kind_of(tensor)
        if kind is None:
            watch.address(tensor)
            continue
        attributes = "qdata", "scale" if kind == "int8" else "scale_and_zero"
        for attribute, part in zip(attributes, tensors_of(tensor, kind), strict=True):
            watch.attribute(tensor, attribute, part)
            watch.address(part)


ANY: Final = "*"  # replaces an adapter's name, on which results do not depend
NOT_READ: Final = frozenset({"r", "lora_alpha", "lora_dropout"})  # `scaling` is made of the first two
PEFT_ROOT: Final = "base_model.model."  # prefix of the names in a model that PEFT wraps


def computing(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that take part in computing, by their names without adapters.

    Idle and disabled adapters are left out. A merged adapter is part of its layer's weights already, and their rounding
    differs from the sum of both, so it counts as another model. Names hold the scales of adapters. Several active
    adapters share names.
    """
    tuned = {name: module for name, module in model.named_modules() if _is_tuned(module)}
    if not tuned:
        return [*model.state_dict(keep_vars=True).items()]
    found: dict[str, str | None] = {}  # prefixes of names and their replacements (None: takes no part in computing)
    for name, module in tuned.items():
        found |= _saved(name, module) if _kept(module) else _adapted(name, module)
    named = [(_renamed(name, found), tensor) for name, tensor in model.state_dict().items()]
    return [(name.removeprefix(PEFT_ROOT), tensor) for name, tensor in named if name is not None]


def inner_model(model: nn.Module) -> nn.Module:
    """Return the transformers model that PEFT wraps, or the model itself if it is one."""
    if isinstance(model, PreTrainedModel):
        return model
    inner = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    return inner[0] if inner else model


def _is_tuned(module: nn.Module) -> bool:
    return bool(getattr(module, "adapter_layer_names", ())) or _kept(module)


def _kept(module: nn.Module) -> bool:
    """Return True if PEFT keeps a whole module for each adapter (`modules_to_save`)."""
    return {"original_module", "modules_to_save"} <= module._modules.keys()


def _active(module: Any) -> list[str]:
    """The names of the adapters that compute in a layer."""
    if module.disable_adapters or getattr(module, "merged", False):
        return []
    return list(module.active_adapters)


def _held(module: nn.Module) -> dict[str, Any]:
    """Return a layer's attributes that hold tensors and numbers of adapters, by name."""
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


SAMPLES = 256  # values of each parameter in a fingerprint, about

# Options of a run, of training or of a library version, which change no key: not in the fingerprint.
VOLATILE_KEYS = frozenset(
    {
        *(
            "architectures",
            "chunk_size_feed_forward",
            "distributed_config",
            "dtype",
            "id2label",
            "initializer_range",
            "label2id",
        ),
        *("output_attentions", "output_hidden_states", "pretraining_tp", "problem_type", "return_dict"),
        *("transformers_version", "use_cache"),
    }
)


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the model's architecture and of a sample of every parameter.

    Equal for the same weights in the same dtype, wherever they lie and whatever loaded them. It costs about
    `SAMPLES` values of each parameter, however large that is: time grows with the number of parameters, not with
    their size. Of a model that is spread over processes it is the same, and a collective call that gathers each
    parameter in turn. Of adapters (PEFT) it has those that are active, with their scales: one that is idle or switched
    off changes nothing, and merged weights, which round otherwise, are those of another model.

    Raises: UsageError for weights that accelerate keeps elsewhere.
    """
    config = model.config.get_text_config().to_diff_dict()
    digest = hashlib.sha256(json.dumps(_without_volatile(config), sort_keys=True, default=str).encode())
    parts = [(name, _sampled(name, tensor, model)) for name, tensor in computing(model)]
    for _, part in sorted(parts):  # tensors of several active adapters share a name
        digest.update(part)
    return digest.hexdigest()


def _sampled(name: str, tensor: Tensor, model: PreTrainedModel) -> bytes:
    """The name of a tensor, and the layout and a sample of each of its parts."""
    if tensor.is_meta:
        raise UsageError(f"{name} of this {type(model).__name__} is offloaded. The fingerprint needs all weights here")
    found = b""
    for part, held in parts_of(whole_of(tensor)).items():
        values = held.detach().flatten()
        # An odd stride: an even one could meet the same column of every row, and no other.
        sample = values[:: max(1, len(values) // SAMPLES) | 1].cpu().contiguous()
        found += f"{name}{part} {tuple(held.shape)} {held.dtype}".encode() + bytes(raw_bytes(sample))
    return found


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the tokenizer's chat template, also where it has none."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor in row-major order, without a copy if it is contiguous."""
    return tensor.flatten().view(torch.uint8).numpy().data


def _without_volatile(config: dict[str, Any]) -> dict[str, Any]:
    """A config without names, paths, versions and options of a run."""
    return {
        key: _without_volatile(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not (str(key).startswith("_") or str(key).endswith("_token_id") or key in VOLATILE_KEYS)
    }
