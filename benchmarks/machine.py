"""Where and when a measurement was made, for its JSON line."""

import datetime
import os

import torch
import transformers

from windlass.evals.speed.table import cpu_name


def machine(threads: int) -> dict[str, str | int | None]:
    """The machine, the versions and the date."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
