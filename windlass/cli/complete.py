"""What a shell completes: names of policies, stores, modes and models. Nothing heavy is imported for it."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Final

from windlass.hf.names import DEVICES as DEVICES
from windlass.hf.names import DTYPES as DTYPES
from windlass.hf.names import WEIGHTS as WEIGHTS

PACKAGE: Final = Path(__file__).parents[1]
MODES: Final = ("auto", "original", "compact", "self_extend", "clamp")
STORES: Final = ("plain", "int8", "int4")
MERGES: Final = ("mean_count", "mean", "sum", "pick", "weighted")
NO_POLICIES: Final = ("base", "interfaces", "wrapper")  # what a policy is made of


def policies(incomplete: str) -> list[str]:
    """Names of policies, and file names are left to the shell."""
    tree = ast.parse((PACKAGE / "policies" / "__init__.py").read_text())
    modules = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = [module.rpartition(".")[2] for module in modules if module.startswith("windlass.policies.")]
    return [name for name in dict.fromkeys(names) if name not in NO_POLICIES and name.startswith(incomplete)]


def names_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completes to one of `known`."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def models(incomplete: str) -> list[str]:
    """Folders that hold a model, or lead to one."""
    folder, _, start = incomplete.rpartition("/")
    parent = Path(f"{folder}/" if folder or incomplete.startswith("/") else ".").expanduser()
    if not parent.is_dir():
        return []
    found = sorted(each.name for each in parent.iterdir() if each.is_dir() and each.name.startswith(start))
    before = incomplete[: len(incomplete) - len(start)]
    return [f"{before}{name}" for name in found if not name.startswith(".")]
