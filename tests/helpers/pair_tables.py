"""Files of pair tables, as `windlass calibrate` writes them."""

from pathlib import Path

from transformers import PreTrainedModel

from windlass.hf.weights import fingerprint
from windlass.policies import pairs
from windlass.policies.pairs import PairTable


def table_of(path: Path, model: PreTrainedModel, costs: dict[tuple[int, int], float]) -> str:
    """The name of a file with these costs, dearest first: the order in a file must not matter."""
    rows = [(first, second, 1, cost) for (first, second), cost in costs.items()]
    table = PairTable(
        type(model).__name__, fingerprint(model), "mean_count(next)", 7, 0, sorted(rows, key=lambda row: -row[3])
    )
    pairs.write(table, path)
    return str(path)
