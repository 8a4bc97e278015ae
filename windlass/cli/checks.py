"""Options are checked here before torch is imported, which takes seconds: names, numbers, and whether files are there.

Whatever passes is checked once more where it is used, in full: here only what is certainly wrong is refused.
"""

import ast
import json
import math
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from windlass.cli.measure_options import EvalLists, TextsArguments
from windlass.cli.options import CacheArguments, LoadOptions
from windlass.core.errors import PolicyError, UsageError
from windlass.core.files import check_folder, check_readable, check_regular, read_text
from windlass.core.files import check_writable as check_writable
from windlass.core.parse import (
    AUTO,
    MAX_NUMBER,
    NO_MERGE,
    NO_SHARES,
    PluginKind,
    Spec,
    check_dtype,
    check_given,
    check_max_tokens,
    check_range,
    check_recall,
    check_weights,
    folder_of,
    gpu_number,
    int_parser,
    near_to,
    parse_ints,
    parse_list,
    parse_spec,
    use_one_of,
)
from windlass.core.parse import check_limits as check_limits
from windlass.evals.speed.workloads import BenchLists, check_subject, setups_of, workloads_of
from windlass.evals.task import TASKS, budget_of, depth_of
from windlass.evals.tasks import NAMES as TASK_NAMES

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


@cache
def policies() -> dict[str, DeclaredClass]:
    """The policies that can be made without arguments, and after them those that go around another one, by name."""
    named = [kind for kind in _plain_policies() if None not in kind.fields.values()]
    return {kind.module: kind for kind in (*named, *(kind for kind in _policies() if is_wrapper(kind)))}


@cache
def from_files() -> dict[str, DeclaredClass]:
    """The policies that are made of a file, by name."""
    return {kind.module: kind for kind in _plain_policies() if None in kind.fields.values()}


def _plain_policies() -> list[DeclaredClass]:
    return [kind for kind in _policies() if "Policy" in kind.bases and "ABC" not in kind.bases]


def _policies() -> list[DeclaredClass]:
    classes = classes_of("policies")
    return [classes[name] for name in exported("policies") if name in classes]


def is_wrapper(kind: DeclaredClass) -> bool:
    """Whether a policy goes around another one."""
    return "Wrapper" in kind.bases


@cache
def positions() -> dict[str, dict[str, str | None]]:
    """The names of position modes, and of the numbers that each takes, with what they are by default."""
    modes = [kind for kind in classes_of("positions").values() if kind.module == "modes"]
    kinds = [kind for kind in modes if "PositionMode" in kind.bases and "name" in kind.attributes]
    return {kind.attributes["name"]: kind.fields for kind in kinds}


@cache
def stores() -> dict[str, list[str]]:
    """The names of stores, and of the numbers that each takes."""
    classes = classes_of("stores")
    numbers = {}
    for name in keys_of("stores/formats.py", "STORES"):
        kind = classes[name.capitalize()]
        lines = (kind, *(classes[base] for base in kind.bases))
        declared = (each.attributes.get("parameters") for each in lines)
        numbers[name] = list(next(filter(None, declared), ()))
    return numbers


@cache
def merges() -> list[str]:
    """The names of the rules of merging."""
    return [kind.attributes["name"] for kind in classes_of("cache").values() if "Merge" in kind.bases]


@cache
def merge_targets() -> list[str]:
    """The names of target slots."""
    return keys_of("cache/merging.py", "TARGETS")


@cache
def shapes() -> list[str]:
    """The names of a benchmark's models with random weights."""
    return keys_of("evals/speed/rows.py", "SHAPES")


POLICIES = PluginKind("policy", "policies", object, "windlass.Policy", PolicyError)


def check_model(name: str, load: LoadOptions) -> None:
    """Raises: UsageError for a folder that lacks what a model needs, or an unknown dtype, device or kind of weights."""
    check_dtype(load.dtype)
    check_weights(load.weights)
    gpu_number(load.device)
    folder_of(name)


def check_session(
    model: str, load: LoadOptions, cache: CacheArguments, prompt_cache: Path | None = None, max_tokens: int = 1
) -> None:
    """Raises: WindlassError for a model, a cache or a number of tokens that cannot be had."""
    check_max_tokens(max_tokens)
    check_cache(cache, prompt_cache)
    check_model(model, load)


def check_prompt(prompt: str | None, file: Path | None) -> None:
    """Raises: UsageError for a prompt that is given twice, or a file that cannot be read."""
    if prompt is not None and file is not None:
        raise UsageError("both a prompt and --file were given; use one of them")
    if file is not None and str(file) != "-":
        check_readable(file, f"prompt file {file}")


