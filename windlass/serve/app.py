"""The application: routes, and what stands before them."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.serve.errors import ApiError
from windlass.serve.guard import BodyLimit, Guard, Watch
from windlass.serve.server import Server

Answer = Callable[[HttpRequest], Awaitable[ASGIApp]]


class Endpoint:
    """One route, as ASGI."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._answer(HttpRequest(scope, receive))
        await answer(scope, receive, send)


def make_app(server: Server) -> ASGIApp:
    """The whole application; an exception of any kind ends in `Watch`."""
    posted: dict[str, Answer] = {
        "/v1/chat/completions": server.chat,
        "/v1/completions": server.complete,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
    }
    got: dict[str, Answer] = {
        "/v1/models": server.models,
        "/health": server.health,
        "/ready": server.ready,
        "/metrics": server.show_metrics,
        "/v1/cache": server.cache,
    }
    routes = [Route(path, Endpoint(answer), methods=["POST"]) for path, answer in posted.items()]
    routes += [Route(path, Endpoint(answer), methods=["GET"]) for path, answer in got.items()]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown, ApiError: _refused})
    app.router.redirect_slashes = False
    settings = server.settings
    limited = BodyLimit(app, settings.request.body_bytes)
    return Watch(Guard(limited, settings.keys, settings.hosts), server.metrics, [*posted, *got])


async def _unknown(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001  # what Starlette gives
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = "this route takes another method" if status == 405 else "there is no such route"
    return ApiError(status, f"{what}; docs/serve.md lists them", None, "unknown_route").answer()


async def _refused(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001
    assert isinstance(error, ApiError)
    return error.answer()
