"""The classes of a room as their source declares them, without running it.

Most rooms import torch, which takes seconds. What a list of names, or a wrong name, needs of a class is in its source:
its name, docstring, fields, and the attributes that are plain values.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class DeclaredClass:
    """A class of a file: `module` is the file's name, `bases` are names as they stand in the source.

    `fields` are the annotated names of a dataclass and their defaults as source, None where there is none.
    `attributes` are those that a class assigns without an annotation, and that are plain values.
    """

    name: str
    module: str
    bases: tuple[str, ...]
    doc: str
    fields: dict[str, str | None]
    attributes: dict[str, Any]


def classes_of(room: str) -> dict[str, DeclaredClass]:
    """All classes of a room by name, file by file in the order of the alphabet."""
    found: dict[str, DeclaredClass] = {}
    for path in sorted((PACKAGE / room).glob("*.py")):
        nodes = ast.parse(path.read_text(encoding="utf-8")).body
        found |= {node.name: _class(node, path.stem) for node in nodes if isinstance(node, ast.ClassDef)}
    return found


def exported(room: str) -> list[str]:
    """The names that a room's `__init__` imports, in their order."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    return [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def keys_of(file: str, table: str) -> list[str]:
    """The keys of a dict of plain names that a file of the package assigns to `table`."""
    for node in ast.parse((PACKAGE / file).read_text(encoding="utf-8")).body:
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == table:
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert isinstance(node.value, ast.Dict), f"{table} of {file} is no dict"
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError(f"{file} has no {table}")


def _class(node: ast.ClassDef, module: str) -> DeclaredClass:
    bases = tuple(ast.unparse(base) for base in node.bases)
    return DeclaredClass(
        node.name, module, bases, ast.get_docstring(node) or "", dict(_fields(node)), dict(_attributes(node))
    )


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    for each in node.body:
        if not (isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)):
            continue
        if not ast.unparse(each.annotation).startswith("ClassVar"):
            yield each.target.id, None if each.value is None else ast.unparse(each.value)


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    for each in node.body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            try:
                yield each.targets[0].id, ast.literal_eval(each.value)
            except ValueError:  # not a plain value
                continue
