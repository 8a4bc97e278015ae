"""An engine that reuses rows exactly writes the texts of one that reads each prompt anew, and no tenant's row serves
another one."""

from pathlib import Path

from tests.helpers.engine_fuzz import EngineFuzz


def test_random_operations(tmp_path: Path) -> None:
    fuzz = EngineFuzz(tmp_path, 7)
    fuzz.run(60)
    fuzz.close()
    assert fuzz.differences == []
    assert fuzz.spared > 0.3 * fuzz.tokens
    assert len(fuzz.counts) > 7
