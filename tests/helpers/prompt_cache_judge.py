"""Outcome of loading a spoiled file: refused in words, loaded rightly, loaded silently, or worse."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.helpers.prompt_cache_files import SIGNED, CacheFile, Honest
from windlass import KVCache, PromptCacheError, WindlassError
from windlass.testing import VOCABULARY

REFUSED, LOADED, SILENT, TRACEBACK = "refused", "loaded", "silent", "traceback"
OF_ROWS = "tokens_seen", "next_position", "since_edit", "prompts", "columns"


def verdict(honest: Honest, data: bytes, path: Path) -> tuple[str, str]:
    """One of the four words, and the reason.

    "loaded" is harmless: the file contradicts itself nowhere, the cache agrees with the file, and a decode step gives
    logits, or an error in words. "silent" is a load where one of the first two is not true.
    """
    path.write_bytes(data)
    try:
        cache = KVCache.load(path, honest.model, policy=honest.policy)
    except PromptCacheError as error:
        message = str(error)
        is_line = message.isprintable() and len(message) < 9000 and message.startswith(str(path)) and ". " in message
        return (REFUSED, message) if is_line else (TRACEBACK, f"not one clear line: {message!r}")
    except Exception as error:  # any other error is a fault
        return TRACEBACK, f"{type(error).__name__}: {error}"[:300]
    try:
        file = CacheFile.read(path)
        wrong = _contradiction(file, honest) or _difference(file, cache, path)
        if wrong:
            return SILENT, wrong
        return LOADED, _decoded(cache, honest)
    except Exception as error:
        return TRACEBACK, f"after the load, {type(error).__name__}: {error}"[:300]


def _decoded(cache: KVCache, honest: Honest) -> str:
    """Two steps of the model. Their logits may be anything, as keys may be anything finite."""
    ids = torch.arange(cache.batch_size)[:, None] % VOCABULARY
    try:
        with torch.no_grad():
            for _ in range(2):
                logits = honest.model(input_ids=ids, past_key_values=cache).logits
    except WindlassError as error:
        return f"{type(error).__name__}: {error}"
    assert logits.shape == (cache.batch_size, 1, VOCABULARY)
    return "decodes"


def _difference(file: CacheFile, cache: KVCache, path: Path) -> str | None:
    """Differences of the cache, saved again, from the file."""
    cache.save(path)
    again = CacheFile.read(path)
    ours, theirs = again.document, file.document
    if json.dumps(ours, sort_keys=True) != json.dumps(theirs, sort_keys=True):
        return f"the document is another one: {[name for name in theirs if theirs[name] != ours.get(name)]}"
    if set(file.metadata) != SIGNED or set(again.tensors) != set(file.tensors):
        return f"other names: {sorted(set(again.tensors) ^ set(file.tensors))}"
    changed = [name for name, tensor in file.tensors.items() if not _is_same(tensor, again.tensors[name])]
    return f"other tensors: {changed}" if changed else None


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))  # NaN is like NaN


def _contradiction(file: CacheFile, honest: Honest) -> str | None:
    """The first thing that a file says and that cannot be, found in plain Python on lists."""
    document, truth = file.document, honest.file
    rows, batch = {name: [row[name] for row in document["rows"]] for name in OF_ROWS}, document["options"]["batch"]
    if len(document["rows"]) != batch:
        return "rows"
    for row, (seen, end, since, prompts, columns) in enumerate(zip(*rows.values(), strict=True)):
        if columns < seen:
            return f"columns of row {row}"
        flat = [number for span in prompts for number in span]
        if not 0 <= since <= min(seen, end) or flat != sorted(set(flat)) or (flat and flat[-1] > end):
            return f"row {row}"
        if since == seen and seen != end:
            return f"row {row}: unedited, and at another place than after what it saw"
        ids = file.tensors.get(f"tokens.{row}")
        if (ids is not None) != document["has_tokens"]:
            return f"ids of row {row}"
        if ids is not None and (len(ids) != seen or not all(0 <= token < VOCABULARY for token in ids.tolist())):
            return f"ids of row {row}"
    for name, tensor in file.tensors.items():
        is_known = honest.policy is None or ".state." not in name
        if is_known and tensor.is_floating_point() and not all(map(_is_number, tensor.flatten().tolist())):
            return f"{name} is not finite"
        if honest.policy is None and (".state." in name or name.endswith(".count")) and bool((tensor < 0).any()):
            return f"{name} is below 0"
        if honest.policy is None and name.endswith(".count"):
            counts = tensor.flatten(1).tolist()
            if any(max(count) > seen for count, seen in zip(counts, rows["tokens_seen"], strict=True)):
                return f"{name} is above what was seen"
        known = truth.tensors.get(name)
        if known is not None and (
            known.dtype != tensor.dtype or (known.shape[1:2] != tensor.shape[1:2] and (not name.startswith("tokens.")))
        ):
            return f"{name} is of another kind than in the honest file"
    for index, note in enumerate(document["layers"]):
        wrong = None if note is None else _in_layer(file, index, note, rows, batch)
        if wrong:
            return f"layer {index}: {wrong}"
    return None


def _in_layer(file: CacheFile, index: int, note: dict[str, Any], rows: dict[str, Any], batch: int) -> str | None:
    """The same of one layer."""
    own = {
        name.removeprefix(f"layers.{index}."): tensor
        for name, tensor in file.tensors.items()
        if name.startswith(f"layers.{index}.")
    }
    positions = own["positions"].tolist()
    slots = len(positions[0][0])
    for name, tensor in own.items():
        if name.startswith("recall."):
            continue
        per_slot = name.endswith(("codes", "scales")) or name in ("keys", "values") or name.startswith("state.")
        if (tensor.shape[0] != batch and name != "key_centres") or (per_slot and tensor.shape[2] != slots):
            return f"{name} has shape {tuple(tensor.shape)}"
    for row in range(batch):
        seen, end, since = (rows[name][row] for name in OF_ROWS[:3])
        for head, places in enumerate(positions[row]):
            held = [place for place in places if place != -1]
            if any(not 0 <= place < end for place in held):
                return "a position is outside of the text"
            doubled = [place for place, times in Counter(held).items() if times > 1]
            if any(place >= end - since for place in doubled):
                return "a position is there twice"
            before = [place for place in held if place < end - since]
            if len(before) > seen - since:
                return "more tokens than were seen"
            merged = own.get("state.merged")
            if merged is not None:
                counts = [count for count, place in zip(merged[row, head].tolist(), places, strict=True) if place >= 0]
                if any(count < 0 or count != int(count) for count in counts) or sum(counts) + len(held) > seen:
                    return "merged tokens that were never seen"
            named = own.get("state.recall_index")
            if named is not None:
                wrong = _in_recall(own["recall.positions"][row].tolist(), places, named[row, head].tolist(), seen, end)
                if wrong:
                    return wrong
        if "exact_slots" in own:
            wrong = _in_ring(own, row, positions[row], (seen, end, since))
            if wrong:
                return wrong
    del note
    return None


def _in_recall(remembered: list[int], places: list[int], index: list[float], seen: int, end: int) -> str | None:
    """The tokens that may be recalled: those in slots are among them, where they say, each once."""
    if any(not -1 <= place < end for place in remembered) or any(place != -1 for place in remembered[seen:]):
        return "a position to recall is outside of the text"
    named = [number for number, place in zip(index, places, strict=True) if place >= 0]
    if any(number != int(number) or not 0 <= number < seen for number in named) or len(set(named)) < len(named):
        return "slots name tokens that there are not"
    stands = [remembered[int(number)] for number in named]
    return None if stands == [place for place in places if place >= 0] else "slots name other tokens"


def _in_ring(
    own: dict[str, torch.Tensor], row: int, positions: list[list[int]], text: tuple[int, int, int]
) -> str | None:
    """The tokens in full precision: each entry's token is that of its slot."""
    seen, end, since = text
    written, index = int(own["exact_written"][row]), own["exact_serials"][row].tolist()
    if not since <= written <= seen:
        return "written"
    owners = own["exact_slots"][row].tolist()
    for head, slots in enumerate(owners):
        places = positions[head if len(positions) > 1 else 0]
        used = [(token, slot) for token, slot in zip(index, slots, strict=True) if token >= 0 and slot >= 0]
        if any(slot >= len(places) for _, slot in used) or len({slot for _, slot in used}) < len(used):
            return "slots in full precision"
        for token, slot in used:
            place = places[slot]
            if place >= end - since and place >= 0 and token != written - (end - place):
                return f"token {token} in full precision stands for the one at {place}"
    return None


def _is_number(value: float) -> bool:
    return value == value and abs(value) != float("inf")
