"""`windlass view FILE`, and the recordings that it shows."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from windlass.cli.loading import loading

RecordingFile = Annotated[
    Path, Argument(metavar="FILE", help="A recording, of `windlass generate --record`.", show_default=False)
]
Port = Annotated[int, Option("--port", min=0, max=65535, help="Of 127.0.0.1; 0 takes any that is free.")]
Record = Annotated[
    Path | None,
    Option("--record", metavar="FILE", help="Record what the cache holds after each step, for `windlass view`."),
]


def view(file: RecordingFile, port: Port = 0) -> int:
    """Show a recording of a cache in the browser, without its model, until Ctrl-C.

    The page is served on this machine alone.
    """
    from windlass.cli.terminal import note, say

    with loading():
        from windlass.view.local_server import RecordingServer

    with RecordingServer(file, port) as server:
        say(f"{server.address}\n")
        note("Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("")
    return 0
