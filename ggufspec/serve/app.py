"""Routes of the endpoint: OpenAI's API in front of a :class:`~ggufspec.serve.engine.ServerProcess`.

Errors use OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ggufspec import __version__
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.llamacpp.chat_template import TemplateOptions
from ggufspec.llamacpp.grammar import check_grammar, check_schema
from ggufspec.serve import metrics, page, session, vocabulary
from ggufspec.serve.answers import AnswerWriter, together
from ggufspec.serve.engine import GoneError, PendingAnswer, QueueFullError, RefusedError, ServerProcess
from ggufspec.serve.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, with_whole_characters

BODY_BYTES, BODY_S = 16 << 20, 60.0  # maximum size of a request body, and time limit for receiving it
SEND_S = 60.0  # time limit for sending a chunk to a client that reads slowly or not at all
_OPEN = ("/", "/health", "/v1/health")  # paths that need no key
LOCAL = ("localhost", "127.0.0.1", "[::1]")
_RETRY_S = "5"
_MOST_GRAMMARS = 64  # maximum number of cached grammars
_WAITING = b": waiting\n\n"  # an SSE comment, so that proxies do not consider the connection dead

_FIELD = re.compile(r"(?!(str|int|float|bool)$)[a-z_]+")  # a field, not a type, in pydantic's error locations

Finished = Callable[[session.ServeReply, float], None]
_Event = dict[str, Any]  # event from the child process, see :mod:`ggufspec.serve.session`


class ApiError(Exception):
    """Error response to a request, in OpenAI's format; ``more`` are additional keys."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **more: Any
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.more = status, param, code, more

    @property
    def body(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code, **self.more}}

    def response(self) -> Response:
        headers = {503: {"Retry-After": _RETRY_S}, 401: {"WWW-Authenticate": "Bearer"}}.get(self.status)
        return JSONResponse(self.body, self.status, headers=headers)


def api_error(error: GgufspecError) -> ApiError:
    """Convert a GgufspecError to an ApiError."""
    message = f"{error.message}: {error.hint}" if error.hint else error.message
    if isinstance(error, QueueFullError | GoneError):
        return ApiError(503, message, code="overloaded" if isinstance(error, QueueFullError) else "model_unavailable")
    return ApiError(400, message, **(error.details if isinstance(error, RefusedError) else {}))


