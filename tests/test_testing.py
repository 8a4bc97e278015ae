"""`check_policy` finds every broken rule, and names it."""

from typing import ClassVar

import pytest
import torch

from tests.helpers.policies import policy, unchecked
from windlass import KVCache, PolicyError, UsageError
from windlass.cache import layer as slot_layer
from windlass.policies import NAMES, Initializer, Needs, NewTokens, Observation, Policy, Recent, Slots
from windlass.testing import check_on_models, check_policy, tiny_model


@pytest.mark.parametrize("name", NAMES)
def test_ours_pass(name: str) -> None:
    check_policy(NAMES[name]())


def test_a_policy_that_keeps_the_contract_passes() -> None:
    check_policy(policy())
    check_policy(policy(needs=Needs(per_head=False)))


def written(_: Policy, slots: Slots) -> torch.Tensor:
    return slots.positions.add_(1).float()


def keys_written(_: Policy, slots: Slots) -> torch.Tensor:
    return slots.keys().mul_(2).sum(-1)


def values_written(_: Policy, slots: Slots) -> torch.Tensor:
    return slots.values().mul_(2).sum(-1)


def state_added(_: Policy, slots: Slots) -> torch.Tensor:
    return slots.state.setdefault("mass", slots.positions.float())


def by_slot(_: Policy, slots: Slots) -> torch.Tensor:
    return torch.arange(slots.positions.shape[-1]).expand(slots.positions.shape).float()


def state_replaced(_: Policy, slots: Slots, observation: Observation) -> None:
    slots.state["mass"] = observation.mass


def keys_hidden(_: Policy, queries: torch.Tensor, keys: torch.Tensor, *__: object) -> NewTokens:
    return NewTokens(queries, keys.mul_(2))


def state_given(_: Policy, queries: torch.Tensor, keys: torch.Tensor, *__: object) -> NewTokens:
    return NewTokens(queries, keys, {"mass": keys[:, :1].sum(-1)})


def a_head_left_out(_: Policy, queries: torch.Tensor, keys: torch.Tensor, *__: object) -> NewTokens:
    return NewTokens(queries, keys[:, 1:])


def new_state_given(_: Policy, __: torch.Tensor, keys: torch.Tensor, *___: object) -> dict[str, torch.Tensor]:
    return {"mass": keys[:, :1].sum(-1)}


def new_keys_hidden(_: Policy, __: torch.Tensor, keys: torch.Tensor, *___: object) -> dict[str, torch.Tensor]:
    keys.mul_(2)
    return {}


def observing_fails(*_: object) -> None:
    raise ValueError("out of luck")


