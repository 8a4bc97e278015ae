"""The course of a training: the context and the lessons of every step."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from windlass.core.errors import UsageError
from windlass.core.files import read_text

STAGE = {"contexts", "mix"}


@dataclass(frozen=True)
class Stage:
    """Steps with the same lessons: the context of each, and how often each lesson is drawn."""

    contexts: list[int]
    mix: dict[str, float]


@dataclass(frozen=True)
class Course:
    """Stages, one after the other."""

    stages: list[Stage]

    @property
    def contexts(self) -> list[int]:
        """Of every step."""
        return [context for stage in self.stages for context in stage.contexts]

    @property
    def mixes(self) -> list[dict[str, float]]:
        """Of every step."""
        return [stage.mix for stage in self.stages for _ in stage.contexts]


def course_of(path: Path, batch_tokens: int, names: list[str]) -> Course:
    """The stages of a JSON file: a list of `{"contexts": "128:500", "mix": "novel=3,pairs=1"}`.

    Raises: UsageError for a file that is no such list, or a stage that cannot be honoured, whose number it names.
    """
    try:
        stages = json.loads(read_text(path, f"stages {path}"))
    except json.JSONDecodeError as error:
        raise UsageError(f"stages {path} is not JSON: {error}") from error
    if not isinstance(stages, list) or not stages:
        raise UsageError(f'stages {path} is not a list of stages; write [{{"contexts": "128:500", "mix": "novel=3"}}]')
    made = []
    for number, stage in enumerate(stages, 1):
        if not isinstance(stage, dict) or stage.keys() != STAGE or not all(isinstance(x, str) for x in stage.values()):
            raise UsageError(f"stages {path}: stage {number} is not contexts and mix, both as on the command line")
        try:
            made.append(Stage(contexts_of(stage["contexts"], batch_tokens), mix_of(stage["mix"], names)))
        except UsageError as error:
            raise UsageError(f"stages {path}: stage {number}: {error}") from error
    return Course(made)


def contexts_of(text: str, batch_tokens: int) -> list[int]:
    """The context of every step: `"128:2,256:1"` is 128, 128, 256.

    Raises: UsageError for what is no such list, or more than a batch holds.
    """
    way_out = "write tokens:steps, as 128:2000,256:1000"
    if not re.fullmatch(r"[1-9]\d{0,6}:[1-9]\d{0,6}(,[1-9]\d{0,6}:[1-9]\d{0,6})*", text):
        raise UsageError(f"--contexts {text!r} is not a list of contexts; {way_out}")
    parts = [(int(context), int(steps)) for context, _, steps in (part.partition(":") for part in text.split(","))]
    longest = max(context for context, _ in parts)
    if longest > batch_tokens:
        raise UsageError(f"--contexts {longest} is more than a batch of {batch_tokens}; raise --batch-tokens")
    return [context for context, steps in parts for _ in range(steps)]


def mix_of(text: str, names: list[str]) -> dict[str, float]:
    """How often each lesson is drawn: `"novel=3,vt=1"`.

    Raises: UsageError for what is no such list, or names no lesson.
    """
    mix = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+)=(\d+(?:\.\d+)?)", part)
        if found is None or found[1] not in names or not float(found[2]):
            raise UsageError(
                f"--mix {part!r} is not a lesson and its share, as {names[0]}=3; the lessons are {', '.join(names)}"
            )
        mix[found[1]] = float(found[2])
    return mix