def _cut() -> ApiError:
    return ApiError(503, "the answer was cut off: the server is shutting down", code="model_unavailable")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Access rules for requests."""

    keys: tuple[str, ...] = ()  # API keys, one of which is required; empty: no key is needed
    origins: tuple[str, ...] = ()  # origins of other sites' pages that may send requests (CORS)
    hosts: tuple[str, ...] = ()  # host names under which clients may address this server; empty: any

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error if the request must be refused; None if it is allowed."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.hosts and not self.keys:  # another site's name may resolve to this machine (DNS rebinding)
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name not in self.hosts:
                said = f"this server is not {host[:200]!r}: start it with --api-key KEY to allow any host name"
                return ApiError(403, said, code="unknown_host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        allowed = self.keys or {origin, "*"}.intersection(self.origins)
        # A cross-site request can do harm even if the page cannot read the answer
        if origin and not allowed and origin.partition("://")[2] != host:
            said = f"pages of {origin[:200]!r} may not send requests: start the server with --cors ORIGIN"
            return ApiError(403, said, code="unknown_origin")
        if not self.keys or scope["path"] in _OPEN:
            return None
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Compare with all keys, so that the time taken does not reveal a near match
        if sum(hmac.compare_digest(given, key.encode()) for key in self.keys):
            return None
        said = "the API key is wrong" if given else "an API key is required: Authorization: Bearer KEY"
        return ApiError(401, said, code="invalid_api_key")


class Endpoint:
    """The ASGI application.

    Args:
        engine: the running engine.
        desk: tokenizer process, for requests that need no weights.
        names: the model's names; the first is shown.
        tags: further labels in the model list.
        thinks: default for thinking if a request does not set it; None: the template's default.
        verbose: add the prompt to chat answers.
        rules: rules for who may send requests.
        on_answer: called with every reply and the duration of its request in seconds.
        on_request: called with the JSON of every valid request, on one line.
    """

    def __init__(
        self,
        engine: ServerProcess,
        desk: vocabulary.TokenizerProcess,
        names: Sequence[str],
        *,
        tags: Sequence[str] = (),
        thinks: bool | None = None,
        verbose: bool = False,
        rules: AccessRules = AccessRules(),
        on_answer: Finished = lambda *_: None,
        on_request: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.engine, self._desk, self._rules = engine, desk, rules
        self._names, self._name, self._tags = list(names), names[0], list(tags)
        self._of_template, self._verbose = {} if thinks is None else {"enable_thinking": thinks}, verbose
        self.on_answer, self._on_request = on_answer, on_request
        self._created = int(time.time())
        self.metrics = metrics.Metrics()
        engine.on_restart.append(lambda _: self.metrics.restarted())
        self._grammars: OrderedDict[tuple[bool, str], str] = OrderedDict()
        self._converting = asyncio.Semaphore(2)

    def app(self) -> ASGIApp:
        """Return the ASGI application."""
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self._rules.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,  # required by Chrome if a page on the internet sends requests to this machine
        )
        guard = Middleware(_Guard, rules=self._rules, refused=self.metrics.refused)
        both = {"/health": self._health, "/models": self._models, "/models/{name:path}": self._model}
        posted = {"/chat/completions": self._chat, "/completions": self._completion}
        posted |= {"/chat/completions/input_tokens": self._input_tokens}
        own = {"/tokenize": self._tokenize, "/detokenize": self._detokenize, "/apply-template": self._apply_template}
        routes = [
            Route("/", self._page),
            Route("/figures", self._figures),
            Route("/metrics", self._metrics),
            Route("/props", self._guarded(self._props)),
            *(Route(v + path, work) for v in ("", "/v1") for path, work in both.items()),
            *(
                Route(v + path, self._guarded(work), methods=["POST"])
                for v in ("", "/v1")
                for path, work in posted.items()
            ),
            *(Route(path, self._guarded(work), methods=["POST"]) for path, work in own.items()),
        ]
        return Starlette(
            routes=routes,
            middleware=[*([cors] if self._rules.origins else []), guard],
            exception_handlers={HTTPException: self._http_error, Exception: self._fault},
        )

    async def _http_error(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        said = {404: "there is no such path", 405: "this path does not allow the method"}
        answer = ApiError(error.status_code, said.get(error.status_code, error.detail)).response()
        answer.headers.update(error.headers or {})
        self.metrics.refused(error.status_code)
        return answer

    async def _fault(self, _: Request, __: Exception) -> Response:
        self.metrics.refused(500)
        return ApiError(500, "the server failed to handle this request").response()

    # ---- pages and metrics -----------------------------------------------------------------------------------------

    @property
    def _ready(self) -> session.ChatReady:
        """Description of the pair that was loaded last."""
        assert self.engine.ready is not None
        return self.engine.ready

    async def _page(self, _: Request) -> Response:
        headers = {
            "Content-Security-Policy": page.CSP,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        return HTMLResponse(page.html(self._name, self._ready), headers=headers)

    async def _figures(self, _: Request) -> Response:
        figures = self.metrics.figures(waiting=self.engine.waiting, running=self.engine.running)
        return JSONResponse(figures, headers={"Cache-Control": "no-store"})

    async def _metrics(self, _: Request) -> Response:
        engine, kept = self.engine, self._ready.parallel
        text = self.metrics.text(waiting=engine.waiting, running=engine.running, kept=kept)
        return PlainTextResponse(text, media_type=metrics.MEDIA_TYPE)

    async def _health(self, _: Request) -> Response:
        if failure := self.engine.failure:
            return ApiError(503, f"the model is not loaded: {failure.message}").response()
        return JSONResponse({"status": "ok"})

    def _described(self) -> dict[str, Any]:
        ready = self._ready
        meta = {
            "n_ctx": ready.ctx_size,
            "target": ready.target.description,
            "draft": ready.draft.description if ready.draft else None,
            "drafters": list(ready.drafters),
        }
        named = {"id": self._name, "aliases": self._names, "tags": self._tags}
        return {**named, "object": "model", "created": self._created, "owned_by": "ggufspec", "meta": meta}

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] not in self._names:
            return ApiError(404, f"the model served here is {self._name!r}", code="model_not_found").response()
        return JSONResponse(self._described())

    # ---- small endpoints of llama-server that front ends use -------------------------------------------------------

    async def _props(self, _: Request) -> Response:
        ready, desk = self._ready, await self._desk.ready()
        settings = asdict(CompletionBody.model_validate({"prompt": ""}).sampling())
        return JSONResponse(
            {
                "default_generation_settings": {"n_ctx": ready.ctx_size, "params": settings},
                "total_slots": ready.parallel,
                "model_alias": self._name,
                "model_path": str(self.engine.spec.target),
                "modalities": {"vision": False, "audio": False},
                "chat_template": ready.chat_template,
                "bos_token": desk.bos,
                "eos_token": desk.eos,
                "build_info": f"ggufspec {__version__}",
            }
        )

    async def _tokenize(self, request: Request) -> Response:
        asked: TokenizeBody = await self._read(request, TokenizeBody)
        wanted = vocabulary.TokenizerRequest(text=asked.content, start=asked.add_special, special=asked.parse_special)
        found = await self._desk.ask(wanted)
        if not asked.with_pieces:
            return JSONResponse({"tokens": found.tokens})
        spelled = zip(found.tokens, found.pieces, strict=True)
        return JSONResponse({"tokens": [{"id": id_, "piece": _piece(bytes(one))} for id_, one in spelled]})

    async def _detokenize(self, request: Request) -> Response:
        asked: DetokenizeBody = await self._read(request, DetokenizeBody)
        return JSONResponse(
            {"content": (await self._desk.ask(vocabulary.TokenizerRequest(tokens=tuple(asked.tokens)))).text}
        )

    async def _apply_template(self, request: Request) -> Response:
        return JSONResponse({"prompt": (await self._prompt(await self._read(request, ChatBody))).text})

    async def _input_tokens(self, request: Request) -> Response:
        found = await self._prompt(await self._read(request, ChatBody))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(found.tokens)})

    async def _prompt(self, asked: ChatBody) -> vocabulary.TokenizerReply:
        wanted = vocabulary.TokenizerRequest(messages=asked.plain_messages(), wishes=self._wishes(asked))
        return await self._desk.ask(wanted)

    def _wishes(self, asked: ChatBody) -> TemplateOptions:
        """Return the template options of a request, with the server's defaults."""
        wishes = asked.wishes
        own = {} if "reasoning_effort" in wishes.options else self._of_template
        return replace(wishes, options=own | wishes.options)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route so that its errors become responses in OpenAI's format."""

        async def answer(request: Request) -> Response:
            try:
                return await work(request)
            except ApiError as error:
                failed = error
            except GgufspecError as error:
                failed = api_error(error)
            except ClientDisconnect:
                failed = ApiError(400, "the client has disconnected")
            self.metrics.refused(failed.status)
            return failed.response()

        return answer

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        """Read and validate a request's body.

        Raises:
            ApiError: the body is not valid; ``param`` names the field.
        """
        body = with_whole_characters((await _body(request)).removeprefix(b"\xef\xbb\xbf"))
        try:
            asked = kind.model_validate_json(body)
            self._on_request(asked.model_dump_json(by_alias=True, exclude_unset=True))
            return asked
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _FIELD.fullmatch(part))
            said = first["msg"].removeprefix("Value error, ")
            param = where or said.partition(":")[0]
            is_field = bool(where) or bool(_FIELD.fullmatch(re.split(r"[.\[]", param)[0]))
            raise ApiError(400, f"{where}: {said}" if where else said, param=param if is_field else None) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None

    async def _chat(self, request: Request) -> Response:
        asked: ChatBody = await self._read(request, ChatBody)
        if not self._ready.chat_template:
            raise UsageError("the model has no chat template", session.ANOTHER_TEMPLATE)
        await self._grammar(asked)
        wanted = session.ServeRequest(
            messages=asked.plain_messages(),
            wishes=self._wishes(asked),
            grammar=asked.grammar,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            **asked.common,
        )
        shown = asked.verbose or self._verbose
        more = {"__verbose": {"prompt": (await self._prompt(asked)).text}} if shown else {}
        return await self._answered(request, asked, wanted, more)

    async def _completion(self, request: Request) -> Response:
        asked: CompletionBody = await self._read(request, CompletionBody)
        grammar = await self._grammar(asked)
        wanted = session.ServeRequest(
            prompt=asked.text(), echo=asked.echo, grammar=grammar, logprobs=asked.logprobs, **asked.common
        )
        return await self._answered(request, asked, wanted, {})

    async def _answered(
        self, request: Request, asked: ChatBody | CompletionBody, wanted: session.ServeRequest, more: dict[str, Any]
    ) -> Response:
        """Respond with a stream, or with ``n`` answers generated one after another, plus the keys in ``more``."""

        def answering(wanted: session.ServeRequest) -> _Answering:
            answer = self.engine.submit(wanted, _client(request, asked.user))
            return _Answering(self, answer, AnswerWriter(asked.model or self._name, chat=isinstance(asked, ChatBody)))

        if asked.stream:
            return await answering(wanted).stream(request, usage=asked.stream_options.include_usage)
        found: list[dict[str, Any]] = []
        for index in range(asked.n):
            if index and await request.is_disconnected():
                break
            sampling = replace(wanted.sampling, seed=(wanted.sampling.seed + index) % 2**64)
            found.append(await answering(replace(wanted, sampling=sampling)).whole(request))
        return JSONResponse(together(found) | more)

    async def _grammar(self, asked: ChatBody | CompletionBody) -> str:
        """Return the grammar of a request or its schema, checked in a child process without blocking the event loop."""
        key = bool(asked.schema_text), asked.schema_text or asked.grammar
        if key[1] and key not in self._grammars:
            async with self._converting:
                self._grammars[key] = await asyncio.to_thread(check_schema if key[0] else check_grammar, key[1])
            while len(self._grammars) > _MOST_GRAMMARS:
                self._grammars.popitem(last=False)
        return self._grammars[key] if key[1] else ""


