"""An endpoint without a model, for tests of what talks to one: Starlette on a free port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ggufspec.bench.trial import LoadedModel
from ggufspec.serve import page
from ggufspec.serve.session import ChatReady

HOSTILE = (
    '</script><script>document.title="taken"</script><img src="http://127.0.0.1:9/x.png" onerror="alert(1)">\x1b[31m'
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def ready(**changes: Any) -> ChatReady:
    """What a pair that is loaded says of itself."""
    usual: dict[str, Any] = {
        "target": LoadedModel("llama 70B Q3_K_S", 80, 64, 30 << 30),
        "draft": LoadedModel("llama 8B Q4_K_M", 32, 33, 4 << 30),
        "drafters": ("draft", "lookup"),
        "notes": ("no card here: everything runs on the CPU",),
        "ctx_size": 8192,
        "parallel": 2,
        "chat_template": TEMPLATE,
    }
    return ChatReady(**usual | changes)


def figures(count: int = 20) -> dict[str, Any]:
    """Of so many answers."""
    answers = [
        {
            "number": number,
            "tokens": 10 * number,
            "tokens_per_s": 20.5 + number,
            "prompt_tokens": 1000 + number,
            "cached": 900,
            "time_to_first_token_s": 0.25,
            "seconds": 3.5,
            "drafted": 0 if number == 1 else 40,
            "accepted": 0 if number == 1 else 30,
            "acceptance_rate": None if number == 1 else 0.75,
            "rounds": 5,
            "tokens_per_round": 2.0 * number,
            "gain": None if number == 1 else 1.4,
            "stop_reason": "end" if number % 2 else "length",
            "speculation": True,
        }
        for number in range(count, 0, -1)
    ]
    names = ("answers", "tokens", "drafted", "accepted", "refused", "restarts")
    speed = {"tokens_per_s": 22.7, "expected": 44.0, "state": "slower", "reason": "a & <b>", "change": ""}
    return {
        "now": {"running": 2, "waiting": 1, "answers_per_batch": 1.75 if count else None},
        "target": speed if count else None,
        "answers": answers,
        "totals": dict.fromkeys(names, 7) | {"answers": count},
    }


class Endpoint:
    """Serves a page and answers; what it says can be changed while it runs.

    Attributes:
        url: where it is.
        figures: what ``/figures`` answers.
        reasoning, pieces: what an answer streams.
        open: whether a stream goes on until the client leaves.
        fault: (status, message, hint) of every answer; or None.
        late_fault: the message of an error in the middle of a stream; or empty.
        key: what requests need; empty for none.
        asked: the bodies of requests for answers, in order.
        left: set when a client has left a stream.
    """

    def __init__(self, html: str) -> None:
        self.html, self.url = html, ""
        self.figures: dict[str, Any] = figures(0)
        self.reasoning: list[str] = []
        self.pieces = ["Hello", ", ", "world."]
        self.open = False
        self.fault: tuple[int, str, str] | None = None
        self.late_fault = ""
        self.key = ""
        self.usage: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        self.more: dict[str, Any] = {}  # further keys of the last event
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.app = Starlette(
            routes=[
                Route("/", self._page),
                Route("/figures", self._figures),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._answer, methods=["POST"]),
                Route("/v1/completions", self._answer, methods=["POST"]),
            ]
        )

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(self.html, headers={"Content-Security-Policy": page.CSP})

    def _refusal(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "the key is wrong", "code": "invalid_api_key"}}, 401)
        return None

    async def _figures(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self.figures)

    async def _models(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({"object": "list", "data": [{"id": "the pair"}]})

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        if refusal := self._refusal(request):
            return refusal
        self.asked.append({"path": request.url.path} | body)
        if self.fault:
            status, message, hint = self.fault
            return JSONResponse({"error": {"message": message, "hint": hint, "type": "x", "code": None}}, status)
        return StreamingResponse(self._events(chat="chat" in request.url.path), media_type="text/event-stream")

    async def _events(self, *, chat: bool) -> AsyncIterator[str]:
        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return f"data: {json.dumps({'choices': choices} | more)}\n\n"

        try:
            yield ": a comment\n\n"
            for text in self.reasoning:
                yield event([{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}])
            for text in self.pieces:
                yield event(
                    [{"index": 0, "finish_reason": None} | ({"delta": {"content": text}} if chat else {"text": text})]
                )
            while self.open:
                yield ": still here\n\n"
                await asyncio.sleep(0.02)
            if self.late_fault:
                yield f"data: {json.dumps({'error': {'message': self.late_fault}})}\n\n"
                return
            yield event([{"index": 0, "finish_reason": "stop"} | ({"delta": {}} if chat else {"text": ""})])
            yield event([], usage=self.usage, **self.more)
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left.set()
            raise


@contextlib.contextmanager
def served(endpoint: Endpoint) -> Iterator[Endpoint]:
    """It runs, in a thread, until the block's end."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(endpoint.app, log_level="warning", lifespan="off"))
        endpoint.url = f"http://127.0.0.1:{place.getsockname()[1]}"
        place.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        try:
            yield endpoint
        finally:
            endpoint.open = False
            server.should_exit = True
            server.force_exit = True
            thread.join(20)
