"""How the cache calls a policy: shapes are checked, and errors name the policy and the layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from windlass.core.errors import PolicyError
from windlass.core.shapes import NewKeys, Queries, Scores, SlotPositions, TokenIds
from windlass.policies.base import TOKEN, WEIGHT, Observation, Policy, Slots
from windlass.policies.interfaces import Initializer, Trained
from windlass.policies.wrapper import find

UNKNOWN_STATE: Final = {TOKEN: -1.0, WEIGHT: 1.0}  # of tokens written while it was not kept; other state is 0


@contextmanager
def policy_errors(policy: Policy, layer: int) -> Iterator[None]:
    """Re-raise whatever a policy raises as a PolicyError that names it and the layer."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{policy!r} in layer {layer}: {type(error).__name__}: {error}") from error


def scores_of(policy: Policy, layer: int, slots: Slots) -> Scores:
    """The rank of every slot, as the policy gives it.

    Raises: PolicyError for whatever the policy raises, and for scores of another shape.
    """
    with policy_errors(policy, layer):
        score = policy.score(slots)
    if score.shape != slots.positions.shape:
        raise PolicyError(
            f"{policy!r} in layer {layer}: score has shape {tuple(score.shape)}, "
            f"expected {tuple(slots.positions.shape)} (batch, kv_heads, slots)"
        )
    return score


def observe(policy: Policy, layer: int, slots: Slots, seen: Observation) -> None:
    """Let the policy observe. Raises: PolicyError for whatever it raises."""
    with policy_errors(policy, layer):
        policy.observe(slots, seen)


def preprocess(
    policy: Policy, layer: int, queries: Queries, keys: NewKeys, ids: TokenIds | None
) -> tuple[Queries, NewKeys, dict[str, Tensor]]:
    """The queries and keys that attention reads, and the state that the new tokens start with, their ids included.

    Raises: PolicyError for whatever the policy raises, and for queries or keys of another shape.
    """
    ids_state = {} if ids is None else {TOKEN: ids[:, None]}
    trained = find(policy, Trained)
    if trained is None:
        return queries, keys, ids_state
    with policy_errors(policy, layer):
        new = trained.preprocess(queries, keys, layer)
    for what, given, wanted in (("queries", new.queries, queries), ("keys", new.keys, keys)):
        if given.shape != wanted.shape:
            raise PolicyError(
                f"{policy!r} in layer {layer}: preprocess gives {what} of shape {tuple(given.shape)}, "
                f"expected {tuple(wanted.shape)}"
            )
    return new.queries, new.keys, {**ids_state, **new.state}


def initial_state(
    policy: Policy, layer: int, heads: tuple[int, ...] | None, queries: Queries, keys: NewKeys
) -> dict[str, Tensor]:
    """The state that the policy gives new tokens for their queries and keys.

    Raises: PolicyError for whatever the policy raises, and for state of another shape.
    """
    initializer = find(policy, Initializer)  # type: ignore[type-abstract]  # none is made
    if initializer is None:
        return {}
    with policy_errors(policy, layer):
        state = initializer.initial_state(queries, keys, layer, heads)
    expected = keys.shape[0], keys.shape[1] if policy.needs.per_head else 1, keys.shape[2]
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected:
            raise PolicyError(
                f"{policy!r} in layer {layer}: initial_state gives {name!r} of shape {tuple(tensor.shape)}, "
                f"expected {expected}"
            )
    return state


def initial_writes(state: dict[str, Scores], initial_state: dict[str, Tensor]) -> list[tuple[Tensor, Tensor | float]]:
    """Each tensor of state with what new tokens start with, for `kernels.write_all`: 0 where nothing else is given."""
    known = {
        name: initial_state[name].expand(-1, tensor.shape[1], -1)
        for name, tensor in state.items()
        if name in initial_state
    }
    return [(tensor, known.get(name, 0.0)) for name, tensor in state.items()]


def unknown_state(names: tuple[str, ...], positions: SlotPositions) -> dict[str, Scores]:
    """The state of tokens that were written while none was kept."""
    return {name: torch.full_like(positions, UNKNOWN_STATE.get(name, 0.0), dtype=torch.float32) for name in names}
