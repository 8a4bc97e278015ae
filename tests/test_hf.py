"""The seam: what `attach` changes and what it does not, and what `generate` asks of a cache."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import windlass
from windlass import H2O, TOVA, KeyDiff, KVCache, Policy, SnapKV, UnsupportedModel, UsageError
from windlass.testing import SLIDING_WINDOW, tiny_model

TOLERANCE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}

Models = Callable[[str], PreTrainedModel]
Texts = Callable[..., Tensor]


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, cache: object = None, **options: object) -> Tensor:
    return model(ids, past_key_values=cache, **options).logits


def held(cache: KVCache) -> list[object]:
    """Everything that a step may change."""
    counts = [list(cache.tokens_seen), list(cache.next_positions), copy.deepcopy(cache.tokens), cache.columns_seen]
    tensors = [tensor.clone() for layer in cache.layers for tensor in layer.tensors().values()]
    return [counts, [layer.most_held for layer in cache.layers], tensors]


def assert_same(one: list[object], other: list[object]) -> None:
    assert one[:2] == other[:2]
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


def trained(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The logits and all gradients of one training step."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    out = model(ids, labels=ids)
    out.loss.backward()
    model.eval()
    return [out.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("family", ["llama_dynamic", "gemma3", "gpt_oss"])
def test_without_our_cache_nothing_changes(family: str, text: Texts) -> None:
    model, ids = tiny_model(family), text(21, rows=2)
    model.config.attention_dropout = 0.3
    before, states = trained(model, ids), copy.deepcopy(model.state_dict())
    plain = logits_of(model, ids)
    generated = model.generate(ids, max_new_tokens=5, **GREEDY)

    def assert_unchanged() -> None:
        assert torch.equal(logits_of(model, ids), plain)
        assert torch.equal(model.generate(ids, max_new_tokens=5, **GREEDY), generated)
        assert all(torch.equal(a, b) for a, b in zip(trained(model, ids), before, strict=True))
        assert model.config._attn_implementation == "eager"
        assert list(model.state_dict()) == list(states)
        assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())

    assert windlass.attach(model) is model
    assert_unchanged()
    logits_of(model, ids, KVCache(model, batch=2))
    assert_unchanged()
    assert windlass.detach(model) is model
    assert_unchanged()
    assert [name for name, module in model.named_modules() if "windlass" in vars(module)] == []
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def test_attach_keeps_each_modules_mode() -> None:
    model = tiny_model("llama").train()
    model.model.layers[1].eval()
    windlass.attach(model)
    assert model.training
    assert model.model.layers[0].training
    assert not model.model.layers[1].training


def test_attach_twice_is_attach(text: Texts) -> None:
    model = windlass.attach(tiny_model("llama"))
    cache = KVCache(model)
    windlass.attach(model)
    expected = logits_of(tiny_model("llama"), text(9))
    assert torch.allclose(logits_of(model, text(9), cache), expected, rtol=0, atol=TOLERANCE)
    windlass.detach(model)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is not attached.*windlass\.attach"):
        windlass.detach(model)


def test_deepcopy_of_an_attached_model_stands_alone(text: Texts) -> None:
    model = windlass.attach(tiny_model("gemma3"))
    twin, ids = copy.deepcopy(model), text(30)
    expected = logits_of(model, ids)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    windlass.detach(model)
    cache = KVCache(twin)
    assert torch.allclose(logits_of(twin, ids, cache), expected, rtol=0, atol=TOLERANCE)
    assert cache.tokens_seen == [30]
    assert torch.equal(logits_of(windlass.detach(twin), ids), expected)


def test_save_pretrained_of_an_attached_model(tmp_path: Path, text: Texts) -> None:
    model, ids = windlass.attach(tiny_model("qwen2")), text(20)
    expected = logits_of(model, ids, KVCache(model))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert "windlass" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert torch.equal(logits_of(windlass.attach(again), ids, KVCache(again)), expected)


def test_a_cache_needs_its_own_attached_model(text: Texts) -> None:
    model = tiny_model("llama")
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is not attached.*windlass\.attach"):
        KVCache(model)
    cache = KVCache(windlass.attach(model))
    with pytest.raises(UsageError, match=r"not attached.*windlass\.attach"):
        logits_of(tiny_model("llama"), text(5), cache)
    with pytest.raises(UsageError, match="made for another model"):
        logits_of(windlass.attach(tiny_model("llama")), text(5), cache)
    windlass.detach(model)
    with pytest.raises(UsageError, match=r"not attached.*windlass\.attach"):
        model.generate(text(5), past_key_values=cache, max_new_tokens=2, **GREEDY)
    assert cache.tokens_seen == [0]


def test_sampling_equals_transformers(plain_model: Models, attached_model: Models, text: Texts) -> None:
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 20, "pad_token_id": 0}
    tokens = []
    for model, cache in (
        (plain_model("mistral"), None),
        (attached_model("mistral"), KVCache(attached_model("mistral"))),
    ):
        torch.manual_seed(5)
        tokens.append(model.generate(text(14), past_key_values=cache, **options).tolist())
    assert tokens[0] == tokens[1]


def test_sdpa_models_too(text: Texts) -> None:
    model, ids = tiny_model("qwen2"), text(33)
    model.set_attn_implementation("sdpa")
    expected = logits_of(model, ids)
    cache = KVCache(windlass.attach(model))
    assert torch.allclose(logits_of(model, ids, cache), expected, rtol=0, atol=TOLERANCE)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_second_turn_equals_a_fresh_run(family: str, attached_model: Models, text: Texts) -> None:
    model = attached_model(family)
    cache = KVCache(model, budget=80)
    first = model.generate(text(17), past_key_values=cache, max_new_tokens=9, **GREEDY)
    ids = torch.cat((first, text(8, seed=1)), 1)
    second = model.generate(ids, past_key_values=cache, max_new_tokens=9, **GREEDY)
    assert second.tolist() == model.generate(ids, max_new_tokens=9, **GREEDY).tolist()
    # The last token is chosen but not fed.
    assert cache.tokens == [second[0, :-1].tolist()]


def test_a_ragged_second_turn_on_sliding_windows(plain_model: Models, attached_model: Models, text: Texts) -> None:
    """Padding in the middle of a row: transformers' own mask counts it into the window, ours does not."""
    turns = [[text(16, seed=1), text(9, seed=2)], [text(6, seed=3), text(13, seed=4)]]
    columns, masks = [], []
    for texts in turns:
        width = max(piece.shape[1] for piece in texts)
        gaps = [width - piece.shape[1] for piece in texts]
        columns.append(torch.cat([torch.cat((torch.full((1, n), 7), p), 1) for n, p in zip(gaps, texts, strict=True)]))
        masks.append(torch.tensor([[0] * n + [1] * (width - n) for n in gaps]))
    mask = torch.cat(masks, 1)
    ids = torch.cat(columns, 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model, plain = attached_model("mistral"), plain_model("mistral")
    cut = columns[0].shape[1]
    errors = []
    for one, cache in ((model, KVCache(model, batch=2)), (plain, DynamicCache(config=plain.config))):
        options = {"cache": cache, "attention_mask": mask[:, :cut], "position_ids": positions[:, :cut]}
        parts = [logits_of(one, ids[:, :cut], **options)]
        options |= {"attention_mask": mask, "position_ids": positions[:, cut:]}
        parts.append(logits_of(one, ids[:, cut:], **options))
        together = torch.cat(parts, 1)
        rows = [torch.cat([texts[row] for texts in turns], 1) for row in range(2)]
        assert all(row.shape[1] > SLIDING_WINDOW for row in rows)
        errors.append(
            max(
                float((together[r][mask[r].bool()] - logits_of(plain, row)[0]).abs().max())
                for r, row in enumerate(rows)
            )
        )
    assert errors[0] <= TOLERANCE
    assert errors[1] > 0.01

    ours = model.generate(ids, attention_mask=mask, past_key_values=KVCache(model, batch=2), max_new_tokens=7, **GREEDY)
    for row, alone in enumerate(rows):
        expected = plain.generate(alone, max_new_tokens=7, **GREEDY)
        assert ours[row, -7:].tolist() == expected[0, -7:].tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_assisted_decoding_equals_greedy(family: str, attached_model: Models, text: Texts) -> None:
    model, ids = attached_model(family), text(15)
    for assistant in (tiny_model(family), tiny_model("qwen3")):
        cache = KVCache(model)
        assisted = model.generate(ids, past_key_values=cache, assistant_model=assistant, max_new_tokens=25, **GREEDY)
        assert assisted.tolist() == model.generate(ids, max_new_tokens=25, **GREEDY).tolist()
        assert cache.tokens is not None
        assert cache.tokens[0] == assisted[0, : cache.tokens_seen[0]].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_assisted_decoding_over_budget(family: str, attached_model: Models, text: Texts) -> None:
    """`Recent` evicts alike whatever the step, so a rejected draft must leave no trace."""
    model, ids = attached_model(family), text(30)
    limits = {"budget": 16, "window": 6}
    options = {"max_new_tokens": 25, **GREEDY}
    # A draft that is mostly wrong, and one that is mostly right.
    for assistant in (tiny_model("qwen3"), tiny_model(family)):
        cache = KVCache(model, **limits)
        assisted = model.generate(ids, past_key_values=cache, assistant_model=assistant, **options)
        greedy = model.generate(ids, past_key_values=KVCache(model, **limits), **options)
        assert assisted.tolist() == greedy.tolist()
    unlimited = model.generate(ids, **options)
    assert family == "mistral" or greedy.tolist() != unlimited.tolist()


@pytest.mark.parametrize(
    "policy", [H2O(), TOVA(), SnapKV(observed_queries=4), KeyDiff()], ids=lambda p: type(p).__name__
)
def test_a_rejected_draft_leaves_no_trace(policy: Policy, attached_model: Models, text: Texts) -> None:
    """A step of which `crop` takes a part back equals the shorter step, evictions and scores included."""
    model, ids, draft = attached_model("llama"), text(30), text(4, seed=9)
    caches = [KVCache(model, budget=16, policy=policy, window=4) for _ in range(2)]
    for cache in caches:
        logits_of(model, ids, cache)
    logits_of(model, torch.cat((draft, text(4, seed=8)), 1), caches[0])
    caches[0].crop(-4)
    logits_of(model, draft, caches[1])
    assert caches[0].tokens_seen == caches[1].tokens_seen == [34]
    after = [torch.cat([logits_of(model, text(3, seed=s), cache) for s in (5, 6)], 1) for cache in caches]
    assert torch.allclose(*after, rtol=0, atol=TOLERANCE)


def test_roomy_scored_assisted_decoding(attached_model: Models, text: Texts) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, budget=80, policy=H2O())
    assisted = model.generate(
        ids, past_key_values=cache, assistant_model=tiny_model("qwen3"), max_new_tokens=25, **GREEDY
    )
    assert assisted.tolist() == model.generate(ids, max_new_tokens=25, **GREEDY).tolist()


