"""Files that are bad, foreign or cannot be written: one clear line, and nothing lost."""

import errno
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.models import Models
from windlass import KVCache, PromptCacheError, UsageError
from windlass.core.errors import WindlassWarning
from windlass.hf import prompt_cache
from windlass.hf.prompt_cache_format import VERSION
from windlass.hf.weights import fingerprint
from windlass.policies import KeyNorm
from windlass.testing import VOCABULARY, tiny_model

PROMPTS = (53, 38)  # tokens of the two rows


@pytest.fixture(scope="module")
def model(attached_model: Models) -> PreTrainedModel:
    return attached_model("llama")


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    filled(model).save(path)
    return path


def filled(model: PreTrainedModel) -> KVCache:
    """A small cache that has evicted and holds policy state."""
    cache = KVCache(model, 20, windlass.policies.H2O(), sinks=2, window=3, chunk=7, batch=2)
    windlass.prefill(model, cache, [torch.arange(n).remainder(VOCABULARY).tolist() for n in PROMPTS])
    return cache


def test_another_policy_is_refused(saved: Path, model: PreTrainedModel) -> None:
    assert KVCache.load(saved, model, policy=windlass.policies.H2O()).policy == windlass.policies.H2O()
    with pytest.raises(PromptCacheError, match=r"policy H2O\(\), not with KeyNorm\(\)"):
        KVCache.load(saved, model, policy=KeyNorm())


def test_an_unattached_model_at_load(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"Call windlass.attach\(model\) first"):
        KVCache.load(saved, tiny_model("llama"))


@torch.no_grad()
def test_another_model_is_refused(saved: Path) -> None:
    tuned = tiny_model("llama")
    tuned.model.layers[1].mlp.up_proj.weight += 1e-4
    stretched = tiny_model("llama")
    stretched.config.rope_parameters["rope_theta"] = 500.0
    for model, wrong in (
        (tuned, "another LlamaForCausalLM: config or weights differ"),
        (stretched, "another LlamaForCausalLM: config or weights differ"),
        (tiny_model("llama").bfloat16(), "in float32, this model is in bfloat16"),
        (tiny_model("qwen3"), "by a LlamaForCausalLM, this model is a Qwen3ForCausalLM"),
    ):
        with pytest.raises(PromptCacheError, match=wrong) as caught:
            KVCache.load(saved, windlass.attach(model))
        assert_clear(caught.value, saved)


