"""A pass with a cache runs model code that changed after `attach`, and a refused `attach` changes nothing."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured

import windlass
from tests.helpers.models import Text
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.hf.attach import AttachedModel, attached
from windlass.testing import tiny_model

Patch = pytest.MonkeyPatch


def _layer(model: Any) -> Any:
    return model.model.layers[0]


def _epsilon(model: Any, _: Patch) -> None:
    _layer(model).input_layernorm.variance_epsilon = 0.7


def _scaled(factor: float, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: forward(*args, **kwargs) * factor


def _class_of(part: str) -> Callable[[Any, Patch], None]:
    def change(model: Any, patch: Patch) -> None:
        kind = type(_layer(model).get_submodule(part))
        patch.setattr(kind, "forward", _scaled(1.5, kind.forward))

    return change


def _instance(part: str) -> Callable[[Any, Patch], None]:
    def change(model: Any, _: Patch) -> None:
        module = _layer(model).get_submodule(part)
        module.forward = _scaled(1.5, module.forward)

    return change


def _hook(part: str) -> Callable[[Any, Patch], None]:
    def change(model: Any, _: Patch) -> None:
        _layer(model).get_submodule(part).register_forward_hook(lambda _, __, out: out * 1.5)

    return change


def _linear_class(_: Any, patch: Patch) -> None:
    patch.setattr(nn.Linear, "forward", lambda self, states: linear(states, self.weight, self.bias) * 1.2)


def _activation(model: Any, _: Patch) -> None:
    _layer(model).mlp.act_fn = nn.GELU()


def _another_class(model: Any, _: Patch) -> None:
    norm = _layer(model).input_layernorm
    kind = type(norm)
    norm.__class__ = type("Louder", (kind,), {"forward": _scaled(1.5, kind.forward)})


def _weights(model: Any, _: Patch) -> None:
    norm, up = _layer(model).input_layernorm, _layer(model).mlp.up_proj
    norm.weight = nn.Parameter(norm.weight * 1.5)
    up.weight = nn.Parameter(up.weight * 1.5)


def _in_place(model: Any, _: Patch) -> None:
    with torch.no_grad():
        _layer(model).mlp.up_proj.weight.mul_(1.5)


def _scale_of_scores(model: Any, _: Patch) -> None:
    _layer(model).self_attn.scaling *= 2


def _dtype(model: Any, _: Patch) -> None:
    model.double()


CHANGES: dict[str, Callable[[Any, Patch], None]] = {
    "epsilon": _epsilon,
    **{f"class of {part or 'layer'}": _class_of(part) for part in ("", "mlp", "input_layernorm", "mlp.act_fn")},
    **{
        f"instance of {part or 'layer'}": _instance(part) for part in ("", "mlp", "self_attn.v_proj", "input_layernorm")
    },
    **{f"hook on {part or 'layer'}": _hook(part) for part in ("", "mlp", "self_attn.o_proj", "mlp.act_fn")},
    "class of linears": _linear_class,
    "activation": _activation,
    "another class": _another_class,
    "weights": _weights,
    "in place": _in_place,
    "scale of scores": _scale_of_scores,
    "dtype": _dtype,
}


@torch.no_grad()
def logits(model: Any, ids: Tensor, cache: KVCache | None = None) -> Tensor:
    """Logits of a few tokens, and of single ones after them."""
    if cache is None:
        return model(ids).logits
    pieces = [ids[:, :9], *ids[:, 9:].split(1, 1)]
    return torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_changed_code_is_run(family: str, name: str, text: Text, monkeypatch: Patch) -> None:
    plain, model, ids = tiny_model(family), windlass.attach(tiny_model(family)), text(14)
    before = logits(model, ids, KVCache(model))
    torch.testing.assert_close(before, logits(plain, ids), atol=1e-4, rtol=1e-4)
    CHANGES[name](plain, monkeypatch)
    if "class" not in name or name == "another class":  # else both have it already
        CHANGES[name](model, monkeypatch)
    expected = logits(plain, ids)
    assert float((expected.float() - before).abs().max()) > 1e-3 or name == "dtype"
    torch.testing.assert_close(logits(model, ids, KVCache(model)), expected, atol=1e-4, rtol=1e-4)


def _frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 4


def _another_scheme(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)


def _scaled_tables(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.3


def _hooked_tables(model: Any) -> None:
    model.model.rotary_emb.register_forward_hook(lambda _, __, out: (out[1], out[0]))


def _another_layer(model: Any) -> None:
    before = model.model.layers[1].self_attn
    model.model.layers[1].self_attn = type(before)(model.config, 1)
    model.model.layers[1].self_attn.load_state_dict(before.state_dict())


@pytest.mark.parametrize("change", [_frequencies, _another_scheme, _scaled_tables, _hooked_tables, _another_layer])
def test_another_rotation_or_attention_is_refused_until_it_is_attached(
    change: Callable[[Any], None], text: Text
) -> None:
    plain, model, ids = tiny_model("llama"), windlass.attach(tiny_model("llama")), text(14)
    for each in (plain, model):
        change(each)
    with pytest.raises(UsageError, match=r"since it was attached\. Call windlass\.detach\(model\), then"):
        KVCache(model)
    windlass.detach(model)
    if change is _hooked_tables:  # tables are asked of the module, and its hooks are not
        with pytest.raises(UnsupportedModel, match="attends otherwise in layer 0"):
            windlass.attach(model)
        return
    windlass.attach(model)
    torch.testing.assert_close(logits(model, ids, KVCache(model)), logits(plain, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family", ["llama", "llama_dynamic", "llama_yarn", "deepseek_v3", "gemma3", "llama4", "gpt_oss"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_cast_is_no_other_rotation(family: str, dtype: torch.dtype, text: Text) -> None:
    """Small frequencies lose bits, and those of a long text are forgotten."""
    model: Any = tiny_model(family)
    for module in model.modules():
        if isinstance(frequencies := vars(module).get("_buffers", {}).get("inv_freq"), Tensor):
            frequencies[-1] = 1.3e-6  # of a base of a million, below the normal numbers of float16
    windlass.attach(model)
    KVCache(model)
    with torch.no_grad():
        model(input_ids=text(40), use_cache=False)
    model.to(dtype)
    KVCache(model)


def _pruned(linear: nn.Module) -> None:
    l1_unstructured(linear, "weight", amount=0.5)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("change", [_pruned, weight_norm], ids=["pruned", "weight_norm"])
def test_weights_that_each_call_makes_anew(change: Callable[[nn.Module], object], is_first: bool, text: Text) -> None:
    plain, model, ids = tiny_model("llama"), tiny_model("llama"), text(14)
    if not is_first:
        windlass.attach(model)
    for each in (plain, model):
        change(_layer(each).mlp.up_proj)
    windlass.attach(model)
    torch.testing.assert_close(logits(model, ids, KVCache(model)), logits(plain, ids), atol=1e-4, rtol=1e-4)


def _torch_saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), _torch_saved])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_a_copy_of_an_attached_model_is_attached(family: str, copied: Callable[[Any], Any], text: Text) -> None:
    model, ids = windlass.attach(tiny_model(family)), text(14)
    expected = logits(model, ids, KVCache(model))
    twin = copied(model)
    torch.testing.assert_close(logits(twin, ids, KVCache(twin)), expected, atol=1e-5, rtol=0)
    assert attached(twin).model is twin
    windlass.detach(twin)
    torch.testing.assert_close(logits(twin, ids), logits(tiny_model(family), ids), atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(model, ids, KVCache(model)), expected, atol=1e-5, rtol=0)


def _state(model: nn.Module) -> list[tuple[object, ...]]:
    """The attributes and hooks of all modules."""
    found: list[tuple[object, ...]] = []
    for module in model.modules():
        held = {name: dict(each) if isinstance(each, dict) else each for name, each in vars(module).items()}
        found.append((module, held))
    return found


STAGES = [
    "windlass.hf.attach.check_kind_of_model",
    "windlass.hf.attach.decoder_of",
    "windlass.hf.attach.few_rows_of",
    "windlass.hf.attach.CheckedGenerate",
    "windlass.hf.attach.rotaries_of",
    "windlass.hf.attach.SelfCheck",
    "windlass.hf.cpu_decoder.LayerTrace",
]


@pytest.mark.parametrize("error", [UnsupportedModel("no"), RuntimeError("no"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_attach_changes_nothing(stage: str, error: BaseException, text: Text, monkeypatch: Patch) -> None:
    model, ids = tiny_model("llama").train(), text(14)
    model.model.layers[0].register_forward_hook(lambda *_: None)
    state, expected = _state(model), logits(model, ids)

    def refuse(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(stage, refuse)
        with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UnsupportedModel):
            windlass.attach(model)
    assert _state(model) == state
    assert torch.equal(logits(model, ids), expected)
    assert not any(isinstance(vars(module).get("windlass"), AttachedModel) for module in model.modules())
    windlass.attach(model.eval())
    torch.testing.assert_close(logits(model, ids, KVCache(model)), expected, atol=1e-4, rtol=1e-4)
