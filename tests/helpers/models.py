"""Models and texts that the tests read, and a model's results for a text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from windlass import KVCache
from windlass.hf.passes import CACHE_NAMES
from windlass.testing import VOCABULARY

Models = Callable[[str], PreTrainedModel]
Text = Callable[..., Tensor]
MODEL = str(Path(windlass.__file__).parent / "assets" / "finder-3m")
TEXT_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}  # of a tiny text model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(MODEL)
    return made


@pytest.fixture(scope="module")
def one_layer(plain_model: Models) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of one layer, plain and attached: its keys depend on the tokens alone, so any edit is exact."""
    config = plain_model("llama").config.__class__(**{**plain_model("llama").config.to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(config).eval()
    attached = AutoModelForCausalLM.from_config(config).eval()
    attached.load_state_dict(plain.state_dict())
    return plain, windlass.attach(attached)


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor, chunk: int) -> Tensor:
    """Logits of every token, read `chunk` at a time."""
    with torch.no_grad():
        return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(chunk, 1)], 1)


def given_cache(options: dict[str, Any]) -> Any:
    """Take the cache from the arguments of a layer, by its name in this release of transformers."""
    return next((cache for name in CACHE_NAMES if (cache := options.pop(name, None)) is not None), None)


def masked(model: PreTrainedModel, ids: Tensor, seen: Tensor) -> Tensor:
    """Logits of transformers itself under an explicit (tokens, tokens) mask."""
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(ids, attention_mask=bias[None, None].expand(ids.shape[0], -1, -1, -1), use_cache=False).logits


def logits_at(model: PreTrainedModel, ids: list[int], positions: list[int]) -> Tensor:
    """The last token's logits when transformers reads `ids` at `positions`."""
    with torch.no_grad():
        return model(torch.tensor([ids]), position_ids=torch.tensor([positions])).logits[0, -1]


@torch.no_grad()
def greedy(model: Callable[..., Any], cache: KVCache, ids: Tensor, tokens: int) -> list[int]:
    """The next tokens, all of which are fed."""
    written = []
    for _ in range(tokens):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        written.append(int(ids))
    model(ids, past_key_values=cache)
    return written
