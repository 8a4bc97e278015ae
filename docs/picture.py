"""Draw the recorded demo of start.md as the picture of the README: python docs/picture.py."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
PICTURE = DOCS / "demo.svg"
COLUMNS = 102


def picture() -> str:
    """SVG of the session, as a terminal shows it."""
    session = re.search(r"<!-- session: demo -->\n```console\n(.*?)```", (DOCS / "start.md").read_text(), re.DOTALL)
    assert session is not None
    text = Text(session[1].rstrip())
    text.highlight_regex(r"(?m)^\$ .*$", "bold green")
    text.highlight_regex(r"\d+ of \d+|\byes\b|\bno\b", "bold cyan")
    text.highlight_regex("─+", "dim")
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(text)
    return console.export_svg(title="windlass demo", unique_id="demo")


if __name__ == "__main__":
    PICTURE.write_text(picture())
