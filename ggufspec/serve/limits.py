"""What a client may take: time for a request's head, bytes and time for its body, time to read a chunk."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # from a connection, or a request's first byte, to the end of its head
BODY_S = 60.0  # for all of a body
SEND_S = 60.0  # for a chunk, of a client that reads slowly or not at all
BODY_BYTES = 16 << 20


class BodyError(Exception):
    """A body that is not taken; ``status`` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def body(request: Request) -> bytes:
    """A request's body.

    Raises:
        BodyError: it is too large, or comes too slowly.
        ClientDisconnect: the client has gone.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES:
                    raise BodyError(413, f"the body has more than {BODY_BYTES >> 20} MiB")
                parts.append(part)
    except TimeoutError:
        raise BodyError(408, f"the body took more than {BODY_S:g} s") from None
    return b"".join(parts)


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a limit for the time that a request's head takes; uvicorn has none."""

    _head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client connects: its first request is due."""
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head, or of a body."""
        if self._head is None and self._is_idle:
            self._expect()
        super().data_received(data)
        if not self._is_idle:
            self._forget()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._forget()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _expect(self) -> None:
        self._head = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None


__all__ = ["BODY_BYTES", "BODY_S", "HEAD_S", "SEND_S", "BodyError", "ClientDisconnect", "Protocol", "body"]
