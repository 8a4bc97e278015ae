"""The longest text that a model was trained on, out of configs as models have them."""

import pytest
from transformers import AutoConfig, PreTrainedConfig

from tests.helpers.models import Models
from windlass.hf.attach import attached
from windlass.hf.model_facts import trained_length
from windlass.testing import tiny_model


def config(kind: str, longest: int, **parameters: object) -> PreTrainedConfig:
    rope = {"rope_theta": 100.0, "rope_type": "default", **parameters}
    made: PreTrainedConfig = AutoConfig.for_model(
        kind, max_position_embeddings=longest, rope_parameters=rope, hidden_size=60, num_attention_heads=15, head_dim=8
    )
    return made


@pytest.mark.parametrize(
    ("given", "trained"),
    [
        (config("llama", 2048), 2048),
        # As transformers asks, the length does not change. See also `KEEPS_LENGTH`.
        (config("llama", 4096, rope_type="linear", factor=4.0), 16384),
        (config("llama", 4096, rope_type="dynamic", factor=2.0), 8192),
        # Qwen 2.5 gives its length before YaRN, DeepSeek its length afterwards.
        (config("llama", 32768, rope_type="yarn", factor=4.0, original_max_position_embeddings=32768), 131072),
        (config("llama", 163840, rope_type="yarn", factor=40.0, original_max_position_embeddings=4096), 163840),
        (
            config(
                "llama", 131072, rope_type="llama3", factor=8.0, original_max_position_embeddings=8192,
                low_freq_factor=1.0, high_freq_factor=4.0,
            ),
            131072,
        ),
        (tiny_model("phi3").config, 512),  # longrope, 64 tokens before it
    ],
)  # fmt: skip
def test_an_extended_window_is_the_trained_one(given: PreTrainedConfig, trained: int) -> None:
    assert trained_length(given) == trained


def test_layers_with_parameters_of_their_own_keep_the_length_of_the_config() -> None:
    """Gemma 3 scales its full layers linearly, and says the length that this gives."""
    given = tiny_model("gemma3").config
    given.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    assert trained_length(given, "full_attention") == trained_length(given, "sliding_attention") == 512


@pytest.mark.parametrize("longest", [None, 0, -1, "long", True, 2**40])
def test_a_config_that_does_not_tell_is_believed_nothing(longest: object) -> None:
    given = tiny_model("llama").config
    object.__setattr__(given, "max_position_embeddings", longest)
    assert trained_length(given) is None


def test_every_layer_of_an_attached_model_knows_it(attached_model: Models) -> None:
    assert {each.trained_length for each in attached(attached_model("llama_dynamic")).rotaries if each} == {256}
