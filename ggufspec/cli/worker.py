"""Command ``ggufspec worker``: serve this machine's devices to another machine over llama.cpp's RPC."""

from __future__ import annotations

import ipaddress
import json
import socket
from typing import Annotated, Any

from ggufspec.cli import ui
from ggufspec.cli.parameters import command, command_option, takes
from ggufspec.errors import ChildError, StopError
from ggufspec.hardware import host as machine
from ggufspec.llamacpp import rpc
from ggufspec.settings.table import Settings

SCHEMA = "ggufspec/worker@1"


@command("ggufspec worker", "ggufspec worker --host 0.0.0.0 --port 50052 --device CUDA0")
def worker(
    host: Annotated[
        str, command_option("--host ADDRESS", "Address to serve on. 0.0.0.0 lets the whole network in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, command_option("--port N", "Port to serve on. 0 picks a free one.", min=0, max=2**16 - 1)
    ] = 50052,
    device: Annotated[
        list[str] | None, command_option("--device NAME", "Serve this device (repeatable).  [all GPUs, else the CPU]")
    ] = None,
    *,
    given: Annotated[Settings, takes("threads")],
) -> int:
    """Serve this machine's devices to another machine, until Ctrl-C.

    A run there with --rpc uses them like GPUs of its own. One client can connect at a time. llama.cpp's RPC has neither
    passwords nor encryption, so without --host it serves this machine only.
    """
    address = rpc.ipv4_address(host)
    if not ipaddress.ip_address(address).is_loopback:
        _warn(address)
    spec = rpc.RpcWorkerJob(
        address, port, given.threads or machine.physical_cores(), tuple(dict.fromkeys(device or ()))
    )
    serving = False

    def announce(event: dict[str, Any]) -> None:
        nonlocal serving
        serving = True
        (_print_document if ui.flags().json else _say)(event)

    try:
        rpc.run_worker(spec, on_event=announce, verbose=ui.flags().verbose)
    except KeyboardInterrupt:
        if ui.flags().json and not serving:
            raise StopError("interrupted before it was serving") from None
        return 130
    except ChildError as error:
        hint = "start it again; -v shows llama.cpp's log"
        if not (ui.flags().json and serving):
            raise ChildError(error.message, hint) from None
        ui.failure(error.message, hint)  # standard output already has its one document
        return error.exit_code
    return 0


def _warn(address: str) -> None:
    text = (
        f"anyone who can reach {address} can use these devices, read what is computed on them and crash the worker: "
        "the protocol has no authentication and no encryption. Serve only on a network that you trust."
    )
    ui.err().say(("warning: ", "bold yellow"), text)


def _print_document(event: dict[str, Any]) -> None:
    keys = ("name", "description", "free_bytes", "total_bytes")
    served = [{key: device[key] for key in keys} for device in event["devices"]]
    document = {"schema": SCHEMA, "endpoint": event["endpoint"], "devices": served}
    ui.data(json.dumps(document))


def _say(event: dict[str, Any]) -> None:
    """Print the endpoint and a command that uses it, in which the host's name replaces the unreachable ``0.0.0.0``."""
    address, _, port = event["endpoint"].rpartition(":")
    shown = [f"{device['name']} ({device['description'].strip()})" for device in event["devices"]]
    reached = socket.gethostname() if address == "0.0.0.0" else address
    where = "on this machine" if ipaddress.ip_address(address).is_loopback else "on the other machine"
    err = ui.err()
    err.say(f"serving {', '.join(shown)} at {event['endpoint']}; Ctrl-C ends it")
    command = (f"ggufspec bench demo --rpc {reached}:{port}", "bold")
    err.whole(f"  {where}: ", command)
