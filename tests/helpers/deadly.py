"""A file with tasks that end, or hold up, the process that scores their answers."""

from pathlib import Path

TASKS = """
import os
import signal
import time
from pathlib import Path

from windlass.evals.tasks.hidden import PassKey

HERE = Path({folder!r})


class Plain(PassKey):
    "Asks for a key."


class Dies(PassKey):
    "Ends the process for good over one text, and over another once."

    def score(self, turn, output):
        if turn.expected[0] in (HERE / "always").read_text().split():
            os.kill(os.getpid(), signal.SIGKILL)
        if turn.expected[0] in (HERE / "once").read_text().split() and not (HERE / "died").exists():
            (HERE / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().score(turn, output)


class Waits(PassKey):
    "Holds one text up until it is released."

    def score(self, turn, output):
        while turn.expected[0] in (HERE / "held").read_text().split():
            (HERE / "waiting").touch()
            time.sleep(0.02)
        return super().score(turn, output)
"""


def written_to(folder: Path) -> Path:
    """The file, and empty lists beside it that name the texts by their pass keys."""
    for name in ("always", "once", "held"):
        (folder / name).write_text("")
    path = folder / "tasks.py"
    path.write_text(TASKS.format(folder=str(folder)))
    return path
