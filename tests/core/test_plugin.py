"""Policies and tasks by name or in a user's file: lookups, and one clear line for each error."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from windlass.cache.options import policy_of
from windlass.core.errors import PolicyError, UsageError, WindlassError
from windlass.evals.grid import load_task

POLICY = '''
from __future__ import annotations
from dataclasses import dataclass
from windlass.policies import Policy, Recent, Slots

@dataclass(frozen=True)
class Mine(Policy):
    """Keeps the oldest tokens.

    Source: this test.
    Differs: nothing.
    """
    number: int = 3

    def score(self, slots: Slots):
        return -slots.positions.float() * self.number

class Other:
    pass
'''
TASK = """
from __future__ import annotations
from dataclasses import dataclass
from windlass.evals import Sample, Task, Question

@dataclass(frozen=True)
class Mine(Task):
    number: int = 3
    answer_tokens: int = 3

    def compose(self, draw, length, units):
        return Sample("The sky is blue.", ())

class Other:
    pass
"""


@dataclass(frozen=True)
class Asked:
    """A lookup of something, and the words of its errors."""

    load: Callable[[str], object]
    source: str
    word: str
    words: str
    base: str
    error: type[WindlassError]

    def says(self, spec: str) -> str:
        with pytest.raises(self.error) as caught:
            self.load(spec)
        return str(caught.value)


BOTH = [
    Asked(policy_of, POLICY, "policy", "policies", "windlass.policies.Policy", PolicyError),
    Asked(lambda spec: load_task(spec)[1], TASK, "task", "tasks", "windlass.evals.Task", UsageError),
]
each = pytest.mark.parametrize("asked", BOTH, ids=lambda asked: asked.word)


@pytest.mark.parametrize(
    ("asked", "spec", "says"),
    [
        (BOTH[0], "snapvk", "policy 'snapvk' is unknown. Did you mean snapkv? The names are recent, random, h2o, "),
        (BOTH[0], "key_dif(3)", "policy 'key_dif' is unknown. Did you mean key_diff?"),
        (BOTH[0], "zzzzz", "policy 'zzzzz' is unknown. The names are recent, "),
        (BOTH[1], "pasky", "task 'pasky' is unknown. Did you mean passkey? The names are passkey, passkey_words, "),
    ],
)
def test_an_unknown_name_is_told_with_its_nearest(asked: Asked, spec: str, says: str):
    assert asked.says(spec).startswith(says)
    assert asked.says(spec).endswith(", or path/to/file.py:Class")


@each
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("{file}", "is a file but names no class. Use {file}:Class"),
        ("{file}:Nope", "{word} file {file} has no class 'Nope'. Its {words}: Mine"),
        ("{file}:Other", "{word} file {file} has something else than a subclass of {base} named 'Other'"),
        ("{file}x:Mine", "{word} file {file}x cannot be read: No such file or directory"),
    ],
)
def test_what_a_file_lacks_is_one_line(asked: Asked, spec: str, says: str, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(asked.source)
    wanted = says.format(file=file, word=asked.word, words=asked.words, base=asked.base)
    assert wanted in asked.says(spec.format(file=file))
    assert "\n" not in asked.says(spec.format(file=file))


@each
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\ndef f(:\n", ", line 2: syntax error: invalid syntax"),
        ("x = 1\n\nimport not_there_at_all\n", ", line 3: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def f():\n    return 1 / 0\nf()\n", ", line 2: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)\n", ", line 2: SystemExit: 3"),
        ("x = 1\n\0", ", line 2: a null byte. Save the file as text"),
    ],
)
def test_a_broken_file_is_one_line_that_names_its_own(asked: Asked, tmp_path: Path, source: str, says: str):
    path = tmp_path / "broken.py"
    path.write_text(source)
    assert asked.says(f"{path}:Any") == f"{asked.word} file {path}{says}"


@each
@pytest.mark.parametrize("end", ["", "\nraise ValueError(3)\n"])
def test_nothing_looks_for_the_source_of_a_pipe(asked: Asked, tmp_path: Path, end: str):
    """The pipe has been read. A second open waits for ever, as in `traceback` and `inspect.getsource`."""
    pipe = tmp_path / f"pipe{len(end)}"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(asked.source + end,))
    writer.start()
    if end:
        line = (asked.source + end).count("\n")
        assert asked.says(f"{pipe}:Mine") == f"{asked.word} file {pipe}, line {line}: ValueError: 3"
    else:
        kind = type(asked.load(f"{pipe}:Mine"))
        assert "__file__" not in vars(sys.modules[kind.__module__])
    writer.join()


@each
@pytest.mark.parametrize("end", ["", "1 / 0"])
def test_a_file_that_is_refused_leaves_no_module(asked: Asked, tmp_path: Path, end: str):
    file, before = tmp_path / "left_behind.py", set(sys.modules)
    file.write_text(f"{asked.source}\n{end}\n")
    asked.says(f"{file}:Nope")
    assert not [name for name in set(sys.modules) - before if "left_behind" in name]


@each
def test_two_files_of_one_name_do_not_mix(asked: Asked, tmp_path: Path):
    for folder, number in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(asked.source.replace("number: int = 3", f"number: int = {number}"))
    assert repr(asked.load(f"{tmp_path}/a/mine.py:Mine")).startswith("Mine(number=1")
    assert repr(asked.load(f"{tmp_path}/b/mine.py:Mine")).startswith("Mine(number=2")
    assert "mine" not in sys.modules


def test_a_policy_and_a_task_in_files_of_one_name_do_not_mix(tmp_path: Path):
    for asked in BOTH:
        (tmp_path / asked.word).mkdir()
        (tmp_path / asked.word / "mine.py").write_text(asked.source)
        asked.load(f"{tmp_path}/{asked.word}/mine.py:Mine")
    assert sys.modules["windlass_policy_mine"] is not sys.modules["windlass_task_mine"]
