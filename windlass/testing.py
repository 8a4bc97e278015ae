"""For tests, ours and yours: a check of the policy contract, and tiny random models of many families."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from windlass.cache.layer import LayerCache
from windlass.cache.second_pass import reread
from windlass.core.errors import PolicyError, UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import NewKeys, PerSlot, Queries, Scores
from windlass.core.step import AttentionCall, Limits, Step
from windlass.policies import Observation, Policy, Slots
from windlass.policies.base import Arrival
from windlass.positions.modes import Original
from windlass.stores.base import Plain

VOCABULARY = 97  # of every tiny model
SLIDING_WINDOW = 11  # of the tiny models that have one
TRAINED_LENGTH = 64  # of the tiny models whose rotary table depends on the length of the text

# All different, so that no broadcast hides a fault: 15 query heads share 3 kv heads.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 15,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Large enough that attention is far from uniform: then a wrong mask or rotation shows.
    "initializer_range": 0.18,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_Options = Mapping[str, object]

_WIDE = {"hidden_size": 120, "initializer_range": 0.13}  # where head_dim is hidden_size / heads
_ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
}
_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.9, 3.7, 7.3],
    "original_max_position_embeddings": TRAINED_LENGTH,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"original_max_position_embeddings": 64}


def _scaled(rope_type: str, factor: float, more: _Options = MappingProxyType({})) -> _Options:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, "factor": factor, **more}}


_CONFIGS: dict[str, tuple[str, _Options]] = {
    # name: (transformers' model type, its options)
    "llama": ("llama", {}),
    "llama_llama3": ("llama", _scaled("llama3", 8.0, _LLAMA3)),
    "llama_yarn": ("llama", _scaled("yarn", 8.0, _YARN)),
    "llama_dynamic": ("llama", {**_scaled("dynamic", 4.0), "max_position_embeddings": TRAINED_LENGTH}),
    "llama_linear": ("llama", _scaled("linear", 4.0)),
    "mistral": ("mistral", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": ("qwen2", {**_ALTERNATING, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "mixtral": ("mixtral", _EXPERTS),
    "gemma2": ("gemma2", {**_ALTERNATING, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 6}),
    "gemma3": ("gemma3_text", {**_ALTERNATING, "query_pre_attn_scalar": 6}),
    "phi3": ("phi3", {**_WIDE, "rope_parameters": _LONGROPE}),
    "smollm3": ("smollm3", {**_WIDE, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", _WIDE),
    "cohere": ("cohere", {**_WIDE, "logit_scale": 0.9}),
    "glm4": ("glm4", {}),
    "granite": (
        "granite",
        {**_WIDE, "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    ),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **_ALTERNATING, **_scaled("yarn", 8.0, {**_YARN, "truncate": False})}),
}

FAMILIES = tuple(_CONFIGS)


def tiny_model(family: str) -> PreTrainedModel:
    """A small random model of one of `FAMILIES`: float32, in eval mode, the same at every call.

    Its logits are of order 1 and its attention far from uniform. Needs no network. Attention is
    transformers' own `eager`, which honours soft-caps and learned sinks.

    Raises: UsageError for an unknown family.
    """
    if family not in _CONFIGS:
        raise UsageError(f"family {family!r} is unknown; use one of: {', '.join(FAMILIES)}")
    model_type, options = _CONFIGS[family]
    config = AutoConfig.for_model(model_type, **{**_SIZES, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        for parameter in model.parameters():
            # Norms, biases and learned sinks start as constants, which would hide that they are used.
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    model.get_output_embeddings().weight.data.mul_(0.5)
    model.eval()
    return model


HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 15, 3, 8, 6
LIMITS = Limits(budget=12, sinks=2, window=3, chunk=7, rollback=0)
# Tokens of each of two rows in every step: whole and ragged chunks, an idle row, then decode.
STEPS = ((7, 7), (4, 7), (7, 0), (5, 3), *((1, 1),) * 6, (0, 1), (1, 0), (7, 5), (1, 1))


def check_policy(policy: Policy) -> None:
    """Run `policy` through a small cache, until well over budget, and check that it keeps the contract.

    Uses neither a model nor files, and takes well under a second.

    Raises: PolicyError, naming the rule that is broken.
    """
    _check_declaration(policy)
    checked = _Checked(policy)
    layer = LayerCache(0, LIMITS, checked, None, Plain())
    draw = torch.Generator().manual_seed(0)
    at, prompt_ends = [0, 0], [0, 0]
    for lengths in STEPS:
        tokens = max(lengths)
        columns = torch.arange(tokens)
        positions = torch.stack([(columns + a).where(columns < n, EMPTY) for a, n in zip(at, lengths, strict=True)])
        at = [a + n for a, n in zip(at, lengths, strict=True)]
        prompt_ends = [a if tokens > 1 and n else end for a, n, end in zip(at, lengths, prompt_ends, strict=True)]
        ids = torch.randint(VOCABULARY, positions.shape, generator=draw)
        step = Step(positions, lengths, torch.tensor(at), torch.tensor(prompt_ends), max(at), ids)
        queries, keys, values = (
            torch.randn(2, heads, tokens, width, generator=draw)
            for heads, width in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
        )
        layer.step(queries, keys, values, step, Original(), AttentionCall(scale=HEAD_DIM**-0.5))
        if policy.repeat:
            later = positions.where(positions < 0, positions + tokens)
            again = replace(step, positions=later, end=step.end + tokens, is_reread=True)
            reread(layer, queries, keys, values, again, Original(), AttentionCall(scale=HEAD_DIM**-0.5))


def _check_declaration(policy: Policy) -> None:
    """What can be seen without running: the class, its fields and its docstring."""
    if not isinstance(policy, Policy):
        raise PolicyError(f"{policy!r} is not a Policy; derive its class from windlass.Policy, and pass an instance")
    kind = type(policy)
    name = kind.__name__
    parameters = vars(kind).get("__dataclass_params__")  # of this class, not of one it inherits from
    if not is_dataclass(policy) or parameters is None or not parameters.frozen:
        raise PolicyError(f"{name} is not a frozen dataclass; put @dataclass(frozen=True) above the class")
    for field, value in ((field.name, getattr(policy, field.name)) for field in fields(policy)):
        is_file = isinstance(value, str) and Path(value).expanduser().is_file()
        if not (is_file or isinstance(value, int | float | Policy | None)):
            raise PolicyError(
                f"{name}.{field} is {value!r}; the fields of a policy are plain numbers, a policy, or a file's name"
            )
    for declared, names in (("state", policy.state), ("statistics", policy.statistics)):
        if not isinstance(names, tuple) or not all(isinstance(entry, str) for entry in names):
            raise PolicyError(f'{name}.{declared} is {names!r}; declare a tuple of names, such as ("mass",)')
    wanted = policy.observed_queries
    if wanted is not None and (not isinstance(wanted, int) or wanted < 0):
        raise PolicyError(f"{name}.observed_queries is {wanted!r}; declare 0 (none), a positive number, or None (all)")
    missing = [word for word in ("Source:", "Differs:") if word not in (kind.__doc__ or "")]
    if missing:
        raise PolicyError(f"the docstring of {name} lacks {' and '.join(missing)}")


class _Checked(Policy):
    """A policy that checks another one at every call."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        # The declarations are the other's, so that the cache treats it as it would treat that one.
        for name in ("state", "statistics", "per_head", "is_recency", "observed_queries", "repeat"):
            setattr(self, name, getattr(policy, name))

    def __repr__(self) -> str:
        return repr(self._policy)

    def arrive(self, queries: Queries, keys: NewKeys) -> Arrival:
        before = queries.clone(), keys.clone()
        arrival = self._policy.arrive(queries, keys)
        if not (queries.equal(before[0]) and keys.equal(before[1])):
            self._fail("arrive writes into the model's queries or keys; return copies")
        for name, tensor in arrival.state.items():
            if name not in self.state:
                self._fail(f"arrive gives state {name!r}, which is not declared in `state` {self.state}")
            expected = (keys.shape[0], keys.shape[1] if self.per_head else 1, keys.shape[2])
            if tuple(tensor.shape) != expected:
                self._fail(f"arrive gives state {name!r} of shape {tuple(tensor.shape)}, expected {expected}")
        return arrival

    def observe(self, slots: Slots, seen: Observation) -> None:
        with self._watched("observe", slots):
            self._policy.observe(slots, seen)

    def score(self, slots: Slots) -> Scores:
        before = {name: tensor.clone() for name, tensor in slots.state.items()}
        again = replace(slots, state={name: tensor.clone() for name, tensor in before.items()})
        score = self._scored(slots)
        is_held = slots.positions >= 0
        if bool(score.isnan()[is_held].any()):
            self._fail("score gives NaN for a slot that holds a token")
        if not torch.equal(self._scored(again)[is_held], score[is_held]):
            self._fail("score differs between two calls with the same slots; derive any draw from positions and a seed")
        turned, order = _reversed(slots, before)
        expected, held = score.gather(-1, order)[is_held.flip(-1)], is_held.flip(-1)
        rounding = 1e-4 * float(expected.abs().max())
        if not torch.allclose(self._scored(turned)[held], expected, rtol=1e-4, atol=rounding):
            self._fail("score depends on the order of the slots; sort by slots.positions before pooling along the text")
        return score

    def _scored(self, slots: Slots) -> PerSlot:
        with self._watched("score", slots):
            score = _anything(self._policy.score(slots))
        expected = tuple(slots.positions.shape)
        if not isinstance(score, Tensor):
            self._fail(f"score gives {type(score).__name__}, expected a tensor of shape {expected}")
        if tuple(score.shape) != expected:
            self._fail(f"score has shape {tuple(score.shape)}, expected {expected} (batch, kv_heads, slots)")
        return score.float()

    @contextmanager
    def _watched(self, method: str, slots: Slots) -> Iterator[None]:
        """Nothing but the declared state may change, and that in place; nothing may be raised."""
        before = {"positions": slots.positions.clone()}
        before |= {name: tensor.clone() for name, tensor in slots.store.tensors().items()}
        state, statistics = dict(slots.state), dict(slots.statistics)
        copies = {name: tensor.clone() for name, tensor in statistics.items()}
        try:
            yield
        except KeyError as error:
            if error.args[0] in self.state:
                raise
            self._fail(f"{method} uses state {error.args[0]!r}, which is not declared in `state` {self.state}")
        except Exception as error:
            raise PolicyError(f"{self!r}: {method} raises {type(error).__name__}: {error}") from error
        after = {"positions": slots.positions, **slots.store.tensors()}
        for name, tensor in before.items():
            if not torch.equal(tensor, after[name]):
                self._fail(f"{method} writes to slots.{name}; only slots.state may be written")
        for name in slots.state:
            if name not in state:
                self._fail(f"{method} adds state {name!r}, which is not declared in `state` {self.state}")
            if slots.state[name] is not state[name]:
                self._fail(f"{method} replaces slots.state[{name!r}]; write into it, in place")
        for name, tensor in statistics.items():
            if not torch.equal(tensor, copies[name]):
                self._fail(f"{method} writes into slots.statistics[{name!r}]; put a new tensor in its place")
        for name, tensor in slots.statistics.items():
            if name not in self.statistics:
                self._fail(f"{method} adds statistics {name!r}, not declared in `statistics` {self.statistics}")
            if method == "score" and tensor is not statistics.get(name):
                self._fail(f"score replaces slots.statistics[{name!r}]; only observe may")

    def _fail(self, rule: str) -> NoReturn:
        raise PolicyError(f"{self!r}: {rule}")


def _anything(given: object) -> object:
    """`given`, of which nothing is believed."""
    return given


def _reversed(slots: Slots, state: dict[str, Tensor]) -> tuple[Slots, Tensor]:
    """The same tokens in the opposite order of slots, and that order."""
    order = torch.arange(slots.positions.shape[-1]).flip(0).expand_as(slots.positions)
    store = Plain()
    store.restore({"keys": slots.keys().flip(2), "values": slots.values().flip(2)})
    turned = {name: tensor.flip(-1) for name, tensor in state.items()}
    return replace(slots, store=store, positions=slots.positions.flip(-1), state=turned), order
