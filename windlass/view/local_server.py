"""`windlass view FILE`: the page with one recording, on this machine alone, without a model."""

import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from windlass.core.errors import UsageError
from windlass.core.files import read_bytes
from windlass.view.page_files import FRAMES_TYPE, HEADERS, PREFIX, page_files
from windlass.view.recording import read_recording

HOST: Final = "127.0.0.1"
OWN_NAMES: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?", re.IGNORECASE)
IDLE_S: Final = 30.0  # a connection that says nothing is closed


class RecordingServer(ThreadingHTTPServer):
    """Serves the page and the recording at `path`; port 0 takes any that is free. Nothing else is given out.

    Raises: RecordingError for a file that cannot be replayed; UsageError for a port that is taken.
    """

    daemon_threads = True

    def __init__(self, path: Path, port: int = 0) -> None:
        read_recording(path).frames  # noqa: B018  # refused here, in words, and not in the browser
        self.name, self.content = path.name, read_bytes(path, f"recording {path}")
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(f"port {port} of {HOST} cannot be taken ({error}); choose another with --port") from None

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_address[1]}/?replay={quote(self.name)}"


class _Handler(BaseHTTPRequestHandler):
    server: RecordingServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer with a file of the page, or the recording."""
        # Another page whose name was pointed here must not read it.
        if OWN_NAMES.fullmatch(self.headers.get("Host", "")) is None:
            self.send_error(421)
            return
        path = urlsplit(self.path).path
        if path == f"{PREFIX}mode":
            self._answer("application/json", json.dumps({"live": False, "replays": [self.server.name]}).encode())
        elif path.startswith(f"{PREFIX}replay/") and unquote(path.removeprefix(f"{PREFIX}replay/")) == self.server.name:
            self._answer(FRAMES_TYPE, self.server.content)
        elif path in page_files():
            self._answer(*page_files()[path])
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
