"""Model folders that are broken in one way each: one line names the problem."""

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file

import windlass
from tests.helpers import cli
from tests.helpers.cli import Ran, assert_refused
from windlass.core.errors import UsageError, WindlassWarning
from windlass.core.parse import check_config
from windlass.hf.load import gist, hub_problem

run = cli.run  # fixture
MODEL = Path(windlass.__file__).parents[1] / "tests" / "models" / "stories260K"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that works."""
    shutil.copytree(MODEL, tmp_path / "model")
    return tmp_path / "model"


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", {"format": "pt"})


CONFIGS = [
    ({"num_hidden_layers": -1}, "config.json: num_hidden_layers is -1. It must be a whole number of at least 1"),
    ({"num_hidden_layers": 0}, "config.json: num_hidden_layers is 0"),
    ({"num_hidden_layers": "five"}, "config.json: num_hidden_layers is 'five'"),
    ({"num_attention_heads": 0}, "config.json: num_attention_heads is 0"),
    ({"num_key_value_heads": -4}, "config.json: num_key_value_heads is -4"),
    ({"vocab_size": 0}, "config.json: vocab_size is 0"),
    ({"hidden_size": True}, "config.json: hidden_size is True"),
    ({"hidden_size": 128}, "has shape (512, 64), and the config asks for (512, 128)"),
    ({"vocab_size": 2**40}, "has shape (512, 64), and the config asks for (1099511627776, 64)"),
    ({"num_hidden_layers": 6}, "its weights lack 9 tensors, the first is model.layers.5."),
    ({"rope_parameters": {"rope_type": "banana", "rope_theta": 10000.0}}, "config.json: rope_type is 'banana', which"),
    ({"model_type": "banana"}, "banana"),
    ({"model_type": "t5"}, "a t5 writes no text token by token. Use a decoder"),
    ({"hidden_act": "banana"}, "config.json: hidden_act is 'banana', which transformers does not know"),
    ({"head_dim": 7}, "config.json cannot be used: Class validation error for validator 'validate_rope': "),
]


@pytest.mark.parametrize(("values", "says"), CONFIGS, ids=[str(values) for values, _ in CONFIGS])
def test_a_config_that_cannot_be_is_told(
    run: Callable[..., Ran], folder: Path, values: dict[str, Any], says: str
) -> None:
    configure(folder, **values)
    ran = run("generate", str(folder), "a")
    assert_refused(ran, says)
    assert str(folder) in ran.err
    assert "ignore_mismatched_sizes" not in ran.err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("config.json", "[]", "config.json is not an object of JSON"),
        ("config.json", "[" * 100_000, "config.json is not JSON"),
        ("config.json", "{}", "model_type"),
        ("tokenizer.json", "{}", "tokenizer.json describes no tokenizer: it has no 'model'"),
        ("tokenizer.json", "{", "tokenizer.json is not JSON"),
        ("tokenizer.json", '{"model": {"type": "BPE"}}', "it has no 'added_tokens'"),
        ("model.safetensors", "", "its weights are damaged"),
        ("model.safetensors", "hello, this is not safetensors", "its weights are damaged"),
    ],
)
def test_a_file_that_is_something_else_is_told(
    run: Callable[..., Ran], folder: Path, name: str, text: str, says: str
) -> None:
    (folder / name).write_text(text)
    assert_refused(run("generate", str(folder), "a"), says)


def test_a_folder_without_tokenizer_files_is_told(run: Callable[..., Ran], folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()
    says = f"model folder {folder} has no tokenizer. Copy its files there: tokenizer.json, or tokenizer.model"
    assert_refused(run("generate", str(folder), "a"), says)


def test_unused_tensors_are_noted(folder: Path) -> None:
    tensors(folder, lambda held: held.update({"model.spare.weight": torch.ones(3), "model.spare.bias": torch.ones(2)}))
    with pytest.warns(WindlassWarning, match="2 tensors of its weights are not used, the first is model.spare.bias"):
        windlass.load(folder)


class Harmful:
    """A pickle of it makes a folder when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_weights_that_could_run_code_are_refused_without_torchs_advice(run: Callable[..., Ran], folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Harmful(folder / "mark")}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ran = run("generate", str(folder), "a")
    assert_refused(ran, "hold more than tensors, which could run any code. Use a model with model*.safetensors")
    assert "weights_only" not in ran.err
    assert not (folder / "mark").exists()


def test_pickled_tensors_are_read(folder: Path) -> None:
    wanted = windlass.load(folder, "float32")[0].state_dict()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    found = windlass.load(folder, "float32")[0].state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class ConnectError(Exception):
    """Called as the one of the hub's client is."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectError("[Errno -2] Name or service not known"), "no connection to huggingface.co"),
        (ConnectionError("refused"), "no connection to huggingface.co"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set, so it is not asked"),
        (ValueError("something else\nwith more"), "something else"),
    ],
)
def test_what_keeps_the_hub_away_is_told(error: Exception, says: str) -> None:
    assert hub_problem(error) == says


def test_a_word_alone_is_no_message() -> None:
    assert gist(KeyError("banana")) == "KeyError 'banana'"
    assert gist(ValueError("")) == "ValueError"
    assert gist(ValueError("\n  what was wrong\nand more")) == "what was wrong"


def test_counts_may_be_lists_or_missing() -> None:
    check_config("a", {"num_hidden_layers": 1, "intermediate_size": [3, 5], "head_dim": None, "hidden_size": 8.0})
    with pytest.raises(UsageError, match="a: vocab_size is nan"):
        check_config("a", {"text_config": {"vocab_size": float("nan")}})
