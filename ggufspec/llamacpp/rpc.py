"""RPC worker that serves this machine's devices to other machines, run in a child process (:mod:`ggufspec.child`).

ggml aborts the process on an unexpected message, and its server can be stopped only by ending the process.
"""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from ggufspec import child
from ggufspec.errors import GgufspecError, UsageError
from ggufspec.llamacpp import devices

_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class RpcWorkerJob:
    """Devices to serve at an IPv4 ``address``; port 0: any free port; no ``names``: all GPUs, or else the CPU."""

    address: str
    port: int
    threads: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RpcWorkerResult:
    """Endpoint at which the worker served until it was stopped."""

    endpoint: str


def ipv4_address(host: str) -> str:
    """Resolve ``host`` to IPv4, which is all that llama.cpp's server accepts; raise UsageError if it has no address."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label is too long or empty
        raise UsageError(
            f"{host!r} is not an IPv4 address or name of this machine", "--host 127.0.0.1, or --host 0.0.0.0 for all"
        ) from None
    return str(found[0][4][0])


def run_worker(
    spec: RpcWorkerJob, *, on_event: Callable[[dict[str, Any]], None], verbose: bool = False
) -> RpcWorkerResult:
    """Serve in a child process until Ctrl-C, which raises Interrupted; the event ``serving`` says when it is ready."""
    return child.call(__name__, spec, RpcWorkerResult, on_event=on_event, verbose=verbose)


def run(spec: RpcWorkerJob, emit: child.Emit, stopping: threading.Event) -> RpcWorkerResult:
    """Serve in this process until ``stopping`` is set; ggml's thread ends with the process."""
    here = {device.name: device for device in devices.devices()}
    names = spec.names or _best(list(here.values()))
    port = _free_port(spec.address, spec.port)
    endpoint = f"{spec.address}:{port}"
    failures: list[GgufspecError] = []

    def work() -> None:
        try:
            devices.serve_rpc(endpoint, spec.threads, names)
        except GgufspecError as error:
            failures.append(error)

    server = threading.Thread(target=work, daemon=True)
    server.start()
    announced = False
    while not stopping.wait(_LOOK_S):
        if not server.is_alive():
            raise next(iter(failures), GgufspecError(f"ggml cannot serve at {endpoint}", "-v shows its output"))
        if not announced and _answers(spec.address, port):
            served = [asdict(here[name]) for name in names]
            emit({"event": "serving", "endpoint": endpoint, "devices": served})
            announced = True
    return RpcWorkerResult(endpoint)


def _best(here: list[devices.Device]) -> tuple[str, ...]:
    """Return the names of the GPUs or, without any, of the CPU."""
    gpus = tuple(device.name for device in here if device.kind in ("gpu", "igpu"))
    return gpus or tuple(device.name for device in here if device.kind == "cpu")


def _free_port(address: str, port: int) -> int:
    """Return ``port``, or a free port if it is 0. Unlike ggml's error, the one raised says why it cannot be used."""
    with closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in ggml/src/ggml-rpc/transport.cpp
        try:
            probe.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise GgufspecError(f"port {port} of {address} is in use", "--port 0 picks a free one") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"{address} is not an address of this machine", "--host 0.0.0.0 serves on all its addresses"
                ) from None
            raise GgufspecError(f"port {port} of {address} cannot be used: {error.strerror}", "try --port 0") from None
        return int(probe.getsockname()[1])


def _answers(address: str, port: int) -> bool:
    with closing(socket.socket()) as knock:
        return knock.connect_ex(("127.0.0.1" if address == "0.0.0.0" else address, port)) == 0