@dataclass(frozen=True, slots=True)
class _Answering:
    """An answer in progress, which is sent to its client and counted in the metrics."""

    endpoint: Endpoint
    answer: PendingAnswer
    writer: AnswerWriter
    began_s: float = field(default_factory=time.monotonic)

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the complete answer."""
        async with _watched(request.receive, self.answer):
            async for event in self.answer.events():
                self.writer.add(event)
        reply = self._finished()
        if self.endpoint.engine.is_ending and not reply.statistics.stop_reason:
            raise _cut()
        return self.writer.whole(reply)

    async def stream(self, request: Request, *, usage: bool) -> Response:
        """Stream the answer as it is generated, with usage if requested."""
        events = self.answer.events()
        async with _watched(request.receive, self.answer):
            first = await anext(events, None)  # before the response starts, so that an error can set the status
        return _Stream(self.answer, self._pieces(_all(first, events), usage=usage))

    async def _pieces(self, events: AsyncIterator[_Event], *, usage: bool) -> AsyncIterator[bytes]:
        writer = self.writer
        if writer.chat:
            yield _event(writer.first())
        try:
            async for event in events:
                if event["event"] == "waiting":
                    yield _WAITING
                for chunk in writer.chunks(event):
                    yield _event(chunk)
        except GgufspecError as error:
            failed = api_error(error)
            self.endpoint.metrics.refused(failed.status)
            yield _event(failed.body)
            return
        reply = self._finished()
        if not reply.statistics.stop_reason:
            yield _event(_cut().body)
            return
        yield _event(writer.last(reply))
        if usage:
            yield _event(writer.usage_chunk(reply))
        yield b"data: [DONE]\n\n"

    def _finished(self) -> session.ServeReply:
        reply, seconds = self.answer.reply, time.monotonic() - self.began_s
        assert reply is not None
        self.endpoint.metrics.answered(reply, seconds=seconds)
        self.endpoint.on_answer(reply, seconds)
        return reply


async def _body(request: Request) -> bytes:
    """Read a request's body within the size and time limits."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {BODY_BYTES >> 20} MiB")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(found)


