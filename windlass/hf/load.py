"""A model and its tokenizer from a folder or the hub, with one clear line for all that can be wrong."""

import json
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, TypeGuard

import torch
from huggingface_hub import hf_hub_download, model_info, snapshot_download
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from windlass.core.errors import UsageError, WindlassWarning, check_kind
from windlass.core.parse import (
    AUTO_WEIGHTS,
    DTYPES,
    GGUF,
    PICKLES,
    SAFETENSORS,
    WEIGHTS,
    check_config,
    check_dtype,
    check_tokenizer,
    check_weights,
    folder_of,
    gguf_among,
    gpu_number,
    split_quant,
)
from windlass.core.torchao_later import quiet_torchao
from windlass.hf import gguf
from windlass.hf.attach import attach
from windlass.hf.tensor_parallel import plan_of_processes
from windlass.hf.weights import quantize

HUB: Final = "huggingface.co"


@contextmanager
def explained(source: str, problem: str, config: PreTrainedConfig | None = None) -> Iterator[None]:
    """Turn any error of loading a part of a model into a UsageError that names `source`, its folder or name.

    With `config`, the part is the weights.
    """
    try:
        yield
    except UsageError:
        raise
    except SafetensorError as error:
        raise UsageError(f"model {source}: its weights are damaged: {gist(error)}. Copy them again") from error
    except UnpicklingError as error:
        raise UsageError(
            f"model {source}: its weights, {PICKLES}, hold more than tensors, which could run any code. Use a model "
            f"with {SAFETENSORS}"
        ) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"model {source} can only be loaded by Python code that comes with it, which windlass does not run. "
                "Use a model of an architecture that transformers has"
            ) from error
        if config is not None and "Unrecognized configuration class" in str(error):
            raise UsageError(
                f"model {source}: a {config.model_type} writes no text token by token. Use a decoder, which "
                "transformers loads as a causal language model"
            ) from error
        if config is None:
            check_tokenizer(Path(source))
        else:
            _check_words(source, config, error)
            _check_shapes(source, config)
        raise UsageError(f"model {source}: {problem}: {gist(error)}") from error


def gist(error: BaseException) -> str:
    """Return the first line of an error's message, after the error's class if the line alone says too little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return line if " " in line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}".strip()


def hub_problem(error: Exception) -> str:
    """Return the reason for which a request to the hub failed."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so it is not asked"
    if isinstance(error, GatedRepoError):
        return f"its owner gives it on request. Ask at {HUB}, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"{HUB} has no such model, or it is private. Look at its spelling, or `hf auth login`"
    # The clients of the hub raise errors of their own, which are recognised by name.
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"ConnectError", "ConnectTimeout", "ConnectionError", "TransportError", "Timeout", "ProxyError"}:
        return f"no connection to {HUB}"
    return gist(error)


def _check_words(source: str, config: PreTrainedConfig, error: Exception) -> None:
    """Raises: UsageError where loading failed at a word of the config that transformers does not know."""
    if not isinstance(error, KeyError):
        return
    parts = [config.to_dict()]
    while parts:
        part = parts.pop()
        parts += [value for value in part.values() if isinstance(value, dict)]
        for name, value in part.items():
            if isinstance(value, str) and value == error.args[0]:
                raise UsageError(
                    f"model {source}: config.json: {name} is {value!r}, which transformers does not know. Look at its "
                    "spelling, or use a newer transformers"
                ) from error


def _check_shapes(source: str, config: PreTrainedConfig) -> None:
    """Raises: UsageError for the first tensor of a folder whose shape is another than its config asks for."""
    try:
        with torch.device("meta"):
            wanted = AutoModelForCausalLM.from_config(config).state_dict()
        found = {name: shape for path in Path(source).glob(SAFETENSORS) for name, shape in _shapes(path).items()}
    except Exception:  # the error before may have the same cause
        return
    wrong = [name for name in found if name in wanted and tuple(wanted[name].shape) != found[name]]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"model {source}: its config.json and its weights do not belong together: {name} has shape {found[name]}, "
            f"and the config asks for {tuple(wanted[name].shape)}" + f". {len(wrong)} tensors differ"
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a safetensors file's tensors from its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


HUB_SECONDS = 10.0
# The key under which a tokenizer notes that it has given this warning.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"


