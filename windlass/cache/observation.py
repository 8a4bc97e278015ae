"""Which of a step's queries a policy observes, and what it is shown of them."""

import torch

from windlass.cache.slot_table import SlotTable
from windlass.core.record import StepRecord
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import ObservedColumns
from windlass.core.step import HEADROOM, Limits, Step
from windlass.policies.base import Observation, Slots
from windlass.positions.rotary import Rotation


def observed_columns(step: Step, wanted: int | None) -> ObservedColumns | None:
    """Columns of the queries whose mass is kept apart, each row's newest first; -1 fills up.

    HEADROOM more than the `wanted` last ones, so that this many tokens of the step can be taken back.
    """
    if wanted == 0:
        return None
    if step.positions.shape[1] == 1:  # at decode, in one operation
        return step.positions.clamp(max=0)
    count = min(step.positions.shape[1], (wanted or 0) + HEADROOM)
    columns = torch.arange(step.positions.shape[1], device=step.positions.device)
    return columns.where(step.positions >= 0, -1).sort(-1, descending=True).values[:, :count]


def observation(record: StepRecord, wanted: int | None) -> Observation:
    """The last `wanted` queries (None: all) of those of the step's tokens that still stand."""
    assert record.mass is not None, "a step that nobody observed"
    assert record.observed is not None, "mass of unknown queries"
    assert record.queries is not None, "a step whose queries were not kept"
    rows = record.mass.rows
    if record.step.positions.shape[1] == 1 and not any(record.rolled_back):  # at decode, with less to do
        return Observation(rows[:, :, 0], record.queries, record.step.positions)
    rolled_back = torch.tensor(record.rolled_back, device=rows.device)[:, None]
    age = torch.arange(rows.shape[2], device=rows.device)[None]
    is_seen = (age >= rolled_back) & (record.observed >= 0)
    if wanted is not None:
        is_seen &= age < rolled_back + wanted
    mass = torch.einsum("bhos,bo->bhs", rows, is_seen.to(rows.dtype))
    if record.mass.rest is not None:
        mass = mass + record.mass.rest
    columns = record.observed.clamp(min=0)
    heads, head_dim = record.queries.shape[1], record.queries.shape[3]
    queries = record.queries.gather(2, columns[:, None, :, None].expand(-1, heads, -1, head_dim))
    return Observation(mass, queries, record.step.positions.gather(1, columns).where(is_seen, EMPTY))


def slots_view(table: SlotTable, limits: Limits, rotation: Rotation, step: Step, layer: int, layers: int) -> Slots:
    """Layer number `layer` of `layers` as a policy sees it after `step`."""
    return Slots(
        table.store,
        table.positions.clamp(min=EMPTY),
        table.state,
        step.next_positions,
        step.prompt_ends,
        rotation.rotate,
        rotation.step_angles,
        table.statistics,
        limits.sinks,
        limits.window,
        layer,
        layers,
    )
