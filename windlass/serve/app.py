"""The FastAPI application: the routes of one model, and the middleware before them."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Annotated, Any, Final, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Query, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException as RouterException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.core import __version__
from windlass.engine.prefix_entry import EntrySelector
from windlass.engine.request import Grammar, owner_of, tenant_of
from windlass.engine.scheduler import Service
from windlass.serve.chat import (
    AnswerDocuments,
    AnswerHeader,
    ChatDocuments,
    CompletionDocuments,
    PartialText,
    message_of,
)
from windlass.serve.errors import ApiError, BadField, JsonAnswer, ServerSettings, from_json, of_validation, stopping
from windlass.serve.grammar import Grammars
from windlass.serve.messages import MessageDocuments, MessagesPrompt, MessagesRequest
from windlass.serve.metrics import Metrics, model_document
from windlass.serve.middleware import TENANT, Authentication, BodyLimit, RequestLog
from windlass.serve.parsers import reader_of
from windlass.serve.prompts import (
    Chunk,
    Prompt,
    PromptTokenizer,
    as_sent,
    check_conversation,
    conversation,
)
from windlass.serve.requests import LEGACY_MAX_TOKENS, GenerationRequest, RequestBuilder
from windlass.serve.responses import ResponseDocuments, ResponsesRequest
from windlass.serve.schema import (
    CacheQuery,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SchemaFormat,
    TokenizeRequest,
)
from windlass.serve.sessions import (
    NO_TURN,
    BranchRequest,
    Responses,
    RewindRequest,
    SessionRequest,
    Sessions,
    Turn,
    UserQuery,
)
from windlass.serve.stream import AnswerStream, EventStream, Gate, Tickets, unless_gone
from windlass.view.server import ViewApp

Value = TypeVar("Value")
THINKING: Final = "enable_thinking"  # the variable of templates whose models may think
THREADS: Final = 4  # most threads that tokenize and compile
JSON_TYPE: Final = "application/json"
METHODS: Final = ("GET", "POST", "DELETE")


class Server:
    """The routes of one model. Once `gate` is closed, no request is admitted, and those under way go on."""

    def __init__(self, service: Service, tokenizer: PromptTokenizer, settings: ServerSettings) -> None:
        self.service, self.tokenizer, self.settings = service, tokenizer, settings
        self.gate, self.metrics = Gate(), Metrics(service)
        self._grammars = Grammars(tokenizer, settings.request.grammar_bytes, settings.request.grammar_depth)
        self._builder = RequestBuilder(service, tokenizer, settings.request.texts, settings.reuse)
        self._threads = CapacityLimiter(THREADS)
        self._sessions = Sessions(settings.folder, settings.salt or b"", settings.sessions)
        self._responses = Responses(settings.folder, settings.sessions)

    async def chat(self, http: HttpRequest, body: ChatRequest) -> Response:
        """Answer a conversation, or add a turn to a session."""
        self._check_model(body.model)
        messages = await self._in_thread(partial(conversation, body.messages))
        turn = NO_TURN
        if body.session is not None:
            if body.n > 1:
                raise BadField("n", f"must be 1 in a session, got {body.n}")
            turn = await self._in_thread(partial(self._sessions.begin, caller(http, body.user), body.session))
        with turn.closed_by_errors():
            given = [*turn.history, *messages]
            asked = await self._chat_requests(http, body, "messages", given)
            texts = [self._partial(body, asked) for _ in asked.requests]
            form = ChatDocuments(self._head(asked, body.left_out))
            return await self._answer(http, asked, form, texts, turn, messages)

    async def complete(self, http: HttpRequest, body: CompletionRequest) -> Response:
        """Go on with a text."""
        self._check_model(body.model)
        asked = await self._in_thread(partial(self._built_completion, body, http.scope[TENANT], monotonic()))
        texts = await self._in_thread(partial(self._echoing, body, asked))
        return await self._answer(http, asked, CompletionDocuments(self._head(asked)), texts)

    async def respond(self, http: HttpRequest, body: ResponsesRequest) -> Response:
        """Answer a conversation as OpenAI's Responses API does."""
        self._check_model(body.model)
        tenant, previous = caller(http, body.user), body.previous_response_id
        stored = partial(self._responses.item, tenant)
        messages, chat = await self._in_thread(lambda: (body.messages(stored), body.as_chat()))
        turn = await self._in_thread(partial(self._responses.begin, tenant, previous))
        given = [*body.system, *turn.history, *messages]
        asked = await self._chat_requests(http, chat, "input", given)
        is_stored = body.store is not False and self._responses.is_on
        form = ResponseDocuments(self._head(asked, body.left_out), body, is_stored)
        texts = [self._partial(chat, asked)]
        return await self._answer(http, asked, form, texts, turn if is_stored else NO_TURN, messages)

    async def show_response(self, http: HttpRequest, number: str, query: Annotated[UserQuery, Query()]) -> Response:
        """A stored response of this API key and user."""
        return JsonAnswer(await self._in_thread(partial(self._responses.get, caller(http, query.user), number)))

    async def delete_response(self, http: HttpRequest, number: str, query: Annotated[UserQuery, Query()]) -> Response:
        """Delete a stored response of this API key and user."""
        await self._in_thread(partial(self._responses.delete, caller(http, query.user), number))
        return JsonAnswer({"id": number, "object": "response", "deleted": True})

    async def create_session(self, http: HttpRequest, body: SessionRequest) -> Response:
        """A new session of this API key and user."""
        return JsonAnswer(await self._in_thread(lambda: self._created(caller(http, body.user), body)))

    def _created(self, tenant: str, body: SessionRequest) -> dict[str, Any]:
        messages = conversation(body.messages or ())
        check_conversation("messages", messages, self.settings.request.characters)
        return self._sessions.create(tenant, body.name, [as_sent(each) for each in messages])

    async def list_sessions(self, http: HttpRequest, query: Annotated[UserQuery, Query()]) -> Response:
        """The sessions of this API key and user."""
        found = await self._in_thread(partial(self._sessions.all, caller(http, query.user)))
        return JsonAnswer({"object": "list", "data": found})

    async def show_session(self, http: HttpRequest, name: str, query: Annotated[UserQuery, Query()]) -> Response:
        """A session with its messages."""
        return JsonAnswer(await self._in_thread(partial(self._sessions.get, caller(http, query.user), name)))

    async def delete_session(self, http: HttpRequest, name: str, query: Annotated[UserQuery, Query()]) -> Response:
        """Delete a session."""
        await self._in_thread(partial(self._sessions.delete, caller(http, query.user), name))
        return JsonAnswer({"object": "session.deleted", "name": name, "deleted": True})

    async def rewind(self, http: HttpRequest, name: str, body: RewindRequest) -> Response:
        """Keep only the first `messages` of a session."""
        tenant = caller(http, body.user)
        return JsonAnswer(await self._in_thread(partial(self._sessions.rewind, tenant, name, body.messages)))

    async def branch(self, http: HttpRequest, name: str, body: BranchRequest) -> Response:
        """A new session that begins with the first messages of another one."""
        tenant = caller(http, body.user)
        return JsonAnswer(await self._in_thread(partial(self._sessions.branch, tenant, name, body.messages, body.name)))

    async def converse(self, http: HttpRequest, body: MessagesRequest) -> Response:
        """Answer a conversation as Anthropic's Messages API does."""
        self._check_model(body.model)
        messages, chat = await self._in_thread(lambda: (body.as_messages(), body.as_chat()))
        asked = await self._chat_requests(http, chat, "messages", messages)
        form = MessageDocuments(self._head(asked, body.left_out), len(asked.requests[0].prompt))
        return await self._answer(http, asked, form, [self._partial(chat, asked)])

    async def count(self, body: MessagesPrompt) -> Response:
        """The number of tokens of a conversation, as Anthropic's Messages API counts them."""
        self._check_model(body.model)
        messages, chat = await self._in_thread(lambda: (body.as_messages(), body.as_chat()))
        check_conversation("messages", messages, self.settings.request.characters)
        prompt = await self._in_thread(partial(self._prompt, chat, messages))
        return JsonAnswer({"input_tokens": len(prompt.ids)})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a conversation."""
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise BadField("prompt", "or messages: give one of them", "missing_required_parameter")
        if body.messages is not None:
            messages = await self._in_thread(partial(conversation, body.messages))
            check_conversation("messages", messages, self.settings.request.characters)
            variables = body.chat_template_kwargs or {}
            tokens = (await self._in_thread(partial(self.tokenizer.chat, messages, (), variables))).ids
        elif body.chat_template_kwargs is not None:
            raise BadField("chat_template_kwargs", "needs messages")
        else:
            tokens = await self._in_thread(partial(self.tokenizer.encoded, body.prompt or "", body.add_special_tokens))
        return JsonAnswer({"tokens": [*tokens], "count": len(tokens)})

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        self._check_model(body.model)
        return JsonAnswer({"prompt": await self._in_thread(partial(self.tokenizer.decoded, body.tokens))})

    async def models(self) -> Response:
        """The only model, as a list."""
        return JsonAnswer({"object": "list", "data": [self._model]})

    async def model(self, name: str) -> Response:
        """The model of this name."""
        self._check_model(name)
        return JsonAnswer(self._model)

    @property
    def _model(self) -> dict[str, Any]:
        return model_document(self.settings.name, self.settings.facts, self.service, self.tokenizer.vocabulary)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.settings.name):
            message = f"this server has the model {self.settings.name} only"
            raise ApiError(404, message, "model", "model_not_found")

    async def health(self) -> Response:
        """Answer `ok` while the engine runs, and 503 once it has stopped. The route needs no key."""
        self._check_alive()
        return JsonAnswer({"status": "ok"})

    async def ready(self) -> Response:
        """Answer `ready` while requests are admitted, and 503 otherwise."""
        self._check_alive()
        if not self.gate.is_open:
            raise stopping()
        return JsonAnswer({"status": "ready"})

    async def show_metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(self.metrics.page(), media_type=self.metrics.content_type)

    async def cache(self, http: HttpRequest, query: Annotated[CacheQuery, Query()]) -> Response:
        """The state of the cache, and the cached prefixes of this API key."""
        status, wanted = self.service.status(), EntrySelector(owner_of(http.scope[TENANT]), query.name)
        told = {name: value for name, value in vars(status).items() if name != "rows"}
        rows = [vars(row) for row in status.rows]
        stored = [vars(each) for each in await self._in_thread(partial(self.service.stored, wanted))]
        return JsonAnswer({"options": self.service.options.labels(), "rows": rows, **told, "stored": stored})

    async def forget(self, http: HttpRequest, query: Annotated[CacheQuery, Query()]) -> Response:
        """Delete all cached prefixes of this API key, or those of a name."""
        return await self._forgotten(EntrySelector(owner_of(http.scope[TENANT]), query.name))

    async def forget_one(self, http: HttpRequest, number: str, query: Annotated[CacheQuery, Query()]) -> Response:
        """Delete one cached prefix of this API key."""
        wanted = EntrySelector(owner_of(http.scope[TENANT]), query.name, number.rstrip("/"))
        if not wanted.id or not await self._in_thread(partial(self.service.stored, wanted)):
            raise ApiError(404, "none of your cached prefixes has this id. GET /v1/cache lists them", None, "not_found")
        return await self._forgotten(wanted)

    async def _forgotten(self, wanted: EntrySelector) -> Response:
        gone = await self._in_thread(partial(self.service.forget, wanted))
        deleted, size = [each.id for each in gone], sum(each.bytes for each in gone)
        return JsonAnswer({"object": "cache.deleted", "deleted": deleted, "bytes": size})

    def _check_alive(self) -> None:
        if not self.service.status().is_alive:
            raise ApiError(503, "the engine has stopped. Restart the server", None, "engine_dead")

    async def _chat_requests(
        self, http: HttpRequest, body: ChatRequest, field: str, messages: list[dict[str, Any]]
    ) -> GenerationRequest:
        """Return the requests of a chat. `field` names the field that its messages came in."""
        tenant, arrived = http.scope[TENANT], monotonic()
        return await self._in_thread(partial(self._built_chat, body, field, messages, tenant, arrived))

    def _built_chat(
        self, body: ChatRequest, field: str, messages: list[dict[str, Any]], tenant: str, arrived: float
    ) -> GenerationRequest:
        check_conversation(field, messages, self.settings.request.characters)
        tools, choice = body.function_tools, body.choice
        is_demanded = choice not in ("none", "auto")
        if is_demanded and not tools:
            raise BadField("tool_choice", "needs tools")
        prompt = self._prompt(body, messages)
        grammars: Sequence[Grammar] = ()
        if is_demanded:  # its text is a call, which no format of answers is for
            grammars = self._grammars.of_call(prompt.form.calls, body.callable, choice, body.n)
        elif isinstance(body.response_format, SchemaFormat):
            name, schema = "response_format.json_schema.schema", body.response_format.json_schema.schema_
            grammars = self._grammars.of_answer(name, schema, body.n, prompt.form.calls, body.callable)
        elif body.response_format.type == "json_object":
            schema = {"type": "object"}
            grammars = self._grammars.of_answer("response_format", schema, body.n, prompt.form.calls, body.callable)
        return self._builder.built(body, [prompt], grammars, self.service.limits.max_tokens, tenant, arrived)

    def _prompt(self, body: ChatRequest, messages: list[dict[str, Any]]) -> Prompt:
        variables = body.chat_template_kwargs
        if body.reasoning_effort == "none" and self.tokenizer.reads(THINKING):
            variables = {THINKING: False, **variables}
        return self.tokenizer.chat(messages, [] if body.choice == "none" else body.function_tools, variables)

    def _partial(self, body: ChatRequest, asked: GenerationRequest) -> PartialText:
        """Return the reader of a chat's text, of thoughts where its model thinks, and of calls of the given tools."""
        hidden = [*self.tokenizer.marks(asked.form.marks(bool(body.callable)))]
        return PartialText(reader_of(asked.form, body.callable, asked.has_begun_thought, hidden))

    def _built_completion(self, body: CompletionRequest, tenant: str, arrived: float) -> GenerationRequest:
        chunks = [Chunk(each) for each in body.chunks.texts] if body.chunks is not None else []
        size = sum(map(len, body.prompts)) + sum(len(chunk.text) for chunk in chunks) + len(body.suffix)
        if size > self.settings.request.characters:
            most = self.settings.request.characters
            raise BadField("prompt", f"must have at most {most} characters in all, got {size}")
        prompts = [
            Prompt(self.tokenizer.encoded(each) if isinstance(each, str) else tuple(each)) for each in body.prompts
        ]
        if body.suffix:
            prompts = [Prompt(self.tokenizer.around(tuple(each.ids), body.suffix)) for each in prompts]
        if chunks:
            prompts = [self.tokenizer.behind(chunks, each) for each in prompts]
        return self._builder.built(body, prompts, (), LEGACY_MAX_TOKENS, tenant, arrived)

    def _echoing(self, body: CompletionRequest, asked: GenerationRequest) -> list[PartialText]:
        """Return the readers of completions, which begin with their prompts where `echo` asks for them."""
        if not body.echo:
            return [PartialText() for _ in asked.requests]
        texts = [each if isinstance(each, str) else None for each in body.prompts]
        prompts = [each.prompt for each in asked.requests[:: asked.choices]]
        echoes = [self.tokenizer.echo(text, tuple(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
        return [PartialText(echo=each) for each in echoes for _ in range(asked.choices)]

    def _head(self, asked: GenerationRequest, left_out: Sequence[str] = ()) -> AnswerHeader:
        return AnswerHeader(
            tokenizer=self.tokenizer,
            model=self.settings.name,
            options=asked.options.labels(),
            choices=asked.choices,
            top_logprobs=asked.top_logprobs,
            has_usage=asked.has_usage,
            left_out=tuple(left_out),
        )

    async def _answer(
        self,
        http: HttpRequest,
        asked: GenerationRequest,
        form: AnswerDocuments,
        texts: list[PartialText],
        turn: Turn = NO_TURN,
        messages: Sequence[Mapping[str, Any]] = (),
    ) -> Response:
        """Hand the texts to the engine, and answer. Once nobody waits for them, the engine is told to leave them.

        A `turn` keeps its new `messages` and the answer.
        """
        tickets = Tickets(self.service, self.gate)
        tickets.submit(asked.requests)

        def keep() -> None:
            turn.keep([*map(as_sent, messages), answer_of(texts[0])], form.answer(texts))

        def close() -> None:
            tickets.cancel()
            turn.close()

        kept = None if turn is NO_TURN else partial(self._in_thread, keep)
        answering = AnswerStream(tickets, form, texts, self.metrics, self.settings.ping_seconds, kept)
        if asked.is_streamed:
            return EventStream(answering.chunks(), self.service.limits.unread_seconds, close)
        try:
            return JsonAnswer(await unless_gone(http.receive, answering.whole()))
        finally:
            close()

    async def _in_thread(self, work: Callable[[], Value]) -> Value:
        """Run `work` in a thread, so that the event loop goes on."""
        return await to_thread.run_sync(work, limiter=self._threads)


def caller(http: HttpRequest, user: str) -> str:
    """The tenant of a request: requests of one API key and `user` share cached prefixes and sessions."""
    return tenant_of(http.scope[TENANT], user)


def answer_of(written: PartialText) -> dict[str, Any]:
    """An answer as a client sends it back."""
    return {name: value for name, value in message_of(written).items() if value is not None}


class JsonRoute(APIRoute):
    """A route that takes its body as JSON. The body must come in time, and a thread parses and validates it."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handled(http: HttpRequest) -> Response:
            if self.body_field is not None:
                body = await body_of(http)
                # FastAPI takes a model as it is.
                http._json = await to_thread.run_sync(parsed, self.body_field.field_info.annotation, body)
            return await handle(http)

        return handled


async def body_of(http: HttpRequest) -> bytes:
    """The body of a request. Raises: ApiError for a body of another type, and one that does not come in time."""
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(415, f"send the body with the header Content-Type: {JSON_TYPE}", None, "bad_content_type")
    seconds = http.app.state.settings.request.body_seconds
    try:
        async with asyncio.timeout(seconds):
            return await http.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {seconds:g} s", None, "body_timeout") from None


def parsed(model: Any, body: bytes) -> Any:
    """Return `body` as an instance of `model`.

    Raises: ApiError if it is no JSON, and RequestValidationError if the model refuses it.
    """
    try:
        document = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", None, "invalid_json") from error
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in found], body=document
        ) from None


class PageRoute(BaseRoute):
    """The files of the page that shows caches."""

    def __init__(self, page: ViewApp) -> None:
        self._page = page

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return (Match.FULL if scope["type"] == "http" and self._page.has(scope["path"]) else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._page(scope, receive, send)


def routes_of(app: FastAPI, path: str) -> list[APIRoute]:
    """The routes of a path, one for each method."""
    return [route for route in app.routes if isinstance(route, APIRoute) and route.path_regex.match(path)]


async def invalid(http: HttpRequest, error: Exception) -> Response:
    """Answer for fields that a model refuses."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    is_query = errors[0]["loc"][0] == "query"
    wrong = of_validation(errors, dict(http.query_params) if is_query else error.body)
    return wrong.answer(http.scope["path"])


async def refused(http: HttpRequest, error: Exception) -> Response:
    """Answer for a request that a route, or the router, refuses."""
    path = http.scope["path"]
    if isinstance(error, ApiError):
        return error.answer(path)
    assert isinstance(error, RouterException)
    if error.status_code == 404:
        known = dict.fromkeys(route.path for route in http.app.routes if isinstance(route, APIRoute))
        message = f"there is no such route. There are {', '.join(known)}"
        return ApiError(404, message, None, "unknown_route").answer(path)
    if error.status_code == 405:
        methods = [method for route in routes_of(http.app, path) for method in sorted(route.methods or ())]
        methods = methods or ["GET"]
        answer = ApiError(405, f"{path} takes {' and '.join(methods)} only", None, "wrong_method").answer(path)
        answer.headers["allow"] = ", ".join(methods)
        return answer
    return ApiError(error.status_code, str(error.detail)).answer(path)


def make_app(server: Server, page: ViewApp | None = None) -> ASGIApp:
    """Return the application, with `page`, which shows caches, if it is given.

    An exception without a handler ends in `RequestLog`.
    """
    app = FastAPI(
        title="Windlass",
        summary="A fixed-size KV cache for Hugging Face decoders, over OpenAI's API.",
        version=__version__,
        redoc_url=None,
        redirect_slashes=False,
        responses={
            "4XX": {"description": 'A request that is refused: {"error": {"message", "type", "param", "code"}}'}
        },
        exception_handlers={RequestValidationError: invalid, RouterException: refused},
    )
    app.state.settings = server.settings
    app.router.route_class = JsonRoute
    if page is not None:
        app.router.routes.insert(0, PageRoute(page))
    app.get("/v1/models")(server.models)
    app.get("/v1/models/{name:path}")(server.model)
    app.get("/v1/cache")(server.cache)
    app.delete("/v1/cache")(server.forget)
    app.delete("/v1/cache/{number:path}")(server.forget_one)
    app.get("/health")(server.health)
    app.get("/ready")(server.ready)
    app.get("/metrics")(server.show_metrics)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/completions")(server.complete)
    app.post("/v1/responses")(server.respond)
    app.get("/v1/responses/{number}")(server.show_response)
    app.delete("/v1/responses/{number}")(server.delete_response)
    app.post("/v1/sessions")(server.create_session)
    app.get("/v1/sessions")(server.list_sessions)
    app.get("/v1/sessions/{name}")(server.show_session)
    app.delete("/v1/sessions/{name}")(server.delete_session)
    app.post("/v1/sessions/{name}/rewind")(server.rewind)
    app.post("/v1/sessions/{name}/branch")(server.branch)
    app.post("/v1/messages")(server.converse)
    app.post("/v1/messages/count_tokens")(server.count)
    app.post("/tokenize")(server.tokenize)
    app.post("/detokenize")(server.detokenize)

    def label_of(path: str) -> str:
        return next((route.path.partition("{")[0] for route in routes_of(app, path)), "other")

    settings = server.settings
    app.add_middleware(BodyLimit, most=settings.request.body_bytes)
    app.add_middleware(
        Authentication,
        keys=settings.keys,
        hosts=settings.hosts,
        is_public=ViewApp.is_public if page is not None else lambda _: False,
        salt=settings.salt,
    )
    app.add_middleware(RequestLog, metrics=server.metrics, route_of=label_of)
    return with_origins(app, settings.origins)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application. Browsers let pages of these origins read its answers.

    The origin `*` stands for all pages. Without origins, pages from elsewhere cannot read answers.
    """
    if not origins:
        return app
    # A browser's preflight request has no key.
    return CORSMiddleware(app, origins, METHODS, ("*",), expose_headers=("x-request-id", "x-replica", "retry-after"))
