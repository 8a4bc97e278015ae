"""The options of a cache and of sampling are declared once: all else derives from their fields."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pytest
import typer

import windlass
from windlass.cache import options
from windlass.cache.options import CacheOptions
from windlass.cli import session
from windlass.cli.options import expanded
from windlass.core.errors import UsageError
from windlass.core.fields import Option, declared, field_info
from windlass.engine.sampling import Sampling
from windlass.hf import kv_cache

PACKAGE = Path(windlass.__file__).parent
NAMES = {each.name for each in fields(CacheOptions)}
MAX_NAMES = 4  # of them that any other place may name
SPELLED_OUT = {
    ("cache/options.py", "CacheOptions"),
    ("hf/kv_cache.py", "KVCache"),
}
PARTS = {
    ("core/step.py", "Limits"),  # the limits of a layer
    ("cache/contract.py", "LIMITS"),
    ("cli/measure_options.py", "EvalLists"),  # options that an evaluation may vary, as lists
    ("serve/schema.py", "CacheFields"),  # options of a request
    ("evals/grid.py", "PARSERS"),  # of each that a list may vary
    ("evals/results.py", "Case"),  # labels of a row, as a file of results holds them
    ("hf/prompt_cache_format.py", "OptionsHeader"),  # their types, as a prompt-cache file holds them
    ("hf/prompt_cache_format.py", "LimitsHeader"),
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
            targets = getattr(top, "targets", [getattr(top, "target", None)])
            yield getattr(top, "name", None) or ast.unparse(targets[0])


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


def parameters_of(module: ModuleType, record: str) -> list[tuple[str, str, Any]]:
    """Name, annotation and default of each parameter of a class's `__init__`, as its file writes them."""
    tree = ast.parse(inspect.getsource(module))
    (kind,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == record)
    (made,) = (each for each in ast.walk(kind) if isinstance(each, ast.FunctionDef) and each.name == "__init__")
    given, defaults = made.args.args[-len(made.args.defaults) :], map(ast.unparse, made.args.defaults)
    pairs = zip(given, defaults, strict=True)
    return [(each.arg, ast.unparse(each.annotation or each), eval(default, vars(module))) for each, default in pairs]


def test_a_cache_takes_the_options_as_they_are_declared() -> None:
    """Its signature repeats them, for editors, type checkers and documents, which import nothing."""
    taken = parameters_of(kv_cache, "KVCache")
    assert taken == parameters_of(options, "CacheOptions")
    assert [(name, default) for name, _, default in taken] == [
        (each.name, each.default) for each in fields(CacheOptions)
    ]


@dataclass(frozen=True)
class Wider(CacheOptions):
    """A copy of the declaration with a further option."""

    dice: int = declared(Option(3, "Dice that are thrown", int, least=1, most=6, label=lambda options: options.dice))


@dataclass(frozen=True)
class WiderSampling(Sampling):
    """A copy of that of sampling."""

    spice: float = declared(Option(0.5, "Spice in the choice", float, least=0, most=2))


def test_a_further_field_of_a_cache_is_an_option_everywhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = field_info(Wider)["dice"]
    assert (info.name, info.kind, info.default, info.least, info.most) == ("dice", int, 3, 1, 6)
    assert info.variable == "WINDLASS_DICE"
    assert Wider(dice=5).labels() == CacheOptions().labels() | {"dice": 5}
    with pytest.raises(UsageError, match="dice must be from 1 to 6, got 7"):
        Wider(dice=7)

    taken = []

    def command(limits: Annotated[dict[str, Any], Wider]) -> int:
        """A command."""
        taken.append(limits)
        return 0

    app = typer.Typer()
    app.command()(expanded(command))
    app(["--help"], standalone_mode=False)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--dice" in shown
    assert "Dice that are thrown (default: 3)" in shown
    app(["--dice", "2"], standalone_mode=False)
    monkeypatch.setenv("WINDLASS_DICE", "4")
    app([], standalone_mode=False)
    assert taken == [{"dice": 2}, {"dice": 4}]

    monkeypatch.setattr(session, "CacheOptions", Wider)
    ((rows, made),) = session.kinds_of(["rows=2,dice=6,budget=99"], {"sinks": 1})
    assert (rows, made) == (2, Wider(dice=6, budget=99, sinks=1, store=made.store, recall_store=made.recall_store))
    with pytest.raises(UsageError, match="dice must be from 1 to 6, got 9"):
        session.kinds_of(["rows=2,dice=9"], {})


def test_a_further_field_of_sampling_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert field_info(WiderSampling)["spice"].default == 0.5
    taken = []

    def command(sampling: WiderSampling) -> int:
        """A command."""
        taken.append(sampling)
        return 0

    app = typer.Typer()
    app.command()(expanded(command))
    app(["--help"], standalone_mode=False)
    assert "--spice" in capsys.readouterr().out
    app(["--spice", "1.5", "--top-k", "3"], standalone_mode=False)
    assert taken == [WiderSampling(top_k=3, spice=1.5)]
    with pytest.raises(UsageError, match="spice must be from 0 to 2"):
        app(["--spice", "2.5"], standalone_mode=False)
