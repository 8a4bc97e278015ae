"""A model that is compiled as a whole: its caches stay right, and plain passes stay one graph."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._dynamo import OptimizedModule
from transformers import PreTrainedModel

import windlass
from tests.helpers import models
from tests.helpers.models import Text, read
from windlass import KVCache
from windlass.policies import KeyDiff, Policy, SnapKV
from windlass.testing import tiny_model

one_layer = models.one_layer  # fixture
COMPILER = os.environ.get("CXX", "g++")
NEEDS_COMPILER = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no C++ compiler {COMPILER}")
# Of PyTorch itself, when inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
Compile = Callable[[PreTrainedModel, str], PreTrainedModel]


@pytest.fixture(autouse=True)
def _forgetting() -> Iterator[None]:
    """Clear the compiled functions between tests. Checks of shapes would be compiled, too."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def in_place(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    model.compile(backend=backend)
    return model


def its_forward(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def as_a_whole(model: PreTrainedModel, backend: str) -> PreTrainedModel:
    compiled: object = torch.compile(model, backend=backend)
    assert isinstance(compiled, OptimizedModule)
    return compiled  # type: ignore[return-value]  # it passes calls on


def steps(model: PreTrainedModel, cache: KVCache, ids: Tensor, chunk: int) -> Tensor:
    """Logits of a prompt, read in chunks, and of single tokens after it, some of them over budget."""
    return torch.cat((read(model, cache, ids[:, :-5], chunk), read(model, cache, ids[:, -5:], 1)), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "compiled", "is_attached_first", "policy", "chunk"),
    [
        ("eager", as_a_whole, True, KeyDiff(), 40),
        pytest.param("eager", in_place, False, SnapKV(observed_queries=4), 40, marks=pytest.mark.slow),
        # Each length of a pass is compiled of its own: one length.
        pytest.param("inductor", its_forward, False, KeyDiff(), 1, marks=[NEEDS_COMPILER, pytest.mark.slow]),
    ],
    ids=["eager-whole-key_diff", "eager-in_place-snapkv", "inductor-forward-key_diff"],
)
def test_a_compiled_model_reads_as_before(
    backend: str,
    compiled: Compile,
    is_attached_first: bool,
    policy: Policy,
    chunk: int,
    one_layer: tuple[PreTrainedModel, PreTrainedModel],
    text: Text,
) -> None:
    """Its kernels get addresses of tensors. Frames that hold tensors by address alone have crashed the interpreter."""
    attached, ids = one_layer[1], text(43)
    model = copy.deepcopy(one_layer[0])
    if is_attached_first:
        windlass.attach(model)
    run = compiled(model, backend)
    if not is_attached_first:
        windlass.attach(model)
    ours, plain = (KVCache(one, 24, policy, window=5) for one in (model, attached))
    torch.testing.assert_close(steps(run, ours, ids, chunk), steps(attached, plain, ids, chunk), atol=1e-5, rtol=0)
    assert ours.tokens == plain.tokens


def test_without_a_cache_an_attached_model_is_one_graph(text: Text) -> None:
    model = windlass.attach(tiny_model("llama"))
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(whole(text(9), use_cache=False).logits, model(text(9)).logits)
