"""Random operations on caches beside an independent model of them, for as long as one likes.

    python benchmarks/fuzz.py --minutes 30 --jobs 1 --seed 0

Each seed gives one sequence of operations on a cache of some kind, see `tests/helpers/cache_operations.py`, and
another job takes other seeds. Prints how many calls were compared, how many lists were cut to their budget and in how
many of these rounding decided, and for each sequence that differs its seed, its operations but for those that the
difference does not need, and what differs. `--replay SEED` runs one sequence again. Exits with 1 if any differs.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # the model of a cache is among the tests' helpers

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_operations import Run, sequence, shortest

STRIDE = 10**6  # seeds of one job: as many are never reached


class Found(NamedTuple):
    """A sequence after which cache and model differ."""

    seed: int
    what: str


class Totals(NamedTuple):
    """What a job did."""

    operations: int
    sequences: int
    evictions: int
    decided_by_rounding: int
    differences: tuple[Found, ...]


def run(seed: int, seconds: float) -> Totals:
    """Sequences from `seed` on, one after the other, for so many seconds."""
    torch.set_num_threads(1)
    end, found = time.monotonic() + seconds, []
    operations = sequences = evictions = rounding = 0
    while time.monotonic() < end:
        setup, actions = sequence(seed)
        pair = Run(setup)
        try:
            for action in actions:
                pair.apply(action)
        except Difference as difference:
            found.append(Found(seed, str(difference)))
            print(f"seed {seed}: {difference}", file=sys.stderr, flush=True)
        operations, sequences = operations + pair.operations, sequences + 1
        evictions += pair.model.counts.evictions
        rounding += pair.model.counts.resettled
        seed += 1
    return Totals(operations, sequences, evictions, rounding, tuple(found))


def explained(found: Found) -> str:
    """A sequence that differs, as short as it gets."""
    setup, actions = sequence(found.seed)
    lines = [f"seed {found.seed}: {found.what}", f"    {setup}"]
    return "\n".join([*lines, *(f"    {action}" for action in shortest(setup, actions))])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replay", type=int, help="the seed of one sequence")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        setup, actions = sequence(given.replay)
        pair = Run(setup)
        print(setup)
        for action in actions:
            print(action, flush=True)
            pair.apply(action)
        return 0
    work = [(given.seed + STRIDE * job, 60 * given.minutes) for job in range(given.jobs)]
    if given.jobs == 1:
        each = [run(*work[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
            each = pool.starmap(run, work)
    differences = [found for totals in each for found in totals.differences]
    sums = {name: sum(getattr(totals, name) for totals in each) for name in Totals._fields[:-1]}
    print(json.dumps({"seed": given.seed, **sums, "differences": len(differences)}))
    if differences:
        print(min((explained(found) for found in differences), key=lambda text: text.count("\n")))
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
