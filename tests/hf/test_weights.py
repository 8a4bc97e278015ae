"""Weights in 8 and 4 bits: which layers get them, how near they are, and how a model that has them is told apart."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import read
from windlass import KVCache, UsageError
from windlass.cli.app import main
from windlass.core import parse as names
from windlass.core.errors import PromptCacheError, WindlassWarning
from windlass.evals.run import header_of
from windlass.hf.weights import fingerprint, labelled, name_of, parameter_count, quantize, stored_bytes, weight_bytes
from windlass.testing import tiny_model

FOLDER = Path(windlass.__file__).parent / "assets" / "finder-3m"
LEVELS = {"int8": 254, "int4": 15}  # steps from the smallest to the largest code


def made(hidden: int = 96, mlp: int = 192, vocabulary: int = 112, **options: Any) -> PreTrainedModel:
    """A small model of these sizes, in eval mode."""
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "head_dim": hidden // 3,
    }
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, **sizes, **options)
    return LlamaForCausalLM(config).eval()


def needs_torchao() -> None:
    pytest.importorskip("torchao")


def multiplied(linear: nn.Linear) -> Tensor:
    """The weights, as a product with them tells."""
    with torch.no_grad():
        return linear(torch.eye(linear.in_features, dtype=linear.weight.dtype)).T


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_within_half_a_step_of_the_weights(weights: str, dtype: torch.dtype) -> None:
    needs_torchao()
    model, plain = made(), made()
    nn.Module.to(model, dtype), nn.Module.to(plain, dtype)
    quantize(model, weights)
    for name, linear in model.named_modules():
        if type(linear) is nn.Linear:
            truth = plain.get_submodule(name).weight.detach()
            group = {"int8": linear.in_features, "int4": 64 if linear.in_features % 64 == 0 else 32}[weights]
            parts = truth.view(linear.out_features, -1, group).float()
            if weights == "int8":
                step = 2 * parts.abs().amax(-1, keepdim=True) / LEVELS[weights]
            else:
                step = (parts.amax(-1, keepdim=True) - parts.amin(-1, keepdim=True)) / LEVELS[weights]
            error = (multiplied(linear).view(parts.shape).float() - parts).abs()
            rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype] * parts.abs().amax()
            assert (error <= 0.5 * step + rounding).all(), name
            assert error.max() > 0.2 * step.min()


def test_layers_that_no_group_divides_stay_and_are_told() -> None:
    needs_torchao()
    model = made(mlp=80, vocabulary=97)
    with pytest.warns(
        WindlassWarning, match=r"3 tensors stay in float32, the first is model.layers.0.mlp.down_proj \(80"
    ):
        quantize(model, "int4")
    kept = [
        name for name, each in model.named_modules() if type(each) is nn.Linear and type(each.weight) is nn.Parameter
    ]
    assert len(kept) == 3
    assert kept[-1] == "lm_head"
    with pytest.warns(WindlassWarning, match="For int4, 32 must divide the inputs"):
        quantize(made(mlp=80), "int4")
    with pytest.raises(UsageError, match="no layer of this LlamaForCausalLM can have them"):
        quantize(made(hidden=54, mlp=18, vocabulary=9), "int4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(made(mlp=80, vocabulary=97), "int8")


def test_experts_that_are_one_tensor_stay_and_are_told() -> None:
    needs_torchao()
    model = tiny_model("mixtral")
    experts = {name for name, each in model.named_parameters() if each.ndim > 2}
    assert experts
    with pytest.warns(WindlassWarning, match=rf"{len(experts)} tensors stay in float32, the first is .*experts"):
        quantize(model, "int8")


def test_a_quantised_model_is_told_apart_and_its_bytes_are_those_it_holds() -> None:
    needs_torchao()
    models = {kind: made(tie_word_embeddings=True) for kind in ("auto", "int8", "int4")}
    for kind, model in models.items():
        quantize(model, kind)
    assert {kind: name_of(model) for kind, model in models.items()} == {"auto": None, "int8": "int8", "int4": "int4"}
    assert [labelled("a", model) for model in models.values()] == ["a", "a int8", "a int4"]
    assert [header_of("a", 0, model).model for model in models.values()] == ["a", "a int8", "a int4"]
    assert len({parameter_count(model) for model in models.values()}) == 1
    assert len({fingerprint(model) for model in models.values()}) == 3
    coded: Any = models["int8"].lm_head.weight
    before = fingerprint(models["int8"])
    coded.qdata.bitwise_not_()
    assert fingerprint(models["int8"]) != before
    projection = {kind: model.model.layers[1].mlp.down_proj.weight for kind, model in models.items()}
    assert {kind: stored_bytes(each) for kind, each in projection.items()} == {
        "auto": 96 * 192 * 4,
        "int8": 96 * 192 + 96 * 4 + 96,  # codes, scales, and torchao's zero points of zero
        "int4": 96 * 192 // 2 + 96 * (192 // 64) * 2 * 4,  # codes, scales and zero points
    }
    # A head of codes is read beside the embedding. A shared one is the embedding.
    embedding = models["auto"].model.embed_tokens.weight.nbytes
    everything = sum(map(stored_bytes, models["int8"].parameters()))
    assert weight_bytes(models["int8"]) == everything - embedding
    assert weight_bytes(models["auto"]) == sum(each.nbytes for each in models["auto"].parameters())


def test_a_prompt_cache_is_read_by_the_weights_that_made_it(tmp_path: Path) -> None:
    needs_torchao()
    path = tmp_path / "cache.safetensors"
    models = {kind: windlass.load(FOLDER, "bfloat16", weights=kind)[0] for kind in ("auto", "int8", "int4")}
    for maker, model in models.items():
        cache = KVCache(model, budget=24)
        read(model, cache, torch.arange(40)[None], 16)
        cache.save(path)
        assert KVCache.load(path, model).tokens_seen == [40]
        for kind, other in models.items():
            if kind != maker:
                with pytest.raises(PromptCacheError, match="config or weights differ"):
                    KVCache.load(path, other)


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"weights 'int2' are unknown\. Use one of: auto, int8, int4"):
        windlass.load(FOLDER, weights="int2")
    model = made()
    model.config.quantization_config = {"quant_method": "mxfp4"}
    with pytest.raises(UsageError, match=r"quantised already\. Leave them out"):
        quantize(model, "int8")
    monkeypatch.setattr(names, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(UsageError, match=r"'int8' need torchao, .* pip install 'windlass\[weights\]'"):
        windlass.load(FOLDER, weights="int8")
    windlass.load(FOLDER)


def test_codes_are_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_torchao()
    from windlass.hf import load as load_module

    monkeypatch.setattr(load_module, "device_of", lambda name: torch.device("cuda", 0))  # noqa: ARG005
    with pytest.raises(UsageError, match="weights 'int8' are for a CPU, this is cuda:0"):
        windlass.load(FOLDER, weights="int8", device="cuda")


def test_the_command_line_names_the_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    needs_torchao()
    shape = ("bench", "--shape", "tiny", "-p", "0", "-n", "2", "-r", "1", "--json", "-q")
    assert main([*shape, "--weights", "int8"]) == 0
    coded = json.loads(capsys.readouterr().out)
    assert main(shape) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (coded["model"], plain["model"]) == ("tiny int8", "tiny")
    assert coded["parameters"] == plain["parameters"]
    assert plain["size_bytes"] / 2 < coded["size_bytes"] < plain["size_bytes"]
    assert main([*shape, "--weights", "int4"]) == 2
    assert "no layer of this LlamaForCausalLM can have them" in capsys.readouterr().err
    results = str(tmp_path / "results.jsonl")
    asked = ("eval", str(FOLDER), "--lengths", "200", "--budgets", "all", "--samples", "1", "-q", "-o", results)
    assert main([*asked, "--policies", "recent", "--weights", "int4"]) == 0
    assert json.loads(Path(results).read_text().splitlines()[0])["model"] == "finder-3m int4"
    assert main([*asked, "--policies", "recent"]) == 2
    assert "fingerprint" in capsys.readouterr().err
