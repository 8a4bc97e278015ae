"""A model and its tokenizer from a folder or the hub, with one clear line for all that can be wrong."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import model_info
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from windlass.core.errors import UsageError
from windlass.hf.attach import attach

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HUB_SECONDS = 10.0
# The key under which a tokenizer notes that it has given this warning.
TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def load(
    name: str | os.PathLike[str], dtype: str = "auto", device: str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model of a folder, or of a name on the Hugging Face hub, and its tokenizer.

    A `Path` is always a folder, and a folder is read without the network. The model is attached, in eval
    mode, on `device`: `cpu`, `cuda` or `cuda:1`; a GPU becomes the process's current one. `dtype` is `auto`
    (that of the file), `float32`, `bfloat16` or `float16`. The tokenizer does not warn of texts longer than
    the trained window.

    Raises: UsageError when a part is missing, damaged or unknown; UnsupportedModel from `attach`.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is unknown; use one of: {', '.join(DTYPES)}")
    place = device_of(device)
    with _quiet():
        tokenizer, model = _from_folder_or_hub(name, dtype)
    tokenizer.deprecation_warnings[TOO_LONG] = True
    return attach(model.eval().to(place)), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warnings and progress bars: what they tell of a damaged model, our errors tell."""
    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()


def _from_folder_or_hub(name: str | os.PathLike[str], dtype: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    folder = Path(name).expanduser()
    if not isinstance(name, str) or folder.exists() or _is_path(name):
        _check_folder(folder)
        return _loaded(str(folder), True, dtype)
    problem = _hub_problem(name)
    try:
        return _loaded(name, problem is not None, dtype)
    except UsageError as error:
        if problem is None:
            raise
        raise UsageError(
            f"model {name!r} is no folder here, was not fetched before, and the hub cannot give it: {problem}"
        ) from error


def device_of(name: str) -> torch.device:
    """The device that is called `cpu`, `cuda` (the first GPU) or `cuda:1`; a GPU becomes the process's current one.

    Raises: UsageError for another name, or a GPU that is not there.
    """
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,3}))?", name)
    if match is None:
        raise UsageError(f"device {name!r} is unknown; use cpu, cuda, or cuda:1 for the second of several GPUs")
    if name == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        is_built = torch.version.cuda is not None or torch.version.hip is not None
        why = "finds no GPU that it can use" if is_built else "was built without CUDA"
        raise UsageError(f"device {name}: PyTorch {torch.__version__} {why}; use device cpu, or install one that does")
    if index >= count:
        raise UsageError(f"device {name}: PyTorch finds {count} GPU{'s' if count > 1 else ''}, the first is cuda:0")
    # Triton starts kernels on the current device, wherever their tensors are.
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _is_path(name: str) -> bool:
    """Whether `name` can only be meant as a folder: hub names have one slash at most."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1 or not name


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise UsageError(f"model folder {folder} does not exist")
    if not folder.is_dir():
        raise UsageError(f"model {folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model folder {folder} has no config.json")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHTS):
        raise UsageError(f"model folder {folder} has no weights; expected {' or '.join(WEIGHTS)}")


def _hub_problem(name: str) -> str | None:
    """Why the hub cannot give this model now; asked once, because transformers itself tries for a minute."""
    try:
        model_info(name, timeout=HUB_SECONDS)
    except Exception as error:
        return _gist(error)
    return None


def _loaded(source: str, is_offline: bool, dtype: str) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    try:
        # Said to be False: otherwise transformers asks the user at the terminal whether to run code of the folder.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, local_files_only=is_offline, trust_remote_code=False
        )
    except Exception as error:
        _check_own_code(source, error)
        raise UsageError(f"model {source}: no tokenizer that can be loaded: {_gist(error)}") from error
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=DTYPES[dtype],
            local_files_only=is_offline,
            output_loading_info=True,
            trust_remote_code=False,
        )
    except SafetensorError as error:
        raise UsageError(f"model {source}: its weights are damaged: {_gist(error)}") from error
    except Exception as error:
        _check_own_code(source, error)
        raise UsageError(f"model {source} cannot be loaded: {_gist(error)}") from error
    model: PreTrainedModel = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    if missing:
        raise UsageError(f"model {source}: its weights lack {len(missing)} tensors, the first is {missing[0]}")
    return tokenizer, model


def _check_own_code(source: str, error: Exception) -> None:
    """Raises: UsageError where transformers failed because the model brings code of its own."""
    if "trust_remote_code" in str(error):
        raise UsageError(
            f"model {source} can only be loaded by Python code that comes with it, which windlass does not run; "
            "use a model of an architecture that transformers has"
        ) from error


def _gist(error: Exception) -> str:
    """The first line of a message that may be a page long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
