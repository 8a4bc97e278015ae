"""Prompt-cache files of models with recurrent layers: their states go on, and damaged ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.helpers.hybrid_caches import assert_close, assert_same, begun, each_kind, held, step
from tests.helpers.hybrids import bound
from tests.helpers.models import Text, read
from windlass import KVCache, PromptCacheError
from windlass.hf import prompt_cache


@each_kind
def test_a_file_goes_on_with_the_text(family: str, text: Text, tmp_path: Path) -> None:
    cache, path = begun(family, text), tmp_path / "text.cache"
    cache.save(path)
    loaded = KVCache.load(path, bound(family))
    assert_same(held(loaded), held(cache))
    for piece in text(7, rows=2, seed=4).split(3, 1):
        assert_close(step(family, piece)(loaded), step(family, piece)(cache))


def test_a_file_of_an_empty_cache_has_no_states(text: Text, tmp_path: Path) -> None:
    path = tmp_path / "empty.cache"
    KVCache(bound("lfm2")).save(path)
    loaded = KVCache.load(path, bound("lfm2"))
    assert_close(read(bound("lfm2"), loaded, text(9), 3), read(bound("lfm2"), KVCache(bound("lfm2")), text(9), 3))


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """The file with its tensors and its document changed, and a checksum that fits."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in tuple(file.keys())}
    document = json.loads(metadata["contents"])
    change(tensors, document)
    prompt_cache.write(path, tensors, json.dumps(document))


def _set(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[name] = value(tensors[name])

    return change


def _without_states(tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    document["has_states"] = False
    for row in document["rows"]:
        row["checkpoints"] = []
    for name in [each for each in tensors if each.startswith(("states.", "checkpoints."))]:
        del tensors[name]


def _with_checkpoints(ends: list[int]) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    def change(_: dict[str, Tensor], document: dict[str, Any]) -> None:
        document["rows"][1]["checkpoints"] = ends

    return change


HOSTILE: list[tuple[Callable[[dict[str, Tensor], dict[str, Any]], object], str]] = [
    (lambda tensors, _: tensors.pop("states.1.state.0"), "tensor states.1.state.0 is missing"),
    (
        lambda tensors, _: tensors.update({"states.2.conv.0": torch.zeros(2)}),
        "'states.2.conv.0' is not expected",
    ),
    (_set("states.0.conv.0", lambda state: state[:1].clone()), "tensor states.0.conv.0 is .* and must be"),
    (_set("states.0.conv.0", lambda state: state.double()), "tensor states.0.conv.0 is .* and must be"),
    (_set("states.3.state.0", lambda state: state * torch.nan), "states.3.state.0 has numbers that are not finite"),
    (
        lambda _, document: document.update(has_states=False),
        "a row has checkpoints of states, and the file has no states",
    ),
    (_without_states, "its recurrent layers have no states, though tokens were seen"),
    (
        lambda _, document: document.update(has_states=1),
        "has_states in its header is 1: input should be",
    ),
    (lambda tensors, _: tensors.pop("checkpoints.1.26.states.0.conv.0"), "checkpoints.1.26.* is missing"),
    (_set("checkpoints.0.25.states.3.state.0", lambda state: state[:1].clone()), r"checkpoints.0.25.* and must be"),
    (_set("checkpoints.0.26.states.1.conv.0", lambda state: state * torch.inf), "checkpoints.0.26.* not finite"),
    (_with_checkpoints([26, 25]), "its checkpoints are not in order up to its 26 tokens"),
    (_with_checkpoints([25, 25]), "its checkpoints are not in order"),
    (_with_checkpoints([25, 27]), "its checkpoints are not in order"),
    (_with_checkpoints([26]), "'checkpoints.1.25.* is not expected"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_damaged_file_is_refused(
    change: Callable[[dict[str, Tensor], dict[str, Any]], None], message: str, text: Text, tmp_path: Path
) -> None:
    path = tmp_path / "text.cache"
    cache = begun("qwen3_next", text, has_checkpoints=True)
    cache.save(path)
    rewritten(path, change)
    with pytest.raises(PromptCacheError, match=message):
        KVCache.load(path, bound("qwen3_next"))
