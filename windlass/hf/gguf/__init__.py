"""A model out of a GGUF file: its config, its tokenizer, and weights that stay at the bits that they have there."""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)

from windlass.core.errors import UsageError, WindlassWarning
from windlass.core.parse import MAX_NUMBER, in_units
from windlass.hf.gguf.blocks import (
    FLOATS,
    LAYOUTS,
    Header,
    StoredTensor,
    codes_of,
    codes_of_experts,
    decoded_of,
    read_header,
)
from windlass.hf.weights import CodedWeights

__all__ = ["Header", "config_of", "dtype_of", "model_of", "read_header", "tokenizer_of"]

MOST_LAYERS: Final = 1024
ROPE_FACTORS: Final = "rope_freqs.weight"
# Metadata keys and tensors that extend a model's positions. transformers reads neither.
ROPE_SCALING: Final = ".rope.scaling.type"
LINEAR: Final = "linear"  # as a file without that key means it
YARN: Final = "yarn"
YARN_BETAS: Final = ("beta_fast", "beta_slow")
# Keys of YaRN that no config has, and the values with which they change nothing.
YARN_USUAL: Final = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
# Metadata keys that transformers does not read for all architectures, and their names in configs.
SETTINGS: Final = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Control tokens that end an answer, beside the one that ends a text.
ENDS: Final = ("eot_token_id", "eom_token_id")
# Types of a field's value in the format.
GGUF_TYPES: Final[dict[type, int]] = {int: 4, float: 6, bool: 7, str: 8}
GGUF_ARRAY: Final = 9


def config_of(header: Header) -> PreTrainedConfig:
    """The config that transformers makes of a file's metadata.

    Raises: UsageError for an architecture that it does not know.
    """
    layers = header.metadata.get(f"{header.architecture}.block_count", 0)
    length = header.metadata.get(f"{header.architecture}.context_length", 1)
    for name, value, most in (("block_count", layers, MOST_LAYERS), ("context_length", length, MAX_NUMBER)):
        if type(value) is not int or not 0 <= value <= most:
            raise UsageError(f"model {header.path} is damaged: its {name} is {value!r}. Copy it again")
    try:
        with _read_once(header):
            config: PreTrainedConfig = AutoConfig.from_pretrained(**_place(header))
    except ValueError as error:
        if "not supported yet" not in str(error):
            raise
        known = sorted(each for each in _known() if each not in ("general", "tokenizer"))
        raise UsageError(
            f"model {header.path}: transformers {__version__} reads no GGUF files of architecture "
            f"{header.architecture!r}. It reads {', '.join(known)}"
        ) from error
    config.name_or_path = str(header.path)
    _complete(header, config)
    return config


def tokenizer_of(header: Header) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers makes of a file's metadata, with its chat template."""
    try:
        with _read_once(header):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_place(header))
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # raised by the Rust code of tokenizers
            raise
        raise ValueError(str(error)) from None
    return tokenizer


def dtype_of(header: Header) -> torch.dtype:
    """Return the dtype of a file's matrices: bfloat16 for quantised ones, which no 16-bit type holds exactly."""
    kinds = {tensor.kind for tensor in header.tensors.values() if len(tensor.shape) > 1}
    found = {FLOATS.get(kind, torch.bfloat16) for kind in kinds} - {torch.float32}
    return found.pop() if len(found) == 1 else torch.bfloat16 if found else torch.float32


