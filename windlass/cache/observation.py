"""Which of a step's queries a policy observes, and what it is shown of them."""

import torch

from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import ObservedColumns
from windlass.core.step import SPARE, Record, Step
from windlass.policies.base import Observation


def observed_columns(step: Step, wanted: int | None) -> ObservedColumns | None:
    """Columns of the queries whose mass is kept apart, each row's newest first; -1 fills up.

    SPARE more than the `wanted` last ones, so that this many tokens of the step can be taken back.
    """
    if wanted == 0:
        return None
    if step.positions.shape[1] == 1:  # at decode, in one operation
        return step.positions.clamp(max=0)
    count = min(step.positions.shape[1], (wanted or 0) + SPARE)
    columns = torch.arange(step.positions.shape[1], device=step.positions.device)
    return columns.where(step.positions >= 0, -1).sort(-1, descending=True).values[:, :count]


def observation(record: Record, wanted: int | None) -> Observation:
    """The last `wanted` queries (None: all) of those of the step's tokens that still stand."""
    assert record.mass is not None, "a step that nobody observed"
    assert record.observed is not None, "mass of unknown queries"
    assert record.queries is not None, "a step whose queries were not kept"
    rows = record.mass.rows
    if record.step.positions.shape[1] == 1 and not any(record.undone):  # at decode, with less to do
        return Observation(rows[:, :, 0], record.queries, record.step.positions)
    undone = torch.tensor(record.undone, device=rows.device)[:, None]
    age = torch.arange(rows.shape[2], device=rows.device)[None]
    is_seen = (age >= undone) & (record.observed >= 0)
    if wanted is not None:
        is_seen &= age < undone + wanted
    mass = torch.einsum("bhos,bo->bhs", rows, is_seen.to(rows.dtype))
    if record.mass.rest is not None:
        mass = mass + record.mass.rest
    columns = record.observed.clamp(min=0)
    heads, head_dim = record.queries.shape[1], record.queries.shape[3]
    queries = record.queries.gather(2, columns[:, None, :, None].expand(-1, heads, -1, head_dim))
    return Observation(mass, queries, record.step.positions.gather(1, columns).where(is_seen, EMPTY))
