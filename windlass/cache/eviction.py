"""Eviction: the tokens that rank lowest leave their slots, and may be merged into others."""

from dataclasses import replace

from windlass import kernels
from windlass.cache.history import Checkpoint
from windlass.cache.layer_config import LayerConfig
from windlass.cache.merging import LayerView, plan_merge
from windlass.cache.slot_table import SlotTable
from windlass.core.inputs import EvictionInput
from windlass.core.step import Step, StepRecord
from windlass.core.types import Scores
from windlass.policies.base import Slots
from windlass.policies.calls import scores_of


def parts_of(table: SlotTable, rules: LayerConfig, step: Step, is_recalling: bool) -> tuple[Step, ...]:
    """`step.parts`, or the whole step if it evicts, recalls, observes and holds in full precision no token.

    `is_recalling` tells whether the step searches for evicted tokens.
    """
    is_evicting = rules.budget is not None and table.occupancy_bound + max(step.lengths) > rules.budget
    is_observing = rules.policy.observed_queries != 0 or table.store.full_precision.newest > 0
    return step.parts if (is_evicting or is_recalling or is_observing) and not step.defer_eviction else (step,)


def scores_over_budget(table: SlotTable, rules: LayerConfig, layer: int, slots: Slots) -> Scores:
    """The policy's scores of a layer in which some row is over budget.

    A policy may change state as it scores. Rows within the budget get their state back: alone, they would not be
    scored.
    """
    assert rules.budget is not None, "scores without a budget"
    before = table.copied_state() if len(slots.next_positions) > 1 else {}
    score = scores_of(rules.policy, layer, slots)
    if before:
        is_over = (table.positions >= 0).sum(-1, keepdim=True).amax(1, keepdim=True) > rules.budget
        for name, tensor in table.state.items():
            tensor.copy_(tensor.where(is_over, before[name]))
    return score


def evict(
    table: SlotTable, rules: LayerConfig, record: StepRecord, score: Scores, checkpoint: Checkpoint | None
) -> StepRecord:
    """Reserve the slots of the tokens over budget whose `score` is lowest, and merge the tokens if the rules say so.

    Returns the record with the evicted tokens and, after a merge, the former contents of the slots that took them.
    """
    assert rules.budget is not None, "eviction without a budget"
    count, evicted_count = table.slots - rules.budget, table.occupancy_bound - rules.budget
    (sinks, window), row_sinks = rules.protected, rules.row_sinks(record.step)
    evicted, before = kernels.evict(
        EvictionInput(
            score=score,
            positions=table.positions,
            next_positions=record.step.next_positions,
            sinks=sinks,
            window=window,
            sliding_window=rules.sliding_window,
            count=count,
            attention_chunk=rules.attention_chunk,
            row_sinks=None if row_sinks is None else row_sinks.tensor,
        )
    )
    table.occupancy_bound = rules.budget
    record = replace(record, evicted=evicted, evicted_positions=before, evicted_count=evicted_count)
    return record if rules.merge is None else _merged(table, rules, record, checkpoint)


def _merged(table: SlotTable, rules: LayerConfig, record: StepRecord, checkpoint: Checkpoint | None) -> StepRecord:
    """Merge the tokens that `record` evicted into kept slots. `checkpoint` gets the plan before it is applied."""
    assert rules.merge is not None, "a merge without a rule"
    assert record.evicted is not None, "a merge without an eviction"
    assert record.evicted_positions is not None, "evicted tokens without positions"
    ends, limits = record.step.next_positions, rules.limits
    view = LayerView(
        table.store,
        table.positions,
        table.state,
        ends,
        limits.sinks if record.step.sinks is None else record.step.sinks.per_slot,
        limits.window,
        rules.sliding_window,
        rules.attention_chunk,
    )
    plan = plan_merge(rules.merge, view, record.evicted, record.evicted_positions)
    if checkpoint is not None:
        checkpoint.merged.append(plan)
    plan.apply(table.store, table.state)
    return replace(record, merged_into=plan.targets, merged_before=plan.before.parts)
