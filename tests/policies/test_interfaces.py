"""Interfaces of a policy beyond its scores: found through wrappers, and refused where nothing would use them."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, read
from tests.helpers.policies import policy as made
from tests.helpers.shares import APART
from windlass import KVCache, PolicyError, PromptCacheError, Shares
from windlass.core.types import ModelInfo, NewKeys, Queries, Scores
from windlass.hf.prompt_cache_format import PolicyHeader
from windlass.hf.weights import fingerprint
from windlass.policies import (
    DMC,
    FROM_FILES,
    NAMES,
    TOVA,
    WRAPPERS,
    Budgeter,
    ByValueNorm,
    Composite,
    InGroups,
    Initializer,
    KeyDiff,
    KVzip,
    ModelSpecific,
    Needs,
    OneShot,
    Policy,
    Pyramid,
    Recent,
    Slots,
    Smoothed,
    find,
)
from windlass.policies.base import PerToken
from windlass.policies.wrappers import changes_keys, keeps_newest, scoring_chunk
from windlass.testing import check_policy


@dataclass(frozen=True)
class OneInEach(Policy):
    """Layer n keeps every nth position of as many as there are layers. Source: none. Differs: none."""

    def score(self, slots: Slots) -> Scores:
        return (slots.positions % slots.layers == slots.layer).float()


def test_slots_tell_their_layer(attached_model: Models, text: Text) -> None:
    check_policy(OneInEach())
    model = attached_model("smollm3")  # four layers
    cache = KVCache(model, 12, OneInEach(), sinks=1, window=1, chunk=40)
    read(model, cache, text(40), 40)
    for index, layer in enumerate(cache.layers):
        newest = [p for p in range(1, 39) if p % 4 == index][-10:]
        others = [p for p in range(1, 39) if p % 4 != index][len(newest) - 10 :] if len(newest) < 10 else []
        expected = sorted([0, *newest, *others, 39])
        for head in layer.positions[0].tolist():
            assert sorted(p for p in head if p >= 0) == expected


def test_the_outermost_that_offers_it_is_found() -> None:
    composite = Composite(KeyDiff())
    assert find(Pyramid(composite), OneShot) is composite
    pyramid = Pyramid(KeyDiff(), 3)
    nested = Smoothed(pyramid)
    assert find(nested, Budgeter) is pyramid  # type: ignore[type-abstract]
    assert find(nested, OneShot) is None
    assert [scoring_chunk(each) for each in (KeyDiff(), composite, Composite(ByValueNorm(KVzip(9))))] == [0, 0, 9]
    assert [keeps_newest(each) for each in (Recent(), Pyramid(Recent()), Smoothed(Recent()))] == [True, True, False]


def test_a_wrapper_needs_what_is_inside_and_its_own() -> None:
    assert Smoothed(InGroups(TOVA())).needs == Needs(state=("last", "smoothed", "weight"), per_head=False)
    assert InGroups(TOVA()).observed_queries == 1
    assert repr(InGroups(TOVA())) == "InGroups(policy=TOVA(), group=4)"


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (
            {"budgets": lambda *_: []},
            r"Made.budgets is never used: Made is no Budgeter. Derive the class",
        ),
        ({"scoring_chunk": 4}, r"Made.scoring_chunk is never used: Made is no OneShot"),
        ({"needs": ("mass",)}, r"Made.needs is \('mass',\). Declare Needs, such as needs = Needs\(state="),
    ],
    ids=["budgets", "second pass", "needs"],
)
def test_what_nothing_would_use_is_named(attributes: dict[str, object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        check_policy(made(**attributes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Asking(Policy, ModelSpecific):
    """Keeps the facts that it gets of a model. Source: none. Differs: none."""

    told: list[ModelInfo] = field(default_factory=list)

    def check(self, model: ModelInfo) -> None:
        self.told.append(model)

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float()


def test_a_policy_is_told_of_the_model(attached_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy, asked = attached_model("qwen2"), Asking(), list[PreTrainedModel]()

    def ask(model: PreTrainedModel) -> str:
        asked.append(model)
        return fingerprint(model)

    monkeypatch.setattr("windlass.hf.forward.fingerprint", ask)
    KVCache(model, 20, Smoothed(policy))
    [told] = policy.told
    assert (told.name, told.dtype, told.layers) == ("Qwen2ForCausalLM", torch.float32, 4)
    assert not asked, "the weights were read though nobody asked"
    assert told.fingerprint() == fingerprint(model)
    assert asked == [model]


@dataclass(frozen=True)
class Placed(Policy, Initializer):
    """Keeps tokens by the facts it gets of their place, and notes these. Source: none. Differs: none."""

    told: set[tuple[str, int, tuple[int, ...] | None]] = field(default_factory=set)

    needs = Needs(state=("number", "unset"))

    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        assert queries.shape[1] == 5 * keys.shape[1]
        self.told.add(("new", layer, heads))
        numbers = torch.tensor([layer * 10 + head for head in heads or range(3)], dtype=torch.float32)
        return {"number": numbers[:, None].expand(keys.shape[:-1]).clone()}

    def score(self, slots: Slots) -> Scores:
        self.told.add(("slots", slots.layer, slots.heads))
        assert not slots.state["unset"].any()
        return slots.state["number"] + slots.positions


@pytest.mark.parametrize("shares", [None, Shares(APART)], ids=["whole", "groups"])
def test_a_policy_is_told_the_layer_and_the_heads(attached_model: Models, text: Text, shares: Shares | None) -> None:
    """And new tokens start with the state that it gives, in a prompt and in decode."""
    policy, model, ids = Placed(), attached_model("llama"), text(40, rows=2)
    cache = KVCache(model, 16, Smoothed(policy), sinks=2, window=3, batch=2, shares=shares)
    for piece in ids.split([30, 1, 1, 8], 1):
        read(model, cache, piece, 30)
    places = [(0, None), (1, None)] if shares is None else [(0, (0, 2)), (0, (1,)), (1, (0, 1)), (1, (2,))]
    assert policy.told == {(when, *place) for when in ("new", "slots") for place in places}
    for own in cache.layers:
        expected = torch.tensor([own.index * 10 + head for head in own.heads or range(3)])[None, :, None]
        assert ((own.table.state["number"] == expected) | (own.positions < 0)).all()


def test_every_policy_is_named_and_public() -> None:
    """A policy needs its line in `windlass/policies/__init__.py`, and all but wrappers a file of their own."""
    found: dict[str, list[str]] = {}
    for path in Path(windlass.policies.__file__ or "").parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and "score" in {getattr(each, "name", "") for each in node.body}:
                found.setdefault(path.stem, []).append(node.name)
    del found["base"], found["calls"]  # not policies themselves: the contract, and calls under tensor parallelism
    assert [kind.__name__ for kind in WRAPPERS.values()] == found.pop("wrappers")
    assert {name: [kind.__name__] for name, kind in (NAMES | FROM_FILES).items()} == found
    for name, kind in (NAMES | WRAPPERS | FROM_FILES).items():
        assert getattr(windlass.policies, kind.__name__) is kind
        assert name.replace("_", "") == kind.__name__.lower()


def test_a_file_of_another_windlass_is_refused(tmp_path: Path) -> None:
    """`KVzip` had a field of another name once."""
    header = PolicyHeader(name="kvzip", fields={"repeat": 128}, label="KVzip(repeat=128)")
    words = r"written by a windlass whose policy was KVzip\(repeat=128\). This one has KVzip\(scoring_chunk=128\)"
    with pytest.raises(PromptCacheError, match=words):
        header.made(tmp_path / "file")


def test_only_some_policies_change_what_attention_reads() -> None:
    assert changes_keys(Smoothed(DMC()))
    assert not any(changes_keys(policy) for policy in (KeyDiff(), Smoothed(Asking()), Placed()))


def test_a_wrong_shape_of_new_state_is_named(attached_model: Models, text: Text) -> None:
    def too_short(_: Policy, __: Queries, keys: NewKeys, *___: object) -> PerToken:
        return {"number": keys[:, :1, :, 0]}

    policy = made(bases=(Policy, Initializer), initial_state=too_short, needs=Needs(state=("number",)))
    model = attached_model("llama")
    with pytest.raises(PolicyError, match=r"initial_state gives 'number' of shape \(1, 1, 9\), expected \(1, 3, 9\)"):
        read(model, KVCache(model, 20, policy), text(9), 9)
