"""The options of a cache are spelled out where they are defined, and nowhere else."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import windlass
from windlass.cache.options import CacheOptions

PACKAGE = Path(windlass.__file__).parent
NAMES = {each.name for each in fields(CacheOptions)}
MAX_NAMES = 4  # of them that any other place may name
SPELLED_OUT = {
    ("cache/options.py", "CacheOptions"),
    ("hf/kv_cache.py", "KVCache"),
}
PARTS = {
    ("core/step.py", "Limits"),  # those that a layer is told
    ("cache/contract.py", "LIMITS"),
    ("cli/measure_options.py", "EvalLists"),  # those that an evaluation may vary, as lists
    ("serve/schema.py", "CacheFields"),  # those that a request may give
    ("evals/grid.py", "PARSERS"),  # of each that a list may vary
    ("evals/results.py", "Case"),  # labels of a row, as a file of results holds them
    ("hf/prompt_cache_format.py", "parsed"),  # the type and range of each limit, as a prompt-cache file holds them
}


def names_in(node: ast.AST) -> set[str]:
    """The names that a class declares, a function takes, a call passes, or a dict or tuple lists as text."""
    if isinstance(node, ast.ClassDef):
        declared = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        return {each.id for each in declared if isinstance(each, ast.Name)}
    if isinstance(node, ast.FunctionDef):
        return {each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    if isinstance(node, ast.Call):
        return {each.arg for each in node.keywords if each.arg is not None}
    texts = node.keys if isinstance(node, ast.Dict) else node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return {str(each.value) for each in texts if isinstance(each, ast.Constant)}


def places(source: str) -> Iterator[str]:
    """The names defined at the top of a file with more of the options in them than `MAX_NAMES`, at any depth."""
    for top in ast.parse(source).body:
        if any(len(names_in(node) & NAMES) > MAX_NAMES for node in ast.walk(top)):
            yield ast.unparse(top.targets[0]) if isinstance(top, ast.Assign) else getattr(top, "name", "?")


def test_the_options_are_spelled_out_in_two_places() -> None:
    assert len(NAMES) == 14
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {(path.relative_to(PACKAGE).as_posix(), name) for path in paths for name in places(path.read_text())}
    assert found - PARTS == SPELLED_OUT


def test_a_place_is_found_by_what_it_names() -> None:
    names = sorted(NAMES)[:5]
    for source in (
        "class A:\n" + "".join(f"    {name}: int\n" for name in names),
        f"def a({', '.join(names)}): ...",
        f"def a():\n    return f({', '.join(f'{name}=0' for name in names)})",
        f"a = {dict.fromkeys(names)}",
        f"a = {names}",
    ):
        assert len(list(places(source))) == 1
    assert not list(places(f"def a({', '.join(names[:4])}): ..."))
