"""Sessions and stored responses do what plain lists do, over restarts and torn lines."""

from pathlib import Path

import pytest

from tests.helpers.sessions_model import Fuzz


@pytest.mark.parametrize("seed", range(3))
def test_random_operations(tmp_path: Path, seed: int) -> None:
    fuzz = Fuzz(tmp_path, seed)
    fuzz.run(300)
    assert fuzz.differences == []
    assert len(fuzz.counts) == 13
    assert min(fuzz.counts.values()) > 3


def test_random_operations_in_memory() -> None:
    fuzz = Fuzz(None, 5)
    fuzz.run(300)
    assert fuzz.differences == []
    assert len(fuzz.counts) == 11
