"""Random sequences of all operations on a cache and its model, and the shortest that still fails."""

import random
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_model_rules import MergeModel
from tests.helpers.cache_operations import Run
from tests.helpers.cache_pair import MODES, Operation
from tests.helpers.cache_setup import MODELS, POLICIES, Setup, windows_of

WEIGHTS = {
    "decode": 40, "draft": 6, "prompt": 3, "rollback": 16, "interrupt": 4, "drop": 7, "keep": 1.5, "shift": 7,
    "divide": 3, "copy": 3, "select": 2, "reset": 0.4, "mode": 4, "compress": 2, "splice": 1.5, "file": 0.5, "twin": 1,
    "import": 0.7, "model": 2, "adapter": 0.01,
}  # fmt: skip
WITH_ADAPTERS = WEIGHTS | {"decode": 10, "model": 30, "adapter": 12, "file": 4}


SHARES = [(1.5, 0.5, 1.5), (0.25, 0.25, 2.0), (1.0, 2.0, 3.0), (1.0, 1.0, 1.0)]


def random_setup(draw: random.Random) -> Setup:
    """A pair of any kind."""
    store = draw.choice(["plain"] * 6 + ["int8", "int4", "int4(sinks=2, newest=5)", "int8(newest=4)"])
    budget = draw.choice([None, 8, 9, 12, 12, 20])
    merge = None
    if budget is not None and "(" not in store and draw.random() < 0.25:
        merge = MergeModel(
            draw.choice(["mean_count", "mean", "sum", "pick"]),
            draw.choice(["nearest", "next"]),
            draw.choice([-1.0, 0.3]),
        )
    dtype = draw.choice(["float32"] * 4 + ["bfloat16"])
    if merge is not None and merge.name == "sum":  # sums grow too large for a useful bound in bfloat16
        dtype = "float32"
    recall = draw.choice([0, 8, 8, 16, 256]) if budget is not None else 0
    model = draw.choice(["plain", "plain", "plain" if recall else "windowed", *MODELS])
    shares = None
    if draw.random() < 0.25:
        shares = tuple(draw.choice(SHARES) for _ in windows_of(model))
    return Setup(
        model=model,
        dtype=dtype,
        batch=draw.choice([1, 1, 2, 2, 3, 4]),
        budget=budget,
        policy=draw.choice(list(POLICIES)),
        sinks=draw.choice([0, 1, 2]),
        window=draw.choice([None, 1, 3, 5]),
        chunk=draw.choice([1, 20, 64]),
        rollback=draw.choice([0, 3, 16]),
        mode=draw.choice(MODES),
        store=store,
        merge=merge,
        softcap=draw.choice([None, None, 1.5]),
        has_sink_logits=draw.random() < 0.2,
        repeats=draw.random() < 0.2,
        trained_length=draw.choice([4096, 13, 23, 60]),
        recall=recall,
        recall_store=draw.choice(["plain", "int8", "int4"]) if recall else "int4",
        recall_in_files=recall > 0 and draw.random() < 0.1,
        candidates=draw.choice([256, 256, 2]),
        shares=shares,
        has_adapters=draw.random() < 0.05 and find_spec("peft") is not None,
    )


def random_operations(draw: random.Random, count: int, weights: Mapping[str, float] = WEIGHTS) -> list[Operation]:
    names = draw.choices(list(weights), list(weights.values()), k=count)
    numbers = ([draw.randrange(2**20) for _ in range(4)] for _ in names)
    return [(name, a, b, c, d) for name, (a, b, c, d) in zip(["prompt", *names], numbers, strict=False)]


def first_difference(setup: Setup, operations: Sequence[Operation]) -> tuple[int, str] | None:
    """The index of the operation after which cache and model differ, and how, or None where they never do."""
    run = Run(setup)
    for at, operation in enumerate(operations):
        try:
            run.apply(operation)
        except Difference as difference:
            return at, str(difference)
    return None


def shortest(setup: Setup, operations: Sequence[Operation]) -> list[Operation]:
    """A sequence that fails, and no longer does so when any one operation is left out."""
    found = first_difference(setup, operations)
    assert found is not None, "a sequence that does not fail"
    left = list(operations[: found[0] + 1])
    size = max(1, len(left) // 2)
    while True:
        for start in range(0, len(left), size):
            fewer = left[:start] + left[start + size :]
            found = first_difference(setup, fewer)
            if found is not None:
                left = fewer[: found[0] + 1]
                break
        else:
            if size == 1:
                return left
            size = max(1, size // 2)


def sequences(seed: int) -> Iterator[tuple[int, Setup, list[Operation]]]:
    """Random sequences without end, each with the seed that gives it again."""
    for number in range(seed, 2**62):
        yield (number, *sequence(number))


def sequence(seed: int) -> tuple[Setup, list[Operation]]:
    draw = random.Random(seed)
    setup = random_setup(draw)
    return setup, random_operations(draw, draw.choice([20, 60, 150]), WITH_ADAPTERS if setup.has_adapters else WEIGHTS)
