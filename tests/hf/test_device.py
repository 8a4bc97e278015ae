"""Device of a model: the names of devices, and the error where there is none."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.models import MODEL
from windlass import kernels
from windlass.cli.app import main
from windlass.core.errors import UsageError
from windlass.engine.generate import prefill
from windlass.engine.text import encode
from windlass.evals.speed.rows import SHAPES, random_model
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import device_of, load
from windlass.policies import H2O, TOVA, KeyDiff, KeyNorm, Policy, Recent, SnapKV

COMMANDS = {
    "generate": (MODEL, "text"),
    "chat": (MODEL,),
    "cache": (MODEL, "text", "--prompt-cache", "file"),
    "bench": ("--shape", "tiny"),
    "eval": (MODEL, "-o", "results.jsonl"),
    "calibrate": (MODEL, "text.txt", "-o", "pairs.json"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_opens_a_model_takes_a_device(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    assert main((command, *COMMANDS[command], "--device", "gpu")) == 2
    said = capsys.readouterr()
    assert said.err == (
        "windlass: error: device 'gpu' is unknown. Use auto, cpu, mps, cuda, or cuda:1 for the second of several GPUs\n"
    )
    assert said.out == ""


@pytest.mark.parametrize("name", ["", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "CUDA", "mps:0", " cuda"])
def test_other_names_are_refused(name: str):
    with pytest.raises(UsageError, match=r"is unknown\. Use auto, cpu, mps, cuda, or cuda:1"):
        device_of(name)


@pytest.mark.parametrize(
    ("built_with", "count", "name", "why"),
    [
        (None, 0, "cuda", "was built without CUDA. Use device cpu, or install one that does"),
        ("13.0", 0, "cuda:0", "finds no GPU that it can use. Use device cpu, or install"),
        ("13.0", 1, "cuda:1", "device cuda:1: PyTorch finds 1 GPU, the first is cuda:0"),
        ("13.0", 2, "cuda:12", "device cuda:12: PyTorch finds 2 GPUs, the first is cuda:0"),
    ],
)
def test_a_gpu_that_is_not_there_is_told(
    built_with: str | None, count: int, name: str, why: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.version, "cuda", built_with)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError, match=why):
        device_of(name)


def test_a_gpu_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch):
    chosen = Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen)
    assert [device_of(name) for name in ("cuda", "cuda:1")] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert [call.args for call in chosen.call_args_list] == [(0,), (1,)]
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("has_cuda", "has_mps", "expected"),
    [(True, True, "cuda:0"), (True, False, "cuda:0"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_is_the_first_that_is_there(has_cuda: bool, has_mps: bool, expected: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(has_cuda))
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has_mps)
    assert str(device_of("auto")) == expected
    if has_mps:
        assert str(device_of("mps")) == "mps"
    else:
        with pytest.raises(
            UsageError, match=r"device mps: PyTorch .* finds no GPU of an Apple computer. Use device cpu"
        ):
            device_of("mps")


class NoFloat64(TorchDispatchMode):
    """Fails where a GPU of Apple's would: at the first tensor of float64."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        made = function(*args, **(kwargs or {}))
        assert not any(isinstance(each, Tensor) and each.dtype is torch.float64 for each in tree_leaves(made)), function
        return made


@pytest.mark.parametrize("store", ["plain", "int8"])
@pytest.mark.parametrize("policy", [Recent(), KeyDiff(), SnapKV(), H2O(), TOVA(), KeyNorm()], ids=repr)
def test_what_runs_on_a_device_without_float64(policy: Policy, store: str, monkeypatch: pytest.MonkeyPatch):
    """The reference path, which serves such a device, from loading to the logits after a prompt and one token."""
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    with NoFloat64():
        model, tokenizer = load(MODEL, "float32")
        cache = KVCache(model, budget=12, policy=policy, positions="compact", store=store, chunk=5)
        prefill(model, cache, [encode(tokenizer, "He was in the boat, and the river was quiet.", is_start=True)])
        prefill(model, cache, [[7]])
    assert cache.tokens_seen[0] > 13


@pytest.mark.gpu
def test_a_random_model_is_the_same_on_a_gpu():
    here, there = (random_model(SHAPES["tiny"], torch.bfloat16, device_of(name)) for name in ("cpu", "cuda"))
    theirs = dict(there.named_parameters()) | dict(there.named_buffers())
    for name, tensor in (*here.named_parameters(), *here.named_buffers()):
        assert theirs[name].is_cuda
        assert torch.equal(tensor, theirs[name].cpu())


@pytest.mark.gpu
def test_a_gpu_is_benched(capsys: pytest.CaptureFixture[str]):
    assert (
        main(("bench", "--shape", "tiny", "--device", "cuda", "-p", "9", "-n", "3", "-d", "40", "--batch", "1,2")) == 0
    )
    said = capsys.readouterr().out
    assert torch.cuda.get_device_name() in said
    assert "tg3 b2 @ d40" in said
    assert main(("bench", "--shape", "tiny", "--device", "cuda", "--threads", "1")) == 2
    assert "--threads is for a CPU" in capsys.readouterr().err
