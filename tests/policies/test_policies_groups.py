"""Groups of neighbours that shrink to one cell: the order by hand, and the cells of a cache."""

from dataclasses import replace

import pytest

from tests.helpers.models import Models, Text, read
from tests.helpers.policies import Given, OneForAll, given
from tests.helpers.slots import texts
from windlass import KVCache, PolicyError
from windlass.cache.options import policy_of
from windlass.policies import H2O, InGroups, KeyDiff, Leverage, Policy, Recent, Smoothed, SnapKV
from windlass.testing import check_policy


@pytest.mark.parametrize("window", [0, 9, 40])
@pytest.mark.parametrize("group", [2, 3, 4, 7, 8, 200])
def test_groups_shrink_pairs_first_those_with_the_lowest_best_score_first(group: int, window: int) -> None:
    policy = InGroups(Given(), group)
    slots = replace(given(policy, group), window=window)
    ends = slots.next_positions.tolist()

    score = policy.score(slots)
    for row, head, order in texts(slots):
        positions, best = slots.positions[row, head].tolist(), slots.state["given"][row, head].tolist()

        def turn(i: int) -> tuple[int, float, int, int]:
            members = [j for j in order if positions[j] // group == positions[i] // group]  # noqa: B023
            newest = max(positions[j] for j in members)  # noqa: B023
            age = newest - positions[i]  # noqa: B023
            halvings = 0  # the joining, to pairs, to fours, ..., with which the token goes
            while age and age % 2 ** (halvings + 1) == 0:
                halvings += 1
            waits = newest >= ends[row] - window  # noqa: B023
            return 2 if waits else age == 0, max(best[j] for j in members), age and halvings + 1, positions[i]  # noqa: B023

        assert sorted(order, key=score[row, head].tolist().__getitem__) == sorted(order, key=turn)


def test_a_group_of_four_becomes_two_pairs_and_then_one(attached_model: Models, text: Text) -> None:
    """By hand: token by token after a text of 20, groups [4, 5, 6, 7], [8, ...] of the oldest tokens first."""
    cache = KVCache(attached_model("llama"), 20, InGroups(Recent(), 4), sinks=4, window=3, merge="mean_count(next)")
    ids, seen = text(27), []
    for at in range(27):
        read(attached_model("llama"), cache, ids[:, at : at + 1], 1)
        layer = cache.layers[0]
        order = layer.positions[0, 0].argsort()
        held = [(int(layer.positions[0, 0, i]), int(layer.table.state["merged"][0, 0, i]) + 1) for i in order]
        seen.append([(at, count) for at, count in held if 4 <= at < 12])
    single = [(at, 1) for at in range(4, 12)]
    assert seen[19] == single
    assert seen[20] == [(5, 2), *single[2:]]
    assert seen[21] == [(5, 2), (7, 2), *single[4:]]
    assert seen[22] == [(7, 4), *single[4:]]
    assert seen[25] == [(7, 4), (11, 4)]
    assert seen[26] == [(7, 4), (11, 4)]


@pytest.mark.parametrize(("chunk", "budget"), [(1, 45), (6, 45), (77, 45), (13, 36)])
@pytest.mark.parametrize("policy", [KeyDiff(), SnapKV(), Recent()], ids=repr)
def test_a_cell_holds_one_group_and_every_token_is_in_a_cell(
    attached_model: Models, text: Text, policy: Policy, chunk: int, budget: int
) -> None:
    model, ids = attached_model("llama"), text(77, rows=2)
    cache = KVCache(
        model, budget, InGroups(policy, 4), sinks=3, window=6, chunk=chunk, batch=2, merge="mean_count(next)"
    )
    read(model, cache, ids, chunk)
    whole = 0
    for layer in cache.layers:
        for places, merged in zip(
            layer.positions.flatten(0, 1), layer.table.state["merged"].flatten(0, 1), strict=True
        ):
            held = {int(at): int(n) + 1 for at, n in zip(places, merged, strict=True) if at >= 0}
            assert sum(held.values()) == 77
            assert {*range(3), *range(71, 77)} <= set(held)
            for first in range(0, 77, 4):
                group = {at: held[at] for at in range(first, min(first + 4, 77)) if at in held}
                assert sum(group.values()) == min(4, 77 - first), "a group's tokens left it"
                whole += len(group) == 4
    assert whole > 4 * len(cache.layers), "a policy that chooses leaves groups whole"


@pytest.mark.parametrize(
    "policy", [InGroups(H2O(), 2), InGroups(KeyDiff(), 3), Smoothed(InGroups(Leverage(2), 4)), InGroups(OneForAll(), 5)]
)
def test_groups_keep_the_contract(policy: Policy) -> None:
    check_policy(policy)


def test_a_group_is_at_least_two() -> None:
    with pytest.raises(PolicyError, match="InGroups: group must be from 2 to 65536, got 1"):
        InGroups(KeyDiff(), 1)
    assert repr(InGroups(KeyDiff())) == "InGroups(policy=KeyDiff(), group=4)"
    assert policy_of("in_groups(key_diff, group=3)") == InGroups(KeyDiff(), 3)
