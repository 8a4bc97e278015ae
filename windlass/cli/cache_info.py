"""`windlass cache FILE info`: what is in a prompt-cache file, without its model."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from windlass.cli.terminal import say
from windlass.core.errors import PromptCacheError
from windlass.core.units import in_units
from windlass.hf import prompt_cache_file
from windlass.hf.load import load_tokenizer
from windlass.hf.policy_note import AGAIN
from windlass.hf.prompt_cache_document import Contents, parsed
from windlass.hf.prompt_cache_fields import InconsistentFile, shown
from windlass.hf.prompt_cache_layout import POSITIONS, Layout

IDS = "tokens.0"
SHOWN_TOKENS = 12  # at the beginning of the text, and at its end


def show(path: Path, tokenizer: str | None, is_json: bool) -> int:
    """Print what is in the file, or one JSON object of it; returns the exit code.

    `tokenizer` is the model whose tokenizer turns the ids in the file into words; None shows none.

    Raises: PromptCacheError for a file that is missing, damaged or no prompt cache; UsageError for a model without
    tokenizer.
    """
    try:
        contents, tensors = prompt_cache_file.read(path, _checked)
        told = facts(path, contents, tensors)
    except InconsistentFile as error:
        raise PromptCacheError(f"{path} is damaged: {error}; {AGAIN}") from None
    if tokenizer is not None and IDS in tensors:
        ids, decode = tensors[IDS].clamp(min=0).tolist(), load_tokenizer(tokenizer).decode
        first, last = decode(ids[:SHOWN_TOKENS]), decode(ids[-SHOWN_TOKENS:])
        told |= {"tokenizer": tokenizer, "first words": str(first), "last words": str(last)}
    if is_json:
        say(json.dumps({name.replace(" ", "_"): value for name, value in told.items()}, ensure_ascii=False) + "\n")
        return 0
    for name, value in told.items():
        say(f"{name:14}{_text(name, value)}\n")
    if tokenizer is None:
        say("words         for the words of the text, name the model with -m\n")
    return 0


def _checked(text: str, version: int, found: Mapping[str, Layout]) -> Contents:
    """The document, when the tensors that are looked at are of their kind: a file need not come from a friend."""
    for name, layout in found.items():
        kind = (1, torch.int32) if name == IDS else (3, torch.int32) if _is_positions(name) else None
        if kind is not None and ((len(layout.shape), layout.dtype) != kind or 0 in layout.shape):
            raise InconsistentFile(f"tensor {shown(name)} is {layout}")
    return parsed(text, version)


def _is_positions(name: str) -> bool:
    return name.startswith("layers.") and name.split(".")[2:] == [POSITIONS]


def facts(path: Path, contents: Contents, tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """What the file says of itself, by the names that are shown; counts of a batch are those of its first row."""
    options, standing = dict(contents.options), contents.standing
    limits, texts = options.pop("limits"), options.pop("batch")
    if not options["recall"]:
        del options["recall"], options["recall_store"]
    shares = options.pop("shares")
    if shares is not None:
        options["shares"] = shares["name"] if isinstance(shares, dict) and shares.get("name") else "of its own"
    held = [tensor for name, tensor in tensors.items() if _is_positions(name)]
    kept = [int((positions[0] >= 0).sum(-1).max()) for positions in held]
    places = [positions[0][positions[0] >= 0] for positions in held]
    return {
        "model": contents.model,
        "dtype": contents.dtype,
        "fingerprint": contents.fingerprint[:12],
        "policy": contents.policy.label,
        **options,
        **limits,
        "texts": texts,
        "tokens seen": standing["tokens_seen"][0],
        "tokens kept": max(kept, default=0),
        "next position": standing["next_positions"][0],
        "first kept": min((int(each.min()) for each in places if len(each)), default=None),
        "last kept": max((int(each.max()) for each in places if len(each)), default=None),
        "file bytes": path.stat().st_size,
    }


def _text(name: str, value: object) -> str:
    if value is None:
        return "all" if name == "budget" else "by default" if name == "window" else "none"
    if name == "file bytes" and isinstance(value, int):
        return in_units(value)
    return f"{value:,}" if isinstance(value, int) else repr(value) if name.endswith("words") else str(value)
