"""Settings of a cache and its model, side by side: tiny models, policies, stores, as plain data."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.cache_adapters import Adapted, Twin
from tests.helpers.cache_model import CacheModel
from tests.helpers.cache_model_rows import Leaf, Options, Rules
from tests.helpers.cache_model_rules import MergeModel, PolicyModel
from tests.helpers.cache_model_tokens import Kind, Mode
from windlass import Shares
from windlass.cache.options import CacheOptions
from windlass.hf.attach import attached
from windlass.policies import H2O, TOVA, KeyDiff, KeyNorm, Policy, Random, Recent, SnapKV
from windlass.stores.formats import store_of

Array = NDArray[Any]
KV_HEADS, GROUP, HEAD_DIM = 3, 2, 4
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
    """A tiny attached model. Most passes are made up, and only its shape is used."""
    return windlass.attach(unbound_model(name, dtype, trained_length))


def unbound_model(name: str, dtype: str, trained_length: int) -> PreTrainedModel:
    """The same one each time, not attached."""
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
    model: PreTrainedModel = made.eval().to(getattr(torch, dtype))
    return model


@cache
def twin_of(name: str, dtype: str, trained_length: int) -> Twin:
    return Twin(unbound_model(name, dtype, trained_length))


@cache
def adapted(name: str, dtype: str, trained_length: int) -> Adapted:
    """One of each kind. Its `reset` undoes the changes of sequences."""
    return Adapted(unbound_model(name, dtype, trained_length))


@cache
def windows_of(name: str) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    config = model_of(name).config
    types = getattr(config, "layer_types", None) or ["sliding_attention" if name == "windowed" else "full_attention"]
    return tuple(WINDOW if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True)
class Setup:
    """Settings of a pair, as plain data that can be written down and made again."""

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
    recall: int = 0
    recall_store: str = "int4"
    recall_in_files: bool = False
    candidates: int = 256  # pages whose tokens are looked at
    shares: tuple[tuple[float, ...], ...] | None = None  # of the heads of each layer
    has_adapters: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32

    @property
    def options(self) -> CacheOptions:
        return CacheOptions(
            self.budget, POLICIES[self.policy][0], self.sinks, self.window, self.chunk, str(self.mode), self.batch,
            self.rollback, self.store, None if self.merge is None else str(self.merge), self.recall, self.recall_store,
            self.recall_folder, None if self.shares is None else Shares(self.shares),
        )  # fmt: skip

    @property
    def recall_folder(self) -> str | None:
        return tempfile.gettempdir() if self.recall_in_files else None

    def leaves(self) -> list[Leaf]:
        """Heads of one layer with one share lie together, and alone where all have one."""
        found = []
        for layer in range(len(windows_of(self.model))):
            own = (1.0,) if self.shares is None else self.shares[layer]
            groups = [tuple(head for head, share in enumerate(own) if share == one) for one in dict.fromkeys(own)]
            found += [Leaf(layer, None)] if len(groups) == 1 else [Leaf(layer, heads) for heads in groups]
        return found

    @property
    def its_model(self) -> PreTrainedModel:
        kind = self.model, self.dtype, self.trained_length
        return adapted(*kind).model if self.has_adapters else model_of(*kind)

    @property
    def twin(self) -> Twin:
        """The model that is not attached."""
        kind = self.model, self.dtype, self.trained_length
        return adapted(*kind).twin if self.has_adapters else twin_of(*kind)

    @property
    def adapted(self) -> Adapted:
        return adapted(self.model, self.dtype, self.trained_length)

    def kinds(self) -> list[Kind]:
        angles = tuple(BASE ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2))
        windows, rotaries, kinds = windows_of(self.model), self.rotaries(), []
        for layer, heads in self.leaves():
            own = range(KV_HEADS) if heads is None else heads
            sinks = tuple(0.3 * (head * GROUP + at) - 1 for head in own for at in range(GROUP))
            kinds.append(
                Kind(
                    len(own), GROUP, 0.4, windows[layer], self.softcap, sinks if self.has_sink_logits else None,
                    None if rotaries[layer] is None else angles, self.trained_length,
                )
            )  # fmt: skip
        return kinds

    def rotaries(self) -> list[Any]:
        return attached(self.its_model).rotaries

    def cache_model(self) -> CacheModel:
        store = store_of(self.store)
        ring = store.full_precision
        is_coarse = self.dtype == "bfloat16"
        rules = Rules(
            POLICIES[self.policy][1], self.merge, None, 0, 0, 0, ring.sinks, ring.newest,
            2.0**-9 if is_coarse and self.store != "plain" else 2.0**-24, 0.06 if is_coarse else 3e-5,
            self.recall, self.recall_store, self.candidates < 256,
        )  # fmt: skip
        options = Options(self.budget, self.sinks, self.window, self.rollback, rules)
        recall_codec = self.codec(self.recall_store) if self.recall else None
        return CacheModel(options, self.leaves(), self.batch, self.codec(self.store), recall_codec, self.mode)

    def codec(self, store: str) -> Callable[[int, Array, Array], tuple[Array, Array]]:
        """Keys and values (batch, kv_heads, tokens, channels) of a leaf, as a store decodes them."""
        dtype, leaves = self.torch_dtype, self.leaves()
        if store == "plain":
            if self.dtype == "float32":
                return lambda _, keys, values: (keys, values)
            return lambda _, keys, values: (rounded(keys, dtype), rounded(values, dtype))
        made: dict[int, Any] = {}

        def coded(leaf: int, keys: Array, values: Array) -> tuple[Array, Array]:
            tensors = torch.from_numpy(keys).to(dtype), torch.from_numpy(values).to(dtype)
            if leaf not in made:
                every, (layer, heads) = attached(self.its_model).key_means, leaves[leaf]
                means = None if every is None else every[layer]
                if means is not None and heads is not None:
                    means = means[list(heads)]
                made[leaf] = store_of(store).fresh(means)
                made[leaf]._constants = made[leaf].make_constants(tensors[0])
            its = made[leaf].over(made[leaf].encode(*tensors))
            packed = its.packed_keys(), its.packed_values()
            return packed[0].floats().double().numpy(), packed[1].floats().double().numpy()

        return coded


def rounded(states: Array, dtype: torch.dtype) -> Array:
    result: Array = torch.from_numpy(states).to(dtype).double().numpy()
    return result
