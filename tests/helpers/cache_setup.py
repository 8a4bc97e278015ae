"""What a cache and its model are made of, side by side: tiny models, policies, stores, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.cache_model import CacheModel
from tests.helpers.cache_model_rows import Options, Rules
from tests.helpers.cache_model_rules import MergeModel, PolicyModel
from tests.helpers.cache_model_tokens import Kind, Mode
from windlass import H2O, TOVA, KeyDiff, KeyNorm, Policy, Random, Recent, SnapKV
from windlass.cache.options import CacheOptions
from windlass.hf.attach import attached
from windlass.stores.spec import store_of

Array = NDArray[Any]
KV_HEADS, GROUP, HEAD_DIM = 2, 3, 4
BASE = 64.0  # whose frequencies, 1 and 1/8, a model in bfloat16 holds exactly
WINDOW = 7

POLICIES: dict[str, tuple[Policy, PolicyModel]] = {
    "recent": (Recent(), PolicyModel("recent", per_head=False)),
    "key_norm": (KeyNorm(), PolicyModel("key_norm")),
    "key_diff": (KeyDiff(), PolicyModel("key_diff")),
    "h2o": (H2O(), PolicyModel("h2o", observed=None)),
    "tova": (TOVA(), PolicyModel("tova", per_head=False, observed=1)),
    "snap_kv": (SnapKV(3, 3), PolicyModel("snap_kv", observed=3, pool=3)),
    "random": (Random(), PolicyModel("random")),
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "plain": ("llama", {"num_hidden_layers": 1}),
    "windowed": ("mistral", {"num_hidden_layers": 1, "sliding_window": WINDOW}),
    "mixed": (
        "gemma2",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW},
    ),
    "unrotated": ("smollm3", {"num_hidden_layers": 2, "no_rope_layer_interval": 2}),
}


@cache
def model_of(name: str, dtype: str = "float32", trained_length: int = 4096) -> PreTrainedModel:
    """A tiny attached model; only its shape is used, its passes are made up."""
    kind, options = MODELS[name]
    sizes: dict[str, object] = {
        "vocab_size": 31, "hidden_size": KV_HEADS * GROUP * HEAD_DIM, "intermediate_size": 10,
        "num_attention_heads": KV_HEADS * GROUP, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "max_position_embeddings": trained_length, "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **options}))
    model: PreTrainedModel = windlass.attach(made.eval().to(getattr(torch, dtype)))
    return model


@cache
def windows_of(name: str) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    config = model_of(name).config
    types = getattr(config, "layer_types", None) or ["sliding_attention" if name == "windowed" else "full_attention"]
    return tuple(WINDOW if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class Setup:
    """What a pair is made of, as plain data that can be written down and made again."""

    model: str = "plain"
    dtype: str = "float32"
    batch: int = 2
    budget: int | None = 12
    policy: str = "recent"
    sinks: int = 2
    window: int | None = 3
    chunk: int = 20
    rollback: int = 16
    mode: Mode = field(default_factory=lambda: Mode("original"))
    store: str = "plain"
    merge: MergeModel | None = None
    softcap: float | None = None
    has_sink_logits: bool = False
    repeats: bool = False  # keys of few kinds, as of few words
    trained_length: int = 4096

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    @property
    def options(self) -> CacheOptions:
        return CacheOptions(
            self.budget, POLICIES[self.policy][0], self.sinks, self.window, self.chunk, str(self.mode), self.batch,
            self.rollback, self.store, None if self.merge is None else str(self.merge),
        )  # fmt: skip

    @property
    def its_model(self) -> PreTrainedModel:
        return model_of(self.model, self.dtype, self.trained_length)

    def kinds(self) -> list[Kind]:
        angles = tuple(BASE ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2))
        sinks = tuple(0.3 * head - 1 for head in range(KV_HEADS * GROUP)) if self.has_sink_logits else None
        return [
            Kind(
                KV_HEADS,
                GROUP,
                0.4,
                window,
                self.softcap,
                sinks,
                None if rotary is None else angles,
                self.trained_length,
            )
            for window, rotary in zip(windows_of(self.model), self.rotaries(), strict=True)
        ]

    def rotaries(self) -> list[Any]:
        return attached(self.its_model).rotaries

    def cache_model(self) -> CacheModel:
        store = store_of(self.store)
        ring = store.full_precision
        is_coarse = self.dtype == "bfloat16"
        rules = Rules(
            POLICIES[self.policy][1], self.merge, None, 0, 0, 0, ring.sinks, ring.newest,
            2.0**-9 if is_coarse and self.store != "plain" else 2.0**-24, 0.06 if is_coarse else 3e-5,
        )  # fmt: skip
        options = Options(self.budget, self.sinks, self.window, self.rollback, rules)
        return CacheModel(options, len(windows_of(self.model)), self.batch, self.codec(), self.mode)

    def codec(self) -> Callable[[int, Array, Array], tuple[Array, Array]]:
        """What the store gives back of keys and values (batch, kv_heads, tokens, channels)."""
        dtype = self.torch_dtype
        if self.store == "plain":
            if self.dtype == "float32":
                return lambda _, keys, values: (keys, values)
            return lambda _, keys, values: (rounded(keys, dtype), rounded(values, dtype))
        made: dict[int, Any] = {}

        def coded(layer: int, keys: Array, values: Array) -> tuple[Array, Array]:
            tensors = torch.from_numpy(keys).to(dtype), torch.from_numpy(values).to(dtype)
            if layer not in made:
                means = attached(self.its_model).key_means
                made[layer] = store_of(self.store).fresh(None if means is None else means[layer])
                made[layer]._constants = made[layer].make_constants(tensors[0])
            made[layer]._parts = made[layer].encode(*tensors)
            made[layer].full_precision.tensors = {}
            packed = made[layer].packed_keys(), made[layer].packed_values()
            return packed[0].floats().double().numpy(), packed[1].floats().double().numpy()

        return coded


def rounded(states: Array, dtype: torch.dtype) -> Array:
    result: Array = torch.from_numpy(states).to(dtype).double().numpy()
    return result