def model_of(header: Header, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model, in eval mode, computing in this dtype.

    Matrices of linear layers and embeddings that are of one of the LAYOUTS stay codes, and one that is both embedding
    and head is held once. All others are decoded, with a warning where that takes more bytes, or rounds.

    Raises: UsageError for weights that are not those of the config.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        plan = AutoModelForCausalLM.from_config(config, dtype=dtype)
    try:
        names = get_gguf_hf_weights_map(_Named(plan), processor)
    except NotImplementedError:  # of an architecture that transformers reads in its second way
        model = _decoded_model(header, dtype)
    else:
        found = _Weights(header, processor, names, plan, dtype)
        found.read()
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        found.give(model)
        if found.has_experts:
            model.set_experts_implementation("eager")  # one expert after the other: others read all matrices
    _scale_rope(header, model)
    _tell_scaling(header, model.config)
    ends = [header.metadata.get(f"tokenizer.ggml.{name}") for name in ENDS]
    if model.generation_config is not None and any(isinstance(end, int) for end in ends):
        own = config.eos_token_id
        own = own if isinstance(own, list) else [own]
        model.generation_config.eos_token_id = sorted({each for each in (*own, *ends) if isinstance(each, int)})
    model.eval()
    return model


def _decoded_model(header: Header, dtype: torch.dtype) -> PreTrainedModel:
    """The model as transformers reads it, with all weights decoded. Raises: UsageError for weights that are missing."""
    made: Any = AutoModelForCausalLM.from_pretrained(**_place(header), dtype=dtype, output_loading_info=True)
    model, told = made
    if told["missing_keys"]:
        raise _missing(header, sorted(told["missing_keys"]))
    rounded = [each for each in header.tensors.values() if _is_rounded(each, dtype)]
    _tell(header, dtype, rounded, sorted(told["unexpected_keys"]))
    found: PreTrainedModel = model
    return found


def _place(header: Header) -> dict[str, Any]:
    """Return the arguments with which transformers reads the file, without network access or remote code."""
    return {
        "pretrained_model_name_or_path": str(header.path.parent),
        "gguf_file": str(header.path.absolute()),  # a name alone would be looked for in the current folder first
        "local_files_only": True,
        "trust_remote_code": False,
    }


@dataclass(frozen=True)
class _Field:
    """A field of a header as gguf's reader has it: values among its `parts`, by their indices `data`."""

    parts: list[Any]
    data: range
    types: list[int]


class HeaderReader:
    """The fields and tensors of a header that was read, in the place of gguf's reader.

    That one makes several arrays for each token of the vocabulary, and transformers asks it twice: with 262,144 tokens
    that takes half a minute.
    """

    def __init__(self, header: Header) -> None:
        self.fields = {name: _field_of(name, value) for name, value in header.metadata.items()}
        self.tensors = list(header.tensors.values())


def _field_of(name: str, value: Any) -> _Field:
    is_array = isinstance(value, list)
    values = value if is_array else [value]
    kind = GGUF_TYPES[type(values[0])] if values else GGUF_TYPES[int]
    parts = [each.encode() if isinstance(each, str) else [each] for each in values]
    before = [[len(name)], name.encode(), [kind]]  # as in gguf's reader
    return _Field(
        before + parts, range(len(before), len(before) + len(parts)), [GGUF_ARRAY, kind] if is_array else [kind]
    )


@contextmanager
def _read_once(header: Header) -> Iterator[None]:
    """Let transformers take the fields of a file from the header that was read of it."""
    import gguf

    names = vars(gguf)
    reader = names["GGUFReader"]
    names["GGUFReader"] = lambda _: HeaderReader(header)
    try:
        yield
    finally:
        names["GGUFReader"] = reader


def _known() -> set[str]:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return set(GGUF_SUPPORTED_ARCHITECTURES)


class _Named:
    """A model as transformers' map of names asks for it, without the modules inside of its decoder.

    It makes the map of all names for each module, for which a model of 80 layers takes minutes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config = model, model.config

    def state_dict(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._model.state_dict()
        return found

    def named_children(self) -> list[tuple[str, "_Named"]]:
        children = self._model.named_children()
        return [(name, _Named(child)) for name, child in children if isinstance(child, PreTrainedModel)]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have their buffers here, and no memory for parameters."""
    register = nn.Module.register_parameter

    def registered(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and not param.is_meta:
            kept = self._parameters[name]
            assert kept is not None
            self._parameters[name] = nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    nn.Module.register_parameter = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _scale_rope(header: Header, model: PreTrainedModel) -> None:
    """Divide the frequencies of RoPE by the factors of a file, which transformers leaves out (Llama 3.1 and later)."""
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is None:
        return
    factors, is_used = decoded_of(header.path, stored, torch.float32).flatten(), False
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            frequencies = module._buffers.get(name)
            if frequencies is not None and frequencies.shape == factors.shape:
                module._buffers[name], is_used = frequencies / factors, True
    if not is_used:
        _warn(f"model {header.path}: the {len(factors)} factors of {ROPE_FACTORS} are not those of its RoPE, not used")


@dataclass
class _Weights:
    """The weights of a model by their names in transformers, read from a file one after the other.

    `names` are those of the file's tensors in transformers. `plan` is the model without memory, and tells shapes.
    """

    header: Header
    processor: Any
    names: dict[str, str]
    plan: PreTrainedModel
    dtype: torch.dtype
    found: dict[str, Tensor] = field(default_factory=dict)
    rounded: list[StoredTensor] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Read all. Raises: UsageError for a tensor that is missing or of another shape."""
        wanted: dict[str, Tensor] = self.plan.state_dict(keep_vars=True)
        targets = {name: self._target(name) for name in self.header.tensors}
        self._check_missing(wanted, {each for each in targets.values() if each is not None})
        parts = Counter(targets.values())  # of a tensor in transformers
        held: dict[str, Any] = {"tensors": {}}
        experts = self._experts(targets, wanted)
        for made, own in experts.items():
            self.found[made] = CodedWeights(codes_of_experts(self.header.path, own), self.dtype, self._label())
        for name, stored in self.header.tensors.items():
            target = targets[name]
            if target in experts:
                continue
            if target is None:
                self.unused.append(name)
                continue
            order = self._order(stored)
            if order is None:
                self._process(stored, target, held)
            elif stored.kind in LAYOUTS and self._can_be_codes(target):
                self._check_shape(target, stored.shape, wanted)
                self.found[target] = CodedWeights(codes_of(self.header.path, stored, order), self.dtype, self._label())
            else:
                self._check_shape(target, stored.shape, wanted)
                self._note(stored)
                whole = decoded_of(self.header.path, stored, self.dtype)
                self.found[target] = whole if _is_in_order(order) else whole[order]
            parts[target] -= 1
            for made in [each for each in held["tensors"] if not parts[target]]:
                self.found[made] = held["tensors"].pop(made).to(self.dtype)
        for target, tensor in self.found.items():
            self._check_shape(target, tuple(tensor.shape), wanted)

    def give(self, model: PreTrainedModel) -> None:
        """Put them into a model that has no memory of its own for them, each where the plan shares it."""
        shared: dict[int, list[str]] = {}
        for name, tensor in self.plan.state_dict(keep_vars=True).items():
            shared.setdefault(id(tensor), []).append(name)
        for same in shared.values():
            value = next(self.found[name] for name in same if name in self.found)
            is_coded = isinstance(value, CodedWeights)
            parameter = nn.Parameter(value, requires_grad=not is_coded and value.is_floating_point())
            for name in same:
                path, _, leaf = name.rpartition(".")
                module = model.get_submodule(path)
                if leaf in module._parameters:
                    module._parameters[leaf] = parameter
                else:
                    module._buffers[leaf] = value
        _tell(self.header, self.dtype, self.rounded, self.unused)

    @property
    def has_experts(self) -> bool:
        """Return True if matrices of experts are codes."""
        return any(isinstance(each, CodedWeights) and each.ndim == 3 for each in self.found.values())

    def _target(self, name: str) -> str | None:
        """The tensor's name in transformers, where experts merged into one tensor have no `.weight` ending."""
        return self.names.get(name) or self.names.get(name.removesuffix(".weight"))

    def _check_missing(self, wanted: dict[str, Tensor], given: set[str]) -> None:
        held = {id(tensor) for name, tensor in wanted.items() if name in given}
        missing = [name for name, tensor in wanted.items() if id(tensor) not in held]
        if missing:
            raise _missing(self.header, missing)

    def _check_shape(self, target: str, shape: tuple[int, ...], wanted: dict[str, Tensor]) -> None:
        if target not in wanted or tuple(wanted[target].shape) != shape:
            asked = tuple(wanted[target].shape) if target in wanted else "no such tensor"
            raise UsageError(
                f"model {self.header.path}: its metadata and its weights do not belong together: {target} has shape "
                f"{shape}, and the metadata ask for {asked}"
            )

    def _can_be_codes(self, target: str) -> bool:
        path, _, leaf = target.rpartition(".")
        module = self.plan.get_submodule(path)
        return leaf == "weight" and (type(module) is nn.Linear or isinstance(module, nn.Embedding))

    def _experts(self, targets: dict[str, str | None], wanted: dict[str, Tensor]) -> dict[str, list[StoredTensor]]:
        """The matrices of experts that can be codes: by their names in transformers, the tensors of the file.

        Those are in the order in which an expert's outputs come from them. As in `_order`, transformers converts row
        numbers, and what it makes of them tells where rows go.
        """
        parts: dict[str, list[StoredTensor]] = {}
        for name, target in targets.items():
            stored = self.header.tensors[name]
            if target in wanted and len(stored.shape) == 3 and stored.kind in LAYOUTS:
                parts.setdefault(target, []).append(stored)
        found = {}
        for target, own in parts.items():
            shape = (*wanted[target].shape[:2], 1)
            begins = [self._place_of_rows(stored, target, shape) for stored in own]
            known = sorted((begin, stored) for begin, stored in zip(begins, own, strict=True) if begin is not None)
            ends = [begin + stored.shape[1] for begin, stored in known]
            is_whole = [0, *ends] == [*(begin for begin, _ in known), shape[1]] and len(known) == len(own)
            is_alike = len({(stored.kind, stored.shape[0], stored.shape[2]) for stored in own}) == 1
            if is_whole and is_alike and Counter(targets.values())[target] == len(own):
                found[target] = [stored for _, stored in known]
        return found

    def _place_of_rows(self, stored: StoredTensor, target: str, shape: tuple[int, ...]) -> int | None:
        """Return the first of the places that the rows of each expert take, in their order, or None if they do not."""
        numbers = np.arange(1, stored.rows + 1).reshape(*stored.shape[:2], 1)
        held: dict[str, Any] = {"tensors": {}}
        try:
            self.processor.process(
                weights=numbers.copy(), name=stored.name, tensor_key_mapping=self.names, parsed_parameters=held
            )
        except Exception:  # it wants to see the matrices
            return None
        made = held["tensors"].get(target)
        if made is None or tuple(made.shape[:1]) != shape[:1] or made.ndim != 3 or made.shape[2] != 1:
            return None
        begin = int((made[0, :, 0] == 1).nonzero()[0, 0]) if (made[0, :, 0] == 1).any() else 0
        own = made[:, begin : begin + stored.shape[1]]
        return begin if own.shape == numbers.shape and np.array_equal(own.numpy(), numbers) else None

    def _order(self, stored: StoredTensor) -> Tensor | None:
        """Return the file's row for each row of the matrix, or None if transformers changes more than their order.

        A column of row numbers goes through the same conversion in transformers as the matrix itself.
        """
        if len(stored.shape) != 2:
            return None
        numbers = np.arange(stored.rows)[:, None]
        try:
            done = self.processor.process(
                weights=numbers.copy(),
                name=stored.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": {}},
            )
        except Exception:  # it wants to see the matrix
            return None
        if done.name != stored.name or done.weights.shape != numbers.shape:
            return None
        return (
            torch.from_numpy(done.weights[:, 0].copy()) if np.array_equal(np.sort(done.weights, 0), numbers) else None
        )

    def _process(self, stored: StoredTensor, target: str, held: dict[str, Any]) -> None:
        """Decode a tensor and let transformers convert it to its module's layout."""
        self._note(stored)
        numbers = decoded_of(self.header.path, stored, torch.float32).numpy()
        done = self.processor.process(
            weights=numbers, name=stored.name, tensor_key_mapping=self.names, parsed_parameters=held
        )
        if done.name is not None:
            self.found[target] = torch.from_numpy(np.array(done.weights)).to(self.dtype)

    def _label(self) -> str:
        """The file's name for its types, as `Q4_K_M`."""
        from gguf import LlamaFileType

        number: Any = self.header.metadata.get("general.file_type")
        try:
            return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
        except ValueError:
            sizes: Counter[str] = Counter()
            for each in self.header.tensors.values():
                sizes[each.kind] += each.nbytes
            return sizes.most_common(1)[0][0]

    def _note(self, stored: StoredTensor) -> None:
        if _is_rounded(stored, self.dtype):
            self.rounded.append(stored)


def _missing(header: Header, names: list[str]) -> UsageError:
    return UsageError(f"model {header.path}: its weights lack {len(names)} tensors, the first is {names[0]}")


def _is_rounded(stored: StoredTensor, dtype: torch.dtype) -> bool:
    """Return True for a matrix that takes more bytes in this dtype than in the file, or that is rounded."""
    own = FLOATS.get(stored.kind)
    is_exact = own in (dtype, torch.float32) or dtype == torch.float32
    return len(stored.shape) > 1 and not (own is not None and is_exact)


def _tell(header: Header, dtype: torch.dtype, rounded: list[StoredTensor], unused: list[str]) -> None:
    """Warn of matrices that are decoded, and of tensors that are not used."""
    if rounded:
        before, after = (
            sum(each.nbytes for each in rounded),
            sum(each.rows * each.shape[-1] for each in rounded) * dtype.itemsize,
        )
        kinds = ", ".join(sorted({each.kind for each in rounded}))
        _warn(
            f"model {header.path}: {len(rounded)} matrices ({kinds}) are decoded to "
            f"{str(dtype).removeprefix('torch.')}, and take {in_units(after)} instead of {in_units(before)}"
        )
    unused = [name for name in unused if name != ROPE_FACTORS]
    if unused:
        _warn(f"model {header.path}: {len(unused)} tensors of its weights are not used, the first is {unused[0]}")


def _tell_scaling(header: Header, config: PreTrainedConfig) -> None:
    """Warn of positions that the file scales in a way that the config does not have."""
    scaling = header.metadata.get(f"{header.architecture}{ROPE_SCALING}", "none")
    if scaling not in ("none", LINEAR) and not _is_scaled(config):
        _warn(
            f"model {header.path}: its RoPE is scaled ({scaling}), which transformers does not read from a GGUF file: "
            "texts come out worse, long ones most. Use the model in transformers' own format"
        )


def _turned(config: PreTrainedConfig) -> dict[str, Any]:
    """The parameters of RoPE, those of layers that see the whole text where there are two kinds."""
    own = getattr(config, "rope_parameters", None) or {}
    found: dict[str, Any] = own.get("full_attention", own) if isinstance(own, dict) else {}
    return found


def _is_scaled(config: PreTrainedConfig) -> bool:
    return bool(_turned(config).get("rope_type", "default") != "default")


def _complete(header: Header, config: PreTrainedConfig) -> None:
    """Set scaled and partial RoPE, windows and caps as the metadata say, where transformers does not read them."""

    def said(name: str) -> Any:
        return header.metadata.get(f"{header.architecture}.{name}")

    known, turned = config.to_dict(), _turned(config)
    for name, own in SETTINGS.items():
        if own in known and said(name) is not None:
            setattr(config, own, said(name) or None)  # files say 0 for none, as Phi-4's do
    factor = said("rope.scaling.factor") or said("rope.scale_linear")
    kind, original = said("rope.scaling.type"), said("rope.scaling.original_context_length")
    if factor not in (None, 1.0) and not _is_scaled(config):
        if kind in (None, LINEAR):
            turned |= {"rope_type": LINEAR, "factor": float(factor)}
        elif (
            kind == YARN
            and original
            and all(said(f"rope.scaling.{name}") in (None, usual) for name, usual in YARN_USUAL.items())
        ):
            turned |= {"rope_type": YARN, "factor": float(factor), "original_max_position_embeddings": original}
            betas = {name: said(f"rope.scaling.yarn_{name}") for name in YARN_BETAS}
            turned |= {name: float(value) for name, value in betas.items() if value is not None}
    if "partial_rotary_factor" in turned and said("rope.dimension_count") is not None:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        turned["partial_rotary_factor"] = said("rope.dimension_count") / width


def _is_in_order(order: Tensor) -> bool:
    return bool((order == torch.arange(len(order))).all())


def _warn(message: str) -> None:
    warnings.warn(message, WindlassWarning, stacklevel=7)
