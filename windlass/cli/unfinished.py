"""Where an interrupted command writes what it has."""

from pathlib import Path


def part_of(path: Path) -> Path:
    """The file of an unfinished result beside `path`."""
    return path.with_name(path.name + ".part")


def unfinished(path: Path) -> Path:
    """The file for an unfinished result: `path`, or one beside it, where an older file is there to stay."""
    return part_of(path) if path.exists() else path
