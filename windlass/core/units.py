"""Numbers as people read them."""

from typing import Final

UNITS: Final = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def in_units(count: int) -> str:
    """A number of bytes as people write it: `"1.50 MiB"`."""
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
