"""Processes that others have started."""

from pathlib import Path


def descendants(parent: int) -> list[int]:
    """The processes that one has started, and those that they have."""
    found = []
    for each in (int(name.name) for name in Path("/proc").iterdir() if name.name.isdigit()):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent:
            found += [each, *descendants(each)]
    return found


def is_alive(process: int) -> bool:
    """Return True if it runs. A zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