def _piece(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not valid UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _all(first: _Event | None, events: AsyncIterator[_Event]) -> AsyncIterator[_Event]:
    """Yield all events, starting with the one already taken."""
    if first:
        yield first
    async for event in events:
        yield event


@contextlib.asynccontextmanager
async def _watched(receive: Receive, answer: PendingAnswer) -> AsyncIterator[None]:
    """Cancel the answer if, within the block, its client disconnects or the waiting task is cancelled."""
    watching = asyncio.ensure_future(_gone(receive, answer))
    try:
        yield
    except asyncio.CancelledError:
        answer.cancel()
        raise
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def _gone(receive: Receive, answer: PendingAnswer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


class _Stream(Response):
    """Response that streams an answer as server-sent events."""

    def __init__(self, answer: PendingAnswer, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answer, self._pieces = answer, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events as they arrive, until the end or until the client stops reading."""
        async with _watched(receive, self._answer):
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in self._pieces:
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (TimeoutError, OSError):  # the client stopped reading
                self._answer.cancel()


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _client(request: Request, user: str | None) -> str:
    """Return an identifier of the client for fair queueing: address, program, key, and the request's ``user``."""
    headers = request.headers
    address = request.client.host if request.client else ""
    return "\n".join((address, headers.get("user-agent", ""), headers.get("authorization", ""), user or ""))


class _Guard:
    """Middleware that refuses requests before reading their body."""

    def __init__(self, app: ASGIApp, rules: AccessRules, refused: Callable[[int], None]) -> None:
        self._app, self._rules, self._refused = app, rules, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # base URLs that end in a slash cause double slashes
            scope["path"] = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        if scope["type"] == "http" and (error := self._rules.refusal(scope)):
            self._refused(error.status)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
