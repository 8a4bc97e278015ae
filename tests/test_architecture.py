"""The rooms of the package, and the one way in which they import each other: docs/architecture.md."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import windlass
from tests.helpers.house import splatted, tuples_splatted

PACKAGE = Path(windlass.__file__).parent
# From the top to the bottom. A module imports from floors below its own and from its own room. Two rooms on one
# floor do not know each other.
FLOORS = (
    ("cli",),
    ("serve", "evals"),
    ("view",),
    ("testing",),
    ("engine",),
    ("hf",),
    ("cache",),
    ("policies",),
    ("stores", "positions"),
    ("kernels",),
    ("core",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
KNOWS_TRANSFORMERS = {"hf", "engine", "evals", "serve", "view", "cli", "testing"}
# Folders where one file is one plug-in: short files, and as many as there are plug-ins.
PLUGINS = {Path("policies"), Path("evals/tasks")}
MOST_BOXES, MOST_FILES, MOST_FILES_IN_A_FOLDER = 20, 180, 22
LEAST_LINES, MOST_LINES = 60, 700
MOST_SPLATTED = 0
USES_RAY = {Path("evals/ray.py"), Path("evals/ray_cluster.py"), Path("serve/replicas.py")}

Imports = dict[str, set[str]]


def imports_of(package: Path) -> tuple[Imports, set[str]]:
    """Imports of each module from the package, wherever in the file, and the modules that import transformers.

    Modules are named without the package's name, which alone stands for its `__init__`.
    """
    files = {_name_of(path.relative_to(package.parent)): path for path in package.rglob("*.py")}
    found: Imports = {}
    with_transformers = set()
    for name, path in files.items():
        targets, _ = imported(path)
        if any(target.split(".")[0] == "transformers" for target in targets):
            with_transformers.add(_short(name))
        ours = {target for target in targets if target.split(".")[0] == package.name}
        # `from windlass.core import errors` names a module, `from windlass.core.errors import X` a thing inside one.
        found[_short(name)] = {_short(each if each in files else each.rpartition(".")[0]) for each in ours}
    return found, with_transformers


@cache
def imported(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Imports of a file, wherever they stand, and those at its top."""
    tree = ast.parse(path.read_text())
    at_top = ast.Module([each for each in tree.body if isinstance(each, ast.Import | ast.ImportFrom)], [])
    return frozenset(_imported(tree)), frozenset(_imported(at_top))


def _name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _short(name: str) -> str:
    return name.partition(".")[2] or name


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(imports: Imports) -> set[str]:
    """Each import that does not go down, as `module -> imported`. The package itself is above all rooms."""
    pairs = [(name, target) for name, targets in imports.items() for target in targets]
    rooms = [(name.split(".")[0], target.split(".")[0]) for name, target in pairs]
    return {
        f"{name} -> {target}"
        for (name, target), (here, there) in zip(pairs, rooms, strict=True)
        if here != there and here in FLOOR_OF and FLOOR_OF[here] >= FLOOR_OF.get(there, -1)
    }


def in_circles(imports: Imports) -> set[str]:
    """The modules from which a chain of imports inside their room leads back to themselves."""

    def beside(name: str) -> set[str]:
        return {target for target in imports[name] if target.split(".")[0] == name.split(".")[0]} - {name}

    def reached(name: str) -> set[str]:
        found, ahead = set(), beside(name)
        while ahead:
            found |= ahead
            ahead = {target for each in ahead for target in beside(each)} - found
        return found

    return {name for name in imports if name in reached(name)}


def test_imports_go_one_way() -> None:
    imports, _ = imports_of(PACKAGE)
    assert {name.split(".")[0] for name in imports} <= {*FLOOR_OF, PACKAGE.name, "__main__"}, (
        "a room that no floor names"
    )
    assert upward(imports) == set()


def test_tests_share_through_helpers_alone() -> None:
    found = {path: imported(path)[0] for path in Path(__file__).parent.rglob("*.py")}
    between = {f"{path} -> {target}" for path in found for target in found[path] if target.startswith("tests.")}
    assert {each for each in between if " -> tests.helpers." not in each} == set()


