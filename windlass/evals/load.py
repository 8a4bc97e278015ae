"""A task out of what a user typed: a name, a name with a text file, or a class in a file."""

import difflib
import inspect
import re
from pathlib import Path

from windlass.errors import PolicyError, UsageError
from windlass.evals.fit import task_errors
from windlass.evals.task import Task
from windlass.evals.tasks import NAMES
from windlass.policies.load import _module_of


def load_task(spec: str) -> tuple[str, Task]:
    """The task that `spec` names, and its label: `"vt"`, `"perplexity(text.txt)"` or `"path/to/file.py:Class"`.

    Names ignore case, and `-` is `_`. Code of a file is run, once.

    Raises: UsageError for what cannot be found, read or made.
    """
    with_file = re.fullmatch(r"([\w-]+)\((.+)\)", spec)
    if with_file is not None:
        name, task = _named(with_file[1])
        made = task.reading(Path(with_file[2]).expanduser())
        if made is None:
            raise UsageError(f"task {name} reads no text, so it takes no file; use {name}")
        return f"{name}({with_file[2]})", made
    in_file = re.fullmatch(r"(.*):\s*([^\W\d]\w*)", spec, re.DOTALL)
    if in_file is not None:
        return spec, _made(Path(in_file[1]).expanduser(), in_file[2])
    if spec.endswith(".py"):
        raise UsageError(f"task {spec!r} is a file but names no class; use {spec}:Class")
    return _named(spec)


def _named(typed: str) -> tuple[str, Task]:
    name = typed.lower().replace("-", "_")
    if name in NAMES:
        return name, NAMES[name]
    near = difflib.get_close_matches(name, list(NAMES), n=1, cutoff=0.5)
    offer = f"did you mean {near[0]}? " if near else ""
    raise UsageError(f"task {typed!r} is unknown; {offer}the names are {', '.join(NAMES)}, or path/to/file.py:Class")


def _made(path: Path, name: str) -> Task:
    try:
        module = _module_of(path)
    except PolicyError as error:
        raise UsageError(str(error).replace("policy file", "task file", 1)) from error
    found = vars(module).get(name)
    if not isinstance(found, type) or not issubclass(found, Task):
        own = [
            each.__name__
            for each in vars(module).values()
            if isinstance(each, type) and issubclass(each, Task) and each.__module__ == module.__name__
        ]
        what = "has no class" if found is None else "has something else than a subclass of windlass.evals.Task named"
        raise UsageError(f"task file {path} {what} {name!r}; its tasks: {', '.join(own) or 'none'}")
    if inspect.isabstract(found) or "answer_tokens" not in {field for kind in found.__mro__ for field in vars(kind)}:
        raise UsageError(f"task {name} of {path} is not whole; it needs a method compose and a number answer_tokens")
    with task_errors(f"{path}:{name}"):
        return found()
