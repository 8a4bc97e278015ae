"""Tiny models whose pictures have positions of three axes, and their inputs."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

import windlass
from tests.helpers.models import Text
from windlass import KVCache
from windlass.policies import Recent
from windlass.testing import VOCABULARY

IMAGE, VIDEO, START, END, AUDIO = (VOCABULARY - at for at in range(1, 6))  # ids of tokens that stand for pictures
WORDS = VOCABULARY - 7
GREEDY: dict[str, Any] = {
    "max_new_tokens": 13,
    "do_sample": False,
    "pad_token_id": 0,
    "suppress_tokens": list(range(WORDS, VOCABULARY)),
}
MERGE, PATCH = 2, 4
GRID = (6, 10)  # patches of a picture: 3 by 5 tokens
PICTURE = GRID[0] * GRID[1] // MERGE**2
KEPT = ("A_log", "dt_bias")  # of a recurrence, which other weights may let explode

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": TEXT["hidden_size"],
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
GLM_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START, "image_end_token_id": END}
DEEP = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
AUDIO_CONFIG = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 20}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "decoder_sparse_step": 1}
GLM_ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
# By family: fields of its text and vision configs beside the common ones, and its own.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({}, DEEP, IDS),
    "qwen3_vl_moe": (EXPERTS, DEEP, IDS),
    "qwen2_vl": ({}, {"embed_dim": 24, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2}, IDS),
    "qwen2_vl_windows": (
        {"use_sliding_window": True, "sliding_window": 19, "layer_types": ["sliding_attention", "full_attention"]},
        {"embed_dim": 24, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2},
        IDS,
    ),
    "qwen2_5_vl": ({}, {"window_size": 16, "fullatt_block_indexes": [1]}, IDS),
    "glm4v": ({"head_dim": 16, "rope_parameters": GLM_ROPE}, {"image_size": 24}, GLM_IDS),
    "glm4v_moe": (
        {
            "head_dim": 16,
            "rope_parameters": GLM_ROPE,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        {"image_size": 24},
        GLM_IDS,
    ),
    "glm_ocr": (
        {"rope_parameters": {**GLM_ROPE, "partial_rotary_factor": 1.0}},
        {"image_size": 24, "num_heads": 4, "hidden_size": 32},
        GLM_IDS,
    ),
    "ernie4_5_vl_moe": (
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [20, 12],
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
        },
        {"temporal_merge_size": 2},
        GLM_IDS,
    ),
    "qwen3_5": ({**LINEAR, "rope_parameters": GLM_ROPE, "head_dim": 16}, {"num_position_embeddings": 64}, IDS),
    "qwen3_5_moe": (
        {
            **LINEAR,
            **EXPERTS,
            "shared_expert_intermediate_size": 12,
            "rope_parameters": GLM_ROPE,
            "head_dim": 16,
        },
        {"num_position_embeddings": 64},
        IDS,
    ),
    "qwen2_5_omni_thinker": (
        {},
        {"window_size": 16, "fullatt_block_indexes": [1]},
        {
            "image_token_index": IMAGE,
            "video_token_index": VIDEO,
            "audio_token_index": AUDIO,
            "vision_start_token_id": START,
            "audio_config": {**AUDIO_CONFIG, "output_dim": TEXT["hidden_size"]},
        },
    ),
    "qwen3_omni_moe_thinker": (
        EXPERTS,
        DEEP,
        {
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "audio_token_id": AUDIO,
            "vision_start_token_id": START,
            "audio_start_token_id": START - 9,
            "audio_config": {**AUDIO_CONFIG, "downsample_hidden_size": 12, "output_dim": TEXT["hidden_size"]},
        },
    ),
}
WITH_STATES = ("qwen3_5", "qwen3_5_moe")
THINKERS: dict[str, type[PreTrainedModel]] = {
    "qwen2_5_omni_thinker": Qwen2_5OmniThinkerForConditionalGeneration,
    "qwen3_omni_moe_thinker": Qwen3OmniMoeThinkerForConditionalGeneration,
}


@cache
def plain_reader(family: str, layers: int = 2) -> PreTrainedModel:
    """A tiny model of `FAMILIES`, as transformers has it, with attention far from uniform."""
    text, vision, own = FAMILIES[family]
    text = {**TEXT, **text, "num_hidden_layers": layers}
    if layers == 1 and "layer_types" in text:
        text["layer_types"] = text["layer_types"][-1:]
    config = AutoConfig.for_model(
        family.removesuffix("_windows"), text_config=text, vision_config={**VISION, **vision}, **own
    )
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = THINKERS.get(family)
        model: PreTrainedModel = (
            AutoModelForImageTextToText.from_config(config, **options)
            if kind is None
            else kind._from_config(config, **options)
        )
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith(KEPT):
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
            elif parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
    return model.eval()


@cache
def attached_reader(family: str, layers: int = 2) -> PreTrainedModel:
    return windlass.attach(copy.deepcopy(plain_reader(family, layers)))


def shown(
    text: Text,
    tokens: int,
    starts: tuple[int, ...],
    family: str = "qwen3_vl",
    grid: tuple[int, int] = GRID,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a model that reads a text with pictures of `grid` patches at the columns `starts`."""
    ids, size = text(tokens, seed=seed) % (WORDS - 1) + 1, grid[0] * grid[1] // MERGE**2
    for start in starts:
        ids[:, start : start + size] = IMAGE
        ids[:, start - 1], ids[:, start + size] = START, END
    generator = torch.Generator().manual_seed(seed)
    channels = 3 * PATCH**2 * (1 if family == "ernie4_5_vl_moe" else 2)
    given: dict[str, Any] = {
        "input_ids": ids,
        "pixel_values": torch.randn(len(starts) * grid[0] * grid[1], channels, generator=generator),
        "image_grid_thw": torch.tensor([[1, *grid]] * len(starts)),
    }
    if family in THINKERS:  # which do not look for pictures without it
        given["attention_mask"] = torch.ones_like(ids)
    else:
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    return given