@pytest.mark.slow
def test_the_fingerprint_survives_what_changes_no_key(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    mark = fingerprint(model)
    model.config.use_cache, model.config.pad_token_id = False, 3
    assert fingerprint(windlass.attach(model).train()) == mark
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == mark
    code = "import windlass.hf.weights as f, windlass.testing as t; print(f.fingerprint(t.tiny_model('gemma2')))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == mark


def assert_clear(error: PromptCacheError, path: Path) -> None:
    """One line that begins with the file and ends with a way out."""
    message = str(error)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ". " in message


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_is_found(data: st.DataObject, saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    whole = bytearray(saved.read_bytes())
    # The header is small beside the tensors: half of the flips go there.
    header = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1)))
    before, whole[at] = whole[at], whole[at] ^ data.draw(st.integers(1, 255))
    if chr(before).isspace() and chr(whole[at]).isspace():
        return  # white space between the words of the header means nothing
    assert_refused(bytes(whole), tmp_path / "damaged", model)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_cut_or_longer_file_is_found(
    data: st.DataObject, saved: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    whole = saved.read_bytes()
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    longer = whole + data.draw(st.binary(min_size=1, max_size=99))
    assert_refused(data.draw(st.sampled_from((cut, longer))), tmp_path / "damaged", model)


def assert_refused(content: bytes, path: Path, model: PreTrainedModel) -> None:
    path.write_bytes(content)
    with pytest.raises(PromptCacheError) as caught:
        KVCache.load(path, model)
    assert_clear(caught.value, path)


def test_what_is_no_prompt_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    weights, words, folder, missing = (tmp_path / name for name in ("weights", "words", "folder", "missing"))
    save_file({"a": torch.ones(3)}, weights)
    words.write_text("It was a dark and stormy night.")
    folder.mkdir()
    for path, wrong in (
        (weights, "is not a prompt cache"),
        (words, "not a safetensors file"),
        (folder, "is not a regular file"),
        (missing, "does not exist"),
    ):
        with pytest.raises(PromptCacheError, match=wrong) as caught:
            KVCache.load(path, model)
        assert_clear(caught.value, path)


@pytest.mark.parametrize("version", [1, 10, VERSION + 1])
def test_a_file_of_another_format_is_refused_by_its_version_alone(
    version: int, saved: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    path = tmp_path / "other"
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    save_file({"of_another_kind": torch.ones(3)}, path, {**metadata, "contents": "x", "version": str(version)})
    way_out = "Upgrade windlass. Otherwise: Make it again" if version > VERSION else "Make it again"
    with pytest.raises(PromptCacheError) as caught:
        KVCache.load(path, model)
    assert str(caught.value).startswith(
        f"{path} has format version {version}, and this windlass reads {VERSION} alone. {way_out} (`windlass cache "
    )
    assert_clear(caught.value, path)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_halfway(
    failure: BaseException, is_first: bool, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    cache = filled(model)
    if not is_first:
        cache.save(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(_tensors: dict[str, Tensor], filename: Path, _metadata: dict[str, str]) -> None:
        Path(filename).write_bytes(b"half a file")
        raise failure

    monkeypatch.setattr(prompt_cache, "save_file", half)
    cache.drop(3, 5)  # the saved cache now differs
    wanted = PromptCacheError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as caught:
        cache.save(path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    if isinstance(caught.value, PromptCacheError):
        assert_clear(caught.value, path)
        assert "No space left on device" in str(caught.value)


def test_a_disk_without_room(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    """The real writer against a real limit."""
    path = tmp_path / "cache"
    path.write_bytes(saved.read_bytes())
    cache = KVCache.load(saved, model)
    with most_bytes_in_a_file(1000), pytest.raises(PromptCacheError, match="older file is unchanged") as caught:
        cache.save(path)
    assert_clear(caught.value, path)
    assert path.read_bytes() == saved.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


@contextmanager
def most_bytes_in_a_file(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_where_a_file_cannot_be(model: PreTrainedModel, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # stands for devices too, which must not be replaced by a file
    os.mkfifo(pipe)
    for path in (tmp_path, tmp_path / "no_folder" / "cache", pipe):
        with pytest.raises(PromptCacheError) as caught:
            filled(model).save(path)
        assert_clear(caught.value, path)
    assert pipe.is_fifo()


def test_an_older_file_keeps_its_link_and_its_rights(model: PreTrainedModel, tmp_path: Path) -> None:
    path, link = tmp_path / "cache", tmp_path / "link"
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    filled(model).save(link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    KVCache.load(path, model)


def test_another_chat_template_is_told(model: PreTrainedModel, tmp_path: Path) -> None:
    path, cache = tmp_path / "talk", filled(model)
    cache.save(path, tokenizer=with_template())
    with warnings.catch_warnings(record=True) as told:
        KVCache.load(path, model, tokenizer=with_template())
        KVCache.load(path, model)
    assert not told
    for other in (with_template(TEMPLATE + " "), with_template(None)):
        with pytest.warns(WindlassWarning, match="written with another chat template than the tokenizer has now"):
            loaded = KVCache.load(path, model, tokenizer=other)
        assert loaded.tokens == cache.tokens


def test_a_file_of_no_tokenizer_tells_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    filled(model).save(tmp_path / "talk")
    with warnings.catch_warnings(record=True) as told:
        KVCache.load(tmp_path / "talk", model, tokenizer=with_template())
    assert not told
