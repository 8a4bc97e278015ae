"""What a user asks for by name: one of ours, or a class in a Python file of theirs."""

import re
import sys
import traceback
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from windlass.core.close_names import did_you_mean, plain
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import read_bytes


@dataclass(frozen=True)
class PluginKind:
    """What can be asked for: subclasses of `base`, which users import as `imported_as`.

    Errors call one of them `word` and several `words`, and are of class `error`.
    """

    word: str
    words: str
    base: type[Any]
    imported_as: str
    error: type[WindlassError]

    def split(self, spec: str) -> tuple[Path | None, str]:
        """The file, if any, and what is asked for: a name, perhaps with parentheses after it.

        Raises: the kind's error for a file alone.
        """
        match = re.fullmatch(r"(.*):\s*([^\W\d]\w*\s*(?:\(.*\))?)\s*", spec, re.DOTALL)
        if match is not None:
            return Path(match[1]).expanduser(), match[2]
        spec = spec.strip()
        if spec.endswith(".py"):
            raise self.error(f"{self.word} {spec!r} is a file but names no class; use {spec}:Class")
        return None, spec

    def name_in(self, typed: str, names: Iterable[str]) -> str | None:
        """That of `names` which is meant, if any; case, `_` and `-` do not matter."""
        return next((name for name in names if plain(name) == plain(typed)), None)

    def name_of(self, typed: str, names: Collection[str]) -> str:
        """That of `names` which is meant; case, `_` and `-` do not matter.

        Raises: the kind's error for an unknown name, with one that is close to it, if any.
        """
        if (found := self.name_in(typed, names)) is not None:
            return found
        raise self.error(
            f"{self.word} {typed!r} is unknown; {did_you_mean(typed, names)}the names are {', '.join(names)}, "
            "or path/to/file.py:Class"
        )

    def class_in(self, path: Path, name: str) -> type[Any]:
        """The class `name` of a file, which is run for it.

        Raises: the kind's error for a file that cannot be read or run, or that has no such class.
        """
        module = self._run(path)
        found = vars(module).get(name)
        if self._is_one(found):
            return found
        kinds = [each for each in vars(module).values() if self._is_one(each)]
        del sys.modules[module.__name__]
        own = ", ".join(kind.__name__ for kind in kinds if kind.__module__ == module.__name__)
        what = "has no class" if found is None else f"has something else than a subclass of {self.imported_as} named"
        raise self.error(f"{self.word} file {path} {what} {name!r}; its {self.words}: {own or 'none'}")

    def _is_one(self, what: object) -> TypeGuard[type[Any]]:
        return isinstance(what, type) and issubclass(what, self.base)

    def _run(self, path: Path) -> ModuleType:
        """Unlike `import`, leaves no byte code beside the file."""
        file = f"{self.word} file {path}"
        # What runs through all modules, or prints a traceback, opens their sources: a pipe would let it wait for ever.
        source = str(path) if path.is_file() else f"<{path}>"
        try:
            code = compile(read_bytes(path, file), source, "exec")
        except UsageError as error:
            raise self.error(str(error)) from None
        except SyntaxError as error:
            raise self.error(f"{file}, line {error.lineno or 1}: syntax error: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:  # the last two of brackets in brackets
            raise self.error(f"{file} is not Python: {str(error) or type(error).__name__}") from None
        module = ModuleType(f"windlass_{self.word}_{path.stem}")
        if path.is_file():
            module.__file__ = source
        # `dataclass` looks its module up here to read annotations that are strings.
        sys.modules[module.__name__] = module
        try:
            exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[module.__name__]
            frames = traceback.extract_tb(error.__traceback__)
            lines = [frame.lineno for frame in frames if frame.filename == source]
            at = f", line {lines[-1]}" if lines else ""
            raise self.error(f"{file}{at}: {type(error).__name__}: {error}") from error
        return module