def test_crop(attached_model: Models, text: Texts) -> None:
    model, ids = attached_model("llama"), text(24)
    cache = KVCache(model)
    expected = logits_of(model, ids, KVCache(model))[:, 18:]
    logits_of(model, ids, cache)
    for crop in (-6, 18):
        cache.crop(crop)
        assert cache.get_seq_length() == 18
        assert cache.tokens == [ids[0, :18].tolist()]
        assert torch.allclose(logits_of(model, ids[:, 18:], cache), expected, rtol=0, atol=TOLERANCE)
    cache.crop(0)
    cache.crop(100)
    assert cache.tokens_seen == [24]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("policy", [None, H2O()])
def test_beam_search_equals_transformers(
    family: str, policy: Policy | None, attached_model: Models, text: Texts
) -> None:
    model, ids = attached_model(family), text(13, rows=2)
    options = {"num_beams": 3, "max_new_tokens": 12, **GREEDY}
    cache = KVCache(model, 60, policy, batch=6)
    ours = model.generate(ids, past_key_values=cache, **options)
    assert ours.tolist() == model.generate(ids, **options).tolist()


def test_a_cache_for_other_rows_is_refused(attached_model: Models, text: Texts) -> None:
    model = attached_model("llama")
    with pytest.raises(UsageError, match=r"batch=1.*2 rows"):
        logits_of(model, text(5, rows=2), KVCache(model))


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"position_ids": torch.arange(11, 16)[None]}, r"position_ids\[0, 0\] is 11.*position 10"),
    ({"position_ids": torch.tensor([[10, 11, 13, 14, 15]])}, r"position_ids\[0, 2\] is 13.*position 12"),
    ({"attention_mask": torch.ones(1, 1, 5, 15, dtype=torch.bool)}, "two-dimensional"),
    ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "covers 9 columns; expected 15, the 10 seen and 5 new"),
    ({"output_attentions": True}, "output_attentions is not available"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_refused_call_changes_nothing(
    options: dict[str, object], message: str, attached_model: Models, text: Texts
) -> None:
    model, ids = attached_model("llama"), text(15)
    cache = KVCache(model, budget=12, policy=H2O(), window=3)
    logits_of(model, ids[:, :10], cache)
    before = held(cache)
    with pytest.raises(UsageError, match=message):
        logits_of(model, ids[:, 10:], cache, **options)
    assert_same(held(cache), before)
    assert model.config._attn_implementation == "eager"
    assert logits_of(model, ids[:, 10:], cache).isfinite().all()


def test_training_with_a_cache_is_refused(text: Texts) -> None:
    model = windlass.attach(tiny_model("llama")).train()
    cache = KVCache(model)
    with pytest.raises(UsageError, match=r"model\.eval\(\)"):
        model(text(5), past_key_values=cache)
    assert cache.tokens_seen == [0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was(
    error: type[BaseException], tokens: int, text: Texts
) -> None:
    model, ids = windlass.attach(tiny_model("gemma3")), text(40)
    cache, twin = (KVCache(model, budget=20, policy=H2O(), window=3) for _ in range(2))
    for one in (cache, twin):
        logits_of(model, ids[:, :24], one)
        logits_of(model, ids[:, 24:30], one)
    is_failing = True

    def fail(*_: object) -> None:
        if is_failing:
            raise error("half way")

    handle = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(error, match="half way"):
        logits_of(model, ids[:, 30 : 30 + tokens], cache)
    is_failing = False
    assert (cache.tokens_seen, cache.next_positions, cache.get_seq_length()) == ([30], [30], 30)
    for mine, theirs in zip(cache.layers, twin.layers, strict=True):
        assert mine.most_held == theirs.most_held
        assert positions_held(mine.positions) == positions_held(theirs.positions)
    assert torch.equal(logits_of(model, ids), logits_of(tiny_model("gemma3"), ids))
    assert torch.equal(logits_of(model, ids[:, 30:], cache), logits_of(model, ids[:, 30:], twin))
    handle.remove()


def positions_held(positions: Tensor) -> list[list[int]]:
    """Per row and head, sorted."""
    return [sorted(at for at in head if at >= 0) for head in positions.flatten(0, 1).tolist()]


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 6, "v_head_dim": 10}
EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
UNSUPPORTED: list[tuple[str, dict[str, object], str]] = [
    ("deepseek_v3", {**SMALL, **LATENT, **EXPERTS}, "DeepseekV3ForCausalLM uses multi-head latent attention"),
    ("llama", {**SMALL, "rope_parameters": MROPE}, "LlamaForCausalLM uses multi-dimensional positions"),
    ("t5", {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2}, "T5Model is an encoder-decoder"),
    ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}, "GPT2LMHeadModel has no rotary module"),
    ("opt", {**SMALL, "word_embed_proj_dim": 32, "ffn_dim": 40}, "OPTForCausalLM has no rotary module"),
    ("mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}, "MambaForCausalLM is recurrent"),
    ("lfm2", {**SMALL, "num_key_value_heads": 2, "full_attn_idxs": [1]}, "Lfm2ForCausalLM is recurrent"),
    (
        "llama4_text",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 16},
        "Llama4ForCausalLM attends within fixed chunks",
    ),
    (
        "gemma3_text",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True},
        "Gemma3ForCausalLM masks attention in layer 0 by more than causality",
    ),
]


