"""The policies as a list to read, out of their own docstrings and without importing them."""

import json

from windlass.cli import declared
from windlass.core.declared import DeclaredClass

AROUND = "KeyDiff()"  # what a policy that goes around another one is shown with


def catalogue() -> list[dict[str, str]]:
    """Per policy: `name`, how it is `made` by default, what it `keeps`, and its `source`."""
    entries = []
    for name, kind in (declared.policies() | declared.from_files()).items():
        paragraphs = kind.doc.split("\n\n")
        notes = " ".join(paragraphs[-1].split())
        entries.append(
            {
                "name": name,
                "made": _made(kind),
                "keeps": " ".join(paragraphs[0].split()),
                "source": notes.partition("Source: ")[2].partition(" Differs:")[0],
            }
        )
    return entries


def _made(kind: DeclaredClass) -> str:
    """As a policy of this class prints itself; with FILE for one of `windlass calibrate`."""
    fields: dict[str, str | None] = {"policy": AROUND} if declared.is_wrapper(kind) else {}
    fields |= kind.fields
    return f"{kind.name}({', '.join('FILE' if value is None else f'{name}={value}' for name, value in fields.items())})"


def show(is_json: bool) -> int:
    """Print the list, or one JSON object of it; returns the exit code."""
    entries = catalogue()
    if is_json:
        print(json.dumps({"policies": entries}, ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.text import Text

    # A pipe gets whole lines, whatever the width of a terminal.
    console = Console(soft_wrap=True, highlight=False)
    for entry in entries:
        console.print(Text.assemble((f"{entry['name']:20}", "bold"), entry["made"]))
        console.print(Text(f"{'':20}{entry['keeps']}\n{'':20}Source: {entry['source']}"), style="dim")
    return 0
