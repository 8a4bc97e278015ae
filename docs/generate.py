"""Write the generated pages: contract.md, results/policies.md and results/house.md. The tests check the first two."""

import inspect
import subprocess
import sys
from pathlib import Path

from windlass.policies import FROM_FILES, NAMES, WRAPPERS, KeyDiff, OneShot, Policy, base, find
from windlass.policies.wrappers import scoring_chunk

DOCS = Path(__file__).parent
STREAMS = "Reads a text within the budget."
HELD_WHOLE = "Holds a first text whole until it is cut to the budget."
WRITE_A_POLICY = """
A policy scores the tokens of a layer. When the layer is over budget, the cache evicts the tokens with the lowest
scores. This is a whole policy:

```python
from dataclasses import dataclass

import windlass


@dataclass(frozen=True)
class LargeValues(windlass.policies.Policy):
    \"\"\"Keeps the tokens with the largest values. Source: this page. Differs: nothing.\"\"\"

    def score(self, slots):
        return slots.values().float().norm(dim=-1)
```

`windlass.testing.check_policy(LargeValues())` checks it, `check_on_models` runs it on tiny models of every kind.
`--policy file.py:LargeValues` uses it on the command line, and `KVCache(model, budget=256, policy=LargeValues())` in
Python. A policy that joins Windlass follows the list in [CONTRIBUTING](../CONTRIBUTING.md).
[Policies](results/policies.md) have one file each in `windlass/policies/`, and the wrappers share one. The
contract below is the docstring of [`windlass/policies/base.py`](../windlass/policies/base.py), where the types are.
"""


def contract() -> str:
    """The page of the policy contract."""
    said = inspect.cleandoc(base.__doc__ or "").removeprefix("The policy contract: which tokens a layer keeps.\n")
    intro = WRITE_A_POLICY.strip()
    said = said.replace(":\n1. ", ":\n\n1. ")  # some readers of Markdown begin a list after an empty line only
    return f"# Write a policy\n\n{intro}\n\n## The policy contract: which tokens a layer keeps\n\n{said.strip()}\n"


def made_by_default() -> dict[str, Policy]:
    """One of each policy by its name. Wrappers are around `KeyDiff`."""
    around = {name: kind(KeyDiff()) for name, kind in WRAPPERS.items()}
    return {name: kind() for name, kind in NAMES.items()} | around


def catalogue() -> str:
    """The page of all policies."""
    intro = (
        "Every policy works with any budget, sinks, window, chunk and position mode. The names are for `--policy`,\n"
        "the classes are in `windlass.policies`. `python docs/generate.py` writes this page from the docstrings."
    )
    made = [_entry(name, type(each), repr(each), each) for name, each in made_by_default().items()]
    made += [_entry(name, kind, f"{kind.__name__}(FILE)", kind) for name, kind in FROM_FILES.items()]
    return "\n\n".join([f"# Policies\n\n{intro}", *made]) + "\n"


def _entry(name: str, kind: type[Policy], label: str, made: Policy | type[Policy]) -> str:
    """The entry of a policy that is `made`, or of a class that no file is at hand for."""
    file = Path(inspect.getfile(kind)).name
    ranks = "each kv head by itself" if made.needs.per_head else "all heads of a row alike"
    wanted = made.observed_queries
    counts = {None: "every query", 0: "no attention", 1: "the last query of a step"}
    sees = counts.get(wanted, f"the last {wanted} queries of a step")
    if wanted != 0 and not made.needs.mass:
        sees += ", without attention"
    text = (
        inspect.cleandoc(kind.__doc__ or "").replace("\nDiffers:", "  \nDiffers:").replace("\nChunks:", "  \nChunks:")
    )
    entry = f"## `{name}`: [`{label}`](../../windlass/policies/{file})\n\n{text}"
    whole = find(made, OneShot) if isinstance(made, Policy) else None
    if name in WRAPPERS:
        goes_on = f" {HELD_WHOLE}" if whole is not None else ""
        return f"{entry}\n\nGoes around any other: `{name}(snapkv)`, `{name}(snapkv(pool=7))`.{goes_on}"
    if isinstance(made, Policy) and scoring_chunk(made):
        sees = f"the text a second time, {scoring_chunk(made)} tokens at once"
    told = f"Ranks {ranks}. Observes {sees}. State per slot: {', '.join(made.needs.state) or 'none'}."
    return f"{entry}\n\n{told} {STREAMS if whole is None else HELD_WHOLE}"


def main() -> None:
    """Write the pages."""
    (DOCS / "contract.md").write_text(contract())
    (DOCS / "results" / "policies.md").write_text(catalogue())
    subprocess.run([sys.executable, "-m", "tests.helpers.house", "--write"], check=True, cwd=DOCS.parent)


if __name__ == "__main__":
    main()