def first(given: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same for the first `tokens`, which must have all pictures."""
    names = ("input_ids", "mm_token_type_ids", "attention_mask")
    return {name: value[:, :tokens] if name in names else value for name, value in given.items()}


def error(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in standard deviations."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.std())


@torch.no_grad()
def embedded(model: PreTrainedModel, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Inputs of a plain model's decoder: embeddings, with those of pictures, and (3, batch, tokens) axes."""
    found: dict[str, Any] = {}

    def note(_module: object, _args: object, kwargs: dict[str, Any]) -> None:
        found.update(kwargs)

    handle = model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    model(**given, use_cache=False)
    handle.remove()
    return found["inputs_embeds"], found["position_ids"][-3:]


@torch.no_grad()
def at_axes(model: PreTrainedModel, embeds: Tensor, axes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits of a plain model that reads these embeddings at these positions, of which it `mask`s some to others."""
    bias = None
    if mask is not None:
        bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    out = model.get_decoder()(inputs_embeds=embeds, position_ids=axes, attention_mask=bias, use_cache=False)
    logits: Tensor = model.get_output_embeddings()(out.last_hidden_state)
    return logits


@torch.no_grad()
def read_on(model: PreTrainedModel, cache: Any, given: dict[str, Any], prompt: int, chunk: int) -> Tensor:
    """Logits of all columns: a prompt with the pictures in one pass, then text."""
    pieces = [model(**first(given, prompt), past_key_values=cache).logits]
    for at in range(prompt, given["input_ids"].shape[1], chunk):
        pieces.append(model(given["input_ids"][:, at : at + chunk], past_key_values=cache).logits)
    return torch.cat(pieces, 1)


@torch.no_grad()
def one_layer_read(
    family: str, given: dict[str, Any], cut: int, **options: Any
) -> tuple[KVCache, Callable[[int], Tensor]]:
    """A cache that has read `cut` tokens, and a function that feeds it one of the rest and returns its logits."""
    model = attached_reader(family, 1)
    cache = KVCache(model, **{"policy": Recent(), "positions": "original", **options})
    model(**first(given, cut), past_key_values=cache)

    @torch.no_grad()
    def feed(column: int) -> Tensor:
        ids = given["input_ids"][:, column : column + 1]
        logits: Tensor = model(ids, past_key_values=cache).logits[:, -1]
        return logits

    return cache, feed
