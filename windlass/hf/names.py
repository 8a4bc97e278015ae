"""What a user may say of a model: its folder, number type and device. Nothing here needs torch."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from windlass.core.close_names import use_one_of
from windlass.core.errors import UsageError

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
AUTO_WEIGHTS: Final = "auto"
WEIGHTS: Final = (AUTO_WEIGHTS, "int8", "int4")
DEVICES: Final = ("auto", "cpu", "cuda", "mps")
DEVICE: Final = re.compile(r"auto|cpu|mps|cuda(?::(\d{1,3}))?")
HUB_NAME: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
SAFETENSORS: Final = "model*.safetensors"  # others may be adapters, or a scorer of ours
PICKLES: Final = "pytorch_model*.bin"
# A tokenizer has a file of one of these names, whatever its kind.
TOKENIZERS: Final = ("tokenizer*", "tokenization_*.py", "vocab*", "*.model", "*.tiktoken", "tekken.json")
CONFIG: Final = "tokenizer_config.json"
# Numbers of a config that count something; whether it has them depends on the architecture.
COUNTS: Final = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "intermediate_size", "vocab_size"),
)


def check_dtype(name: str) -> None:
    """Raises: UsageError for a number type that is unknown."""
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is unknown; {use_one_of(name, DTYPES)}")


def check_weights(name: str) -> None:
    """Raises: UsageError for codes of weights that are unknown, or cannot be made because torchao is missing."""
    if name not in WEIGHTS:
        raise UsageError(f"weights {name!r} are unknown; {use_one_of(name, WEIGHTS)}")
    if name != AUTO_WEIGHTS and find_spec("torchao") is None:
        raise UsageError(f"weights {name!r} need torchao, which is not installed; run: pip install 'windlass[weights]'")


def gpu_number(device: str) -> int | None:
    """Which GPU `cuda` or `cuda:1` means; None for `auto`, `cpu` and `mps`. Raises: UsageError for another name."""
    match = DEVICE.fullmatch(device)
    if match is None:
        raise UsageError(
            f"device {device!r} is unknown; use auto, cpu, mps, cuda, or cuda:1 for the second of several GPUs"
        )
    return int(match[1] or 0) if device.startswith("cuda") else None


def folder_of(name: str | os.PathLike[str]) -> Path | None:
    """The folder that `name` means, checked; None where it is a name on the hub.

    Raises: UsageError for a folder that lacks what a model needs, and for a name that can be neither.
    """
    folder = Path(name).expanduser()
    if not isinstance(name, str) or _exists(folder) or _is_path(name):
        check_folder(folder)
        return folder
    if not HUB_NAME.fullmatch(name):
        raise UsageError(f"model {name!r} is no folder here, nor a name that the hub could have; it has owner/name")
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _is_path(name: str) -> bool:
    """Whether `name` can only be meant as a folder: hub names have one slash at most."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1 or not name


def check_folder(folder: Path) -> None:
    """Raises: UsageError for a folder that is missing, or has no config, weights or tokenizer."""
    if not _exists(folder):
        raise UsageError(f"model folder {folder} does not exist")
    if not folder.is_dir():
        raise UsageError(f"model {folder} is a file; give the folder that holds config.json and the weights")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model folder {folder} has no config.json")
    config = _json(folder / "config.json")
    check_config(f"model {folder}: config.json", config)
    named, files = config.get("transformers_weights"), (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLES)
    is_named = isinstance(named, str) and _exists(folder / named)
    if not is_named and not any(any(folder.glob(pattern)) for pattern in files):
        raise UsageError(f"model folder {folder} has no weights; expected {SAFETENSORS} or {PICKLES}")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise UsageError(
            f"model folder {folder} has no tokenizer; copy its files there: tokenizer.json, or tokenizer.model"
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"model {path.parent}: {path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {path.parent}: {path.name} is not JSON ({error}); copy it again") from None


def check_config(what: str, config: Any) -> None:
    """Raises: UsageError, which calls the config `what`, where it is no object or counts something wrongly."""
    if not isinstance(config, dict):
        raise UsageError(f"{what} is not an object of JSON; copy it again")
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for name in COUNTS:
            value = part.get(name)
            if isinstance(value, str | bool) or (isinstance(value, int | float) and not value >= 1):
                raise UsageError(f"{what}: {name} is {value!r}; it must be a whole number of at least 1")


def check_tokenizer(folder: Path) -> None:
    """Why the tokenizer of a folder cannot be loaded, where its files tell. Raises: UsageError."""
    path = folder / "tokenizer.json"
    if path.is_file():
        found = _json(path)
        lacking = [name for name in ("model", "added_tokens") if not isinstance(found, dict) or name not in found]
        if lacking:
            raise UsageError(
                f"model {folder}: tokenizer.json describes no tokenizer: it has no {lacking[0]!r}; copy it again"
            )
    elif folder.is_dir() and {each.name for kind in TOKENIZERS for each in folder.glob(kind)} == {CONFIG}:
        raise UsageError(f"model folder {folder} has no tokenizer beside {CONFIG}; copy tokenizer.json there")
