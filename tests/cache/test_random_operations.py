"""Random sequences of every operation beside an independent model of a cache: all that can be seen is the same."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.helpers.cache_operations import Run
from tests.helpers.cache_pair import Operation
from tests.helpers.cache_sequences import WEIGHTS, random_setup, sequence

NAMES = [name for name, weight in WEIGHTS.items() for _ in range(max(1, round(weight)))]
NUMBER = st.integers(0, 2**20 - 1)
OPERATION = st.tuples(st.sampled_from(NAMES), NUMBER, NUMBER, NUMBER, NUMBER)


@given(st.randoms(use_true_random=False), st.lists(OPERATION, min_size=4, max_size=40))
@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
def test_a_cache_is_what_plain_lists_of_tokens_are(draw: object, operations: list[Operation]) -> None:
    run = Run(random_setup(draw))  # type: ignore[arg-type]  # hypothesis' own kind of Random
    run.apply(("prompt", 1, 2, 1, 1))
    for operation in operations:
        run.apply(operation)


@pytest.mark.parametrize("seed", range(8))
def test_sequences_of_the_long_run(seed: int) -> None:
    """As `tests/helpers/fuzz.py` takes them."""
    setup, operations = sequence(seed)
    run = Run(setup)
    for operation in operations:
        run.apply(operation)
    assert run.operations > run.skipped
