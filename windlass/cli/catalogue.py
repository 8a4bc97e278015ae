"""The policies as a list to read, out of their own docstrings."""

import inspect
import json

from rich.console import Console
from rich.text import Text

from windlass.policies import NAMES, WRAPPERS, KeyDiff, Policy


def made_by_default() -> dict[str, Policy]:
    """One of each policy by its name; what goes around another one, around `KeyDiff`."""
    around = {name: kind(KeyDiff()) for name, kind in WRAPPERS.items()}
    return {name: kind() for name, kind in NAMES.items()} | around


def catalogue() -> list[dict[str, str]]:
    """Per policy: `name`, how it is `made` by default, what it `keeps`, and its `source`."""
    entries = []
    for name, policy in made_by_default().items():
        paragraphs = inspect.cleandoc(policy.__doc__ or "").split("\n\n")
        notes = " ".join(paragraphs[-1].split())
        entries.append(
            {
                "name": name,
                "made": repr(policy),
                "keeps": " ".join(paragraphs[0].split()),
                "source": notes.partition("Source: ")[2].partition(" Differs:")[0],
            }
        )
    return entries


def show(is_json: bool) -> int:
    """Print the list, or one JSON object of it; returns the exit code."""
    entries = catalogue()
    if is_json:
        print(json.dumps({"policies": entries}, ensure_ascii=False))
        return 0
    # A pipe gets whole lines, whatever the width of a terminal.
    console = Console(soft_wrap=True, highlight=False)
    for entry in entries:
        console.print(Text.assemble((f"{entry['name']:20}", "bold"), entry["made"]))
        console.print(Text(f"{'':20}{entry['keeps']}\n{'':20}Source: {entry['source']}"), style="dim")
    return 0
