"""A policy's statistics of a text's queries: right, never lost, and declared."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import assert_same, bytes_of_slots
from tests.helpers.models import Models, Text, read
from tests.helpers.policies import policy as made
from tests.helpers.policies import unchecked
from tests.helpers.slots import BATCH, HEAD_DIM, HEADS, KV_HEADS, observe, turned_slots
from windlass import KVCache, PolicyError, kernels
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.core.inputs import AttentionInput, DecodeInput, Mass
from windlass.core.positions import EMPTY
from windlass.core.step import AttentionCall, Limits, Step
from windlass.policies import H2O, Compactor, ExpectedAttention, Needs, Observation, Policy, Slots, TriAttention
from windlass.positions.modes import Original
from windlass.stores.formats import Plain
from windlass.testing import check_policy

STATISTICS = {ExpectedAttention: ("count", "covariance", "mean"), TriAttention: ("count", "lengths", "mean")}


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_are_those_of_all_queries_so_far(kind: type[Policy]) -> None:
    policy, slots = kind(), turned_slots()
    seen = observe(policy, slots)
    start = policy.skipped if isinstance(policy, ExpectedAttention) else 0
    assert sorted(slots.statistics) == list(STATISTICS[kind])
    for row in range(BATCH):
        queries = [q for p, q in seen[row].items() if p >= start]
        assert slots.statistics["count"][row].item() == len(queries)
        stacked = torch.stack(queries, 1) if queries else torch.zeros(HEADS, 1, HEAD_DIM, dtype=torch.float64)
        torch.testing.assert_close(slots.statistics["mean"][row].double(), stacked.mean(1), rtol=1e-5, atol=1e-6)
        if kind is ExpectedAttention:
            for head in range(HEADS):
                truth = torch.cov(stacked[head].T, correction=0)
                torch.testing.assert_close(
                    slots.statistics["covariance"][row, head].double(), truth, atol=1e-5, rtol=1e-5
                )


def test_a_row_that_observes_nothing_keeps_its_statistics_to_the_bit() -> None:
    policy, slots = ExpectedAttention(), turned_slots()
    observe(policy, slots)
    before = dict(slots.statistics)
    nothing = torch.full((BATCH, 1), EMPTY)
    policy.observe(
        slots, Observation(torch.zeros(slots.positions.shape), torch.randn(BATCH, HEADS, 1, HEAD_DIM), nothing)
    )
    assert all(slots.statistics[name].equal(tensor) for name, tensor in before.items())


def layer_with(policy: Policy, steps: tuple[int, ...], draw: torch.Generator) -> tuple[SlotLayer, Tensor]:
    """A layer that read steps of so many tokens, two rows, and all queries."""
    layer, at, queries = SlotLayer(0, Limits(12, 2, 3, 8, 16), policy, None, Plain()), 0, []
    for tokens in steps:
        end = at + tokens
        q, k = (torch.randn(2, heads, tokens, HEAD_DIM, generator=draw) for heads in (HEADS, KV_HEADS))
        step = Step(
            torch.arange(at, end).expand(2, -1), (tokens,) * 2, torch.tensor([end] * 2), torch.tensor([end] * 2), end
        )
        layer.step(LayerCall(q, k, k, step, Original(), AttentionCall(0.4)))
        queries.append(q)
        at = end
    return layer, torch.cat(queries, 2)


def test_a_layer_shows_its_policy_every_query_once() -> None:
    layer, queries = layer_with(TriAttention(), (8, 8, 1, 1, 5, 1), torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer.table.statistics["mean"], queries.mean(2), rtol=1e-5, atol=1e-6)
    assert layer.table.statistics["count"].flatten().tolist() == [24.0, 24.0]


@dataclass(frozen=True)
class CountsQueries(Policy):
    """Counts, in every slot, the queries that it is shown. Source: none. Differs: nothing."""

    needs = Needs(state=("seen",), mass=False)
    observed_queries = None

    def observe(self, slots: Slots, observation: Observation) -> None:
        slots.state["seen"] += (observation.positions >= 0).sum(-1)[:, None, None]

    def score(self, slots: Slots) -> Tensor:
        return slots.positions.float()


def test_a_policy_of_all_queries_is_shown_each_of_a_long_step_once() -> None:
    layer, queries = layer_with(ExpectedAttention(skipped=0), (40, 1, 23, 2), torch.Generator().manual_seed(5))
    torch.testing.assert_close(layer.table.statistics["mean"], queries.mean(2), rtol=1e-5, atol=1e-6)
    assert layer.table.statistics["count"].flatten().tolist() == [66.0, 66.0]
    layer, _ = layer_with(CountsQueries(), (40, 1, 23), torch.Generator().manual_seed(5))
    is_held = layer.positions[0, 0] >= 0
    counts = dict(zip(layer.positions[0, 0, is_held].tolist(), layer.table.state["seen"][0, 0, is_held], strict=True))
    assert counts == {0: 64, 1: 64} | dict.fromkeys(range(54, 64), 23)


@pytest.mark.parametrize(
    "policy", [ExpectedAttention(), TriAttention(observed_queries=9), Compactor(), H2O()], ids=repr
)
def test_mass_is_computed_only_for_who_reads_it(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    given: list[bool] = []

    def attend(call: AttentionInput) -> tuple[Tensor, Mass | None]:
        given.append(call.observed is not None)
        return reference(call)

    def planned(self: object, new: DecodeInput) -> object:
        given.append(new.is_observed)
        return own(self, new)  # type: ignore[arg-type]  # of a class that may not be there

    reference = kernels.attend
    monkeypatch.setattr(kernels, "attend", attend)
    if kernels.has_decode("cpu"):
        from windlass.kernels.cpu.decode import Decode  # it needs the compiled module

        own = Decode.planned
        monkeypatch.setattr(Decode, "planned", planned)
    layer_with(policy, (40, 8, 1), torch.Generator().manual_seed(6))
    assert given == [policy.needs.mass] * (1 + 8 + 1)  # the step of 8 is taken token by token
    assert policy.needs.mass == (policy == H2O())


@pytest.mark.parametrize(("policy", "kept"), [(ExpectedAttention(), 16), (TriAttention(observed_queries=9), 25)])
def test_a_record_holds_few_of_a_long_steps_queries(policy: Policy, kept: int) -> None:
    """As many as are observed, and as many as can be rolled back: not those of the whole chunk."""
    layer, queries = layer_with(policy, (40,), torch.Generator().manual_seed(7))
    held = layer.history.records[-1].queries
    assert held is not None
    assert held.equal(queries[:, :, 40 - kept :].flip(2))
    assert held.untyped_storage().nbytes() == held.nbytes


@pytest.mark.parametrize("policy", [ExpectedAttention(future=5), CountsQueries()], ids=repr)
@pytest.mark.parametrize("lost", [1, 7, 16])
def test_a_part_of_a_long_step_is_rolled_back_though_its_queries_are_gone(
    attached_model: Models, text: Text, policy: Policy, lost: int
) -> None:
    model, ids = attached_model("llama"), text(60, rows=2)
    caches = [KVCache(model, budget=14, policy=policy, window=2, batch=2) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :3], 3)
    read(model, caches[0], ids[:, 3:48], 45)
    caches[0].rollback(lost)
    read(model, caches[1], ids[:, 3 : 48 - lost], 45)
    assert_same(*caches)
    assert not caches[0].layers[0].can_roll_back([17 - lost] * 2)


def test_only_the_last_queries_of_a_step_are_taken_where_so_asked() -> None:
    layer, queries = layer_with(TriAttention(observed_queries=3), (18, 17), torch.Generator().manual_seed(3))
    last = torch.cat((queries[:, :, 15:18], queries[:, :, 32:35]), 2)
    torch.testing.assert_close(layer.table.statistics["mean"], last.mean(2), rtol=1e-5, atol=1e-6)


def test_statistics_go_with_their_row() -> None:
    layer, _ = layer_with(ExpectedAttention(), (8, 8, 1), torch.Generator().manual_seed(4))
    before = {name: tensor.clone() for name, tensor in layer.table.statistics.items()}
    assert not before["mean"][0].allclose(before["mean"][1])
    layer.select_rows(torch.tensor([1, 0, 1]))
    assert all(layer.table.statistics[name].equal(tensor[[1, 0, 1]]) for name, tensor in before.items())
    layer.copy_row(1, 2)
    assert all(layer.table.statistics[name].equal(tensor[[1, 0, 0]]) for name, tensor in before.items())
    assert layer.table.statistics.keys() == {
        name.removeprefix("statistics.") for name in layer.tensors() if "." in name
    }


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_are_saved_and_taken_back(
    kind: type[Policy], attached_model: Models, text: Text, tmp_path: Path
) -> None:
    model, ids = attached_model("llama_yarn"), text(60, rows=2)
    cache = KVCache(model, budget=20, policy=kind(), sinks=2, window=3, batch=2)
    read(model, cache, ids[:, :40], 40)
    before = [{name: tensor.clone() for name, tensor in layer.table.statistics.items()} for layer in cache.layers]
    size = sum(tensor.nbytes for layer in cache.layers for tensor in layer.table.statistics.values())
    assert size > 0
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    read(model, cache, ids[:, 40:46], 6)
    assert not cache.layers[0].table.statistics["mean"].equal(before[0]["mean"])
    cache.rollback(6)
    for one in (cache, loaded):
        for layer, was in zip(one.layers, before, strict=True):
            assert layer.table.statistics.keys() == was.keys()
            assert all(layer.table.statistics[name].equal(tensor) for name, tensor in was.items())
    plain = KVCache(model, budget=20, policy=H2O(), sinks=2, window=3, batch=2)
    read(model, plain, ids[:, :40], 40)
    read(model, plain, ids[:, 40:46], 6)
    mass = sum(layer.table.state["mass"].nbytes for layer in plain.layers)
    assert bytes_of_slots(cache) == bytes_of_slots(plain) - mass + size
    loaded.reset()
    assert all(not layer.table.statistics for layer in loaded.layers)


def undeclared(_: Policy, slots: Slots, observation: Observation) -> None:
    slots.statistics["other"] = observation.queries.mean(2)


def in_place(_: Policy, slots: Slots, observation: Observation) -> None:
    slots.statistics.setdefault("mean", torch.zeros_like(observation.queries[:, :, 0])).add_(1.0)


def in_score(_: Policy, slots: Slots) -> Tensor:
    slots.statistics["mean"] = slots.positions.float()
    return slots.positions.float()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"needs": unchecked(statistics="mean")}, r"Made.needs.statistics is 'mean'. Declare a tuple of names"),
        ({"observed_queries": 1, "observe": undeclared}, r"adds statistics 'other', not declared in `statistics` \(\)"),
        (
            {"observed_queries": 1, "observe": in_place, "needs": Needs(statistics=("mean",))},
            r"observe writes into slots\.statistics\['mean'\]. Put a new tensor in its place",
        ),
        (
            {"score": in_score, "needs": Needs(statistics=("mean",))},
            r"score replaces slots\.statistics\['mean'\]. Only observe may",
        ),
    ],
    ids=["no tuple", "undeclared", "in place", "in score"],
)
def test_what_is_wrong_with_statistics_is_named(broken: dict[str, object], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        check_policy(made(**broken))  # type: ignore[arg-type]
