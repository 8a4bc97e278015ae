"""Which of the words typed is the model, and which the prompt."""

import re
from pathlib import Path

from windlass.core.errors import UsageError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NO_MODEL = "no model; name one first, with -m, or in WINDLASS_MODEL (`windlass demo` brings its own)"


def the_model(name: str | None, model: str | None, is_default: bool) -> str:
    """The model of a command that takes nothing else: `name` was typed alone, `model` with -m.

    `is_default`: `model` is that of WINDLASS_MODEL, before which one that was typed goes.

    Raises: UsageError when there is none, or two were typed.
    """
    if name is not None and model is not None and not is_default:
        raise UsageError(f"two models, {name} and -m {model}; give one of them")
    chosen = model if name is None else name
    if chosen is None:
        raise UsageError(NO_MODEL)
    return chosen


def model_and_prompt(
    first: str | None, second: str | None, model: str | None, has_file: bool, is_default: bool
) -> tuple[str, str | None]:
    """The model and the prompt out of up to two words, where `model` is as in `the_model`.

    Two words are a model and a prompt. A single word is the prompt after -m, and the model where no other is known.
    Beside the default of WINDLASS_MODEL it is the prompt, unless the prompt comes from a file or the word is a path or
    a folder.

    Raises: UsageError when there is no model, and for a single word that can be meant as either.
    """
    if first is None or (first is not None and second is not None):
        if second is not None and model is not None and not is_default:
            raise UsageError(f"-m {model}, and two words more, {first!r} and {second!r}; quote a prompt of many words")
        return the_model(first, model, is_default), second
    if model is None:
        if any(map(str.isspace, first)) and not Path(first).exists():
            raise UsageError(f"{NO_MODEL}; {_short(first)} looks like a prompt")
        return first, None
    if not is_default:
        return model, first
    if has_file or _is_folder(first):
        return first, None
    if HUB_NAME.fullmatch(first):
        raise UsageError(f"{first} can be a model or a prompt; write -m {first}, or -m {model} {first}")
    return model, first


def file_of_info(first: str | None, second: str | None) -> Path | None:
    """The FILE of `windlass cache FILE info`, or of `windlass cache info FILE`; None for other words."""
    if first is None or second is None or "info" not in (first, second):
        return None
    return Path(first if second == "info" else second)


def _is_folder(word: str) -> bool:
    is_path = word.startswith(("./", "../", "~/", "/")) and not any(map(str.isspace, word))
    return is_path or Path(word).is_dir()


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "...")
