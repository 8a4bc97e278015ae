"""One Ray for all tests that need one."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from windlass.evals.ray_cluster import connected


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    """A local Ray with three processors."""
    if find_spec("ray") is None:
        pytest.skip("needs windlass[ray]")
    with connected("local", 3):
        yield