def check_cache(arguments: CacheArguments, prompt_cache: Path | None = None) -> None:
    """Raises: WindlassError for options that no cache can have, or a prompt cache that is not there."""
    given = arguments.given()
    parsers: dict[str, Callable[[str], None]]
    parsers = {"policy": check_policy, "positions": check_positions, "store": check_store, "merge": check_merge}
    parsers |= {"recall_store": check_store, "recall_folder": _check_recall_folder}
    for name, check in parsers.items():
        if name in given:
            check(given[name])
    if "shares" in given:
        check_shares(str(given["shares"]))
    if prompt_cache is None:
        check_limits(given)
        check_recall(given.get("recall", 0), given.get("budget"), "recall_folder" in given, "recall_store" in given)
        return
    if not prompt_cache.exists():
        raise UsageError(f"prompt cache {prompt_cache} is not there; make it with `windlass cache`")
    check_regular(prompt_cache, "prompt cache")


def _check_recall_folder(folder: str) -> None:
    check_folder(Path(folder), "recall_folder")


def check_policy(spec: str) -> None:
    """Raises: PolicyError for an unknown name, an argument that a policy does not take, or a file that is not there."""
    typed = parse_spec(spec)
    if typed is not None and _is_of_file(spec, typed):
        return
    path, text = POLICIES.split(spec)
    typed = parse_spec(text)
    if typed is None:
        raise PolicyError(
            f"policy {spec!r} cannot be read; use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"
        )
    if path is None:
        _check_made(spec, typed)
        return
    try:
        check_readable(path, f"policy file {path}")
    except UsageError as error:
        raise PolicyError(str(error)) from None


def _is_of_file(spec: str, typed: Spec) -> bool:
    """Whether it is a policy that is made of a file. Raises: PolicyError where that is not there."""
    if POLICIES.name_in(typed.name, from_files()) is None:
        return False
    file = (typed.inside or "").rpartition("=")[2].strip().strip("\"'")
    if file and not Path(file).expanduser().exists():
        raise PolicyError(f"policy {spec!r}: {file} is not there; make it with `windlass calibrate`")
    return True


def _check_made(spec: str, typed: Spec) -> None:
    if typed.name.lower() == AUTO or _is_of_file(spec, typed):
        return
    known = policies() | from_files()
    kind = known[POLICIES.name_of(typed.name, known)]
    fields = [*(("policy",) if is_wrapper(kind) else ()), *kind.fields]
    unknown = [name for name, _ in typed.named if name not in fields]
    if unknown or len(typed.positional) + len(typed.named) > len(fields):
        takes = f"it takes {kind.name}({', '.join(fields)})"
        what = f"{unknown[0]!r} is no argument of it" if unknown else "it has too many arguments"
        raise PolicyError(f"policy {spec!r} cannot be made: {what}; {takes}")
    for value in (*typed.positional, *(value for _, value in typed.named)):
        inner = parse_spec(value)
        try:
            number = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            if inner is not None:
                _check_made(spec, inner)
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise PolicyError(f"policy {spec!r}: {value} is not a number that it can count with; give a smaller one")


def check_positions(spec: str) -> None:
    """Raises: UsageError for an unknown mode, or wrong numbers of one."""
    known = positions()
    typed = parse_spec(spec)
    if typed is not None and typed.name == AUTO:
        return
    if typed is None or typed.name not in known:
        forms = (f"{name}({', '.join(numbers)})" if numbers else name for name, numbers in known.items())
        names = f"{', '.join(forms)}{near_to(spec, known)}"
        raise UsageError(f"positions={spec!r} is not a position mode; use one of: {names}")
    numbers = parse_ints(f"positions={spec!r}", typed, list(known[typed.name]))
    check_given(spec, typed.name, [name for name, default in known[typed.name].items() if default is None], numbers)
    for name, number in numbers.items():
        check_range(name, number)


def check_store(spec: str) -> None:
    """Raises: UsageError for an unknown store, or wrong numbers of one."""
    known = stores()
    typed = parse_spec(spec)
    if typed is None or typed.name not in known:
        hint = "numbers of a store stand in parentheses, as in int4(sinks=4, newest=32)"
        raise UsageError(f"store={spec!r} is not a store; {use_one_of(spec, known)}; {hint}")
    for name, number in parse_ints(f"store={spec!r}", typed, known[typed.name]).items():
        check_range(name, number)


def check_merge(spec: str) -> None:
    """Raises: UsageError for an unknown rule or target."""
    typed = parse_spec(spec)
    if typed is None or typed.name not in merges():
        raise UsageError(
            f"merge={spec!r} is not a rule; {use_one_of(spec, merges())}, or with settings: mean_count(next)"
        )
    for word in typed.positional:
        if word not in merge_targets():
            raise UsageError(f"merge={spec!r}: {word!r} is not a setting; {use_one_of(word, merge_targets())}")


