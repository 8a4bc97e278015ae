"""What the queries of a step read of one layer's slots."""

from windlass import kernels
from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable
from windlass.core.attention import AttentionInput, Mass
from windlass.core.shapes import Attended, ObservedColumns, Queries
from windlass.core.step import AttentionCall, Step
from windlass.merge import log_counts
from windlass.positions.modes import PositionMode
from windlass.positions.rotary import Rotary


def attend(
    table: SlotTable,
    rules: LayerRules,
    rotary: Rotary | None,
    queries: Queries,
    step: Step,
    mode: PositionMode,
    call: AttentionCall,
    observed: ObservedColumns | None,
) -> tuple[Attended, Mass | None]:
    """What the queries read of the slots, and the attention that each slot got from the `observed` ones."""
    tables, index, tokens = None, None, queries.shape[2]
    if rotary is not None:
        index = mode.rotary_index(table.positions, step.positions)
        held = min(table.occupancy_bound + step.graph_headroom, table.slots)
        tables = rotary.tables(mode.bound(step.end, held, tokens), queries.device, kernels.table_dtype(queries))
    is_rest_wanted = rules.policy.observed_queries is None and observed is not None and observed.shape[1] < tokens
    return kernels.attend(
        AttentionInput(
            queries,
            table.store.packed_keys(),
            table.store.packed_values(),
            table.positions,
            step.positions,
            index,
            tables,
            call.scale,
            rules.visibility,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            log_counts=log_counts(rules.merge, table.state),
            observed=observed,
            is_rest_wanted=is_rest_wanted,
        )
    )