BROKEN: dict[str, tuple[Policy, str]] = {
    "rank": (policy(lambda _, s: s.positions.float().sum(1)), r"score has shape \(2, 28\), expected \(2, 3, 28\)"),
    "heads": (policy(lambda _, s: s.positions.float()[:, :1]), r"score has shape \(2, 1, 28\), expected \(2, 3, 28\)"),
    "nothing": (policy(lambda _, __: None), "score gives NoneType"),
    "nan": (policy(lambda _, s: s.positions * torch.nan), "score gives NaN"),
    "positions": (policy(written), r"score writes to slots\.positions"),
    "keys": (policy(keys_written), r"score writes to slots\.keys"),
    "values": (policy(values_written), r"score writes to slots\.values"),
    "undeclared": (policy(lambda _, s: s.state["mass"]), "score uses state 'mass', which is not declared"),
    "added": (policy(state_added), "score adds state 'mass', which is not declared"),
    "replaced": (
        policy(needs=Needs(state=("mass",)), observed_queries=1, observe=state_replaced),
        r"replaces slots\.state\['mass'\]",
    ),
    "state": (policy(needs=unchecked(state="mass")), "Declare a tuple of names"),
    "observed": (policy(observed_queries=-1), "observed_queries is -1"),
    "frozen": (policy(is_frozen=False), "Made is not a frozen dataclass"),
    "field": (policy(__annotations__={"how": "str"}, how="max"), r"Made.how is 'max'\. .* plain numbers"),
    "chance": (policy(lambda _, s: torch.rand(s.positions.shape)), "differs between two calls"),
    "order": (policy(by_slot), "depends on the order of the slots"),
    "raises": (policy(lambda _, s: s.positions / s.nowhere), "score raises AttributeError: .*nowhere"),  # type: ignore[attr-defined]
    "observes": (policy(observed_queries=None, observe=observing_fails), "observe raises ValueError: out of luck"),
    "arrives": (policy(preprocess=keys_hidden), "preprocess writes into the model's queries or keys"),
    "given": (policy(preprocess=state_given), r"preprocess gives state 'mass', which is not declared in `state` \(\)"),
    "given shape": (
        policy(preprocess=state_given, needs=Needs(state=("mass",))),
        r"preprocess gives state 'mass' of shape \(2, 1, 7\), expected \(2, 3, 7\)",
    ),
    "left out": (
        policy(preprocess=a_head_left_out),
        r"preprocess gives keys of shape \(2, 2, 7, 8\), expected \(2, 3, 7, 8\)",
    ),
    "new state": (
        policy(bases=(Policy, Initializer), initial_state=new_state_given),
        r"initial_state gives state 'mass', which is not declared in `state` \(\)",
    ),
    "new state's shape": (
        policy(bases=(Policy, Initializer), initial_state=new_state_given, needs=Needs(state=("mass",))),
        r"initial_state gives state 'mass' of shape \(2, 1, 7\), expected \(2, 3, 7\)",
    ),
    "new tokens": (
        policy(bases=(Policy, Initializer), initial_state=new_keys_hidden),
        "initial_state writes into the model's queries or keys",
    ),
    "no initializer": (policy(initial_state=new_state_given), "Made is no Initializer. Derive the class from"),
    "docstring": (policy(__doc__="Made up. Source: none."), "docstring of Made lacks Differs:"),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_named(rule: str) -> None:
    broken, message = BROKEN[rule]
    with pytest.raises(PolicyError, match=message):
        check_policy(broken)


def test_a_class_without_the_decorator_is_not_a_dataclass() -> None:
    class Plain(Recent):
        """Source: none. Differs: none."""

        extra: ClassVar[int] = 1

    with pytest.raises(PolicyError, match="Plain is not a frozen dataclass"):
        check_policy(Plain())


def test_unknown_family() -> None:
    with pytest.raises(UsageError, match=r"'llamma' is unknown\. Use one of: llama, "):
        tiny_model("llamma")


def test_a_tiny_model_is_the_same_at_every_call() -> None:
    state = torch.get_rng_state()
    one, other = tiny_model("gpt_oss"), tiny_model("gpt_oss")
    assert torch.equal(torch.get_rng_state(), state)
    assert not one.training
    for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same)


# One of each kind: latents, shared keys, chunks, norms after RoPE, states beside attention.
KINDS = ("llama", "deepseek_v3", "gemma3n", "llama4", "hunyuan", "qwen3_next")


@pytest.mark.parametrize(
    "name", ["h2o", *(pytest.param(name, marks=pytest.mark.slow) for name in ("key_diff", "kvzip"))]
)
def test_policies_work_on_models_of_every_kind(name: str) -> None:
    check_on_models(NAMES[name](), KINDS)


def test_a_policy_that_keeps_too_much_is_found_on_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_layer, "_evict", lambda _table, _rules, record, *_: record)
    with pytest.raises(PolicyError, match="keeps 45 tokens in layer 0 of a deepseek_v3 model, with a budget of 20"):
        check_on_models(Recent(), ("deepseek_v3",))


def test_a_policy_that_changes_what_is_read_is_found_on_models(monkeypatch: pytest.MonkeyPatch) -> None:
    own = KVCache.attend

    def steep(cache: KVCache, layer: int, queries: torch.Tensor, *others: object) -> object:
        return own(cache, layer, queries * (1 if cache.budget is None else 1.01), *others)  # type: ignore[arg-type]

    monkeypatch.setattr(KVCache, "attend", steep)
    with pytest.raises(PolicyError, match="changes the logits of a qwen3_next model though nothing is evicted"):
        check_on_models(Recent(), ("qwen3_next",))