def check_shares(file: str) -> None:
    """Raises: UsageError for a file that cannot be read."""
    if not Path(file).expanduser().exists():
        raise UsageError(f"shares {file}: this file is not there; make it with `windlass calibrate --shares`")
    check_readable(Path(file).expanduser(), f"shares {file}")


def check_task(spec: str) -> None:
    """Raises: UsageError for an unknown task, or a file that is not there."""
    typed = parse_spec(spec)
    if typed is not None and typed.inside:
        name = TASKS.name_of(typed.name, TASK_NAMES)
        if TASK_NAMES[name].reading(Path(typed.inside).expanduser()) is None:
            raise UsageError(f"task {name} reads no text, so it takes no file; use {name}")
        return
    path, name = TASKS.split(spec)
    if path is None:
        TASKS.name_of(name, TASK_NAMES)
    else:
        check_readable(path, f"task file {path}")


def check_eval(lists: EvalLists, output: Path) -> None:
    """Raises: WindlassError for a value of a list that cannot be honoured, or a file that cannot be written."""
    check_writable(output, "-o")
    parse_list("--tasks", lists.tasks, check_task)
    parse_list("--lengths", lists.lengths, int_parser("--lengths", 1, MAX_NUMBER))
    if lists.depth is not None:
        parse_list("--depth", lists.depth, depth_of)
    parse_list("--merge", lists.merge, lambda part: None if part == NO_MERGE else check_merge(part))
    parse_list("--shares", lists.shares, lambda part: None if part == NO_SHARES else check_shares(part))
    for number in parse_list("--recall", lists.recall, int_parser("--recall", 0, MAX_NUMBER)):
        check_limits({"recall": number})
    _check_lists({"recall_store": check_store}, vars(lists))
    _check_lists({"policies": check_policy, "positions": check_positions, "store": check_store}, vars(lists))
    for part in parse_list("--budgets", lists.budgets, str):
        check_limits({"budget": budget_of("--budgets", part).slots})


def check_bench(
    model: str | None, shape: str | None, layers: int | None, lists: BenchLists, load: LoadOptions, output: Path | None
) -> None:
    """Raises: WindlassError for a value that cannot be honoured, or a file that cannot be written."""
    check_subject(model, shape, layers, shapes())
    if model is not None:
        check_model(model, load)
    check_dtype(load.dtype)
    check_weights(load.weights)
    gpu_number(load.device)
    workloads_of(lists)
    setups_of(lists)
    _check_lists({"policy": check_policy, "positions": check_positions, "store": check_store}, lists.options)
    for part in parse_list("--budget", lists.options["budget"], str):
        check_limits({"budget": budget_of("--budget", part).slots})
    if output is not None:
        check_writable(output, "-o")


def check_calibration(is_of_shares: bool, is_of_scorer: bool, tokens: int | None, asked: TextsArguments) -> None:
    """Raises: WindlassError for options of another kind of calibration, or a value that cannot be honoured."""
    if is_of_shares and is_of_scorer:
        raise UsageError("both --shares and --scorer were given; a file holds one of them: run the command twice")
    if not (is_of_shares or is_of_scorer):
        if asked.given:
            which = "--shares" if asked.given[0] in asked.of_shares else "--shares or --scorer"
            raise UsageError(f"{asked.given[0]} goes with {which}; leave it out, or measure shares")
        return
    if is_of_scorer and asked.of_shares:
        raise UsageError(f"{asked.of_shares[0]} goes with --shares, and --scorer was given; leave it out")
    if tokens is not None:
        given = "--shares" if is_of_shares else "--scorer"
        raise UsageError(f"--tokens is for pairs, and {given} was given; use --texts and --length")
    if asked.policy is not None:
        check_policy(asked.policy)
    if asked.budget is not None:
        check_limits({"budget": budget_of("--budget", asked.budget).slots})
    if asked.tasks is not None:
        parse_list("--tasks", asked.tasks, check_task)


def check_text(file: Path, what: str) -> None:
    """Raises: UsageError, which calls the file `what`, when it cannot be read; a regular file is read for that."""
    check_readable(file, what)
    if stat.S_ISREG(file.stat().st_mode):
        read_text(file, what)


def _check_lists(checks: Mapping[str, Callable[[str], None]], lists: Mapping[str, str]) -> None:
    for name, check in checks.items():
        parse_list(f"--{name}", lists[name], check)


AROUND = "KeyDiff()"  # what a policy that goes around another one is shown with


def catalogue() -> list[dict[str, str]]:
    """Per policy: `name`, how it is `made` by default, what it `keeps`, and its `source`."""
    entries = []
    for name, kind in (policies() | from_files()).items():
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
    fields: dict[str, str | None] = {"policy": AROUND} if is_wrapper(kind) else {}
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
