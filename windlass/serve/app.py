"""The application: routes, and what stands before them."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.errors import ApiError
from windlass.serve.guard import BodyLimit, Guard, Watch
from windlass.serve.server import Server
from windlass.view.asgi import ViewApp

Answer = Callable[[HttpRequest], Awaitable[ASGIApp]]


class Routes:
    """Each path with its one method, and the paths of a page. Errors are for whoever stands before it: Starlette's own
    application would answer some of them in its own way."""

    def __init__(self, got: Mapping[str, Answer], posted: Mapping[str, Answer], page: ViewApp | None) -> None:
        self._page = page
        self._answers = {path: ("GET", answer) for path, answer in got.items()}
        self._answers |= {path: ("POST", answer) for path, answer in posted.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if self._page is not None and scope["type"] == "http" and self._page.has(path):
            await self._page(scope, receive, send)
            return
        if scope["type"] != "http" or path not in self._answers:
            raise ApiError(404, f"there is no such route; there are {', '.join(self._answers)}", None, "unknown_route")
        method, answer = self._answers[path]
        if scope["method"] != method:
            raise ApiError(405, f"{path} takes {method} only", None, "wrong_method")
        await (await answer(HttpRequest(scope, receive)))(scope, receive, send)


def make_app(server: Server, page: ViewApp | None = None) -> ASGIApp:
    """The whole application, with the `page` that shows caches, if any; an exception of any kind ends in `Watch`."""
    got: dict[str, Answer] = {
        "/v1/models": server.models,
        "/v1/cache": server.cache,
        "/health": server.health,
        "/ready": server.ready,
        "/metrics": server.show_metrics,
    }
    posted: dict[str, Answer] = {
        "/v1/chat/completions": server.chat,
        "/v1/completions": server.complete,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    settings = server.settings
    limited = BodyLimit(Routes(got, posted, page), settings.request.body_bytes)
    return Watch(
        Guard(limited, settings.keys, settings.hosts, ViewApp.is_public if page is not None else _none),
        server.metrics,
        [*got, *posted],
    )


def _none(_path: str) -> bool:
    return False
