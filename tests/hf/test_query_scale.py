"""Models that scale a query by its position: a row's own, not the column in which it came."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import Text
from windlass import KVCache
from windlass.testing import VOCABULARY

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_attention_heads": 15,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Ministral 3 scales queries from its trained length on, here from 16. Beam does from the first position on, Llama 4
# every few tokens, in the layers without RoPE.
OPTIONS: dict[str, dict[str, Any]] = {
    "ministral3": {
        "num_hidden_layers": 2,
        "initializer_range": 0.18,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    # By the length that its cache tells, in layers without RoPE.
    "llama4_text": {
        "num_hidden_layers": 3,
        "initializer_range": 0.18,
        "no_rope_layers": [1, 0, 0],
        "attention_chunk_size": 11,
        "interleave_moe_layer_step": 4,
        "intermediate_size_mlp": 44,
        "attn_temperature_tuning": True,
        "floor_scale": 6,
        "attn_scale": 0.9,
    },
    "beam": {
        "num_hidden_layers": 4,
        "initializer_range": 0.4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] * 4,
        "sliding_window": 11,
    },
}
LENGTHS, AFTER = (45, 29), 9  # tokens of each row, and the number of them after the prompt


@pytest.fixture(scope="module", params=list(OPTIONS))
def scaled(request: pytest.FixtureRequest) -> PreTrainedModel:
    """In float32, its matrices of values that bfloat16 has, too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SIZES, **OPTIONS[request.param])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    return model


def alone(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    """Logits of transformers for the last tokens of each row."""
    with torch.no_grad():
        return torch.cat([model(row, use_cache=False).logits[:, -AFTER:] for row in rows]).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_of_different_lengths(scaled: PreTrainedModel, chunk: int, dtype: torch.dtype, text: Text) -> None:
    rows = [text(length, seed=row) for row, length in enumerate(LENGTHS)]
    expected = alone(scaled.float(), rows)
    model = scaled
    nn.Module.to(model, dtype)
    own_errors = (alone(model, rows) - expected).norm(dim=(1, 2))
    cache = KVCache(windlass.attach(model), batch=2, chunk=chunk)
    # A prompt's columns are its positions. Later tokens come in the same columns in both rows.
    windlass.prefill(model, cache, [row[0, :-AFTER].tolist() for row in rows])
    with torch.no_grad():
        ours = model(torch.cat([row[:, -AFTER:] for row in rows]), past_key_values=cache).logits
    windlass.detach(model)
    errors, sizes = (ours.float() - expected).norm(dim=(1, 2)), expected.norm(dim=(1, 2))
    assert (errors <= 1e-5 * sizes + 1.5 * own_errors).all(), errors / sizes


def test_the_callers_own_positions_are_still_compared(scaled: PreTrainedModel, text: Text) -> None:
    model = windlass.attach(scaled.float())
    ids, at = text(20), torch.arange(20)[None]
    with torch.no_grad():
        given = model(ids, position_ids=at, past_key_values=KVCache(model)).logits
        found = model(ids, past_key_values=KVCache(model)).logits
        by_place = model.model(ids, None, at, past_key_values=KVCache(model)).last_hidden_state
        hidden = model.model(ids, past_key_values=KVCache(model)).last_hidden_state
        with pytest.raises(windlass.UsageError, match=r"position_ids\[0, 0\] is 1, but"):
            model(ids, position_ids=at + 1, past_key_values=KVCache(model))
    windlass.detach(model)
    assert torch.equal(given, found)
    assert torch.equal(by_place, hidden)
