"""The application: routes, and what stands before them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.engine.prefix_cache import EntrySelector
from windlass.engine.request import Grammar, owner_of
from windlass.engine.scheduler import Service
from windlass.serve.chat import AnswerDocuments, AnswerHeader, ChatDocuments, CompletionDocuments, PartialText
from windlass.serve.errors import ApiError, BadField, JsonAnswer, ServerSettings, from_json, name_of, short, stopping
from windlass.serve.grammar import Grammars
from windlass.serve.metrics import Metrics, model_document
from windlass.serve.middleware import TENANT, Authentication, BodyLimit, RequestLog
from windlass.serve.neutral import left_out
from windlass.serve.parsers import CallReader, ThoughtReader, schema_of
from windlass.serve.prompts import Chunk, Prompt, PromptTokenizer
from windlass.serve.requests import LEGACY_MAX_TOKENS, GenerationRequest, asked_of
from windlass.serve.responses import ResponseDocuments, as_chat
from windlass.serve.schema import checked, table
from windlass.serve.stream import AnswerStream, EventStream, Gate, Tickets, unless_gone
from windlass.view.server import ViewApp

Value = TypeVar("Value")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES: Final = "/v1/responses"
MODELS, CACHE = "/v1/models/", "/v1/cache/"  # begin the paths of one model, and of one cache that is kept
THINKING: Final = "enable_thinking"  # the variable of templates whose models may think
LEFT_OUT: Final = "left out"  # beside the fields of a request: see `left_out`
THREADS: Final = 4  # that tokenize and compile, at most
JSON_TYPE: Final = "application/json"


class Server:
    """The routes of one model. `gate` is closed to end; what was admitted is then finished."""

    def __init__(self, service: Service, words: PromptTokenizer, settings: ServerSettings) -> None:
        self.service, self.words, self.settings = service, words, settings
        self.gate, self.metrics = Gate(), Metrics(service)
        self._tables = table(settings.request, settings.cache)
        self._grammars = Grammars(words, settings.request.grammar_bytes, settings.request.grammar_depth)
        self._threads = CapacityLimiter(THREADS)

    async def chat(self, http: HttpRequest) -> ASGIApp:
        given = await self._given(http, CHAT, ["messages"])
        asked = await self._beside(partial(self._asked_of_chat, given, http.scope[TENANT]))
        texts = [self._written(given, asked) for _ in asked.requests]
        return await self._answer(http, asked, ChatDocuments(self._head(asked, given)), texts)

    async def complete(self, http: HttpRequest) -> ASGIApp:
        given = await self._given(http, COMPLETIONS, ["prompt"])
        asked = await self._beside(partial(self._asked_of_completion, given, http.scope[TENANT]))
        texts = await self._beside(partial(self._echoing, given, asked))
        return await self._answer(http, asked, CompletionDocuments(self._head(asked, given)), texts)

    async def respond(self, http: HttpRequest) -> ASGIApp:
        given = await self._given(http, RESPONSES, ["input"])
        chat = as_chat(given)
        asked = await self._beside(partial(self._asked_of_chat, chat, http.scope[TENANT]))
        return await self._answer(
            http, asked, ResponseDocuments(self._head(asked, given), given), [self._written(chat, asked)]
        )

    async def tokenize(self, http: HttpRequest) -> ASGIApp:
        given = await self._given(http, "/tokenize", [])
        if ("prompt" in given) == ("messages" in given):
            raise BadField("prompt", "or messages: give one of them", "missing_required_parameter")
        if "chat_template_kwargs" in given and "messages" not in given:
            raise BadField("chat_template_kwargs", "needs messages")
        if "messages" in given:
            tokens = (await self._beside(partial(self._chat, given))).ids
        else:
            has_special = given.get("add_special_tokens", True)
            tokens = await self._beside(partial(self.words.encoded, given["prompt"], has_special))
        return JsonAnswer({"tokens": list(tokens), "count": len(tokens)})

    async def detokenize(self, http: HttpRequest) -> ASGIApp:
        given = await self._given(http, "/detokenize", ["tokens"])
        return JsonAnswer({"prompt": await self._beside(partial(self.words.decoded, given["tokens"]))})

    async def models(self, http: HttpRequest) -> ASGIApp:
        return JsonAnswer({"object": "list", "data": [self._model]})

    async def model(self, http: HttpRequest) -> ASGIApp:
        if http.scope["path"].removeprefix(MODELS) != self.settings.name:
            raise self._other_model()
        return JsonAnswer(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        return model_document(self.settings.name, self.settings.facts, self.service, self.words.vocabulary)

    def _other_model(self) -> ApiError:
        return ApiError(404, f"this server has the model {self.settings.name} only", "model", "model_not_found")

    async def health(self, http: HttpRequest) -> ASGIApp:
        self._check_alive()
        return JsonAnswer({"status": "ok"})

    async def ready(self, http: HttpRequest) -> ASGIApp:
        self._check_alive()
        if not self.gate.is_open:
            raise stopping()
        return JsonAnswer({"status": "ready"})

    async def show_metrics(self, http: HttpRequest) -> ASGIApp:
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    async def cache(self, http: HttpRequest) -> ASGIApp:
        status, wanted = self.service.status(), self._wanted(http)
        told = {name: value for name, value in vars(status).items() if name != "rows"}
        rows = [vars(row) for row in status.rows]
        stored = [vars(each) for each in await self._beside(partial(self.service.stored, wanted))]
        return JsonAnswer({"options": self.service.options.labels(), "rows": rows, **told, "stored": stored})

    async def forget(self, http: HttpRequest) -> ASGIApp:
        return await self._forgotten(self._wanted(http))

    async def forget_one(self, http: HttpRequest) -> ASGIApp:
        number = http.scope["path"].removeprefix(CACHE).rstrip("/")
        wanted = replace(self._wanted(http), id=number)
        if not await self._beside(partial(self.service.stored, wanted)):
            raise ApiError(404, "nothing that is kept for you has this id; GET /v1/cache lists all", None, "not_found")
        return await self._forgotten(wanted)

    async def _forgotten(self, wanted: EntrySelector) -> ASGIApp:
        gone = await self._beside(partial(self.service.forget, wanted))
        deleted, size = [each.id for each in gone], sum(each.bytes for each in gone)
        return JsonAnswer({"object": "cache.deleted", "deleted": deleted, "bytes": size})

    def _wanted(self, http: HttpRequest) -> EntrySelector:
        """What is kept for whoever asks, or of it what has the name that is asked for."""
        given = dict(http.query_params)
        for field in given:
            if field != "name":
                raise BadField(short(field), "is not supported by this route; name is", "unsupported_parameter")
        name = name_of(self.settings.cache.name)("name", given["name"]) if given else None
        return EntrySelector(owner_of(http.scope[TENANT]), name)

    def _check_alive(self) -> None:
        if not self.service.status().is_alive:
            raise ApiError(503, "the engine has stopped; restart the server", None, "engine_dead")

    async def _given(self, http: HttpRequest, route: str, needed: Collection[str]) -> dict[str, Any]:
        """The fields of a request. Raises: ApiError for what is no JSON, no field of the route, or another model."""
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
            raise ApiError(415, f"send the body with the header Content-Type: {JSON_TYPE}", None, "bad_content_type")
        seconds = self.settings.request.body_seconds
        try:
            async with asyncio.timeout(seconds):
                body = await http.body()
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {seconds:g} s", None, "body_timeout") from None
        try:
            document = await self._beside(partial(from_json, body))
        except ValueError as error:
            raise ApiError(400, f"the body is no JSON: {error}", None, "invalid_json") from error
        given = await self._beside(partial(checked, self._tables[route], document, needed))
        given[LEFT_OUT] = left_out(document)
        if given.get("model", self.settings.name) != self.settings.name:
            raise self._other_model()
        return given

    def _asked_of_chat(self, given: dict[str, Any], tenant: str) -> GenerationRequest:
        tools, choice = given.get("tools", []), given.get("tool_choice", "auto" if "tools" in given else "none")
        if choice not in ("none", "auto") and not tools:
            raise BadField("tool_choice", "needs tools")
        prompt = self._chat(given, [] if choice == "none" else tools)
        form = given.get("response_format", {"type": "text"})
        grammars: Sequence[Grammar] = ()
        if choice not in ("none", "auto"):
            if form["type"] != "text":
                raise BadField("response_format", "and a tool_choice that demands a call exclude each other")
            grammars = self._grammars.of("tools", schema_of(tools, choice), given.get("n", 1))
        elif form["type"] == "json_schema":
            name = "response_format.json_schema.schema"
            grammars = self._grammars.of(name, form["json_schema"]["schema"], given.get("n", 1))
        elif form["type"] == "json_object":
            grammars = self._grammars.of("response_format", {"type": "object"}, given.get("n", 1))
        return self._asked(given, [prompt], grammars, self.service.limits.max_tokens, tenant)

    def _written(self, chat: dict[str, Any], asked: GenerationRequest) -> PartialText:
        """What reads a text of a chat: its thought, if its model thinks, and calls of the tools that it was given."""
        names, choice = [tool["function"]["name"] for tool in chat.get("tools", [])], chat.get("tool_choice", "auto")
        calls = CallReader(names, choice != "auto") if names and choice != "none" else None
        begun = asked.has_begun_thought
        return PartialText(calls, thoughts=None if begun is None else ThoughtReader(begun))

    def _chat(self, given: dict[str, Any], tools: Sequence[dict[str, Any]] = ()) -> Prompt:
        variables, effort = given.get("chat_template_kwargs", {}), given.get("reasoning", {}).get("effort")
        if given.get("reasoning_effort", effort) == "none" and self.words.reads(THINKING):
            variables = {THINKING: False, **variables}
        return self.words.chat(given["messages"], tools, variables)

    def _asked_of_completion(self, given: dict[str, Any], tenant: str) -> GenerationRequest:
        chunks = [Chunk(each) for each in given.get("chunks", {}).get("texts", ())]
        written = sum(len(each) for each in given["prompt"]) + sum(len(chunk.text) for chunk in chunks)
        if written > self.settings.request.characters:
            most = self.settings.request.characters
            raise BadField("prompt", f"must have at most {most} characters in all, got {written}")
        prompts = [
            Prompt(self.words.encoded(each) if isinstance(each, str) else tuple(each)) for each in given["prompt"]
        ]
        if given.get("suffix"):
            prompts = [Prompt(self.words.around(each.ids, given["suffix"])) for each in prompts]
        if chunks:
            prompts = [self.words.behind(chunks, each) for each in prompts]
        return self._asked(given, prompts, (), LEGACY_MAX_TOKENS, tenant)

    def _echoing(self, given: dict[str, Any], asked: GenerationRequest) -> list[PartialText]:
        """What reads the texts of completions, which begin with their prompts where that is asked for."""
        if not given.get("echo"):
            return [PartialText() for _ in asked.requests]
        texts = [each if isinstance(each, str) else None for each in given["prompt"]]
        prompts = [each.prompt for each in asked.requests[:: asked.choices]]
        echoes = [self.words.echo(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        return [PartialText(echo=each) for each in echoes for _ in range(asked.choices)]

    def _asked(
        self,
        given: dict[str, Any],
        prompts: Sequence[Prompt],
        grammars: Sequence[Grammar],
        default_tokens: int,
        tenant: str,
    ) -> GenerationRequest:
        most = self.settings.request.texts
        return asked_of(given, prompts, grammars, self.service, self.words, default_tokens, tenant, most)

    def _head(self, asked: GenerationRequest, given: dict[str, Any]) -> AnswerHeader:
        name, labels, notes = self.settings.name, asked.options.labels(), given[LEFT_OUT]
        return AnswerHeader(self.words, name, labels, asked.choices, asked.top_logprobs, asked.has_usage, notes)

    async def _answer(
        self, http: HttpRequest, asked: GenerationRequest, form: AnswerDocuments, texts: list[PartialText]
    ) -> ASGIApp:
        """Hand the texts to the engine, and answer. Once nobody waits for them, the engine is told to leave them."""
        tickets = Tickets(self.service, self.gate)
        tickets.submit(asked.requests)
        answering = AnswerStream(tickets, form, texts, self.metrics, self.settings.ping_seconds)
        if asked.is_streamed:
            return EventStream(answering.chunks(), self.service.limits.unread_seconds, tickets.cancel)
        try:
            return JsonAnswer(await unless_gone(http.receive, answering.whole()))
        finally:
            tickets.cancel()

    async def _beside(self, work: Callable[[], Value]) -> Value:
        """Run `work` in a thread, so that the event loop goes on."""
        return await to_thread.run_sync(work, limiter=self._threads)


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
    """The application, with the `page` that shows caches, if any; an exception of any kind ends in `RequestLog`."""
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
    guarded = Authentication(limited, settings.keys, settings.hosts, is_public, settings.salt)
    return with_origins(RequestLog(guarded, server.metrics, routes.name_of), settings.origins)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The application, whose answers a browser lets pages of these origins read; `*`: all pages, none: no others."""
    if not origins:
        return app
    # Before a page's own request a browser asks without its key whether that may be sent.
    return CORSMiddleware(app, origins, METHODS, ("*",), expose_headers=("x-request-id", "x-replica", "retry-after"))


def _none(_path: str) -> bool:
    return False
