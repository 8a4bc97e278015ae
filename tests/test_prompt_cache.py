"""Save and load: going on after a load is going on, and a bad file is one clear line."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from windlass import KVCache, Policy, PromptCacheError, UsageError, prompt_cache
from windlass.fingerprint import fingerprint
from windlass.policies import NAMES, KeyNorm, Random, Slots
from windlass.positions import EMPTY
from windlass.shapes import Scores
from windlass.testing import VOCABULARY, tiny_model

PROMPTS = (53, 38)  # tokens of the two rows
CASES = [
    *((kind(), "compact") for kind in NAMES.values()),
    *((windlass.H2O(), mode) for mode in ("original", "self_extend(4, 8)", "clamp(9)")),
    (windlass.KeyDiff(), "original"),
    (Random(keep_prompt=False, seed=3), "original"),
]


@dataclass(frozen=True)
class Oldest(Policy):
    """A policy from outside."""

    slope: float = -1.0

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() * self.slope


@pytest.fixture(scope="module")
def model(attached_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return attached_model("llama")


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file, of a cache that has evicted and holds policy state."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache = small(model, policy=windlass.H2O())
    read(model, cache)
    prompt_cache.save(cache, path, model)
    return path


def small(
    model: PreTrainedModel, policy: Policy | None = None, budget: int | None = 20, mode: str = "compact"
) -> KVCache:
    return KVCache(model, budget, policy, sinks=2, window=3, chunk=7, positions=mode, batch=2)


def read(model: PreTrainedModel, cache: KVCache, seed: int = 0) -> Tensor:
    """Feed one prompt per row; the logits after it."""
    draw = torch.Generator().manual_seed(seed)
    return windlass.prefill(model, cache, [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in PROMPTS])


@torch.no_grad()
def write(model: PreTrainedModel, cache: KVCache, logits: Tensor, tokens: int) -> Tensor:
    """Greedy decode; the logits of each step, (tokens, batch, vocabulary)."""
    steps = []
    for _ in range(tokens):
        logits = model(input_ids=logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        steps.append(logits)
    return torch.stack(steps)


def assert_goes_on(
    model: PreTrainedModel, cache: KVCache, path: Path, logits: Tensor, policy: Policy | None = None
) -> None:
    """Save, load, and write, take another prompt, write: the same as without."""
    prompt_cache.save(cache, path, model)
    loaded = prompt_cache.load(path, model, policy)
    for tokens in (18, 5):
        expected, got = (write(model, each, logits, tokens) for each in (cache, loaded))
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        logits, again = (read(model, each, seed=1) for each in (cache, loaded))
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert loaded.tokens == cache.tokens
    assert loaded.tokens_seen == cache.tokens_seen


@pytest.mark.parametrize(("policy", "mode"), CASES, ids=str)
def test_goes_on_after_eviction(policy: Policy, mode: str, model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model, policy, mode=mode)
    assert_goes_on(model, cache, tmp_path / "after_prompt", read(model, cache))
    assert_goes_on(model, cache, tmp_path / "in_decode", write(model, cache, read(model, cache), 9)[-1])


FAMILIES = [
    *[("llama_dynamic", None), ("llama_dynamic", 20), ("mistral", 20), ("gemma2", 9), ("gemma2", 20)],
    *[("phi3", 9), ("smollm3", 9), ("cohere", 9), ("gpt_oss", None), ("gpt_oss", 20)],
]


@pytest.mark.parametrize(("family", "budget"), FAMILIES)
def test_goes_on_in_every_kind_of_layer(
    family: str, budget: int | None, attached_model: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    model = attached_model(family)
    cache = small(model, windlass.SnapKV(observed_queries=4), budget, "original")
    assert_goes_on(model, cache, tmp_path / "cache", write(model, cache, read(model, cache), 5)[-1])


def test_transformers_generate_goes_on(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = KVCache(model, budget=20, sinks=2, window=3)
    ids = torch.arange(60)[None] % VOCABULARY
    ids = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    prompt_cache.save(cache, tmp_path / "cache", model)
    loaded = prompt_cache.load(tmp_path / "cache", model)
    expected, got = (
        model.generate(ids, past_key_values=each, max_new_tokens=9, do_sample=False) for each in (cache, loaded)
    )
    assert torch.equal(got, expected)


def test_everything_but_the_tensors_comes_back(model: PreTrainedModel, tmp_path: Path) -> None:
    policy = windlass.SnapKV(observed_queries=5, pool=3)
    cache = KVCache(model, 25, policy, sinks=1, window=4, chunk=9, positions="self_extend(3, 7)", batch=2, rollback=5)
    read(model, cache)
    prompt_cache.save(cache, tmp_path / "cache", model)
    loaded = prompt_cache.load(tmp_path / "cache", model)
    for name in ("limits", "policy", "positions", "batch_size", "standing"):
        assert getattr(loaded, name) == getattr(cache, name), name
    assert loaded.tokens == cache.tokens
    held, again = ([layer.most_held for layer in each.layers] for each in (cache, loaded))
    assert again == held == [25, 25]


def test_a_cache_that_saw_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    prompt_cache.save(small(model), tmp_path / "cache", model)
    loaded = prompt_cache.load(tmp_path / "cache", model)
    assert loaded.tokens == [[], []]
    torch.testing.assert_close(read(model, loaded), read(model, small(model)))


@torch.no_grad()
def test_tokens_stay_unknown(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = KVCache(model)
    model(inputs_embeds=torch.randn(1, 5, 60), past_key_values=cache)
    prompt_cache.save(cache, tmp_path / "cache", model)
    assert prompt_cache.load(tmp_path / "cache", model).tokens is None


def test_rollback_after_a_load(model: PreTrainedModel, tmp_path: Path) -> None:
    """Exact where nothing was evicted, refused where the evicted tokens are gone."""
    for budget in (None, 20):
        cache = small(model, budget=budget)
        read(model, cache)
        prompt_cache.save(cache, tmp_path / "cache", model)
        loaded = prompt_cache.load(tmp_path / "cache", model)
        if budget is None:
            loaded.rollback(9)
            cache.rollback(9)
            torch.testing.assert_close(read(model, loaded, seed=1), read(model, cache, seed=1))
        else:
            with pytest.raises(UsageError, match="rollback of 1 tokens"):
                loaded.rollback(1)


def test_the_saved_cache_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model)
    write(model, cache, read(model, cache), 3)
    before = [{name: tensor.clone() for name, tensor in layer.tensors().items()} for layer in cache.layers]
    prompt_cache.save(cache, tmp_path / "cache", model)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, tensors[name]), name
    cache.rollback(3)


def test_a_file_holds_what_is_held_and_no_more(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model, windlass.H2O())
    write(model, cache, read(model, cache), 3)
    path = tmp_path / "cache"
    prompt_cache.save(cache, path, model)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    positions = [tensor for name, tensor in tensors.items() if name.endswith("positions")]
    assert [tuple(p.shape) for p in positions] == [(2, 3, 20)] * 2
    assert all(int(p.min()) >= EMPTY for p in positions)
    # A slot: a key and a value of 8 float32 channels, a position, a float of state.
    slots = 2 * 2 * 3 * 20 * (2 * 8 * 4 + 4 + 4)
    tokens = (53 + 38 + 2 * 3) * 4
    assert sum(tensor.nbytes for tensor in tensors.values()) == slots + tokens
    assert slots + tokens < path.stat().st_size < slots + tokens + 4096
    assert slots < cache.nbytes()


def test_a_policy_from_outside(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = small(model, Oldest())
    assert_goes_on(model, cache, path, read(model, cache), Oldest())
    with pytest.raises(PromptCacheError, match=r"policy Oldest\(slope=-1.0\).* load\(path, model, policy=...\)"):
        prompt_cache.load(path, model)
    with pytest.raises(PromptCacheError, match=r"Oldest\(slope=-1.0\), not with Oldest\(slope=2.0\)"):
        prompt_cache.load(path, model, Oldest(2.0))


def test_another_policy_is_refused(saved: Path, model: PreTrainedModel) -> None:
    assert prompt_cache.load(saved, model, windlass.H2O()).policy == windlass.H2O()
    with pytest.raises(PromptCacheError, match=r"policy H2O\(\), not with KeyNorm\(\)"):
        prompt_cache.load(saved, model, KeyNorm())


def test_the_wrong_model_at_save(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="made for another model"):
        prompt_cache.save(small(model), tmp_path / "cache", windlass.attach(tiny_model("llama")))
    assert not list(tmp_path.iterdir())


def test_an_unattached_model_at_load(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"call windlass.attach\(model\) first"):
        prompt_cache.load(saved, tiny_model("llama"))


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
            prompt_cache.load(saved, windlass.attach(model))
        assert_clear(caught.value, saved)


def test_the_fingerprint_survives_what_changes_no_key(tmp_path: Path) -> None:
    model = tiny_model("gemma2")
    mark = fingerprint(model)
    model.config.use_cache, model.config.pad_token_id = False, 3
    assert fingerprint(windlass.attach(model).train()) == mark
    model.save_pretrained(tmp_path)
    assert fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path)) == mark
    code = "from windlass import fingerprint as f, testing; print(f.fingerprint(testing.tiny_model('gemma2')))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == mark


def assert_clear(error: PromptCacheError, path: Path) -> None:
    """One line that begins with the file and ends with a way out."""
    message = str(error)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert ";" in message


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
        prompt_cache.load(path, model)
    assert_clear(caught.value, path)


def test_what_is_no_prompt_cache(model: PreTrainedModel, tmp_path: Path) -> None:
    weights, words, folder, missing = (tmp_path / name for name in ("weights", "words", "folder", "missing"))
    save_file({"a": torch.ones(3)}, weights)
    words.write_text("It was a dark and stormy night.")
    folder.mkdir()
    for path, wrong in (
        (weights, "is not a prompt cache"),
        (words, "not a safetensors file"),
        (folder, "cannot be read"),
        (missing, "does not exist"),
    ):
        with pytest.raises(PromptCacheError, match=wrong) as caught:
            prompt_cache.load(path, model)
        assert_clear(caught.value, path)


def test_a_newer_format_is_named(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    with safe_open(saved, "pt") as file:
        metadata = file.metadata()
    save_file({"something_new": torch.ones(3)}, tmp_path / "newer", {**metadata, "version": "2"})
    with pytest.raises(PromptCacheError, match="version 2, this windlass reads up to 1; upgrade") as caught:
        prompt_cache.load(tmp_path / "newer", model)
    assert_clear(caught.value, tmp_path / "newer")


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_write_that_fails_halfway(
    failure: BaseException, is_first: bool, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    cache = small(model)
    read(model, cache)
    if not is_first:
        prompt_cache.save(cache, path, model)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def half(_tensors: dict[str, Tensor], filename: Path, _metadata: dict[str, str]) -> None:
        Path(filename).write_bytes(b"half a file")
        raise failure

    monkeypatch.setattr(prompt_cache, "save_file", half)
    write(model, cache, torch.ones(2, VOCABULARY), 1)
    wanted = PromptCacheError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(wanted) as caught:
        prompt_cache.save(cache, path, model)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    if isinstance(caught.value, PromptCacheError):
        assert_clear(caught.value, path)
        assert "No space left on device" in str(caught.value)


def test_a_disk_without_room(saved: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    """The real writer against a real limit."""
    path = tmp_path / "cache"
    path.write_bytes(saved.read_bytes())
    cache = prompt_cache.load(saved, model)
    with most_bytes_in_a_file(1000), pytest.raises(PromptCacheError, match="older file there is unchanged") as caught:
        prompt_cache.save(cache, path, model)
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
            prompt_cache.save(small(model), path, model)
        assert_clear(caught.value, path)
    assert pipe.is_fifo()


def test_an_older_file_keeps_its_link_and_its_rights(model: PreTrainedModel, tmp_path: Path) -> None:
    path, link = tmp_path / "cache", tmp_path / "link"
    path.touch()
    path.chmod(0o640)
    link.symlink_to(path)
    prompt_cache.save(small(model), link, model)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    prompt_cache.load(path, model)
