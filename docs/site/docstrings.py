"""Docstrings of windlass for the API page, an extension of griffe: their lines set out, and the cache's edits found."""

import re
from copy import copy
from typing import Any

import griffe

# A line that begins so begins a paragraph, or an item of a list.
SECTION = re.compile(r"^(Raises|Source|Differs): ?")
ITEM = re.compile(r"^`[^`]+`(, `[^`]+`)*: ")


class WindlassDocstrings(griffe.Extension):
    """Docstrings as Markdown, and functions that a class takes from other modules as its methods."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Set out the docstring of `obj`."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """`rollback = edits.rollback` in a class is a method."""
        for module in _modules(pkg):
            for kind in module.classes.values():
                for name, found in _borrowed(module, kind).items():
                    method = copy(found)
                    method.name, method.parameters = name, griffe.Parameters(*list(found.parameters)[1:])
                    kind.set_member(name, method)


def as_markdown(docstring: str) -> str:
    """`docstring` with a list item for each line like "`name`: ...", and a paragraph for `Raises:` and its like."""
    lines: list[str] = []
    is_in_item = False
    for line in docstring.splitlines():
        if section := SECTION.match(line):
            lines += ["", f"**{section[1]}:** {line[section.end() :]}"]
            is_in_item = False
        elif ITEM.match(line):
            lines += [*([] if is_in_item else [""]), f"- {line}"]
            is_in_item = True
        else:
            is_in_item = is_in_item and bool(line.strip())
            lines.append(f"    {line}" if is_in_item else line)
    return "\n".join(lines)


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inner = [each for each in module.modules.values() if not each.is_alias]
    return [module, *(found for each in inner for found in _modules(each))]


def _borrowed(module: griffe.Module, kind: griffe.Class) -> dict[str, griffe.Function]:
    found = {}
    for name, member in kind.members.items():
        if not isinstance(member, griffe.Attribute) or member.value is None:
            continue
        first, _, rest = str(member.value).partition(".")
        if first not in module.imports:
            continue
        target = _function(module, ".".join(filter(None, [module.imports[first], rest])))
        if target is not None:
            found[name] = target
    return found


def _function(module: griffe.Module, path: str) -> griffe.Function | None:
    """The function of the package at `path`, or None."""
    try:
        target = module.modules_collection.get_member(path)
    except KeyError:
        return None
    return target if isinstance(target, griffe.Function) else None
