"""What the command line knows by name, read from the sources: nothing here imports torch."""

from functools import cache

from windlass.core.declared import DeclaredClass, classes_of, exported, keys_of


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
    kinds = [kind for kind in modes if "PositionMode" in kind.bases]
    return {kind.attributes["name"]: kind.fields for kind in kinds}


@cache
def stores() -> dict[str, list[str]]:
    """The names of stores, and of the numbers that each takes."""
    classes = classes_of("stores")
    numbers = {}
    for name in keys_of("stores/spec.py", "STORES"):
        kind = classes[name.capitalize()]
        lines = (kind, *(classes[base] for base in kind.bases))
        declared = (each.attributes.get("parameters") for each in lines)
        numbers[name] = list(next(filter(None, declared), ()))
    return numbers


@cache
def merges() -> list[str]:
    """The names of the rules of merging."""
    return [kind.attributes["name"] for kind in classes_of("merge").values() if "Merge" in kind.bases]


@cache
def merge_targets() -> list[str]:
    """The names of target slots."""
    return keys_of("merge/targets.py", "TARGETS")


@cache
def shapes() -> list[str]:
    """The names of a benchmark's models with random weights."""
    return keys_of("evals/speed/shapes.py", "SHAPES")