def load(
    name: str | os.PathLike[str],
    dtype: str = "auto",
    device: str = "cpu",
    weights: str = AUTO_WEIGHTS,
    tensor_parallel: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder, a GGUF file or the Hugging Face hub, and attach the model.

    A `Path` is always a folder or a file, and those are read without the network. A folder or hub name with GGUF files
    alone stands for its only GGUF file, and `name:Q4_K_M` selects one of several. Its weights stay quantised, see
    `gguf.model_of`. The model is in eval mode on `device`, see `device_of`. A GPU becomes the process's current one.
    `dtype` is `auto` (the file's, and bfloat16 for quantised weights), `float32`, `bfloat16` or `float16`.
    `weights` is `auto` (unchanged), `int8` or `int4`, made by torchao for linear layers on a CPU, see `quantize`.
    The tokenizer does not warn of texts longer than the trained window.

    `tensor_parallel`: the processes that `torchrun` started each load a part of the model, by transformers'
    tensor-parallel plan. Each uses the accelerator that PyTorch finds for it, or the CPU, and `device` is ignored. See
    docs/parallel.md.

    Raises: UsageError if a part is missing, damaged or unknown. UnsupportedModel from `attach`.
    """
    check_kind("name", name, (str, os.PathLike), "a folder or a name on the hub")
    check_kind("dtype", dtype, str, f"one of: {', '.join(DTYPES)}")
    check_kind("device", device, str, "auto, cpu, mps, cuda or cuda:1")
    check_kind("weights", weights, str, f"one of: {', '.join(WEIGHTS)}")
    check_weights(weights)
    check_kind("tensor_parallel", tensor_parallel, bool, "True or False")
    number_type = dtype_of(dtype)
    _check_gguf(folder_of(name), weights, tensor_parallel)
    plan = plan_of_processes(weights) if tensor_parallel else None
    place = torch.device("cpu") if tensor_parallel else device_of(device)
    check_place(weights, place)
    with _quiet():
        tokenizer, model = _from_folder_or_hub(name, number_type, plan, weights)
    tokenizer.deprecation_warnings[TOO_LONG] = True
    if tensor_parallel:
        return attach(model.eval()), tokenizer
    quantize(model.eval().to(place), weights)
    return attach(model), tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, named as for `load`, without the model. A tokenizer that was fetched before will do.

    Raises: UsageError when there is none.
    """
    with _quiet():
        source, problem = _found(name)
        if _is_gguf(source):
            return _loaded_gguf_tokenizer(source)[0]
        return _loaded_tokenizer(str(source or name), is_offline=source is not None or problem is not None)[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' warnings and progress bars while a model loads. Our errors describe a damaged model.

    The hub's bars stay, because a download takes minutes. They appear in a terminal only, and huggingface_hub's own
    switches turn them off.
    """
    verbosity, has_bars, is_hub_quiet = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
    )
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # the hub's, too
    if not is_hub_quiet:
        enable_progress_bars()
    try:
        with quiet_torchao():
            yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
        if is_hub_quiet:
            disable_progress_bars()


def _from_folder_or_hub(
    name: str | os.PathLike[str], dtype: torch.dtype | None, plan: dict[str, Any] | None, weights: str
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    source, problem = _found(name)
    if _is_gguf(source):
        _check_gguf(source, weights, plan is not None)
        return _loaded_gguf(source, dtype)
    if source is not None:
        return _loaded(str(source), True, dtype, plan)
    try:
        return _loaded(str(name), problem is not None, dtype, plan)
    except UsageError as error:
        if problem is None:
            raise
        raise _unreachable(str(name), problem) from error


def _unreachable(name: str, problem: str) -> UsageError:
    return UsageError(
        f"model {name!r} is no folder here, was not fetched before, and the hub cannot give it: {problem}"
    )


def _found(name: str | os.PathLike[str]) -> tuple[Path | None, str | None]:
    """Return the model's folder or GGUF file, downloaded if need be, and the reason if the hub cannot be reached.

    Both are None for a name on the hub whose files transformers downloads.
    """
    folder = folder_of(name)
    if folder is not None:
        return folder, None
    repository, quant = split_quant(str(name))
    files, problem = _ask_hub(repository)
    held = None
    if problem is not None:
        try:
            held = Path(snapshot_download(repository, local_files_only=True))
            files = [path.name for path in held.iterdir()]
        except (OSError, ValueError):
            if quant is not None:
                raise _unreachable(str(name), problem) from None
    has_files = any(each.lower().endswith(GGUF) for each in files)
    if quant is None and ("config.json" in files or not has_files):
        return None, problem
    file = gguf_among([each for each in files if each.lower().endswith(GGUF)], quant, f"model {repository}")
    if held is not None:
        return held / file, problem
    with explained(str(name), f"{file} cannot be fetched"):
        return Path(hf_hub_download(repository, file)), None


def _is_gguf(source: Path | None) -> TypeGuard[Path]:
    return source is not None and source.suffix.lower() == GGUF and source.is_file()


def _check_gguf(source: Path | None, weights: str, is_parallel: bool) -> None:
    """Raises: UsageError for options that a GGUF file cannot have."""
    if not _is_gguf(source):
        return
    if weights != AUTO_WEIGHTS:
        raise UsageError(
            f"weights {weights!r}: {source.name} has codes of its own. Leave them out, or use the model in "
            "transformers' own format"
        )
    if is_parallel:
        raise UsageError(
            f"{source.name} is a GGUF file, whose codes cannot be spread over processes. Use the model in "
            "transformers' own format with --tensor-parallel"
        )


def _loaded_gguf(path: Path, dtype: torch.dtype | None) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer, config, header = _loaded_gguf_tokenizer(path)
    with explained(str(path), "cannot be loaded", config):
        return tokenizer, gguf.model_of(header, config, gguf.dtype_of(header) if dtype is None else dtype)


def _loaded_gguf_tokenizer(path: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig, gguf.Header]:
    """The tokenizer in a GGUF file, its config and its header."""
    source = str(path)
    header = gguf.read_header(path)
    with explained(source, "its metadata cannot be used"):
        config = gguf.config_of(header)
    check_config(f"model {source}: its metadata", config.to_dict())
    with explained(source, "no tokenizer that can be loaded"):
        return gguf.tokenizer_of(header), config, header


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype of that name, or None for `auto`. Raises: UsageError for an unknown name."""
    check_dtype(name)
    return None if name == "auto" else getattr(torch, name)


def check_place(weights: str, device: torch.device) -> None:
    """Raises: UsageError for codes of weights on a device that has no kernel for them here."""
    if weights != AUTO_WEIGHTS and device.type != "cpu":
        raise UsageError(f"weights {weights!r} are for a CPU, this is {device}. Use device cpu, or leave them out")


def device_of(name: str) -> torch.device:
    """The device that is called `cpu`, `cuda` (the first GPU), `cuda:1` or `mps` (the GPU of an Apple computer).

    `auto` is the first that is there of `cuda`, `mps` and `cpu`. A GPU of CUDA becomes the process's current one.

    Raises: UsageError for another name, or a GPU that is not there.
    """
    if name == "auto":
        has_cuda = torch.cuda.is_available() and torch.cuda.device_count() > 0
        name = "cuda" if has_cuda else "mps" if torch.backends.mps.is_available() else "cpu"
    index = gpu_number(name)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UsageError(f"device mps: PyTorch {torch.__version__} finds no GPU of an Apple computer. Use device cpu")
    if index is None:
        return torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        is_built = torch.version.cuda is not None or torch.version.hip is not None
        why = "finds no GPU that it can use" if is_built else "was built without CUDA"
        raise UsageError(f"device {name}: PyTorch {torch.__version__} {why}. Use device cpu, or install one that does")
    if index >= count:
        raise UsageError(f"device {name}: PyTorch finds {count} GPU{'s' if count > 1 else ''}, the first is cuda:0")
    # Triton starts kernels on the current device, wherever their tensors are.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _ask_hub(name: str) -> tuple[list[str], str | None]:
    """List the model's files on the hub, or return the problem. Asks once: transformers retries for a minute."""
    try:
        return [each.rfilename for each in model_info(name, timeout=HUB_SECONDS).siblings or []], None
    except Exception as error:
        return [], hub_problem(error)


def _loaded(
    source: str, is_offline: bool, dtype: torch.dtype | None, plan: dict[str, Any] | None
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    tokenizer, config = _loaded_tokenizer(source, is_offline)
    with explained(source, "cannot be loaded", config):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype="auto" if dtype is None else dtype,
            local_files_only=is_offline,
            output_loading_info=True,
            trust_remote_code=False,
            **(plan or {}),
        )
    model, found = loaded
    missing, unused = sorted(found["missing_keys"]), sorted(found["unexpected_keys"])
    if missing:
        raise UsageError(f"model {source}: its weights lack {len(missing)} tensors, the first is {missing[0]}")
    if unused:
        warnings.warn(
            f"model {source}: {len(unused)} tensors of its weights are not used, the first is {unused[0]}. Does its "
            "config.json belong to them?",
            WindlassWarning,
            stacklevel=4,
        )
    return tokenizer, model


def _loaded_tokenizer(source: str, is_offline: bool) -> tuple[PreTrainedTokenizerBase, PreTrainedConfig]:
    """The tokenizer of a model, and the model's config."""
    # Said to be False: otherwise transformers asks the user at the terminal whether to run code of the folder.
    options: dict[str, Any] = {"local_files_only": is_offline, "trust_remote_code": False}
    with explained(source, "config.json cannot be used"):
        config = AutoConfig.from_pretrained(source, **options)
    check_config(f"model {source}: config.json", config.to_dict())
    with explained(source, "no tokenizer that can be loaded"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, config=config, **options)
    return tokenizer, config
