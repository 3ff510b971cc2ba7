"""The listening socket, and uvicorn on it: how a server starts and stops."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ggufspec.errors import GgufspecError, UsageError
from ggufspec.serve.engine import Engine

_KEEP_ALIVE_S = 75
_BACKLOG = 128
_CUT_S = 5.0  # time for clients to learn that their answer was cut


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on a name or address of this machine; port 0 picks a free one.

    Raises:
        UsageError: the host is not one of this machine.
        GgufspecError: the port is in use, or may not be used.
    """
    hint = "--host 127.0.0.1, or --host 0.0.0.0 for all of this machine's addresses"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is not an address or name of this machine", hint) from None
    found = socket.socket(family, kind, protocol)  # protocol given, or asyncio omits TCP_NODELAY: 40 ms delays
    try:
        if hasattr(socket, "SO_REUSEADDR"):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise GgufspecError(f"port {port} of {host} is in use", "--port 0 picks a free one") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise UsageError(f"{host} is not an address of this machine", hint) from None
        raise GgufspecError(f"port {port} of {host} cannot be used: {error.strerror}", "try --port 0") from None
    return found


def is_loopback(bound: socket.socket) -> bool:
    """Return True if only this machine can reach a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url(bound: socket.socket) -> str:
    """Return the URL of a socket from this machine."""
    address, port = bound.getsockname()[:2]
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


class _Server(uvicorn.Server):
    """uvicorn's server, which ends the engine's answers first."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace_s: float, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._engine, self._grace_s, self._on_started = engine, grace_s, on_started
        self.ended_by = 0  # signal number

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note the signal that asks for the end; its own handler runs afterwards, unless it is ignored."""
        self.ended_by = self.ended_by or sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse waiting requests; running ones have the grace period."""
        self._engine.drain()
        cutting = asyncio.get_running_loop().call_later(self._grace_s, self._engine.cut)
        await super().shutdown(sockets)
        cutting.cancel()


def serve(
    app: ASGIApp,
    engine: Engine,
    bound: socket.socket,
    *,
    grace_s: float,
    on_started: Callable[[], None],
    verbose: bool = False,
) -> int:
    """Answer until Ctrl-C or SIGTERM, whose own handlers run then.

    Args:
        app: the endpoint's.
        engine: the engine behind it.
        bound: socket from :func:`listen`.
        grace_s: seconds that the running answer may take then.
        on_started: called when the server answers requests.
        verbose: send uvicorn's log to standard error.

    Returns:
        the signal, if its own handler ignores it.
    """
    if not verbose:
        for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(grace_s + _CUT_S),
        h11_max_incomplete_event_size=1 << 16,
    )
    server = _Server(config, engine, grace_s, on_started)
    server.run(sockets=[bound])
    return server.ended_by
