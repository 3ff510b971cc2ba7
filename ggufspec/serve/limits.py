"""What a client may take: bytes and time for a body, time to read a chunk."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

__all__ = ["BODY_BYTES", "BODY_S", "SEND_S", "BodyError", "ClientDisconnect", "body"]

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
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                found += part
                if len(found) > BODY_BYTES:
                    raise BodyError(413, f"the body has more than {BODY_BYTES >> 20} MiB")
    except TimeoutError:
        raise BodyError(408, f"the body took more than {BODY_S:g} s") from None
    return bytes(found)
