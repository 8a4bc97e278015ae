"""What the command line remembers over sessions: a folder of the user's own, which nobody else can read."""

import os
import sys
from pathlib import Path


def state_folder() -> Path:
    """`windlass` in XDG_STATE_HOME where that is set, else where the platform keeps such things.

    Raises: OSError for a user without a home.
    """
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():
        return given / "windlass"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from None
    return home / ("Library/Application Support" if sys.platform == "darwin" else ".local/state") / "windlass"


def private_file(path: Path) -> Path:
    """`path`, which is now there and can be read and written by its user alone. Raises: OSError as the system does."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        os.fchmod(file.fileno(), 0o600)
    return path
