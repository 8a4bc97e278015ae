"""Fallbacks without compiled kernels, or where WINDLASS_CPU asks for slower ones."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text
from windlass import UsageError, kernels
from windlass.engine.generate import prefill
from windlass.kernels import cpu, reference

WITHOUT_MODULE = """
import sys
sys.modules["windlass.kernels.cpu._native"] = None  # its import fails, as where it was never built

import torch, windlass
from tests.kernels.test_fallback import continued, stepped
from windlass.kernels import cpu, reference, sdpa
from windlass.testing import VOCABULARY, tiny_model

torch.set_num_threads(1)
plain, calls = reference.attend, []
reference.attend = lambda *args, **options: calls.append(args) or plain(*args, **options)
cpu.attend = sdpa.attend = None
model = windlass.attach(tiny_model("llama"))
ids = torch.randint(VOCABULARY, (1, 45), generator=torch.Generator().manual_seed(0))
texts = continued(model, ids), continued(model, ids), stepped(model, ids)
print(len(calls) > 36, *texts)
"""


@pytest.fixture
def _caches_cleared() -> Iterator[None]:
    """Clear the decisions of a process, before the test and after it."""
    decided = cpu.instruction_set, kernels._is_compiled
    for decision in decided:
        decision.cache_clear()
    yield
    for decision in decided:
        decision.cache_clear()


def continued(model: PreTrainedModel, ids: Tensor) -> list[int]:
    cache = windlass.KVCache(model, budget=30, policy=windlass.policies.H2O())
    text = model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return text[0].tolist()


def stepped(model: PreTrainedModel, ids: Tensor) -> list[int]:
    """The same by passes of one column, which need not call the model as a whole."""
    cache = windlass.KVCache(model, budget=30, policy=windlass.policies.H2O())
    with torch.no_grad():
        logits = prefill(model, cache, ids.tolist())
        for _ in range(12):
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], -1)
            logits = prefill(model, cache, ids[:, -1:].tolist())
    return ids[0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "warned"), [("", 1), pytest.param("none", 0, marks=pytest.mark.slow)])
def test_without_the_compiled_module_plain_pytorch_runs_and_says_so_once(
    asked: str, warned: int, attached_model: Models, text: Text
) -> None:
    command = [sys.executable, "-W", "always", "-c", WITHOUT_MODULE]
    done = subprocess.run(
        command, env={**os.environ, "WINDLASS_CPU": asked}, capture_output=True, text=True, check=False
    )
    model, ids = attached_model("llama"), text(45)
    expected = continued(model, ids)
    assert done.stdout == f"True {expected} {expected} {stepped(model, ids)}\n", done.stderr
    assert done.stderr.count("without its compiled kernels") == warned
    assert done.stderr.count("compiler") == 2 * warned


@pytest.mark.parametrize("name", [*cpu.instruction_sets(), "none"])
@pytest.mark.usefixtures("_caches_cleared")
def test_every_instruction_set_gives_the_same_text(
    name: str, attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = attached_model("llama"), text(45)
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    expected = continued(model, ids)
    monkeypatch.undo()
    cpu.instruction_set.cache_clear()  # kernels that an earlier test prepared have asked for it
    monkeypatch.setenv("WINDLASS_CPU", name)
    if name != "none":
        monkeypatch.setattr(reference, "attend", lambda *_, **__: pytest.fail("not compiled"))
    assert continued(model, ids) == expected
    assert cpu.instruction_set() == name


@pytest.mark.usefixtures("_caches_cleared")
@pytest.mark.skipif(not cpu.instruction_sets(), reason="windlass was installed without its compiled kernels")
def test_an_unknown_instruction_set_is_refused_before_anything_is_written(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = attached_model("llama")
    cache = windlass.KVCache(model)
    monkeypatch.setenv("WINDLASS_CPU", "avx9000")
    known = ", ".join((*cpu.instruction_sets(), "none"))
    with pytest.raises(UsageError, match=rf"WINDLASS_CPU='avx9000' is not .* Use one of: {known}$"), torch.no_grad():
        model(text(5), past_key_values=cache)
    assert cache.tokens_seen == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what a process has loaded")
def test_one_openmp_library_serves_pytorch_and_the_compiled_kernels() -> None:
    script = (
        "import windlass.kernels\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps')}\n"
        "print(*(path for path in paths if 'libgomp' in path or 'libiomp' in path or 'libomp' in path))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) == 1, done.stdout
