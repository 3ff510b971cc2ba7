"""The endpoint's routes: OpenAI's API in front of an :class:`~ggufspec.serve.engine.Engine`.

Errors have OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``.
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
from ggufspec.llamacpp.chat_template import Wishes
from ggufspec.llamacpp.grammar import check_grammar, check_schema
from ggufspec.serve import metrics, page, session, vocabulary
from ggufspec.serve.answers import Writer, together
from ggufspec.serve.engine import Answer, BusyError, Engine, GoneError, RefusedError
from ggufspec.serve.requests import Chat, Completion, Detokenize, Tokenize, with_whole_characters

BODY_BYTES, BODY_S = 16 << 20, 60.0  # maximum size of a request, and time in which it must arrive
SEND_S = 60.0  # time to send a chunk to a client that reads slowly or not at all
_OPEN = ("/", "/health", "/v1/health")  # paths without a key
LOCAL = ("localhost", "127.0.0.1", "[::1]")
_RETRY_S = "5"
_MOST_GRAMMARS = 64  # cached grammars
_WAITING = b": waiting\n\n"  # a comment, so that no proxy takes the connection for dead

_FIELD = re.compile(r"(?!(str|int|float|bool)$)[a-z_]+")  # excludes pydantic's names of kinds

Finished = Callable[[session.Reply, float], None]
_Event = dict[str, Any]  # child's event, as in :mod:`ggufspec.serve.session`


class ApiError(Exception):
    """An error to answer a request with, in OpenAI's form; ``more`` are further keys."""

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
    if isinstance(error, BusyError | GoneError):
        return ApiError(503, message, code="overloaded" if isinstance(error, BusyError) else "model_unavailable")
    return ApiError(400, message, **(error.details if isinstance(error, RefusedError) else {}))


def _cut() -> ApiError:
    return ApiError(503, "the answer was cut: the server ends", code="model_unavailable")


