"""`windlass.load`: an attached model, its tokenizer, and nothing of the process changed. Errors: `test_cli_errors`."""

import logging as python_logging
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging

import windlass
from windlass.hf import load
from windlass.policies import Recent

FOLDER = Path(windlass.__file__).parent / "assets" / "finder-3m"


@pytest.mark.parametrize("name", [FOLDER, str(FOLDER)])
def test_a_folder_gives_an_attached_model(name: Path | str):
    model, tokenizer = windlass.load(name, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    cache = windlass.KVCache(model, budget=32, policy=Recent())  # refused for a model that is not attached
    [result] = windlass.generate(model, tokenizer, ["It was a dark night"], cache, max_tokens=3)
    assert result.text


def test_a_path_is_never_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(windlass.UsageError, match="model folder some/model does not exist"):
        windlass.load(Path("some/model"))
    with pytest.raises(windlass.UsageError, match="model 'some/model' is no folder here"):
        windlass.load("some/model")


@pytest.mark.parametrize("is_found", [True, False])
@pytest.mark.parametrize("verbosity", [python_logging.INFO, python_logging.WARNING])
def test_the_logging_of_transformers_is_as_before(is_found: bool, verbosity: int, tmp_path: Path):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
    try:
        if is_found:
            windlass.load(FOLDER)
        else:
            (tmp_path / "config.json").write_text("{}")
            (tmp_path / "model.safetensors").touch()
            with pytest.raises(windlass.UsageError, match=r"has no tokenizer\. Copy its files there"):
                windlass.load(tmp_path)
        assert logging.get_verbosity() == verbosity
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(before[0])
        if not before[1]:
            logging.disable_progress_bar()


def test_a_long_text_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture):
    _, tokenizer = windlass.load(FOLDER)
    root = logging.get_logger("transformers")  # which does not propagate
    root.addHandler(caplog.handler)
    try:
        assert len(tokenizer("word " * 2000)["input_ids"]) > tokenizer.model_max_length
    finally:
        root.removeHandler(caplog.handler)
    assert not caplog.records


@pytest.mark.parametrize("is_off", [False, True])
def test_the_hub_shows_its_downloads_where_its_user_wants_them(is_off: bool, monkeypatch: pytest.MonkeyPatch):
    """transformers' bars are silent while a model is loaded. Both are as before afterwards."""
    seen = []

    def loaded(*_: object) -> None:
        seen.append((are_progress_bars_disabled(), logging.is_progress_bar_enabled()))
        raise windlass.UsageError("seen")

    monkeypatch.setattr(load, "_from_folder_or_hub", loaded)
    logging.enable_progress_bar()  # the hub's, too
    (disable_progress_bars if is_off else enable_progress_bars)()
    try:
        with pytest.raises(windlass.UsageError, match="seen"):
            windlass.load("some/model")
        assert seen == [(is_off, False)]
        assert (are_progress_bars_disabled(), logging.is_progress_bar_enabled()) == (is_off, True)
    finally:
        enable_progress_bars()
