"""Tables in Markdown."""

from collections.abc import Collection, Mapping, Sequence

TEXT, NUMBER = "---", "---:"  # what a column's rule says: numbers align at the right


def row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int | None = None, number: str = NUMBER
) -> str:
    """A table whose first `text_columns` columns are text and the others numbers, by default all text."""
    return "\n".join([*top(heads, text_columns, number), *map(row, rows)])


def top(heads: Sequence[str], text_columns: int | None = None, number: str = NUMBER) -> list[str]:
    """The first two lines of a `table` whose rows come later."""
    texts = len(heads) if text_columns is None else text_columns
    return [row(heads), row([TEXT] * texts + [number] * (len(heads) - texts))]


def padded(lines: Sequence[Mapping[str, str]], numbers: Collection[str]) -> str:
    """A table of at least one line, whose columns are the keys of the lines, padded so that it reads as plain text too.

    The columns in `numbers` align at the right. A bar in a cell is escaped.
    """
    cells = [[text.replace("|", "\\|") for text in line.values()] for line in lines]
    heads = list(lines[0])
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]

    def placed(texts: Sequence[str]) -> str:
        columns = zip(texts, heads, widths, strict=True)
        return row([text.rjust(width) if head in numbers else text.ljust(width) for text, head, width in columns])

    rule = row(
        ["-" * (width - 1) + ":" if head in numbers else "-" * width for head, width in zip(heads, widths, strict=True)]
    )
    return "\n".join([placed(heads), rule, *map(placed, cells)])
