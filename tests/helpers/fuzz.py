"""Random operations on caches beside an independent model of them, for as long as one likes.

    python -m tests.helpers.fuzz --minutes 30 --jobs 1 --seed 0

Each seed gives one sequence of operations on a cache of some kind, see `tests/helpers/cache_sequences.py`, and
another job takes other seeds. Prints how many calls were compared, how many lists were cut to their budget, how often
a head recalled evicted tokens, in how many of these rounding decided, and how many operations a core does in a second.
Of each kind of difference it prints the seeds, and of one sequence the operations that the difference needs.
`--replay SEED` runs one sequence again. Exits with 1 if any differs.
"""

import argparse
import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_operations import Run
from tests.helpers.cache_sequences import sequence, shortest

STRIDE = 10**6  # seeds of one job: as many are never reached


class Found(NamedTuple):
    """A sequence after which cache and model differ."""

    seed: int
    what: str


class Totals(NamedTuple):
    """The result of a job."""

    operations: int
    sequences: int
    evictions: int
    recalls: int
    decided_by_rounding: int
    seconds: float  # of a core
    differences: tuple[Found, ...]


def run(seed: int, seconds: float, most: float) -> Totals:
    """Sequences from `seed` on, one after the other, for so many seconds, or until there are `most` operations."""
    torch.set_num_threads(1)
    end, began, found = time.monotonic() + seconds, time.process_time(), []
    operations = sequences = evictions = recalls = rounding = 0
    while time.monotonic() < end and operations < most:
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
        recalls += pair.model.counts.recalls
        rounding += pair.model.counts.resettled
        seed += 1
    spent = time.process_time() - began
    return Totals(operations, sequences, evictions, recalls, rounding, spent, tuple(found))


def kinds_of(differences: Sequence[Found]) -> dict[str, list[Found]]:
    """The differences, by what they say without their numbers and paths, the rarest first."""
    kinds: dict[str, list[Found]] = {}
    for found in differences:
        kinds.setdefault(re.sub(r"\S*/\S*|\[.*\]|[-\d.]+(e-\d+)?", "_", found.what), []).append(found)
    return dict(sorted(kinds.items(), key=lambda pair: len(pair[1])))


def explained(found: Found) -> str:
    """A sequence that differs, as short as it gets."""
    setup, actions = sequence(found.seed)
    lines = [f"seed {found.seed}: {found.what}", f"    {setup}"]
    return "\n".join([*lines, *(f"    {action}" for action in shortest(setup, actions))])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="how long at most; 1 where --operations is not given")
    parser.add_argument("--operations", type=int, help="how many at least, over all jobs")
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
    most = math.inf if given.operations is None else given.operations / given.jobs
    minutes = (1.0 if given.operations is None else math.inf) if given.minutes is None else given.minutes
    work = [(given.seed + STRIDE * job, 60 * minutes, most) for job in range(given.jobs)]
    if given.jobs == 1:
        each = [run(*work[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
            each = pool.starmap(run, work)
    differences = [found for totals in each for found in totals.differences]
    sums = {name: sum(getattr(totals, name) for totals in each) for name in Totals._fields[:-1]}
    sums["a_second"] = sums["operations"] / max(sums.pop("seconds"), 1e-9)
    print(json.dumps({"seed": given.seed, **sums, "differences": len(differences)}))
    for kind, alike in kinds_of(differences).items():
        print(f"\n{len(alike)} times: {kind}\n    seeds {', '.join(str(found.seed) for found in alike[:20])}")
        print(explained(alike[0]), flush=True)
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
