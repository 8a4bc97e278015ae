"""Values as a user types them: specs, ranges of numbers, classes by name or from a file, names of models."""

import difflib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeGuard, TypeVar

from windlass.core.errors import UsageError, WindlassError, whole_number
from windlass.core.files import read_bytes

Value = TypeVar("Value")


AUTO: Final = "auto"  # value of a policy, mode, dtype or device that Windlass chooses
NO_MERGE: Final = "none"  # the label of a cache that drops evicted tokens
NO_SHARES: Final = "none"
NO_RECALL: Final = "none"
HALF: Final = "half"  # of the budget


@dataclass(frozen=True)
class Spec:
    """A name with its arguments, as text: `self_extend(8, window=64)`.

    `named` keeps the order and duplicates. `inside` is the text between the parentheses, for an argument that may hold
    any sign, such as the name of a file, or None without parentheses.
    """

    name: str
    positional: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    inside: str | None = None


def parse_spec(text: str) -> Spec | None:
    """The name and the arguments of `text`, or None where it has another form.

    Arguments are separated by commas, and may be of the same form themselves. One comma may stand after the last.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None or not _is_balanced(match[2] or ""):
        return None
    parts = list(_parts(match[2] or ""))
    if not parts[-1]:
        parts.pop()
    if not all(parts):
        return None
    positional, named = [], []
    for part in parts:
        pair = re.fullmatch(r"(\w+)\s*=\s*(.*)", part, re.DOTALL)
        if pair is None:
            positional.append(part)
        else:
            named.append((pair[1], pair[2]))
    return Spec(match[1], tuple(positional), tuple(named), match[2])


def parse_list(option: str, typed: str, make: Callable[[str], Value]) -> list[Value]:
    """Parse a list: the result of `make` for each part. Commas inside parentheses belong to a part.

    Raises: UsageError, beginning with `option`, for an empty part, and any error that `make` raises.
    """
    parts = list(_parts(typed))
    if not all(parts):
        raise UsageError(f"{option} {typed!r} has an empty value. Put one comma between two values")
    return [make(part) for part in parts]


def int_parser(option: str, least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers in a range. It raises: UsageError, beginning with `option`, for all else."""

    def parse(part: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", part) or not least <= int(part) <= most:
            raise UsageError(f"{option} {part!r} is not a whole number from {least} to {most}")
        return int(part)

    return parse


def parse_ints(setting: str, spec: Spec, names: Sequence[str]) -> dict[str, int]:
    """The arguments of `spec` as whole numbers by name. Unnamed ones are taken in the order of `names`.

    Raises: UsageError, beginning with `setting`, for another name, one given twice, or no number.
    """
    numbers: dict[str, int] = {}
    unnamed = [(names[place] if place < len(names) else "", value) for place, value in enumerate(spec.positional)]
    for name, value in (*unnamed, *spec.named):
        if name not in names or name in numbers:
            takes = f"{' and '.join(names)}, each once" if names else "no numbers"
            raise UsageError(f"{setting}: {spec.name} takes {takes}")
        if not re.fullmatch(r"-?\d+", value):
            raise UsageError(f"{setting}: {name} must be a whole number, got {value!r}")
        numbers[name] = int(value)
    return numbers


def parse_bytes(option: str, typed: str) -> int:
    """A number of bytes as people write it: `"64MiB"`, `"1.5 GiB"` or `"4096"`. Units are powers of 1024.

    Raises: UsageError, beginning with `option`, for another form, or less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", typed, re.IGNORECASE)
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if not size:
        raise UsageError(f"{option} {typed!r} is no number of bytes. Write it as 64MiB, 1.5GiB or 4096")
    return size


def check_given(spec: str, name: str, needed: Sequence[str], numbers: Mapping[str, int]) -> None:
    """Raises: UsageError where a position mode lacks a number that only the user knows."""
    for number in needed:
        if number not in numbers:
            raise UsageError(f"positions={spec!r}: {name} takes a {number} in tokens. Write {name}(256), for example")


def _parts(text: str) -> Iterator[str]:
    """The text between the commas that stand outside of parentheses, without spaces around it."""
    start = depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _is_balanced(text: str) -> bool:
    """Return True if every parenthesis is closed after it was opened."""
    depth = 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0


MAX_NUMBER: Final = 2**30  # positions are 32-bit
DEFAULT_SINKS: Final = 4
SYSTEM: Final = "system"
"""A value of `sinks` instead of a number: the tokens of each row's system text."""
PAGE: Final = 8
"""Number of tokens that are recalled together: neighbours in the order of writing."""
# Least values of the numbers of stores and position modes.
LEAST: Final = {"sinks": 0, "newest": 0, "group": 1, "window": 1, "limit": 1}


def check_recall(recall: int, budget: int | None, has_folder: bool, has_store: bool) -> None:
    """Raises: UsageError for tokens to recall that no budget evicts, or a folder or a store for none."""
    if has_folder and not recall:
        raise UsageError(
            "recall_folder is where tokens to recall are held, and recall is 0. Give recall, or leave it out"
        )
    if has_store and not recall:
        raise UsageError("recall_store is how tokens to recall are held, and recall is 0. Give recall, or leave it out")
    if recall and budget is None:
        raise UsageError(
            f"recall ({recall} tokens) needs a budget: without one nothing is evicted that could be recalled"
        )


def check_range(name: str, value: object) -> int:
    """`value` as an int of Python. Raises: UsageError for a number that its name does not allow."""
    return whole_number(name, value, LEAST[name], MAX_NUMBER)


def check_max_tokens(max_tokens: object) -> int:
    """`max_tokens` as an int of Python. Raises: UsageError for less than one token to write, or no whole number."""
    return whole_number("max_tokens", max_tokens, 1, MAX_NUMBER)


UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def in_units(count: int) -> str:
    """A number of bytes as people write it: `"1.50 MiB"`."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


CLOSE: Final = 0.65  # similarity of names, of 1 for equal ones: names that share only some letters score less


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """A question with the name that is close to `typed`, for an error, or an empty text.

    Case, `_` and `-` do not matter, nor does text in parentheses.
    """
    known = {plain(name): name for name in names}
    near = difflib.get_close_matches(plain(typed.partition("(")[0].strip()), list(known), n=1, cutoff=CLOSE)
    return f"Did you mean {known[near[0]]}? " if near else ""


def use_one_of(typed: str, names: Collection[str]) -> str:
    """The way out of an error about an unknown name: all names, and one that is close to it, if any."""
    return f"Use one of: {', '.join(names)}{near_to(typed, names)}"


def near_to(typed: str, names: Iterable[str]) -> str:
    """The same question in parentheses, after a list of names."""
    asked = did_you_mean(typed, names).strip()
    return asked and f" ({asked})"


def plain(name: str) -> str:
    """A name reduced to the characters that matter."""
    return name.lower().replace("_", "").replace("-", "")


@dataclass(frozen=True)
class PluginKind:
    """A kind of plug-in: subclasses of `base`, which users import as `imported_as`.

    Errors call one of them `word` and several `words`, and are of class `error`.
    """

    word: str
    words: str
    base: type[Any]
    imported_as: str
    error: type[WindlassError]

    def split(self, spec: str) -> tuple[Path | None, str]:
        """The file, if any, and the name after it, perhaps with parentheses.

        Raises: the kind's error for a file alone.
        """
        match = re.fullmatch(r"(.*):\s*([^\W\d]\w*\s*(?:\(.*\))?)\s*", spec, re.DOTALL)
        if match is not None:
            return Path(match[1]).expanduser(), match[2]
        spec = spec.strip()
        if spec.endswith(".py"):
            raise self.error(f"{self.word} {spec!r} is a file but names no class. Use {spec}:Class")
        return None, spec

    def name_in(self, typed: str, names: Iterable[str]) -> str | None:
        """The name in `names` that was typed, if any. Case, `_` and `-` do not matter."""
        return next((name for name in names if plain(name) == plain(typed)), None)

    def name_of(self, typed: str, names: Collection[str]) -> str:
        """The name in `names` that was typed. Case, `_` and `-` do not matter.

        Raises: the kind's error for an unknown name, with one that is close to it, if any.
        """
        if (found := self.name_in(typed, names)) is not None:
            return found
        raise self.error(
            f"{self.word} {typed!r} is unknown. {did_you_mean(typed, names)}The names are {', '.join(names)}, "
            "or path/to/file.py:Class"
        )

    def class_in(self, path: Path, name: str) -> type[Any]:
        """The class `name` of a file, which is run for it.

        Raises: the kind's error for a file that cannot be read or run, or that has no such class.
        """
        module = self._run(path)
        found = vars(module).get(name)
        if self._is_one(found):
            return found
        kinds = [each for each in vars(module).values() if self._is_one(each)]
        del sys.modules[module.__name__]
        own = ", ".join(kind.__name__ for kind in kinds if kind.__module__ == module.__name__)
        what = "has no class" if found is None else f"has something else than a subclass of {self.imported_as} named"
        raise self.error(f"{self.word} file {path} {what} {name!r}. Its {self.words}: {own or 'none'}")

    def _is_one(self, what: object) -> TypeGuard[type[Any]]:
        return isinstance(what, type) and issubclass(what, self.base)

    def _run(self, path: Path) -> ModuleType:
        """Run a file as a module, and return it. Unlike `import`, leaves no byte code beside the file."""
        file = f"{self.word} file {path}"
        # A traceback, or a tool that walks all modules, opens their sources: a pipe would make it wait for ever.
        source = str(path) if path.is_file() else f"<{path}>"
        try:
            text = read_bytes(path, file)
        except UsageError as error:
            raise self.error(str(error)) from None
        if (null := text.find(b"\0")) >= 0:  # the compiler's words for it changed with Python 3.11.4
            number = text.count(b"\n", 0, null) + 1
            raise self.error(f"{file}, line {number}: a null byte. Save the file as text")
        try:
            code = compile(text, source, "exec")
        except SyntaxError as error:
            raise self.error(f"{file}, line {error.lineno or 1}: syntax error: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:  # nested brackets raise the last two
            raise self.error(f"{file} is not Python: {str(error) or type(error).__name__}") from None
        module = ModuleType(f"windlass_{self.word}_{path.stem}")
        if path.is_file():
            module.__file__ = source
        # `dataclass` looks its module up here to read annotations that are strings.
        sys.modules[module.__name__] = module
        try:
            exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == source]
            at = f", line {lines[-1]}" if lines else ""
            raise self.error(f"{file}{at}: {type(error).__name__}: {error}") from error
        return module


DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
AUTO_WEIGHTS: Final = "auto"
WEIGHTS: Final = (AUTO_WEIGHTS, "int8", "int4")
DEVICES: Final = ("auto", "cpu", "cuda", "mps")
DEVICE: Final = re.compile(r"auto|cpu|mps|cuda(?::(\d{1,3}))?")
HUB_NAME: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?", re.ASCII)
GGUF: Final = ".gguf"
PART: Final = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
SAFETENSORS: Final = "model*.safetensors"  # others may be adapters, or a scorer of ours
PICKLES: Final = "pytorch_model*.bin"
# Every kind of tokenizer has a file of one of these names.
TOKENIZERS: Final = ("tokenizer*", "tokenization_*.py", "vocab*", "*.model", "*.tiktoken", "tekken.json")
CONFIG: Final = "tokenizer_config.json"
# Counts in a config. Each architecture has some of them.
COUNTS: Final = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_size", "intermediate_size", "vocab_size"),
)


def check_dtype(name: str) -> None:
    """Raises: UsageError for a number type that is unknown."""
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is unknown. {use_one_of(name, DTYPES)}")


def check_weights(name: str) -> None:
    """Raises: UsageError for codes of weights that are unknown, or cannot be made because torchao is missing."""
    if name not in WEIGHTS:
        raise UsageError(f"weights {name!r} are unknown. {use_one_of(name, WEIGHTS)}")
    if name != AUTO_WEIGHTS and find_spec("torchao") is None:
        raise UsageError(f"weights {name!r} need torchao, which is not installed. Run: pip install 'windlass[weights]'")


def gpu_number(device: str) -> int | None:
    """The number of the GPU in `cuda` or `cuda:1`, or None for `auto`, `cpu` and `mps`.

    Raises: UsageError for another name.
    """
    match = DEVICE.fullmatch(device)
    if match is None:
        raise UsageError(
            f"device {device!r} is unknown. Use auto, cpu, mps, cuda, or cuda:1 for the second of several GPUs"
        )
    return int(match[1] or 0) if device.startswith("cuda") else None


def folder_of(name: str | os.PathLike[str]) -> Path | None:
    """The folder or the GGUF file that `name` means, checked. None: `name` is a name on the hub.

    A folder that has a GGUF file, and no model in the format of transformers, means that file. `folder:Q4_K_M` picks
    one of several files by its types.

    Raises: UsageError for a folder without the files that a model needs, and for a name that can be neither.
    """
    folder, quant = Path(name).expanduser(), None
    if not isinstance(name, str):
        is_path = True
    else:
        is_path = _exists(folder) or _is_path(name)
        base, quant = split_quant(name)
        if quant is not None and not _exists(folder) and (_exists(Path(base).expanduser()) or _is_path(base)):
            folder, is_path = Path(base).expanduser(), True
        else:
            quant = None
    if is_path:
        return _model_at(folder, quant)
    if not HUB_NAME.fullmatch(split_quant(str(name))[0]):
        raise UsageError(f"model {name!r} is no folder here, nor a name that the hub could have. It has owner/name")
    return None


def split_quant(name: str) -> tuple[str, str | None]:
    """A model's name, and the text after its colon: the types of the GGUF file to use."""
    base, colon, quant = name.rpartition(":")
    return (base, quant) if colon and re.fullmatch(r"\w[\w.-]{0,40}", quant, re.ASCII) else (name, None)


def _model_at(folder: Path, quant: str | None) -> Path:
    """The folder, or the GGUF file that it is or has. Raises: UsageError."""
    if folder.suffix.lower() == GGUF and folder.is_file():
        check_gguf(folder.name, f"model {folder}")
        return folder
    if folder.is_dir():
        files = [path.name for path in folder.glob("*") if path.suffix.lower() == GGUF]
        if quant is not None or (files and not (folder / "config.json").is_file()):
            return folder / gguf_among(files, quant, f"model folder {folder}")
    elif quant is not None:
        raise UsageError(f"model {folder} is no folder. Give {quant} after the folder or the hub name of several files")
    check_folder(folder)
    return folder


def gguf_among(files: Iterable[str], quant: str | None, model: str) -> str:
    """The only GGUF file, or the one whose name has `quant` in it.

    Raises: UsageError, beginning with `model`, for none and for several.
    """
    weights = sorted(each for each in files if not re.search(r"mmproj|imatrix", each, re.IGNORECASE))
    asked = rf"(?<![a-z0-9]){re.escape(quant or '')}(?![a-z0-9_])"
    found = [each for each in weights if quant is None or re.search(asked, each, re.IGNORECASE)]
    if not found:
        raise UsageError(f"{model} has no GGUF file of {quant or 'weights'}. It has {', '.join(weights) or 'none'}")
    if len(found) > 1 and not PART.search(found[0]):
        raise UsageError(
            f"{model} has {len(found)} GGUF files: {', '.join(found)}. Choose one by its types: "
            f"{model.rpartition(' ')[2]}:{quant_of(found[0])}"
        )
    check_gguf(found[0], model)
    return found[0]


def quant_of(file: str) -> str:
    """The types in a GGUF file's name, such as `Q4_K_M`. A name without types gives its last word."""
    match = re.search(r"(?<![a-z0-9])(i?q\d\w*|b?f(?:16|32))", file, re.IGNORECASE)
    return match[1] if match else Path(file).stem.rpartition(".")[2]


def check_gguf(file: str, model: str) -> None:
    """Raises: UsageError for a GGUF file that is one of several parts, and where gguf is not installed."""
    if PART.search(file):
        raise UsageError(
            f"{model}: {file} is one of several parts. Join them with llama.cpp: "
            f"llama-gguf-split --merge {file} all.gguf"
        )
    if find_spec("gguf") is None:
        raise UsageError(f"{model}: a GGUF file needs gguf, which is not installed. Run: pip install 'windlass[gguf]'")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _is_path(name: str) -> bool:
    """Return True if `name` can only be meant as a folder: hub names have one slash at most."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count("/") > 1 or not name


def check_folder(folder: Path) -> None:
    """Raises: UsageError for a folder that is missing, or has no config, weights or tokenizer."""
    if not _exists(folder):
        raise UsageError(f"model folder {folder} does not exist")
    if not folder.is_dir():
        raise UsageError(
            f"model {folder} is a file. Give the folder that holds config.json and the weights, or a {GGUF} file"
        )
    if not (folder / "config.json").is_file():
        raise UsageError(f"model folder {folder} has no config.json")
    config = _json(folder / "config.json")
    check_config(f"model {folder}: config.json", config)
    named, files = config.get("transformers_weights"), (SAFETENSORS, f"{SAFETENSORS}.index.json", PICKLES)
    is_named = isinstance(named, str) and _exists(folder / named)
    if not is_named and not any(any(folder.glob(pattern)) for pattern in files):
        raise UsageError(f"model folder {folder} has no weights. Expected {SAFETENSORS} or {PICKLES}")
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise UsageError(
            f"model folder {folder} has no tokenizer. Copy its files there: tokenizer.json, or tokenizer.model"
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"model {path.parent}: {path.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"model {path.parent}: {path.name} is not JSON ({error}). Copy it again") from None


def check_config(what: str, config: Any) -> None:
    """Check a config. Raises: UsageError, with the given label, if it is no object or has a wrong count."""
    if not isinstance(config, dict):
        raise UsageError(f"{what} is not an object of JSON. Copy it again")
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for name in COUNTS:
            value = part.get(name)
            if isinstance(value, str | bool) or (isinstance(value, int | float) and not value >= 1):
                raise UsageError(f"{what}: {name} is {value!r}. It must be a whole number of at least 1")


def check_tokenizer(folder: Path) -> None:
    """Raises: UsageError with the reason why a folder's tokenizer cannot be loaded, if its files tell it."""
    path = folder / "tokenizer.json"
    if path.is_file():
        found = _json(path)
        lacking = [name for name in ("model", "added_tokens") if not isinstance(found, dict) or name not in found]
        if lacking:
            raise UsageError(
                f"model {folder}: tokenizer.json describes no tokenizer: it has no {lacking[0]!r}. Copy it again"
            )
    elif folder.is_dir() and {each.name for kind in TOKENIZERS for each in folder.glob(kind)} == {CONFIG}:
        raise UsageError(f"model folder {folder} has no tokenizer beside {CONFIG}. Copy tokenizer.json there")
