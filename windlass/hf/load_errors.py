"""What is wrong with a model that transformers cannot load, in one line."""

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Final

import torch
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig

from windlass.core.errors import UsageError
from windlass.hf.names import PICKLES, SAFETENSORS, check_tokenizer

HUB: Final = "huggingface.co"


@contextmanager
def explained(source: str, problem: str, config: PreTrainedConfig | None = None) -> Iterator[None]:
    """Re-raise whatever loading a part of a model raises as a UsageError; `source` is its folder or name.

    With `config`, the part is the weights.
    """
    try:
        yield
    except UsageError:
        raise
    except SafetensorError as error:
        raise UsageError(f"model {source}: its weights are damaged: {gist(error)}; copy them again") from error
    except UnpicklingError as error:
        raise UsageError(
            f"model {source}: its weights, {PICKLES}, hold more than tensors, which could run any code; use a model "
            f"with {SAFETENSORS}"
        ) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"model {source} can only be loaded by Python code that comes with it, which windlass does not run; "
                "use a model of an architecture that transformers has"
            ) from error
        if config is not None and "Unrecognized configuration class" in str(error):
            raise UsageError(
                f"model {source}: a {config.model_type} writes no text token by token; use a decoder, which "
                "transformers loads as a causal language model"
            ) from error
        if config is None:
            check_tokenizer(Path(source))
        else:
            _check_words(source, config, error)
            _check_shapes(source, config)
        raise UsageError(f"model {source}: {problem}: {gist(error)}") from error


def gist(error: BaseException) -> str:
    """The first line of a message that may be a page long; with the kind of error where it says too little."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return line if " " in line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}".strip()


def hub_problem(error: Exception) -> str:
    """Why the hub did not give what it was asked for."""
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, so it is not asked"
    if isinstance(error, GatedRepoError):
        return f"its owner gives it to those who ask for it at {HUB}; ask there, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"{HUB} has no such model, or it is private; look at its spelling, or `hf auth login`"
    # The clients of the hub raise errors of their own, whose names tell what they stand for.
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
                    f"model {source}: config.json: {name} is {value!r}, which transformers does not know; look at its "
                    "spelling, or use a newer transformers"
                ) from error


def _check_shapes(source: str, config: PreTrainedConfig) -> None:
    """Raises: UsageError for the first tensor of a folder whose shape is another than its config asks for."""
    try:
        with torch.device("meta"):
            wanted = AutoModelForCausalLM.from_config(config).state_dict()
        found = {name: shape for path in Path(source).glob(SAFETENSORS) for name, shape in _shapes(path).items()}
    except Exception:  # what failed before may fail here, too
        return
    wrong = [name for name in found if name in wanted and tuple(wanted[name].shape) != found[name]]
    if wrong:
        name = wrong[0]
        raise UsageError(
            f"model {source}: its config.json and its weights do not belong together: {name} has shape {found[name]}, "
            f"and the config asks for {tuple(wanted[name].shape)}" + f"; {len(wrong)} tensors differ"
        )


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Those of the tensors of a safetensors file, as its header has them."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
