"""The application: routes, and what stands before them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.errors import ApiError
from windlass.serve.guard import BodyLimit, Guard, Watch
from windlass.serve.server import CACHE, MODELS, Server
from windlass.view.asgi import ViewApp

METHODS: Final = ("GET", "POST", "DELETE")
Answer = Callable[[HttpRequest], Awaitable[ASGIApp]]


class Routes:
    """Each path with its methods, and the paths of a page. `below` has those that go on with a name: `/v1/models/` and
    what stands behind it. Errors are for whoever stands before it: Starlette's own application would answer some of
    them in its own way."""

    def __init__(
        self,
        at: Mapping[str, Mapping[str, Answer]],
        below: Mapping[str, Mapping[str, Answer]],
        page: ViewApp | None,
    ) -> None:
        self._at, self._below, self._page = at, below, page

    def name_of(self, path: str) -> str:
        """What a path is counted under."""
        return next((each for each in (path, self._start(path)) if each in self._at or each in self._below), "other")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._page is not None and scope["type"] == "http" and self._page.has(path):
            await self._page(scope, receive, send)
            return
        answers = self._at.get(path) or self._below.get(self._start(path))
        if scope["type"] != "http" or answers is None:
            raise ApiError(404, f"there is no such route; there are {', '.join(self._at)}", None, "unknown_route")
        if scope["method"] not in answers:
            raise ApiError(405, f"{self.name_of(path)} takes {' and '.join(answers)} only", None, "wrong_method")
        await (await answers[scope["method"]](HttpRequest(scope, receive)))(scope, receive, send)

    def _start(self, path: str) -> str:
        """The part of a path before a name, if it has one."""
        return next((each for each in self._below if len(path) > len(each) and path.startswith(each)), "")


def make_app(server: Server, page: ViewApp | None = None) -> ASGIApp:
    """The whole application, with the `page` that shows caches, if any; an exception of any kind ends in `Watch`."""
    at: dict[str, dict[str, Answer]] = {
        "/v1/models": {"GET": server.models},
        "/v1/cache": {"GET": server.cache, "DELETE": server.forget},
        "/health": {"GET": server.health},
        "/ready": {"GET": server.ready},
        "/metrics": {"GET": server.show_metrics},
        "/v1/chat/completions": {"POST": server.chat},
        "/v1/completions": {"POST": server.complete},
        "/v1/responses": {"POST": server.respond},
        "/tokenize": {"POST": server.tokenize},
        "/detokenize": {"POST": server.detokenize},
    }
    below: dict[str, dict[str, Answer]] = {MODELS: {"GET": server.model}, CACHE: {"DELETE": server.forget_one}}
    settings, routes = server.settings, Routes(at, below, page)
    is_public = ViewApp.is_public if page is not None else _none
    limited = BodyLimit(routes, settings.request.body_bytes)
    guarded = Guard(limited, settings.keys, settings.hosts, is_public, settings.salt)
    return with_origins(Watch(guarded, server.metrics, routes.name_of), settings.origins)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, whose answers a browser lets pages of these origins read; `*`: all pages, none: no others."""
    if not origins:
        return app
    # Before a page's own request a browser asks without its key whether that may be sent.
    return CORSMiddleware(app, origins, METHODS, ("*",), expose_headers=("x-request-id", "x-replica", "retry-after"))


def _none(_path: str) -> bool:
    return False