def test_no_circle_inside_a_room() -> None:
    assert in_circles(imports_of(PACKAGE)[0]) == set()


def test_transformers_stays_above_the_cache() -> None:
    outside = {name for name in imports_of(PACKAGE)[1] if name.split(".")[0] not in KNOWS_TRANSFORMERS}
    assert outside == set()


def test_ray_is_imported_when_it_is_asked_for() -> None:
    modules = {_name_of(Path("windlass") / path) for path in USES_RAY}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE) not in USES_RAY:
            anywhere, at_top = imported(path)
            assert not [each for each in anywhere if each.split(".")[0] == "ray"], path
            assert not [each for each in at_top if each.rpartition(".")[0] in modules], path


def out_of_size(package: Path) -> set[str]:
    """The files of a package that are too long or too short, and the folders with too many files."""
    found = set()
    for path in package.rglob("*.py"):
        name, lines = path.relative_to(package), len(path.read_text().splitlines())
        is_small = path.name in ("__init__.py", "__main__.py") or name.parent in PLUGINS
        if lines > MOST_LINES or (lines < LEAST_LINES and not is_small):
            found.add(f"{name}: {lines} lines")
    for folder in {path.parent for path in package.rglob("*.py")}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        if len(files) > MOST_FILES_IN_A_FOLDER and folder.relative_to(package) not in PLUGINS:
            found.add(f"{folder.relative_to(package)}: {len(files)} files")
    return found


def test_files_are_few_and_of_a_size() -> None:
    boxes = {path.name.split(".")[0] for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert len(boxes) <= MOST_BOXES, boxes
    assert len(list(PACKAGE.rglob("*.py"))) <= MOST_FILES
    assert out_of_size(PACKAGE) == set()


def test_every_wrong_size_is_seen(tmp_path: Path) -> None:
    for name, lines in {"a.py": 701, "b.py": 59, "c.py": 60, "__init__.py": 1, "policies/d.py": 3}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass\n" * lines)
    (tmp_path / "many").mkdir()
    for at in range(23):
        (tmp_path / "many" / f"m{at}.py").write_text("pass\n" * 60)
    assert out_of_size(tmp_path) == {"a.py: 701 lines", "b.py: 59 lines", "many: 23 files"}


def test_tuples_that_are_built_to_be_splatted_grow_no_more() -> None:
    assert len(splatted()) <= MOST_SPLATTED, splatted()


def test_every_splatted_tuple_is_seen() -> None:
    source = """
def f(a, rest):
    beside, x = (a, 1), 2
    g(x, *beside)
    h(*(a, x))
    k(*rest)
"""
    assert tuples_splatted(ast.parse(source)) == {"4: beside", "5: (a, x)"}


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    """A small package that breaks each rule once."""
    sources = {
        "core/errors.py": "",
        "core/step.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from windlass.cache import layer\n",
        "stores/base.py": "def late():\n    import windlass.positions.modes\n",
        "positions/modes.py": "from windlass.core.errors import UsageError\nfrom transformers.utils import logging\n",
        "cache/layer.py": "from windlass.cache.undo import undo\nfrom windlass.core import errors\n",
        "cache/undo.py": "from windlass.cache.layer import Layer\n",
        "hf/kv_cache.py": "import transformers\nfrom windlass import cache\nfrom windlass import KVCache\n",
    }
    for name, source in sources.items():
        path = tmp_path / "windlass" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(source)
    (tmp_path / "windlass" / "__init__.py").touch()
    imports, with_transformers = imports_of(tmp_path / "windlass")
    assert imports["cache.layer"] == {"cache.undo", "core.errors"}
    assert upward(imports) == {
        "core.step -> cache.layer",
        "stores.base -> positions.modes",
        "hf.kv_cache -> windlass",
    }
    assert in_circles(imports) == {"cache.layer", "cache.undo"}
    assert with_transformers == {"positions.modes", "hf.kv_cache"}
