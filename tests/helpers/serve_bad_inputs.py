"""A process that runs command lines one after the other, without weights, and after `light` without torch, too.

Reads a line of JSON per command line, a list of arguments. Writes one per run: exit code, stdout, stderr.
"""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HEAVY = ("torch", "transformers")


class HeavyWork(BaseException):
    """A slow import or load. No `Exception`, so nobody catches it on the way."""


class Refuse:
    """An import finder, asked before all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in HEAVY:
            raise HeavyWork(f"{name} was imported")
        return None


def ran(arguments: list[str]) -> tuple[int, str, str]:
    """Return value of `main`, and the texts on the process's own outputs."""
    from windlass.cli.app import main

    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = main(arguments)
        except HeavyWork as error:
            code = -1
            print(error, file=sys.stderr)
        except Exception as error:  # would be a traceback
            code = -2
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for place, output in enumerate(kept, 1):
                os.dup2(output, place)
                os.close(output)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return code, texts[0], texts[1]


def refuse_weights() -> None:
    """Let all that makes or reads weights fail."""
    from transformers import AutoModelForCausalLM

    def refuse(*_: Any, **__: Any) -> None:
        raise HeavyWork("weights were loaded")

    for name in ("from_pretrained", "from_config"):
        setattr(AutoModelForCausalLM, name, refuse)


def serve() -> None:
    """Serve until stdin ends. The commands themselves get an empty one."""
    if "light" in sys.argv:
        sys.meta_path.insert(0, Refuse())
    else:
        refuse_weights()
    lines = sys.stdin.readlines()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for line in lines:
        print(json.dumps(ran(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
