"""The page's files, and what every answer that gives them out says."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

INDEX: Final = "index.html"
PREFIX: Final = "/view/"
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FRAMES_TYPE: Final = "application/octet-stream"
HEADERS: Final[Mapping[str, str]] = {
    # The page shows what a model wrote and what others asked: nothing of it may become code, or leave.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PageFile(NamedTuple):
    """What a browser is given for a path."""

    kind: str
    content: bytes


@cache
def page_files() -> Mapping[str, PageFile]:
    """All files of the page by the path that they are asked for: `/`, and `/view/NAME`."""
    folder = files("windlass.view") / "page"
    found = {}
    for each in folder.iterdir():
        kind = KINDS.get(f".{each.name.rpartition('.')[2]}")
        if kind is not None:
            found["/" if each.name == INDEX else PREFIX + each.name] = PageFile(kind, each.read_bytes())
    return found
