"""Which of a step's queries a policy observes, and what it is shown of them."""

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable
from windlass.core.record import Settled, StepRecord
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import ObservedColumns, Queries
from windlass.core.step import HEADROOM, Limits, Step
from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.calls import observe
from windlass.positions.rotary import Rotation


def observed_columns(step: Step, wanted: int | None) -> ObservedColumns | None:
    """Columns of the queries that are kept apart, each row's newest first; -1 fills up.

    HEADROOM more than the `wanted` last ones, so that this many tokens of the step can be taken back.
    """
    if wanted == 0:
        return None
    if step.positions.shape[1] == 1:  # at decode, in one operation
        return step.first_columns
    return newest_columns(step)[:, : (wanted or 0) + HEADROOM]


def newest_columns(step: Step) -> ObservedColumns:
    """Columns of each row's tokens, the newest first; -1 fills up."""
    columns = torch.arange(step.positions.shape[1], device=step.positions.device)
    return columns.where(step.positions >= 0, -1).sort(-1, descending=True).values


def queries_at(queries: Queries, columns: ObservedColumns) -> Tensor:
    """The queries of these columns (batch, heads, observed, head_dim), in memory of their own.

    So a record does not hold those of a whole chunk.
    """
    if queries.shape[2] == 1:
        return queries.detach()
    rows = torch.arange(queries.shape[0], device=queries.device)[:, None]
    return queries.detach().transpose(1, 2)[rows, columns.clamp(min=0)].transpose(1, 2)


def settle(policy: Policy, layer: int, slots: Callable[[], Slots], queries: Queries, step: Step) -> Settled | None:
    """Let a policy that asks for all queries, and not for their mass, observe those of them that no record keeps.

    These stand as long as any token of the step can be rolled back alone. Returns what the policy has noted by
    then; None where the record keeps all queries. `slots` is called only where it is needed.
    """
    if policy.needs.mass or policy.observed_queries is not None or queries.shape[2] <= HEADROOM:
        return None
    columns, seen = newest_columns(step)[:, HEADROOM:], slots()
    positions = step.positions.gather(1, columns.clamp(min=0)).where(columns >= 0, EMPTY)
    observe(policy, layer, seen, Observation(_no_mass(queries), queries_at(queries, columns), positions))
    return Settled({name: tensor.clone() for name, tensor in seen.state.items()}, dict(seen.statistics))


def _no_mass(queries: Queries) -> Tensor:
    return torch.zeros(queries.shape[0], queries.shape[1], 0, device=queries.device)


def observation(record: StepRecord, wanted: int | None) -> Observation:
    """The last `wanted` queries (None: all) of those of the step's tokens that still stand."""
    assert record.observed is not None, "a step that nobody observed"
    assert record.queries is not None, "a step whose queries were not kept"
    queries, mass = record.queries, _no_mass(record.queries)
    if record.step.positions.shape[1] == 1 and not any(record.rolled_back):  # at decode, with less to do
        if record.mass is not None:
            mass = record.mass.rows[:, :, 0]
        return Observation(mass, queries, record.step.positions)
    rolled_back = torch.tensor(record.rolled_back, device=queries.device)[:, None]
    age = torch.arange(queries.shape[2], device=queries.device)[None]
    is_seen = (age >= rolled_back) & (record.observed >= 0)
    if wanted is not None:
        is_seen &= age < rolled_back + wanted
    if record.mass is not None:
        mass = torch.einsum("bhos,bo->bhs", record.mass.rows, is_seen.to(record.mass.rows.dtype))
        if record.mass.rest is not None:
            mass = mass + record.mass.rest
    positions = record.step.positions.gather(1, record.observed.clamp(min=0))
    return Observation(mass, queries, positions.where(is_seen, EMPTY))


def slots_view(
    table: SlotTable, limits: Limits, rotation: Rotation, step: Step, layer: int, layers: int, heads: Heads | None
) -> Slots:
    """The kv `heads` of layer number `layer` of `layers`, as a policy sees them after `step`."""
    return Slots(
        table.store,
        table.positions.clamp(min=EMPTY),
        table.state,
        step.next_positions,
        step.prompt_ends,
        rotation.rotate,
        rotation.step_angles,
        rotation.query_gain,
        table.statistics,
        limits.sinks,
        limits.window,
        layer,
        layers,
        heads,
    )
