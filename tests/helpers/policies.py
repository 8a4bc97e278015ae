"""Policies made for a test, and the slots that one of them ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.helpers.slots import slots_of
from windlass.core.types import Scores
from windlass.policies import H2O, NAMES, WRAPPERS, KeyDiff, ModelSpecific, Needs, Policy, Slots

ALL_POLICIES: list[Policy] = [*(kind() for kind in NAMES.values()), *(kind(H2O()) for kind in WRAPPERS.values())]
"""Each policy, and each wrapper around one that keeps state."""


def made_by_default() -> dict[str, Policy]:
    """One of each policy by its name. Wrappers are around `KeyDiff`."""
    around = {name: kind(KeyDiff()) for name, kind in WRAPPERS.items()}
    return {name: kind() for name, kind in NAMES.items()} | around


Score = Callable[[Policy, Slots], object]


def by_position(_: Policy, slots: Slots) -> torch.Tensor:
    return slots.positions.float()


def policy(
    score: Score = by_position, is_frozen: bool = True, bases: tuple[type, ...] = (), **attributes: object
) -> Policy:
    """An instance of a policy class made of `score` and `attributes`."""
    names = {"score": score, "__doc__": "Made up.\n\nSource: none.\nDiffers: none.", **attributes}
    usual = (Policy, ModelSpecific) if "preprocess" in attributes else (Policy,)
    made: Any = type("Made", bases or usual, names)
    return dataclass(frozen=is_frozen)(made)()


def unchecked(**names: object) -> Needs:
    """Needs of a policy, of types that the tests would refuse."""
    needs = Needs()
    vars(needs).update(names)
    return needs


@dataclass(frozen=True)
class Given(Policy):
    """Ranks by its state. Source: none. Differs: none."""

    needs = Needs(state=("given",))

    def score(self, slots: Slots) -> Scores:
        return slots.state["given"]


@dataclass(frozen=True)
class OneForAll(Policy):
    """Ranks all heads by the positions. Source: none. Differs: none."""

    needs = Needs(per_head=False)

    def score(self, slots: Slots) -> Scores:
        return (slots.positions.float() * 7) % 10


def given(policy: Policy, seed: int = 0) -> Slots:
    """Scores with many ties, some negative, in free slots the highest."""
    slots = slots_of(seed, policy.needs.state)
    score = torch.randint(-3, 3, slots.positions.shape, generator=torch.Generator().manual_seed(seed)).float()
    slots.state["given"].copy_(score.where(slots.positions >= 0, 99.0))
    for name in set(policy.needs.state) - {"given"}:
        slots.state[name].zero_()
    return slots