@pytest.mark.parametrize(("model_type", "options", "message"), UNSUPPORTED, ids=[entry[0] for entry in UNSUPPORTED])
def test_what_cannot_work_is_refused_by_name(
    model_type: str, options: dict[str, object], message: str
) -> None:
    config = AutoConfig.for_model(model_type, **options)
    make = AutoModel if config.is_encoder_decoder else AutoModelForCausalLM
    model = make.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(UnsupportedModel, match=message):
        windlass.attach(model)
    assert [name for name, module in model.named_modules() if {"windlass", "forward"} & set(vars(module))] == []
    assert model.config._attn_implementation == "eager"


def test_a_window_that_only_the_mask_knows(text: Texts) -> None:
    """Qwen2-MoE does not tell its attention function of its sliding window."""
    options = {**SMALL, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.3}
    config = AutoConfig.for_model(
        "qwen2_moe", **options, use_sliding_window=True, sliding_window=5, max_window_layers=2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = logits_of(model, text(20))
    cache = KVCache(windlass.attach(model))
    assert torch.allclose(logits_of(model, text(20), cache), expected, rtol=0, atol=TOLERANCE)
    assert [layer.sliding_window for layer in cache.layers] == [5, None]


TRAVELLERS = ["llama", "gemma3", "glm4", "mistral", "cohere", "smollm3", "llama_yarn", "phi3"]


@pytest.mark.parametrize("family", TRAVELLERS)
def test_a_cache_travels_there_and_back(family: str, plain_model: Models, attached_model: Models, text: Texts) -> None:
    plain, model, ids = plain_model(family), attached_model(family), text(45, rows=2)
    theirs = DynamicCache(config=plain.config)
    logits_of(plain, ids[:, :30], theirs)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in theirs.layers]
    ours = KVCache.from_rotated(model, theirs)
    assert (ours.tokens_seen, ours.next_positions) == ([30, 30], [30, 30])
    back = ours.to_rotated()
    for layer, (keys, values) in zip(back.layers, kept, strict=True):
        assert torch.allclose(layer.keys, keys, rtol=0, atol=TOLERANCE)
        assert torch.equal(layer.values, values)

    expected = logits_of(plain, ids)[:, 30:]
    assert torch.allclose(logits_of(model, ids[:, 30:], ours), expected, rtol=0, atol=TOLERANCE)
    parts = [logits_of(plain, ids[:, at : at + 5], back) for at in (30, 35, 40)]
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=0, atol=TOLERANCE)
    # And out again after more was written.
    assert torch.allclose(ours.to_rotated().layers[1].keys, back.layers[1].keys, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_goes_on_in_the_other_cache(
    family: str, plain_model: Models, attached_model: Models, text: Texts
) -> None:
    plain, model, ids = plain_model(family), attached_model(family), text(22)
    expected = plain.generate(ids, max_new_tokens=16, **GREEDY).tolist()
    theirs = DynamicCache(config=plain.config)
    first = plain.generate(ids, past_key_values=theirs, max_new_tokens=8, **GREEDY)
    ours = KVCache.from_rotated(model, theirs)
    assert model.generate(first, past_key_values=ours, max_new_tokens=8, **GREEDY).tolist() == expected
    ours = KVCache(model, budget=64)
    first = model.generate(ids, past_key_values=ours, max_new_tokens=8, **GREEDY)
    theirs = ours.to_rotated()
    assert plain.generate(first, past_key_values=theirs, max_new_tokens=8, **GREEDY).tolist() == expected


def test_from_rotated_refuses_what_it_cannot_know(attached_model: Models, text: Texts) -> None:
    model = attached_model("llama_dynamic")
    theirs = DynamicCache(config=model.config)
    logits_of(model, text(70), theirs)
    with pytest.raises(UsageError, match=r"holds 70 tokens, more than the 64"):
        KVCache.from_rotated(model, theirs)
    with pytest.raises(UsageError, match="is empty"):
        KVCache.from_rotated(attached_model("llama"), DynamicCache(config=attached_model("llama").config))
