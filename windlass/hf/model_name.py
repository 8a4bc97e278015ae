"""What a model is called where its fingerprint alone would tell nobody anything."""

import os
from pathlib import Path


def shown_name(name: str | os.PathLike[str]) -> str:
    """The name of a model's folder, without the path to it; a name on the hub as it is."""
    folder = Path(name).expanduser()
    # Links stay: what a user called it says more than where it lies.
    return (folder.absolute().name or str(name)) if folder.exists() else str(name)
