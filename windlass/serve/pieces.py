"""Marks in a text that comes in pieces."""


def begun(text: str, mark: str) -> int:
    """How many signs at the end of `text` may become `mark`, which is not whole there."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
