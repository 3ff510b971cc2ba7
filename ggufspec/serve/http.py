"""Start and shutdown of the HTTP server: the listening socket, and uvicorn on it."""

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
from ggufspec.serve.engine import ServerProcess

_KEEP_ALIVE_S = 75
_BACKLOG = 128
_CUT_S = 5.0  # time to tell clients that their answer was cut off


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket on a name or address of this machine; port 0 picks a free one.

    Raises:
        UsageError: the host is not an address or name of this machine.
        GgufspecError: the port is in use, or not permitted.
    """
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host  # IPv6 address as in a URL
    hint = "--host 127.0.0.1, or --host 0.0.0.0 for all of this machine's addresses"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is not an address or name of this machine", hint) from None
    found = socket.socket(family, kind, protocol)  # without the protocol, asyncio omits TCP_NODELAY (40 ms delays)
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
    """Return True if a socket can be reached only from this machine."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def name(bound: socket.socket) -> str:
    """Return the address under which this machine reaches a socket, as in a URL."""
    address = bound.getsockname()[0]
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    return f"[{address}]" if ":" in address else address


def endpoint_url(bound: socket.socket) -> str:
    """Return the URL under which this machine reaches a socket."""
    return f"http://{name(bound)}:{bound.getsockname()[1]}"


class _Server(uvicorn.Server):
    """uvicorn server that ends the engine's answers before it shuts down."""

    def __init__(
        self, config: uvicorn.Config, engine: ServerProcess, grace_s: float, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine, self._grace_s, self._on_started = engine, grace_s, on_started
        self.ended_by = 0  # number of the signal that requested shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Store the signal that requests shutdown; unless it is ignored, its previous handler runs afterwards."""
        self.ended_by = self.ended_by or sig
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse waiting requests and give running answers the grace period."""
        self._engine.drain()
        cutting = asyncio.get_running_loop().call_later(self._grace_s, self._engine.cut)
        await super().shutdown(sockets)
        cutting.cancel()


def serve_http(
    app: ASGIApp,
    engine: ServerProcess,
    bound: socket.socket,
    *,
    grace_s: float,
    on_started: Callable[[], None],
    verbose: bool = False,
) -> int:
    """Serve until Ctrl-C or SIGTERM; the signal's previous handler runs afterwards.

    Args:
        app: the endpoint's ASGI application.
        engine: the engine behind it.
        bound: socket from :func:`listen`.
        grace_s: seconds that running answers may still take after the signal.
        on_started: called when the server is ready for requests.
        verbose: send uvicorn's log to standard error.

    Returns:
        the signal's number, if its previous handler ignores the signal.
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
