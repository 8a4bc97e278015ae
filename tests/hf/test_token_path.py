"""A token as the engine feeds it, past the code of transformers: changes between two tokens are seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import windlass
from windlass import KVCache, kernels
from windlass.core.inputs import Norm, Rounding
from windlass.engine.prefill import feed_tokens
from windlass.hf.attach import AttachedModel
from windlass.kernels import cpu, reference
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

TOKEN, BEFORE, TOLERANCE = 5, 20, 1e-5


def _louder(module: Any, args: object, output: Any) -> Any:  # noqa: ARG001
    return (output if isinstance(output, Tensor) else output[0]) * 1.5


def _louder_logits(module: Any, args: object, output: Any) -> Any:  # noqa: ARG001
    output.logits = output.logits * 1.5
    return output


def _louder_states(module: Any, args: object, output: Any) -> Any:  # noqa: ARG001
    output.last_hidden_state = output.last_hidden_state * 1.5
    return output


def _forward(module: Any) -> None:
    own = module.forward
    module.forward = lambda *args, **kwargs: own(*args, **kwargs) * 1.5


def _weight(module: Any) -> None:
    module.weight = nn.Parameter(module.weight * 1.5)


def _data(module: Any) -> None:
    module.weight.data = module.weight.data * 1.5


def _epsilon(module: Any) -> None:
    module.variance_epsilon = 0.7


def _class(module: Any) -> None:
    kind = type(module)
    module.__class__ = type("Other", (kind,), {"forward": lambda self, *args: kind.forward(self, *args) * 1.5})


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model.register_forward_hook(_louder_logits),
    lambda model: model.model.register_forward_hook(_louder_states),
    lambda model: model.lm_head.register_forward_hook(_louder),
    lambda model: model.model.norm.register_forward_hook(_louder),
    lambda model: model.model.embed_tokens.register_forward_hook(_louder),
    lambda model: model.model.layers[1].mlp.register_forward_hook(_louder),
    lambda model: _forward(model.lm_head),
    lambda model: _forward(model.model.norm),
    lambda model: _forward(model.model.embed_tokens),
    lambda model: _weight(model.lm_head),
    lambda model: _weight(model.model.norm),
    lambda model: _weight(model.model.embed_tokens),
    lambda model: _weight(model.model.layers[1].mlp.up_proj),
    lambda model: _data(model.model.layers[1].mlp.up_proj),
    lambda model: _data(model.model.norm),
    lambda model: _epsilon(model.model.norm),
    lambda model: _class(model.model.norm),
    lambda model: _class(model.model.layers[1].mlp.act_fn),
    lambda model: setattr(model, "lm_head", nn.Linear(model.config.hidden_size, model.config.vocab_size)),
    lambda model: model.double().float(),
    lambda _: None,
]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each token, whether it went past the model's own code."""
    found: list[bool] = []
    own = AttachedModel.token

    def token(self: AttachedModel, *given: Any) -> Tensor | None:
        logits = own(self, *given)
        found.append(logits is not None)
        return logits

    monkeypatch.setattr(AttachedModel, "token", token)
    return found


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
@torch.no_grad()
def test_a_change_between_two_tokens_counts(change: Callable[[Any], Any], passed: list[bool]) -> None:
    """The token after the change equals that of a plain model that was changed in the same way."""
    torch.manual_seed(0)
    plain = tiny_model("llama")
    model, text = windlass.attach(copy.deepcopy(plain)), torch.arange(BEFORE)[None] % plain.config.vocab_size
    cache, other = KVCache(model), DynamicCache(config=plain.config)
    model(text, past_key_values=cache)
    plain(text, past_key_values=other)
    for _ in range(3):
        feed_tokens(model, cache, {0: TOKEN})
        plain(torch.tensor([[TOKEN]]), past_key_values=other)
    assert passed == [True] * 3
    for each in (model, plain):
        torch.manual_seed(1)
        change(each)
    ours = feed_tokens(model, cache, {0: TOKEN})
    theirs = plain(torch.tensor([[TOKEN]]), past_key_values=other).logits[:, 0]
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rounding", Rounding)
def test_a_norm_equals_the_reference(dtype: torch.dtype, rounding: Rounding) -> None:
    torch.manual_seed(0)
    states, weights = torch.randn(2, 3, 37).to(dtype), torch.randn(37).to(dtype)
    norm = Norm(weights, 1e-3, rounding)
    found, expected = cpu.norm(states, norm).float(), reference.norm(states, norm).float()
    assert (found - expected).abs().max() <= torch.finfo(dtype).eps * 4 * expected.abs().max()
