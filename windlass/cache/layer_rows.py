"""The batch rows of a layer: kept, repeated, overwritten. Earlier steps can't be taken back after it."""

from torch import Tensor

from windlass.cache.layer import LayerCache


def select_rows(layer: LayerCache, rows: Tensor) -> None:
    """Keep the batch rows at `rows`, which may repeat."""
    if layer.is_empty:
        return
    layer.forget_records(0)
    layer.store.select_rows(rows)
    layer.positions = layer.positions.index_select(0, rows)
    layer.state = {name: tensor.index_select(0, rows) for name, tensor in layer.state.items()}
    layer.statistics = {name: tensor.index_select(0, rows) for name, tensor in layer.statistics.items()}


def copy_row(layer: LayerCache, source: int, target: int) -> None:
    """Overwrite row `target` with row `source`."""
    if layer.is_empty:
        return
    layer.forget_records(0)
    layer.store.copy_row(source, target)
    for tensor in (layer.positions, *layer.state.values(), *layer.statistics.values()):
        tensor[target] = tensor[source]
