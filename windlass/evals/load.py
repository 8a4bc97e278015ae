"""A task out of what a user typed: a name, a name with a text file, or a class in a file."""

import inspect
from pathlib import Path

from windlass.core.errors import UsageError
from windlass.core.spec import parse_spec
from windlass.evals.fit import task_errors
from windlass.evals.task import TASKS, Task
from windlass.evals.tasks import NAMES


def load_task(spec: str) -> tuple[str, Task]:
    """The task that `spec` names, and its label: `"vt"`, `"perplexity(text.txt)"` or `"path/to/file.py:Class"`.

    Names ignore case, `_` and `-`. Code of a file is run, once.

    Raises: UsageError for what cannot be found, read or made.
    """
    typed = parse_spec(spec)
    if typed is not None and typed.inside:
        name = TASKS.name_of(typed.name, NAMES)
        made = NAMES[name].reading(Path(typed.inside).expanduser())
        if made is None:
            raise UsageError(f"task {name} reads no text, so it takes no file; use {name}")
        return f"{name}({typed.inside})", made
    path, name = TASKS.split(spec)
    if path is not None:
        return spec, _made(path, name)
    name = TASKS.name_of(name, NAMES)
    return name, NAMES[name]


def _made(path: Path, name: str) -> Task:
    kind: type[Task] = TASKS.class_in(path, name)
    if inspect.isabstract(kind) or "answer_tokens" not in {field for each in kind.__mro__ for field in vars(each)}:
        raise UsageError(f"task {name} of {path} is not whole; it needs a method compose and a number answer_tokens")
    with task_errors(f"{path}:{name}"):
        return kind()