@dataclass(frozen=True, slots=True)
class Rules:
    """Access rules for requests."""

    keys: tuple[str, ...] = ()  # API keys, one of which is required; empty: none
    origins: tuple[str, ...] = ()  # origins of other pages that may send requests (CORS)
    hosts: tuple[str, ...] = ()  # names that requests may use for this server; empty: any

    def refusal(self, scope: Scope) -> ApiError | None:
        """Return the error for a request to refuse; None if it is allowed."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self.hosts and not self.keys:  # another site's name may resolve to this machine (DNS rebinding)
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name not in self.hosts:
                said = f"this server is not {host[:200]!r}: with --api-key KEY it may be asked by any name"
                return ApiError(403, said, code="unknown_host")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        allowed = self.keys or {origin, "*"}.intersection(self.origins)
        if origin and not allowed and origin.partition("://")[2] != host:  # it could act without reading answers
            said = f"pages of {origin[:200]!r} may not ask: start the server with --cors ORIGIN"
            return ApiError(403, said, code="unknown_origin")
        if not self.keys or scope["path"] in _OPEN:
            return None
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # Compare all keys, so that the time does not reveal which is nearest
        if sum(hmac.compare_digest(given, key.encode()) for key in self.keys):
            return None
        said = "the API key is not known" if given else "an API key is needed: Authorization: Bearer KEY"
        return ApiError(401, said, code="invalid_api_key")


class Endpoint:
    """The ASGI application.

    Args:
        engine: started.
        desk: tokenizer process, for requests that need no weights.
        names: the model's names; the first is shown.
        tags: further labels in the model list.
        thinks: enable thinking if a request does not say; None: as the template does.
        verbose: add the prompt to answers of chats.
        rules: who may send requests.
        on_answer: called with every reply and the seconds of its request.
        on_request: called with the JSON of every valid request, on one line.
    """

    def __init__(
        self,
        engine: Engine,
        desk: vocabulary.Desk,
        names: Sequence[str],
        *,
        tags: Sequence[str] = (),
        thinks: bool | None = None,
        verbose: bool = False,
        rules: Rules = Rules(),
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
            allow_private_network=True,  # Chrome asks for it if a page of the internet sends a request to this machine
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
        said = {404: "there is no such path", 405: "the method is not allowed here"}
        answer = ApiError(error.status_code, said.get(error.status_code, error.detail)).response()
        answer.headers.update(error.headers or {})
        self.metrics.refused(error.status_code)
        return answer

    async def _fault(self, _: Request, __: Exception) -> Response:
        self.metrics.refused(500)
        return ApiError(500, "the server failed at this request").response()

    # ---- what is shown ---------------------------------------------------------------------------------------------

    @property
    def _ready(self) -> session.Ready:
        """The last loaded pair's description."""
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
        return JSONResponse(self.metrics.figures(), headers={"Cache-Control": "no-store"})

    async def _metrics(self, _: Request) -> Response:
        engine, kept = self.engine, self._ready.parallel
        text = self.metrics.text(waiting=engine.waiting, running=int(engine.is_running), kept=kept)
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

    # ---- llama-server's small ones, which front ends ask -----------------------------------------------------------

    async def _props(self, _: Request) -> Response:
        ready, desk = self._ready, await self._desk.ready()
        settings = asdict(Completion.model_validate({"prompt": ""}).sampling())
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
        asked: Tokenize = await self._read(request, Tokenize)
        wanted = vocabulary.Request(text=asked.content, start=asked.add_special, special=asked.parse_special)
        found = await self._desk.ask(wanted)
        if not asked.with_pieces:
            return JSONResponse({"tokens": found.tokens})
        spelled = zip(found.tokens, found.pieces, strict=True)
        return JSONResponse({"tokens": [{"id": id_, "piece": _piece(bytes(one))} for id_, one in spelled]})

    async def _detokenize(self, request: Request) -> Response:
        asked: Detokenize = await self._read(request, Detokenize)
        return JSONResponse({"content": (await self._desk.ask(vocabulary.Request(tokens=tuple(asked.tokens)))).text})

    async def _apply_template(self, request: Request) -> Response:
        return JSONResponse({"prompt": (await self._prompt(await self._read(request, Chat))).text})

    async def _input_tokens(self, request: Request) -> Response:
        found = await self._prompt(await self._read(request, Chat))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(found.tokens)})

    async def _prompt(self, asked: Chat) -> vocabulary.Reply:
        wanted = vocabulary.Request(messages=asked.plain_messages(), wishes=self._wishes(asked))
        return await self._desk.ask(wanted)

    def _wishes(self, asked: Chat) -> Wishes:
        """Return the template options of a request, with the server's defaults."""
        wishes = asked.wishes
        return replace(wishes, options=self._of_template | wishes.options)

    # ---- answers ---------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a route so that its errors are answered in OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                return await work(request)
            except ApiError as error:
                failed = error
            except GgufspecError as error:
                failed = api_error(error)
            except ClientDisconnect:
                failed = ApiError(400, "the client has gone")
            self.metrics.refused(failed.status)
            return failed.response()

        return answer

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        """Read and validate a request's body.

        Raises:
            ApiError: it is not valid; ``param`` names the field.
        """
        body = with_whole_characters(await _body(request))
        try:
            asked = kind.model_validate_json(body)
            self._on_request(asked.model_dump_json(by_alias=True, exclude_unset=True))
            return asked
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or _FIELD.fullmatch(part))
            said = first["msg"].removeprefix("Value error, ")
            param = where or said.partition(":")[0]
            is_field = bool(where) or bool(_FIELD.fullmatch(param.partition(".")[0]))
            raise ApiError(400, f"{where}: {said}" if where else said, param=param if is_field else None) from None
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None

    async def _chat(self, request: Request) -> Response:
        asked: Chat = await self._read(request, Chat)
        if not self._ready.chat_template:
            raise UsageError("the model has no chat template", session.ANOTHER_TEMPLATE)
        await self._grammar(asked)
        wanted = session.Request(
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
        asked: Completion = await self._read(request, Completion)
        grammar = await self._grammar(asked)
        wanted = session.Request(
            prompt=asked.text(), echo=asked.echo, grammar=grammar, logprobs=asked.logprobs, **asked.common
        )
        return await self._answered(request, asked, wanted, {})

    async def _answered(
        self, request: Request, asked: Chat | Completion, wanted: session.Request, more: dict[str, Any]
    ) -> Response:
        """Answer with a stream, or with ``n`` answers one after another, plus the keys ``more``."""

        def answering(wanted: session.Request) -> _Answering:
            answer = self.engine.submit(wanted, _client(request, asked.user))
            return _Answering(self, answer, Writer(asked.model or self._name, chat=isinstance(asked, Chat)))

        if asked.stream:
            return await answering(wanted).stream(request, usage=asked.stream_options.include_usage)
        found: list[dict[str, Any]] = []
        for index in range(asked.n):
            if index and await request.is_disconnected():
                break
            sampling = replace(wanted.sampling, seed=(wanted.sampling.seed + index) % 2**64)
            found.append(await answering(replace(wanted, sampling=sampling)).whole(request))
        return JSONResponse(together(found) | more)

    async def _grammar(self, asked: Chat | Completion) -> str:
        """Return the grammar of a request, or of its schema, checked in a child process, off the loop."""
        key = bool(asked.schema_text), asked.schema_text or asked.grammar
        if key[1] and key not in self._grammars:
            async with self._converting:
                self._grammars[key] = await asyncio.to_thread(check_schema if key[0] else check_grammar, key[1])
            while len(self._grammars) > _MOST_GRAMMARS:
                self._grammars.popitem(last=False)
        return self._grammars[key] if key[1] else ""


@dataclass(frozen=True, slots=True)
class _Answering:
    """An answer in progress: it goes to its client, and is counted."""

    endpoint: Endpoint
    answer: Answer
    writer: Writer
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
        """Stream its events as they come, and its usage if requested."""
        events = self.answer.events()
        async with _watched(request.receive, self.answer):
            first = await anext(events, None)  # now, so that an error still sets the status
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

    def _finished(self) -> session.Reply:
        reply, seconds = self.answer.reply, time.monotonic() - self.began_s
        assert reply is not None
        self.endpoint.metrics.answered(reply, seconds=seconds)
        self.endpoint.on_answer(reply, seconds)
        return reply


async def _body(request: Request) -> bytes:
    """Read a request's body, within the limits."""
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > BODY_BYTES:
                    raise ApiError(413, f"the body has more than {BODY_BYTES >> 20} MiB")
    except TimeoutError:
        raise ApiError(408, f"the body took more than {BODY_S:g} s") from None
    return bytes(found)


def _piece(data: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if these are not complete characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def _all(first: _Event | None, events: AsyncIterator[_Event]) -> AsyncIterator[_Event]:
    """Yield the events, starting with the one that was taken already."""
    if first:
        yield first
    async for event in events:
        yield event


@contextlib.asynccontextmanager
async def _watched(receive: Receive, answer: Answer) -> AsyncIterator[None]:
    """Cancel the answer if its client disconnects meanwhile, or the waiting task is cancelled."""
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


async def _gone(receive: Receive, answer: Answer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answer.cancel()


class _Stream(Response):
    """An answer as server-sent events."""

    def __init__(self, answer: Answer, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        del self.headers["content-length"]
        self._answer, self._pieces = answer, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send the events as they come, until the end or until nobody reads them."""
        async with _watched(receive, self._answer):
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in self._pieces:
                    async with asyncio.timeout(SEND_S):
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except (TimeoutError, OSError):  # nobody reads
                self._answer.cancel()


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")


def _client(request: Request, user: str | None) -> str:
    """Identify the client for fair queueing: address, program, key, and the ``user`` of a request."""
    headers = request.headers
    address = request.client.host if request.client else ""
    return "\n".join((address, headers.get("user-agent", ""), headers.get("authorization", ""), user or ""))


class _Guard:
    """Middleware that refuses requests before anything is read."""

    def __init__(self, app: ASGIApp, rules: Rules, refused: Callable[[int], None]) -> None:
        self._app, self._rules, self._refused = app, rules, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # base URLs that end in a slash cause double slashes
            scope["path"] = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        if scope["type"] == "http" and (error := self._rules.refusal(scope)):
            self._refused(error.status)
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)
